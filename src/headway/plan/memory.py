"""Memory that one device needs to train, by part, from a cost model, what autograd saves, and how the work is shared.

Everything is proportional to a parameter count or to a driver of the largest pack, so that no step has to run:

* weights, gradients, optimizer state and averages: bytes per parameter, divided by the processes that share a copy;
* gathered weights: of FSDP2, the units that are whole at a time, and the gradients of one that wait to be summed;
* activations: what autograd saves of each block, or what enters it where it is recomputed and what attention gave
  where that is kept, and one block's worth to recompute into;
* head: chunks of logits, and the gradients that the head's forward makes.

Not counted: the CUDA context (about 0.5 GiB), communication buffers, attention's log-sum-exp, temporaries of single
operations and what the allocator cannot use; leave them a tenth of the device.
"""

import functools
import operator
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass

from headway.count import CostModel, Workload, drivers
from headway.count.activations import SavedActivations, bytes_of
from headway.count.recompute import recomputed_blocks
from headway.count.rows import Parameter, hidden_matrices
from headway.plan.recompute import block_bytes

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How processes share a model."""

    shards: int = 1  # processes that hold one copy of the weights between them
    gathers: bool = False  # whether FSDP2 gathers them block by block; a lone process has a plain model
    sequence: int = 1  # processes that share each pack
    expert: int = 1  # processes that the experts of a layer are spread over
    reshard: bool = True  # whether a block's gathered weights are freed between forward and backward
    # whether gradients are summed after every pack; otherwise whole ones wait for the last
    reduce_each_pack: bool = True
    reduce_bytes: int = FLOAT32  # bytes of a number in which gradients are summed
    offload: bool = False  # whether weights, gradients and state lie in the host's memory


@dataclass(frozen=True, slots=True)
class State:
    """Dtypes of weights, gradients and optimizer state, and of forward's products."""

    weight_bytes: int = FLOAT32  # bytes of a weight as the optimizer sees it
    compute_bytes: int = BFLOAT16  # bytes of a weight as matrix products see it
    moment_bytes: float = FLOAT32  # bytes of an optimizer moment; 8-bit codes and their scales are 1 + 4 / 256
    muon: bool = False  # whether matrices of hidden layers have one moment instead of two
    averaged: bool = False  # whether there is a moving average of the weights that learn, in float32
    accumulates: bool = False  # whether a step sums several packs
    recompute: str = "none"  # which blocks are computed again, as for `recomputed_blocks`
    fused: bool = False  # whether blocks are compiled or run on fused kernels
    chunk: int | None = None  # slots whose logits exist at a time [slots]; None for those of a whole pack


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that one device holds, by part."""

    weights: int  # this device's share, as the optimizer sees them
    casts: int  # copies of the weights in the dtype of the products, where nothing else makes them; as forward ends
    # of these copies, the ones that exist in backward: of blocks that are not recomputed, and of one that is
    recasts: int
    gradients: int  # this device's share, whole at the end of backward
    optimizer: int  # moments
    average: int  # the moving average of the weights
    gathered: int  # weights that are whole for a while
    reducing: int  # gradients of a unit on their way to being summed
    activations: int  # kept from forward to backward
    recomputing: int  # the largest recomputed block, while it is computed again
    passing: int  # gradients of activations in the block that backward is in
    head: int  # logits, and gradients made with them
    head_gradients: int  # gradients that the head leaves to backward: of the hidden states and of its weight
    host: int  # bytes in the host's memory instead
    accumulates: bool

    @property
    def always(self) -> int:
        """What is held from step to step."""
        return self.weights + self.optimizer + self.average

    @property
    def forward_peak(self) -> int:
        """Bytes at the end of a forward, with the loss at hand."""
        earlier = self.gradients if self.accumulates else 0
        return self.always + self.casts + self.gathered + earlier + self.activations + self.head

    @property
    def backward_peak(self) -> int:
        """Bytes in backward: as it begins, with all activations and no gradients, or as it ends, with the opposite."""
        working = self.gathered + self.recasts + self.recomputing + self.passing + self.reducing
        begins = self.activations + self.head_gradients + (self.gradients if self.accumulates else 0)
        return self.always + working + max(begins, self.gradients)

    @property
    def peak(self) -> int:
        """The most that is held at a time."""
        return max(self.forward_peak, self.backward_peak)

    def as_json(self) -> dict[str, int]:
        """The parts and peaks by name [bytes]."""
        parts = {name: value for name, value in asdict(self).items() if name != "accumulates"}
        return {**parts, "forward_peak": self.forward_peak, "backward_peak": self.backward_peak, "peak": self.peak}


def plan_memory(
    cost_model: CostModel, saved: SavedActivations, pack: Workload, state: State, sharing: Sharing
) -> MemoryPlan:
    """Add up what one device holds while it trains.

    Args:
        cost_model: of the model, with what is frozen frozen.
        saved: what autograd saves of it, in the precision of its forward.
        pack: the largest micro-batch, of which the processes of a sequence group each take a share.
        state: bytes per parameter, and how forward computes.
        sharing: of the model among processes.

    Raises:
        UsageError: `state.recompute` chooses no block.
    """
    trained = [p for p in cost_model.parameters if p.trainable]
    held = _shared(state.weight_bytes * _numel(cost_model.parameters), sharing)
    gradients = _shared(state.weight_bytes * _numel(trained), sharing)
    by_muon = hidden_matrices(cost_model.rows, cost_model.parameters) if state.muon else frozenset()
    moments = sum(p.numel * (1 if p.name in by_muon else 2) for p in trained)
    optimizer = _shared(state.moment_bytes * moments, sharing)
    average = _shared(FLOAT32 * _numel(trained) if state.averaged else 0, sharing)
    gathered, reducing = _units(cost_model, saved, state, sharing)
    if not sharing.reduce_each_pack and state.accumulates:
        gradients += sharing.reduce_bytes * _numel(trained)
    chosen = recomputed_blocks(state.recompute, [name for name in saved.blocks if name])
    blocks = block_bytes(cost_model, saved, pack, fused=state.fused, sequence=sharing.sequence)
    again = {name: blocks[name].kept(keeps) for name, keeps in chosen.items() if name in blocks}
    outside = -(-bytes_of(saved.blocks[""].plain, pack) // sharing.sequence)
    kept = outside + sum(again.get(name, block.whole) for name, block in blocks.items())
    recomputing = max((blocks[name].whole - size for name, size in again.items()), default=0)
    casts = recasts = 0
    if not sharing.gathers and state.compute_bytes < state.weight_bytes:
        casts, recasts = (state.compute_bytes * numel for numel in _cast(cost_model, saved, chosen))
    passing = 2 * state.compute_bytes * _widest(cost_model, pack, blocks) // sharing.sequence
    host = 0
    if sharing.offload:
        host = held + gradients + optimizer + average
        held = gradients = optimizer = average = 0
    head, head_gradients = _head(cost_model, pack, state, sharing)
    return MemoryPlan(
        weights=held,
        casts=casts,
        recasts=recasts,
        gradients=gradients,
        optimizer=optimizer,
        average=average,
        gathered=gathered,
        reducing=reducing,
        activations=kept,
        recomputing=recomputing,
        passing=passing,
        head=head,
        head_gradients=head_gradients,
        host=host,
        accumulates=state.accumulates,
    )


def _shared(num_bytes: float, sharing: Sharing) -> int:
    return -int(-num_bytes // sharing.shards)


def _numel(parameters: Iterable[Parameter]) -> int:
    return sum(p.numel for p in parameters)


def _block_of(parameter: Parameter, saved: SavedActivations) -> str:
    path = parameter.name
    while path and path not in saved.blocks:
        path = path.rpartition(".")[0]
    return path


def _of_products(cost_model: CostModel) -> set[int]:
    bits = functools.reduce(
        operator.or_, (g.needs for row in cost_model.rows for g in row.gradients if g.phase == "wgrad"), 0
    )
    return {i for i in range(len(cost_model.parameters)) if bits >> i & 1}


def _cast(cost_model: CostModel, saved: SavedActivations, chosen: Mapping[str, bool]) -> tuple[int, int]:
    """Numbers of weights that are cast for their products: as forward ends, and in backward.

    Autocast keeps what it cast of a linear layer until forward ends; experts cast their own, which a recomputed block
    drops with everything else. In backward a recomputed block casts its weights again; the head made its gradients in
    forward.
    """
    head = _head_parameter(cost_model)
    linear: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    for number in _of_products(cost_model):
        parameter = cost_model.parameters[number]
        block = "(head)" if number == head else _block_of(parameter, saved)
        (experts if parameter.component.endswith(".experts") else linear)[block] += parameter.numel
    whole = linear + experts
    one_again = max((whole[name] for name in chosen), default=0)
    backward = sum(numel for name, numel in whole.items() if name not in chosen and name != "(head)") + one_again
    return linear.total() + sum(numel for name, numel in experts.items() if name not in chosen), backward


def _widest(cost_model: CostModel, pack: Workload, blocks: Container[str]) -> int:
    """Numbers in the largest input or output of a linear module of some blocks.

    In backward a gated MLP has the gradients of its gate, of what it gates and of their product, and has let go of the
    product: two more of these than the block keeps.
    """
    return max(
        (
            row.forward * drivers.parse(row.driver)(pack) // (2 * min(row.features))
            for row in cost_model.rows
            if row.features and row.block in blocks
        ),
        default=0,
    )


def _units(cost_model: CostModel, saved: SavedActivations, state: State, sharing: Sharing) -> tuple[int, int]:
    """Bytes of the weights that FSDP2 gathers at a time, and of gradients on their way to being summed.

    Each block is a unit, what is left of a vision tower, the input embedding, the head, and the root with the rest. The
    root and the head stay gathered through forward and backward; of the others there are two at a time, the one that
    computes and the one that is fetched meanwhile.
    """
    if not sharing.gathers:
        return 0, 0
    head = _head_parameter(cost_model)
    units: dict[str, int] = {}
    trained: dict[str, int] = {}
    for number, parameter in enumerate(cost_model.parameters):
        size = parameter.numel // (sharing.expert if parameter.component.endswith(".experts") else 1)
        unit = _block_of(parameter, saved) or _outer_unit(number, parameter, cost_model, head)
        units[unit] = units.get(unit, 0) + size
        trained[unit] = trained.get(unit, 0) + (size if parameter.trainable else 0)
    stays = sum(units.pop(name, 0) for name in ("(root)", "(head)"))
    passing = sorted(units.values(), reverse=True)
    at_once = passing[:2] if sharing.reshard else passing
    reducing = max(trained.values()) * (state.compute_bytes + sharing.reduce_bytes)
    return (stays + sum(at_once)) * state.compute_bytes, reducing


def _outer_unit(number: int, parameter: Parameter, cost_model: CostModel, head: int | None) -> str:
    tied = head is not None and not any(
        p.numel == cost_model.parameters[head].numel for i, p in enumerate(cost_model.parameters) if i != head
    )
    if head is not None and parameter.numel == cost_model.parameters[head].numel and not tied:
        return "(head)" if number == head else "(embedding)"
    return "(vision)" if parameter.component.startswith("vision.") else "(root)"


def _head_parameter(cost_model: CostModel) -> int | None:
    for row in cost_model.rows:
        if row.component == "language.head":
            for gradient in row.gradients:
                if gradient.phase == "wgrad":
                    return gradient.needs.bit_length() - 1
    return None


def head_features(cost_model: CostModel) -> tuple[int, int] | None:
    """Width of the hidden states and size of the vocabulary; None without a language head."""
    rows = (row for row in cost_model.rows if row.component == "language.head")
    return next((row.features for row in rows if row.features), None)


def _head(cost_model: CostModel, pack: Workload, state: State, sharing: Sharing) -> tuple[int, int]:
    """Bytes of logits and of what is made with them, and of the gradients that backward begins with.

    In chunks: the hidden states' gradient, the weight's summed in float32, and a chunk's logits, log-probabilities in
    float32 and slopes. Whole: logits, their log-probabilities in float32, and the gradients of both.
    """
    features = head_features(cost_model)
    if features is None:
        return 0, 0
    width, vocabulary = features
    slots = -(-pack.slots // sharing.sequence)
    each = state.compute_bytes + FLOAT32
    head = _head_parameter(cost_model)
    learns = head is not None and cost_model.parameters[head].trainable
    gradients = state.compute_bytes * slots * width + (FLOAT32 * width * vocabulary if learns else 0)
    if state.chunk is None:
        return slots * vocabulary * 2 * each, gradients
    return gradients + min(state.chunk, slots) * vocabulary * (each + state.compute_bytes), gradients
