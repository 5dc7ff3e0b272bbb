"""Memory that one device needs to train, by part and by moment, from a cost model and the saved activations.

Everything is proportional to a parameter count or to a driver of the largest pack, so that no step has to run:

* weights, gradients, optimizer state and averages: bytes per parameter, divided by the processes that share a copy;
* gathered weights: of FSDP2, the units that are whole at a time, and the gradients of one that wait to be summed;
* activations: what autograd saves of each block, or what enters it where it is recomputed and what attention gave
  where that is kept, and one block's worth to recompute into;
* head: chunks of logits, and the gradients that the head's forward makes;
* the update: copies in float32 of what the optimizer neither holds in it nor updates in one pass.

Each of these exists at some moments of a step and not at others; the peak is the fullest moment. `built` is the model
before its first pack. The first step's moments come before the optimizer has state, which its update makes. The plan is
held against measurement in `benchmarks/results/plan_memory_*.md`. `allowances` lists what the allocator and CUDA itself
take, which no tensor holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headway.count import CostModel, Workload
from headway.count.activations import SavedActivations, bytes_of
from headway.count.units import chosen_blocks, head_features, head_parameter, is_tied
from headway.predict.activations import FLOAT32, pixel_bytes
from headway.predict.backward import BackwardBlock, Ends, backward_blocks, casts_weights, fullest_of_backward
from headway.predict.recipe import Sharing, State
from headway.predict.weights import (
    NO_UNIT,
    Fixed,
    Holding,
    Unit,
    UnitName,
    kept_casts,
    shared,
    trained_of_process,
    units_of,
)

MOMENTS = ("built", "first forward", "first backward", "first update", "forward", "backward", "update")
"""Names of the moments, in their order; the last three are moments of later steps."""

PARTS = {
    "weights": "this device's share, as the optimizer sees them",
    "base": "this device's share of the frozen weights in 4 or 8 bits",
    "gradients": "this device's share, of what backward has passed",
    "optimizer": "moments",
    "average": "moving average of the weights",
    "casts": "copies of weights in the dtype of the products, of a base as it is dequantised",
    "gathered": "weights that are whole for a while",
    "reducing": "gradients of a unit on their way to the other devices",
    "batch": "pixels, as they came and as the tower reads them",
    "activations": "kept for backward, of the largest pack",
    "recomputing": "activations of the block that backward recomputes",
    "passing": "gradients of what the block computes that backward is in",
    "head": "logits at hand, and the gradients made with them",
    "updating": "float32 copies that the optimizer works on",
}
"""Parts of memory, each in words."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory of a device at the fullest point of a moment."""

    name: str  # one of `MOMENTS`
    parts: Mapping[str, int]  # bytes by name, in the order of `PARTS`; none is 0

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def moment(name: str, **parts: int) -> Moment:
    """Make a moment of parts; parts of no size are left out.

    >>> moment("built", optimizer=0, weights=8).parts
    {'weights': 8}
    """
    return Moment(name, {part: parts[part] for part in PARTS if parts.get(part)})


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that one device holds: the most of each part, and the parts at each moment."""

    weights: int  # this device's share, as the optimizer sees them
    base: int  # this device's share of the frozen ones that are held in 4 or 8 bits
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
    moments: tuple[Moment, ...]  # bytes at each moment, in the order of a run

    @property
    def fullest(self) -> Moment:
        """The moment of the peak."""
        return max(self.moments, key=lambda m: m.total)

    @property
    def peak(self) -> int:
        """The most that is held at a time."""
        return self.fullest.total

    def at(self, name: str) -> Moment:
        """The moment of a name, one of `MOMENTS`."""
        return next(m for m in self.moments if m.name == name)

    def to_dict(self) -> dict[str, Any]:
        """The parts, the moments with their parts, and the peak [bytes]."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moments"}
        moments = {m.name: {**m.parts, "total": m.total} for m in self.moments}
        return {**parts, "moments": moments, "peak_moment": self.fullest.name, "peak": self.peak}


def plan_memory(
    cost_model: CostModel, saved: SavedActivations, pack: Workload, state: State, sharing: Sharing
) -> MemoryPlan:
    """Add up the bytes that one device holds while it trains.

    Args:
        cost_model: of the model, with what is frozen frozen.
        saved: what autograd saves of it, in the precision of its forward.
        pack: the largest micro-batch, of which the processes of a sequence group each take a share.
        state: bytes per parameter, and how forward computes.
        sharing: of the model among processes.

    Raises:
        UsageError: `state.recompute` chooses no block.
    """
    fixed = Fixed.of(cost_model, state, sharing)
    head = _Head.of(cost_model, pack, state, sharing)

    # Gradients of the step's earlier packs lie ready to be added to, so that this pack's backward makes no more.
    waiting = fixed.gradients if state.accumulates else 0
    if state.accumulates and not sharing.reduce_each_pack:
        waiting = sharing.reduce_bytes * trained_of_process(cost_model, sharing.expert)
    new_gradients = 0 if waiting or sharing.offload else fixed.gradients

    # Blocks are listed once for all choices of what they do not depend on.
    of_blocks = replace(state, accumulates=False, chunk=None)
    sharing_blocks = replace(sharing, reshard=True, reduce_each_pack=True)
    blocks = backward_blocks(cost_model, saved, pack, of_blocks, sharing_blocks)
    units = units_of(cost_model, saved, Holding.of(state, sharing))
    ends = _ends_of(saved, pack, sharing, head, units, new_gradients, sum(block.gradients for block in blocks))

    # parts at the fullest point of each moment; the first update makes the optimizer's state
    between = _between(cost_model, saved, pack, state, sharing, blocks, ends) | {"gradients": waiting}
    walk = fullest_of_backward(cost_model, saved, pack, of_blocks, sharing_blocks, ends, bool(new_gradients))
    walk = {**walk, "gradients": walk["gradients"] + waiting, "batch": between["batch"]}
    results = -(-pack.slots // sharing.sequence) * state.kept_results * state.compute_bytes
    for parts in (between, walk):
        parts["activations"] = parts.get("activations", 0) + results
    forward = {**fixed.built(), **between, "head": head.forward}
    in_head = {**between, "head": head.backward}
    fuller = max(in_head, walk, key=lambda parts: sum(parts.values()))
    backward = {**fixed.built(), **fuller}
    moments = [moment("built", **fixed.built())]
    for when, optimizer in (("first ", 0), ("", fixed.optimizer)):
        moments += [
            moment(f"{when}forward", **forward, optimizer=optimizer),
            moment(f"{when}backward", **backward, optimizer=optimizer),
            moment(f"{when}update", **fixed.update()),
        ]
    most = {part: max(walk.get(part, 0), *(m.parts.get(part, 0) for m in moments)) for part in PARTS}
    return MemoryPlan(**most, host=fixed.host + sum(block.input for block in blocks), moments=tuple(moments))


def _ends_of(
    saved: SavedActivations,
    pack: Workload,
    sharing: Sharing,
    head: "_Head",
    units: Mapping[UnitName, Unit],
    new_gradients: int,
    of_blocks: int,
) -> Ends:
    """List the parts around the blocks in backward; `of_blocks` of the new gradients come in the blocks."""
    head_gradient = shared(head.weight, sharing)
    rows = saved.blocks[""].plain

    def unit(name: str) -> Unit:
        return units.get((name, False), NO_UNIT)

    # with several processes it stayed until the end of backward, on pretended ones
    last_norm = {driver: size for driver, size in rows.items() if driver == "tokens" and not sharing.gathers}
    return Ends(
        outside=-(-bytes_of(rows, pack) // sharing.sequence),
        last_norm=bytes_of(last_norm, pack) // sharing.sequence,
        stream=head.stream,
        head=head_gradient if new_gradients else 0,
        other_gradients=max(0, new_gradients - of_blocks - head_gradient),
        tied=head.tied,
        root=unit("(root)").gathered + unit("(vision)").gathered,
        head_unit=unit("(head)"),
        embedding_unit=unit("(embedding)"),
        stay_gathered=not sharing.reshard,
    )


def _between(
    cost_model: CostModel,
    saved: SavedActivations,
    pack: Workload,
    state: State,
    sharing: Sharing,
    blocks: Sequence[BackwardBlock],
    ends: Ends,
) -> dict[str, int]:
    """Parts as forward ends and backward begins, without head and gradients."""
    # copies that autocast made of weights and that are still there
    chosen = chosen_blocks(state.recompute, cost_model, saved)
    casts = kept_casts(cost_model, saved, chosen) * state.compute_bytes if casts_weights(state, sharing) else 0

    # processes that share a pack with latents are each given their own patches; others cut all of them
    pixels = pixel_bytes(cost_model, pack, state.compute_bytes)
    batch = -(-pixels // sharing.sequence) if cost_model.has_latents else pixels
    # FSDP2 (`Unit`): root and head stay whole, and the buffer of forward's last gathering lies beside its copy
    last_buffer = ends.head_unit.gathered or (blocks[-1].unit.gathered if blocks else 0)
    gathered = ends.root + ends.head_unit.gathered + last_buffer
    if not sharing.reshard:
        gathered += ends.embedding_unit.gathered + sum(block.gathered for block in blocks)
    # Inputs that wait in the host's memory; the last one is still on the device.
    inputs = [0, *(block.input for block in blocks if block.input)]
    activations = ends.outside + sum(block.activations for block in blocks) + inputs[-1]
    return {"activations": activations, "casts": casts, "batch": batch, "gathered": gathered}


@dataclass(frozen=True, slots=True)
class _Head:
    """Bytes of the output layer and its loss."""

    forward: int  # at the fullest point of its forward
    backward: int  # at the fullest point of its backward, where whole logits have one
    weight: int  # gradient of the head's weight, which backward begins with
    tied: int  # gradient of the input embedding, where it is added to the head's
    stream: int  # hidden states in float32

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
        # this process's rows of logits, and the weight's numbers where it learns
        width, vocabulary = features
        slots = -(-pack.slots // sharing.sequence)
        compute = state.compute_bytes
        casts = casts_weights(state, sharing)
        number = head_parameter(cost_model)
        learns = number is not None and cost_model.parameters[number].trainable
        numel = width * vocabulary if learns else 0
        weight_bytes = state.weight_bytes if not sharing.gathers else compute  # bytes of a weight as the head sees it
        logit = compute + FLOAT32 + (FLOAT32 if compute < FLOAT32 else 0)
        tied = numel if learns and number is not None and is_tied(cost_model, number) else 0
        stream, weight = FLOAT32 * slots * width, state.weight_bytes * numel
        if state.logit_bytes is not None:
            return _Head(state.logit_bytes * slots * vocabulary, 0, weight, weight_bytes * tied, stream)
        if state.chunk is None:
            return _Head(
                slots * vocabulary * logit, 3 * FLOAT32 * slots * vocabulary, weight, weight_bytes * tied, stream
            )
        # in chunks: the hidden states' gradient, the weight's in float32, and a chunk of logits; then both are cast
        hidden = compute * slots * width
        copied = hidden if casts else 0  # the norm before gives float32
        working = hidden + copied + FLOAT32 * numel + min(state.chunk, slots) * vocabulary * logit
        ends = hidden + copied + (stream if casts else 0)
        ends += numel * (FLOAT32 + (weight_bytes if weight_bytes < FLOAT32 else 0))
        return _Head(max(working, ends), 0, weight, weight_bytes * tied, stream)


MIB = 2**20


def allowances(communicators: int) -> dict[str, int]:
    """List the memory that a CUDA device holds beside tensors [bytes].

    None of it was measured here: it is why a run may fill nine tenths of a device by its plan, and a reader can set it
    against that tenth. Attention needs no entry: what its backward works on, in float32 and of the queries' shape,
    exists when the gated product of the same block is gone, which is larger.

    Args:
        communicators: groups of processes that this one exchanges with; 0 for a lone one.

    Source: cuBLAS: PyTorch's workspace on Hopper, docs.pytorch.org/docs/stable/notes/cuda.html. Communicators: NCCL's
        4 MiB for each channel and protocol, docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, NCCL_BUFFSIZE.
        Segments: the rest of one for requests of up to 10 MiB and of one for up to 1 MiB at worst, where segments grow,
        c10/core/AllocatorConfig.h of torch 2.13, kLargeBuffer and kSmallBuffer. The context differs by driver.

    >>> sum(allowances(communicators=0).values()) // 2**20
    566
    """
    parts = {"CUDA context": 512 * MIB, "cuBLAS workspace": 32 * MIB, "communicators": communicators * 256 * MIB}
    parts["allocator's last segments"] = (20 + 2) * MIB
    return {name: size for name, size in parts.items() if size}
