"""Memory that one device needs to train, by part and by moment, from a cost model and what autograd saves.

Everything is proportional to a parameter count or to a driver of the largest pack, so that no step has to run:

* weights, gradients, optimizer state and averages: bytes per parameter, divided by the processes that share a copy;
* gathered weights: of FSDP2, the units that are whole at a time, and the gradients of one that wait to be summed;
* activations: what autograd saves of each block, or what enters it where it is recomputed and what attention gave
  where that is kept, and one block's worth to recompute into;
* head: chunks of logits, and the gradients that the head's forward makes;
* the update: copies in float32 of what the optimizer does not hold in it.

Each of these exists at some moments of a step and not at others; the peak is the fullest moment. Held against
measurement in `benchmarks/results/plan_memory_*.md`. What the allocator and CUDA itself take is `plan.allowance`.
"""

import functools
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from headway.count import CostModel, Workload, drivers
from headway.count.activations import SavedActivations, bytes_of
from headway.count.rows import hidden_matrices
from headway.count.units import block_of, chosen_blocks, head_features, head_parameter, is_tied, remembered
from headway.optim.updating import UpdateOf, updating_of
from headway.predict.moments import (
    BFLOAT16,
    FLOAT32,
    NO_UNIT,
    PARTS,
    Ends,
    Moment,
    Passed,
    Unit,
    fullest_of_backward,
    moment,
)
from headway.predict.recompute import block_bytes
from headway.predict.slices import SPREAD, numbers_by_unit, sliced, trained_of_process, values_of_spread


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
    """Bytes that one device holds: the most of each part, and what is held at each moment."""

    weights: int  # this device's share, as the optimizer sees them
    gradients: int  # this device's share, or whole ones that wait for a step's last pack
    optimizer: int  # moments
    average: int  # the moving average of the weights
    casts: int  # copies of the weights in the dtype of the products, where nothing else makes them
    gathered: int  # weights that are whole for a while
    reducing: int  # gradients of a unit on their way to being summed
    batch: int  # pixels, as bytes and as the tower reads them
    activations: int  # kept from forward to backward
    recomputing: int  # a block that is computed again, where backward is fullest
    passing: int  # gradients of activations where backward is fullest
    head: int  # logits, and gradients made with them
    updating: int  # copies that the optimizer works on
    host: int  # bytes in the host's memory instead
    moments: tuple[Moment, ...]  # what is held when, in the order of a run

    @property
    def always(self) -> int:
        """What is held from step to step."""
        return self.weights + self.optimizer + self.average

    @property
    def fullest(self) -> Moment:
        """The moment of the peak."""
        return max(self.moments, key=lambda one: one.total)

    @property
    def peak(self) -> int:
        """The most that is held at a time."""
        return self.fullest.total

    def at(self, name: str) -> Moment:
        """The moment of a name, one of `headway.predict.moments.MOMENTS`."""
        return next(one for one in self.moments if one.name == name)

    def to_dict(self) -> dict[str, Any]:
        """The parts, the moments with theirs, and the peak [bytes]."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moments"}
        moments = {one.name: {**one.parts, "total": one.total} for one in self.moments}
        return {**parts, "moments": moments, "peak_moment": self.fullest.name, "peak": self.peak}


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
    in_slices = sliced(cost_model, sharing.shards, sharing.expert) if sharing.gathers else cost_model
    held = _shared(state.weight_bytes * in_slices.params.total, sharing)
    gradients = _shared(state.weight_bytes * in_slices.params.trainable, sharing)
    optimizer = _shared(state.moment_bytes * num_moments(in_slices, muon=state.muon), sharing)
    average = _shared(FLOAT32 * in_slices.params.trainable if state.averaged else 0, sharing)
    units = _units(cost_model, in_slices, saved, state, sharing)
    chosen = chosen_blocks(state.recompute, cost_model, saved)
    head = _Head.of(cost_model, pack, state, sharing)
    computing = replace(state, accumulates=False, chunk=None)  # what blocks do not depend on
    sharing_blocks = replace(sharing, reshard=True, reduce_each_pack=True)
    passed = _passed(cost_model, in_slices, saved, pack, computing, sharing_blocks)
    outside = -(-bytes_of(saved.blocks[""].plain, pack) // sharing.sequence)
    casts = _kept_casts(cost_model, saved, chosen) * state.compute_bytes if _casts(state, sharing) else 0
    updating = updating_of(
        cost_model, in_slices, state.muon, UpdateOf(state.weight_bytes, state.moment_bytes, sharing.shards)
    )
    batch = _pixels(cost_model, pack, state.compute_bytes)
    if cost_model.draws:  # whose processes are each given their own patches; others cut all of them
        batch = -(-batch // sharing.sequence)
    host = 0
    if sharing.offload:
        host = held + gradients + optimizer + average
        held = gradients = optimizer = average = updating = 0
    # gradients of the step's earlier packs, which those of this one are added to: no more come then
    waits = gradients if state.accumulates else 0
    if state.accumulates and not sharing.reduce_each_pack:
        waits = sharing.reduce_bytes * trained_of_process(cost_model, sharing.expert)
    comes = 0 if waits or sharing.offload else gradients
    in_blocks = sum(block.gradients for block in passed)
    at_once = _shared(head.weight, sharing)
    ends = Ends(
        outside=outside,
        stream=head.stream,
        head=at_once if comes else 0,
        rest=max(0, comes - in_blocks - at_once),
        tied=head.tied,
        root=sum(units.get(name, NO_UNIT).gathered for name in ("(root)", "(vision)")),
        head_unit=units.get("(head)", NO_UNIT),
        embedding_unit=units.get("(embedding)", NO_UNIT),
        stay_gathered=not sharing.reshard,
    )
    walk = _walked(cost_model, in_slices, saved, pack, computing, sharing_blocks, ends, bool(comes))
    walk = {**walk, "gradients": walk["gradients"] + waits}
    # FSDP2 keeps the buffer of the last gathering of a forward until the next, beside what was copied from it
    last = ends.head_unit.gathered or (passed[-1].unit.gathered if passed else 0)
    gathered = ends.root + ends.head_unit.gathered + last
    if not sharing.reshard:
        gathered += ends.embedding_unit.gathered + sum(block.gathered for block in passed)
    always = {"weights": held, "average": average}
    activations = outside + sum(block.kept for block in passed)
    kept = {"activations": activations, "casts": casts, "batch": batch, "gathered": gathered, "gradients": waits}
    found = [moment("built", **always)]
    for when, ahead in (("first ", 0), ("", optimizer)):
        forward = moment(f"{when}forward", **always, **kept, optimizer=ahead, head=head.forward)
        begins = moment(f"{when}backward", **always, **kept, optimizer=ahead, head=head.backward)
        passes = moment(f"{when}backward", **always, **walk, optimizer=ahead, batch=batch)
        update = moment(f"{when}update", **always, optimizer=optimizer, gradients=gradients, updating=updating)
        found += [forward, max(begins, passes, key=lambda one: one.total), update]
    most = {part: max(walk.get(part, 0), *(one.parts.get(part, 0) for one in found)) for part in PARTS}
    return MemoryPlan(**most, host=host, moments=tuple(found))


@remembered
def num_moments(cost_model: CostModel, *, muon: bool) -> int:
    """Numbers that the optimizer keeps of the weights that learn: two each, one of a matrix that Muon updates."""
    by_muon = hidden_matrices(cost_model.rows, cost_model.parameters) if muon else frozenset()
    return sum(p.numel * (1 if p.name in by_muon else 2) for p in cost_model.parameters if p.trainable)


def _casts(state: State, sharing: Sharing) -> bool:
    """Whether autocast makes copies of weights in the dtype of the products."""
    return not sharing.gathers and state.compute_bytes < state.weight_bytes


def _shared(num_bytes: float, sharing: Sharing) -> int:
    return -int(-num_bytes // sharing.shards)


@remembered
def _passed(
    whole: CostModel, cost_model: CostModel, saved: SavedActivations, pack: Workload, state: State, sharing: Sharing
) -> list[Passed]:
    """What the backward of each block needs and leaves, in the order of forward: towers before the language model.

    Args:
        whole: the model.
        cost_model: the same, `sliced`.
        saved: what autograd saves of it.
        pack: the largest micro-batch.
        state: dtypes, and which blocks are recomputed.
        sharing: of the model among processes.
    """
    units, chosen = _units(whole, cost_model, saved, state, sharing), chosen_blocks(state.recompute, whole, saved)
    sizes = block_bytes(cost_model, saved, pack, fused=state.fused, sequence=sharing.sequence)
    gradients = _trained_by_block(cost_model, saved)
    casts = _cast_weights(cost_model, saved) if _casts(state, sharing) else Counter[str]()
    by_spread = values_of_spread(cost_model, saved, sharing.expert)
    widest: Counter[str] = Counter()
    towers: set[str] = set()
    amounts: dict[str, int] = {}
    for row in cost_model.rows:
        if row.block in sizes:
            if row.component.startswith("vision."):
                towers.add(row.block)
            if row.features:
                if row.driver not in amounts:
                    amounts[row.driver] = drivers.parse(row.driver)(pack)
                values = row.forward * amounts[row.driver] // (2 * min(row.features))
                widest[row.block] = max(widest[row.block], values)
    order = sorted(sizes, key=lambda name: name not in towers)  # stable: as they stand in the model
    return [
        Passed(
            sizes[name],
            kept=sizes[name].kept(chosen[name]) if name in chosen else sizes[name].whole,
            casts=state.compute_bytes * casts[name],
            is_recomputed=name in chosen,
            gradients=_shared(state.weight_bytes * gradients[name], sharing),
            passing=2 * state.compute_bytes * widest[name] // sharing.sequence,
            unit=units.get(name, NO_UNIT),
            spread=units.get(f"{name}{SPREAD}", NO_UNIT),
            by_spread=state.compute_bytes * pack.slots * by_spread[name] // sharing.sequence,
        )
        for name in order
    ]


@remembered
def _walked(
    whole: CostModel,
    cost_model: CostModel,
    saved: SavedActivations,
    pack: Workload,
    state: State,
    sharing: Sharing,
    ends: Ends,
    makes_gradients: bool,
) -> dict[str, int]:
    """Parts at the fullest point of a backward, whose blocks make gradients beside those that wait, or do not."""
    passed = _passed(whole, cost_model, saved, pack, state, sharing)
    return fullest_of_backward(passed if makes_gradients else [replace(one, gradients=0) for one in passed], ends)


@remembered
def _trained_by_block(cost_model: CostModel, saved: SavedActivations) -> Counter[str]:
    """Numbers of weights that learn, by block; those outside of blocks under ""."""
    found: Counter[str] = Counter()
    for parameter in cost_model.parameters:
        if parameter.trainable:
            found[block_of(parameter, saved)] += parameter.numel
    return found


def _of_products(cost_model: CostModel) -> set[int]:
    bits = functools.reduce(
        operator.or_, (g.needs for row in cost_model.rows for g in row.gradients if g.phase == "wgrad"), 0
    )
    return {i for i in range(len(cost_model.parameters)) if bits >> i & 1}


def _cast_weights(cost_model: CostModel, saved: SavedActivations) -> Counter[str]:
    """Numbers of weights by block that are cast for their products; the head's under "(head)"."""
    head = head_parameter(cost_model)
    found: Counter[str] = Counter()
    for number in _of_products(cost_model):
        parameter = cost_model.parameters[number]
        found["(head)" if number == head else block_of(parameter, saved)] += parameter.numel
    return found


def _kept_casts(cost_model: CostModel, saved: SavedActivations, chosen: Mapping[str, bool]) -> int:
    """Number of weights whose copies exist as forward ends.

    Autocast keeps what it cast of a linear layer that learns until forward ends. Experts cast their own weights, and of
    a frozen weight nothing keeps the copy but the graph: those a recomputed block drops with everything else, and a
    block without a backward at once.
    """
    head = head_parameter(cost_model)
    alive = cost_model.blocks_in_backward
    kept = 0
    for number in _of_products(cost_model):
        parameter = cost_model.parameters[number]
        block = block_of(parameter, saved)
        is_cached = parameter.trainable and not parameter.component.endswith(".experts")
        if number == head or is_cached or (block in alive and block not in chosen):
            kept += parameter.numel
    return kept


def _units(
    cost_model: CostModel, in_slices: CostModel, saved: SavedActivations, state: State, sharing: Sharing
) -> dict[str, Unit]:
    """What FSDP2 gathers together, by the name of a block or of what is around the blocks.

    Each block is a unit, what is left of a vision tower, the input embedding, the head, and the root with the rest. The
    root and the head stay gathered until backward has passed them. Spread experts are a unit within their block. What
    is gathered and what is laid out for the sum has full slices; gradients come as the weights are.

    Source: `foreach_all_gather_copy_out` and `foreach_reduce` in torch/distributed/fsdp/_fully_shard (torch 2.13).
    """
    if not sharing.gathers:
        return {}
    return {
        name: Unit(state.compute_bytes * whole, state.compute_bytes * learns, sharing.reduce_bytes * padded)
        for name, (whole, learns, padded) in numbers_by_unit(cost_model, in_slices, saved, sharing.expert).items()
    }


@remembered
def _pixels(cost_model: CostModel, pack: Workload, compute_bytes: int) -> int:
    """Bytes of a pack's pixels: as bytes, scaled to float32, and where autocast is, once more for the product.

    A value of a patch is multiplied into each channel of the tower once, which gives how many there are.
    """
    row = next((row for row in cost_model.rows if row.component == "vision.embed"), None)
    width = min(
        (min(r.features) for r in cost_model.rows if r.features and r.block and r.component.startswith("vision.")),
        default=0,
    )
    if row is None or not width:
        return 0
    values = row.forward * drivers.parse(row.driver)(pack) // (2 * width)
    copies = FLOAT32 + (compute_bytes if compute_bytes < FLOAT32 else 0)
    return values * (1 + copies)


@dataclass(frozen=True, slots=True)
class _Head:
    """Bytes of the output layer and its loss."""

    forward: int  # at the fullest point of its forward
    backward: int  # at the fullest point of its backward, where whole logits have one
    weight: int  # of its weight's gradient, which backward begins with
    tied: int  # of the input embedding's gradient, where it is added to the head's
    stream: int  # of the hidden states in float32

    @staticmethod
    def of(cost_model: CostModel, pack: Workload, state: State, sharing: Sharing) -> "_Head":
        """Add up a head.

        In chunks (`headway.models.losses.linear_losses`): the hidden states' gradient, the weight's summed in float32,
        and a chunk's logits, their copy in float32 that log-softmax takes, and its result. As the last chunk ends, both
        gradients are cast to what they belong to. Whole: the same of a whole pack; in backward log-softmax has its
        result, the gradient of that and the gradient of its input, all in float32.
        """
        features = head_features(cost_model)
        if features is None:
            return _Head(0, 0, 0, 0, 0)
        width, vocabulary = features
        slots = -(-pack.slots // sharing.sequence)
        compute = state.compute_bytes
        casts = _casts(state, sharing)
        number = head_parameter(cost_model)
        learns = number is not None and cost_model.parameters[number].trainable
        numel = width * vocabulary if learns else 0
        seen = state.weight_bytes if not sharing.gathers else compute  # bytes of a weight as the head sees it
        logit = compute + FLOAT32 + (FLOAT32 if compute < FLOAT32 else 0)
        tied = numel if learns and number is not None and is_tied(cost_model, number) else 0
        stream, weight = FLOAT32 * slots * width, state.weight_bytes * numel
        if state.chunk is None:
            return _Head(slots * vocabulary * logit, 3 * FLOAT32 * slots * vocabulary, weight, seen * tied, stream)
        hidden = compute * slots * width
        copied = hidden if casts else 0  # the norm before gives float32
        working = hidden + copied + FLOAT32 * numel + min(state.chunk, slots) * vocabulary * logit
        ends = hidden + copied + (stream if casts else 0) + numel * (FLOAT32 + (seen if seen < FLOAT32 else 0))
        return _Head(max(working, ends), 0, weight, seen * tied, stream)
