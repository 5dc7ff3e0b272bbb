"""Rules by which an optimizer updates weights: the numbers that each keeps, and the bytes that it works on.

What is held in float32 is updated in place, and so on CUDA are large parameters in bfloat16, by a kernel that makes one
pass (`headway.optim.adamw`). Anything else is copied to float32, as many values at a time as the optimizer's memory
budget allows (`headway.optim.parts`), and rounded back. `headway.optim.optimizer.UPDATES` has the updates themselves.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headway.count import CostModel
from headway.count.rows import hidden_matrices
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
"""Of a matrix, its inputs and outputs; of anything else, how many numbers it has."""

Held = tuple[int, Shape]
"""Numbers of a parameter that a process holds, and the parameter's shape."""


def adamw_bytes(parts: list[Held], of: UpdateOf) -> int:
    """Bytes while AdamW works.

    Of each value float32 copies of the weight and its gradient and of two moments, and what rounding one of them takes:
    a random number for bfloat16; for codes the old ones of both moments, a quotient, its place in the table and the new
    code.

    >>> adamw_bytes([(2**20, 2**20)], UpdateOf(weight_bytes=4, moment_bytes=4, shards=1))
    0
    >>> adamw_bytes([(2**20, 2**20)], UpdateOf(weight_bytes=2, moment_bytes=2, shards=1)) == 20 * 2**20
    True
    >>> adamw_bytes([(2**20, 2**20)], UpdateOf(weight_bytes=2, moment_bytes=2, shards=1, one_pass=True))
    0
    """
    if of.weight_bytes == _COPY and of.moment_bytes == _COPY:
        return 0
    makes_one_pass = of.one_pass and of.moment_bytes >= _HALF  # the one pass reads no 8-bit moments
    copied = sum(size for size, _ in parts if not (makes_one_pass and size >= ONE_PASS_FROM))
    copies = (2 * _COPY if of.weight_bytes < _COPY else 0) + (2 * _COPY if of.moment_bytes < _COPY else 0)
    rounding = 3 * _CODE + 2 * _COPY if of.moment_bytes < _HALF else _COPY
    return min(AT_ONCE, copied) * (copies + rounding)


def muon_bytes(parts: list[Held], of: UpdateOf) -> int:
    """Bytes while Muon works, at the fullest of three points.

    Reading: momentum and gradient of as many values as are worked on at a time, in float32, and those of the group
    before until the next take their place. Then a stack of matrices of one shape is orthogonalised: put together, and
    three of an iteration's products, in bfloat16. Its result is applied to float32 copies of the weights. While a full
    stack is, what was read last waits; so do all along, in bfloat16, the updates whose stack is not full yet.
    """
    # values that are worked on at a time, and bfloat16 updates of the stacks that are not full yet
    total = sum(size for size, _ in parts)
    at_once = min(AT_ONCE, total)
    counts = Counter(parts)
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


@dataclass(frozen=True)
class UpdateRule:
    """A rule of updating, a row of `RULES`.

    Attributes:
        moments: names of the numbers that it keeps of each weight, as the optimizer's state has them.
        work: bytes that it works on, beside what is held from step to step.
        only_matrices: whether it is for matrices of hidden layers; AdamW then updates the rest.
        iterations: of Newton-Schulz on each matrix, three products each.
        moved: bytes that it moves for a number beside reading gradients and reading and writing weights and moments,
            products left out.
        one_pass: whether a kernel updates numbers of 16 bits in one pass on CUDA; other rules copy them to float32.
    """

    moments: tuple[str, ...]
    work: Callable[[list[Held], UpdateOf], int]
    only_matrices: bool = False
    iterations: int = 0
    moved: int = 0
    one_pass: bool = False


RULES: Mapping[str, UpdateRule] = {
    "adamw": UpdateRule(("exp_avg", "exp_avg_sq"), adamw_bytes, one_pass=True),
    "muon": UpdateRule(
        ("momentum_buffer",),
        muon_bytes,
        only_matrices=True,
        iterations=NEWTON_SCHULZ,
        moved=64,  # two means, copies to float32 and back, norms; counted as operations are dispatched, 2026-11-30
    ),
}
"""Rules by their names, which are those of `optim.name`."""


def rules_of(cost_model: CostModel, name: str) -> dict[str, str]:
    """Find the rule that updates each parameter of a model, by the parameter's name, where `optim.name` is `name`."""
    if not RULES[name].only_matrices:
        return {parameter.name: name for parameter in cost_model.parameters}
    matrices = hidden_matrices(cost_model.rows, cost_model.parameters)
    return {p.name: name if p.name in matrices else "adamw" for p in cost_model.parameters}


@remembered
def trained_by_rule(cost_model: CostModel, name: str) -> Mapping[str, int]:
    """Numbers that learn, by the rule that updates them, where `optim.name` is `name`."""
    rules, trained = rules_of(cost_model, name), Counter[str]()
    for p in cost_model.parameters:
        if p.trainable:
            trained[rules[p.name]] += p.numel
    return trained


def num_moments(cost_model: CostModel, name: str) -> int:
    """Numbers that the optimizer keeps of the weights that learn."""
    return sum(len(RULES[rule].moments) * trained for rule, trained in trained_by_rule(cost_model, name).items())


@remembered
def updating_of(cost_model: CostModel, in_slices: CostModel, rule: str, of: UpdateOf) -> int:
    """Add up the work space of a model's update.

    Args:
        cost_model: of the model.
        in_slices: the same, as processes hold it.
        rule: `optim.name`.
        of: how weights and moments are held.
    """
    rules, parts = rules_of(cost_model, rule), defaultdict[str, list[Held]](list)
    shapes = {f"{row.module}.weight": row.features for row in cost_model.rows if row.features}
    for p in in_slices.parameters:
        if p.trainable:
            parts[rules[p.name]].append((-(-p.numel // of.shards), shapes.get(p.name, p.numel)))
    return max((RULES[name].work(own, of) for name, own in parts.items()), default=0)
