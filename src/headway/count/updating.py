"""Bytes that the optimizer works on while it updates, beside what is held from step to step.

What is held in float32 is updated in place, and so on CUDA are large parameters in bfloat16, by a kernel that makes one
pass (`headway.optim.one_pass`). Anything else is copied to float32, as many values at a time as the optimizer's memory
budget allows (`headway.optim.parts`), and rounded back.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headway.count import CostModel
from headway.count.rows import Parameter, hidden_matrices
from headway.count.units import remembered

AT_ONCE = 2**24
"""Values that the optimizer works on at a time: each float32 copy of them takes 64 MiB."""

NEWTON_SCHULZ = 5
"""Iterations by which Muon orthogonalises a matrix, each three products."""

ONE_PASS_FROM = 2**18
"""Values of a process from which a parameter gets a launch of its own.

Updating so many by copies takes 11 us (690 ms for 16.1 B values on an H200), about what a launch takes the host.
"""

_COPY, _HALF, _CODE = 4, 2, 1
"""Bytes of a value in float32, in bfloat16 and as an 8-bit code."""


@dataclass(frozen=True, slots=True)
class UpdateOf:
    """Storage of the weights that learn, on one device."""

    weight_bytes: int
    moment_bytes: float
    shards: int  # processes that each hold as much of every parameter
    one_pass: bool = False  # whether the device has the kernel that makes one pass, without copies


Shape = tuple[int, int] | int
"""Of a matrix, its inputs and outputs; of a stack of them, how many numbers it has."""


@remembered
def updating_of(cost_model: CostModel, in_slices: CostModel, muon: bool, of: UpdateOf) -> int:
    """Add up the work space of a model's update.

    Args:
        cost_model: of the model.
        in_slices: the same, as processes hold it.
        muon: whether Muon updates the matrices of hidden layers.
        of: how weights and moments are held.
    """
    by_muon = hidden_matrices(cost_model.rows, cost_model.parameters) if muon else frozenset()
    shapes = {f"{row.module}.weight": row.features for row in cost_model.rows if row.features}
    trained = [p for p in in_slices.parameters if p.trainable]
    matrices = ((p, shapes.get(p.name, p.numel)) for p in trained if p.name in by_muon)
    return update_bytes((p for p in trained if p.name not in by_muon), matrices, of)


def update_bytes(by_adamw: Iterable[Parameter], by_muon: Iterable[tuple[Parameter, Shape]], of: UpdateOf) -> int:
    """Add up the copies that an update works on.

    Args:
        by_adamw: parameters that AdamW updates.
        by_muon: matrices of hidden layers that Muon updates, and their shapes.
        of: how they are held.

    >>> one = Parameter("weight", 2**20, 2**20, "language.mlp")
    >>> update_bytes([one], [], UpdateOf(weight_bytes=4, moment_bytes=4, shards=1))
    0
    >>> update_bytes([one], [], UpdateOf(weight_bytes=2, moment_bytes=2, shards=1)) == 20 * 2**20
    True
    >>> update_bytes([one], [], UpdateOf(weight_bytes=2, moment_bytes=2, shards=1, one_pass=True))
    0
    """
    sizes = (-(-p.numel // of.shards) for p in by_adamw)
    makes_one_pass = of.one_pass and of.moment_bytes >= _HALF  # the one pass reads no 8-bit moments
    copied = sum(size for size in sizes if not (makes_one_pass and size >= ONE_PASS_FROM))
    adamw = min(AT_ONCE, copied) * _bytes_by_adamw(of)
    return max(adamw, _by_muon([(-(-p.numel // of.shards), shape) for p, shape in by_muon], of))


def _bytes_by_adamw(of: UpdateOf) -> int:
    """Bytes for each value worked on.

    Float32 copies of the weight and its gradient and of two moments, and what rounding one of them takes: a random
    number for bfloat16; for codes the old ones of both moments, a quotient, its place in the table and the new code.
    """
    if of.weight_bytes == _COPY and of.moment_bytes == _COPY:
        return 0
    copies = (2 * _COPY if of.weight_bytes < _COPY else 0) + (2 * _COPY if of.moment_bytes < _COPY else 0)
    if of.moment_bytes < _HALF:
        return copies + 3 * _CODE + 2 * _COPY
    return copies + _COPY


def _by_muon(matrices: list[tuple[int, Shape]], of: UpdateOf) -> int:
    """Bytes while Muon works, at the fullest of three points.

    Reading: momentum and gradient of as many values as are worked on at a time, in float32, and those of the group
    before until the next take their place. Then a stack of matrices of one shape is orthogonalised: put together, and
    three of an iteration's products, in bfloat16. Its result is applied to float32 copies of the weights. While a full
    stack is, what was read last waits; so do all along, in bfloat16, the updates whose stack is not full yet.
    """
    if not matrices:
        return 0
    # values that are worked on at a time, and bfloat16 updates of the stacks that are not full yet
    total = sum(size for size, _ in matrices)
    at_once = min(AT_ONCE, total)
    counts = Counter(matrices)
    waiting = _HALF * sum(min(count * size, AT_ONCE + size) for (size, _), count in counts.items())
    # reading: momentum and gradient, in float32; rounding takes a copy where momentum is held in less
    rounding = _COPY * at_once if of.moment_bytes < _COPY else 0
    reading = 2 * _COPY * at_once + max(rounding, _COPY * min(at_once, total - at_once))
    # stacks: four copies in bfloat16 while they are orthogonalised; then the update and three float32 copies
    stacks = []
    for (size, _), count in counts.items():
        values = min(count, -(-AT_ONCE // size)) * size
        waiting_values = 2 * _COPY * at_once if count * size >= AT_ONCE else 0
        applied = _HALF * values + 3 * _COPY * min(values, AT_ONCE)
        stacks.append(waiting_values + max(4 * _HALF * values, applied))
    return waiting + max(reading, *stacks)
