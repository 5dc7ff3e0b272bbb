"""Memory that one device needs to train, by part and by moment, from a cost model and the saved activations.

Everything is proportional to a parameter count or to a driver of the largest pack, so that no step has to run:

* weights, gradients, optimizer state and averages: bytes per parameter, divided by the processes that share a copy;
* gathered weights: of FSDP2, the units that are whole at a time, and the gradients of one that wait to be summed;
* activations: what autograd saves of each block, or what enters it where it is recomputed and what attention gave
  where that is kept, and one block's worth to recompute into;
* head: chunks of logits, and the gradients that the head's forward makes;
* the update: copies in float32 of what the optimizer neither holds in it nor updates in one pass.

Each of these exists at some moments of a step and not at others; the peak is the fullest moment. Held against
measurement in `benchmarks/results/plan_memory_*.md`. What the allocator and CUDA itself take, which no tensor
holds, is listed by `allowances`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headway.count import CostModel, Workload, drivers
from headway.count.activations import SavedActivations, bytes_of
from headway.count.units import chosen_blocks, head_features, head_parameter, is_tied, remembered
from headway.predict.attentions import padding_of_sums
from headway.predict.held import (
    Fixed,
    Holding,
    Sharing,
    State,
    dequantised_by_block,
    shared,
    weights_by_unit,
)
from headway.predict.moments import (
    FLOAT32,
    NO_UNIT,
    PARTS,
    BackwardBlock,
    Ends,
    Moment,
    Unit,
    fullest_of_backward,
    moment,
)
from headway.predict.recompute import block_bytes
from headway.predict.slices import (
    SPREAD,
    cast_weights,
    kept_casts,
    numbers_by_unit,
    sliced,
    trained_by_block,
    trained_of_process,
    values_of_experts,
    values_of_spread,
)


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
    def always(self) -> int:
        """Bytes that are held from step to step."""
        return self.weights + self.base + self.optimizer + self.average

    @property
    def fullest(self) -> Moment:
        """The moment of the peak."""
        return max(self.moments, key=lambda m: m.total)

    @property
    def peak(self) -> int:
        """The most that is held at a time."""
        return self.fullest.total

    def at(self, name: str) -> Moment:
        """The moment of a name, one of `headway.predict.moments.MOMENTS`."""
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
    in_slices = sliced(cost_model, sharing.shards, sharing.expert) if sharing.gathers else cost_model
    fixed = Fixed.of(cost_model, in_slices, state, sharing)
    head = _Head.of(cost_model, pack, state, sharing)

    # Gradients of the step's earlier packs lie ready to be added to, so that this pack's backward makes no more.
    waiting = fixed.gradients if state.accumulates else 0
    if state.accumulates and not sharing.reduce_each_pack:
        waiting = sharing.reduce_bytes * trained_of_process(cost_model, sharing.expert)
    new_gradients = 0 if waiting or sharing.offload else fixed.gradients

    # Blocks are listed once for all choices of what they do not depend on.
    of_blocks = replace(state, accumulates=False, chunk=None)
    sharing_blocks = replace(sharing, reshard=True, reduce_each_pack=True)
    blocks = _backward_blocks(cost_model, in_slices, saved, pack, of_blocks, sharing_blocks)
    units = _units(cost_model, in_slices, saved, state, sharing)
    ends = _ends_of(saved, pack, sharing, head, units, new_gradients, sum(block.gradients for block in blocks))

    # parts at the fullest point of each moment; the first update makes the optimizer's state
    between = _between(cost_model, saved, pack, state, sharing, blocks, ends) | {"gradients": waiting}
    walk = _walked(cost_model, in_slices, saved, pack, of_blocks, sharing_blocks, ends, bool(new_gradients))
    walk = {**walk, "gradients": walk["gradients"] + waiting, "batch": between["batch"]}
    forward = {**fixed.built(), **_forward(between, head)}
    backward = {**fixed.built(), **_backward(between, head, walk)}
    moments = [moment("built", **fixed.built())]
    for when, optimizer in (("first ", 0), ("", fixed.optimizer)):
        moments += [
            moment(f"{when}forward", **forward, optimizer=optimizer),
            moment(f"{when}backward", **backward, optimizer=optimizer),
            moment(f"{when}update", **fixed.update()),
        ]
    most = {part: max(walk.get(part, 0), *(m.parts.get(part, 0) for m in moments)) for part in PARTS}
    return MemoryPlan(**most, host=fixed.host + sum(block.input for block in blocks), moments=tuple(moments))


def _forward(between: Mapping[str, int], head: "_Head") -> dict[str, int]:
    """Parts at the end of forward, where the head's logits are."""
    return {**between, "head": head.forward}


def _backward(between: Mapping[str, int], head: "_Head", walk: dict[str, int]) -> dict[str, int]:
    """Parts at the fuller of two points of backward: in the head, or at the fullest of the walk through the blocks."""
    return max({**between, "head": head.backward}, walk, key=lambda parts: sum(parts.values()))


def _ends_of(
    saved: SavedActivations,
    pack: Workload,
    sharing: Sharing,
    head: "_Head",
    units: Mapping[str, Unit],
    new_gradients: int,
    of_blocks: int,
) -> Ends:
    """List the parts around the blocks in backward; `of_blocks` of the new gradients come in the blocks."""
    head_gradient = shared(head.weight, sharing)
    rows = saved.blocks[""].plain
    # with several processes it stayed until the end of backward, on pretended ones
    last_norm = {driver: size for driver, size in rows.items() if driver == "tokens" and not sharing.gathers}
    return Ends(
        outside=-(-bytes_of(rows, pack) // sharing.sequence),
        last_norm=bytes_of(last_norm, pack) // sharing.sequence,
        stream=head.stream,
        head=head_gradient if new_gradients else 0,
        other_gradients=max(0, new_gradients - of_blocks - head_gradient),
        tied=head.tied,
        root=sum(units.get(name, NO_UNIT).gathered for name in ("(root)", "(vision)")),
        head_unit=units.get("(head)", NO_UNIT),
        embedding_unit=units.get("(embedding)", NO_UNIT),
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
    casts = kept_casts(cost_model, saved, chosen) * state.compute_bytes if _casts(state, sharing) else 0

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


def _casts(state: State, sharing: Sharing) -> bool:
    """Tell whether autocast makes copies of weights in the dtype of the products."""
    return not sharing.gathers and state.compute_bytes < state.weight_bytes


@remembered
def _backward_blocks(
    cost_model: CostModel, in_slices: CostModel, saved: SavedActivations, pack: Workload, state: State, sharing: Sharing
) -> list[BackwardBlock]:
    """List the backward of each block, in the order of forward: towers before the language model.

    Args:
        cost_model: the model.
        in_slices: the same, `sliced`.
        saved: what autograd saves of it.
        pack: the largest micro-batch.
        state: dtypes, and which blocks are recomputed.
        sharing: of the model among processes.
    """
    # everything that a block has a share of, by its name
    units = _units(cost_model, in_slices, saved, state, sharing)
    chosen = chosen_blocks(state.recompute, cost_model, saved)
    compute, sequence = state.compute_bytes, sharing.sequence
    sizes = block_bytes(in_slices, saved, pack, fused=state.fused, compute_bytes=compute, sequence=sequence)
    padding = padding_of_sums(in_slices, saved, pack, state.padded, compute) if state.padded else {}
    for name in padding.keys() & sizes.keys():  # each process of a sequence group has its heads
        size, own = sizes[name], padding[name] // sequence
        sizes = {**sizes, name: replace(size, saved=size.saved + own, attention=size.attention + own)}
    gradients = trained_by_block(in_slices, saved)
    casts = cast_weights(in_slices, saved) if _casts(state, sharing) else Counter[str]()
    dequantised = dequantised_by_block(cost_model, saved, Holding.of(state, sharing), sharing.expert)
    by_spread = values_of_spread(in_slices, saved, sharing.expert)
    # largest result of a block's products [values], whose gradient exists beside the one that it is made of;
    # a product's FLOPs are 2 for each result and input feature
    widest: Counter[str] = Counter()
    gated, towers = set[str](), set[str]()  # blocks in which it is of a gated product; those of a vision tower
    amounts = {driver: drivers.parse_driver(driver)(pack) for driver in {row.driver for row in in_slices.rows}}
    for row in in_slices.rows:
        if row.block in sizes:
            if row.component.startswith("vision."):
                towers.add(row.block)
            if row.features:
                values = row.forward * amounts[row.driver] // (2 * min(row.features))
                if values > widest[row.block]:
                    widest[row.block] = values
                    (gated.add if row.component.endswith(".mlp") else gated.discard)(row.block)
    passing = {name: (2 - (state.liger and name in gated)) * widest[name] for name in sizes}
    # Backward that enters routed experts holds the gradient of their outputs, its product with the outputs, which the
    # router's gradient is summed from, and under autocast the incoming gradient, cast to the dtype of the products.
    for name, values in values_of_experts(cost_model, saved).items():
        passing[name] = max(passing.get(name, 0), (2 + _casts(state, sharing)) * values * pack.slots)
    order = sorted(sizes, key=lambda name: name not in towers)  # stable: as they stand in the model
    inputs = {name: sizes[name].entry for name in chosen.keys() & sizes.keys() if state.inputs_on_host}
    sizes = {name: replace(size, entry=0) if name in inputs else size for name, size in sizes.items()}
    return [
        BackwardBlock(
            sizes[name],
            activations=sizes[name].kept(chosen[name]) if name in chosen else sizes[name].saved,
            casts=state.compute_bytes * casts[name],
            # while a weight is dequantised, the gradient of what its product reads is not there yet
            dequantised=sum(
                size if number == 0 else max(0, size - state.compute_bytes * widest[name] // sharing.sequence)
                for number, size in enumerate(dequantised.get(name, ()))
            ),
            is_recomputed=name in chosen,
            input=inputs.get(name, 0),
            gradients=shared(state.weight_bytes * gradients[name], sharing),
            passing=compute * passing[name] // sequence,
            unit=units.get(name, NO_UNIT),
            spread=units.get(f"{name}{SPREAD}", NO_UNIT),
            by_spread=state.compute_bytes * pack.slots * by_spread[name] // sharing.sequence,
        )
        for name in order
    ]


@remembered
def _walked(
    cost_model: CostModel,
    in_slices: CostModel,
    saved: SavedActivations,
    pack: Workload,
    state: State,
    sharing: Sharing,
    ends: Ends,
    makes_gradients: bool,
) -> dict[str, int]:
    """Parts at the fullest point of a backward, whose blocks make gradients beside waiting ones, or do not."""
    blocks = _backward_blocks(cost_model, in_slices, saved, pack, state, sharing)
    return fullest_of_backward(blocks if makes_gradients else [replace(block, gradients=0) for block in blocks], ends)


def _units(
    cost_model: CostModel, in_slices: CostModel, saved: SavedActivations, state: State, sharing: Sharing
) -> dict[str, Unit]:
    """List the units that FSDP2 gathers, by the name of a block or of the part around the blocks.

    What is gathered and what is laid out for the sum has full slices; gradients come as the weights are.
    """
    if not sharing.gathers:
        return {}
    of_weights = weights_by_unit(cost_model, in_slices, saved, sharing.expert, Holding.of(state, sharing))
    return {
        name: Unit(of_weights[name][1], state.compute_bytes * learns, sharing.reduce_bytes * padded)
        for name, (learns, padded) in numbers_by_unit(cost_model, in_slices, saved, sharing.expert).items()
    }


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
        casts = _casts(state, sharing)
        number = head_parameter(cost_model)
        learns = number is not None and cost_model.parameters[number].trainable
        numel = width * vocabulary if learns else 0
        weight_bytes = state.weight_bytes if not sharing.gathers else compute  # bytes of a weight as the head sees it
        logit = compute + FLOAT32 + (FLOAT32 if compute < FLOAT32 else 0)
        tied = numel if learns and number is not None and is_tied(cost_model, number) else 0
        stream, weight = FLOAT32 * slots * width, state.weight_bytes * numel
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


@remembered
def pixel_bytes(cost_model: CostModel, pack: Workload, compute_bytes: int) -> int:
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
    values = row.forward * drivers.parse_driver(row.driver)(pack) // (2 * width)
    copies = FLOAT32 + (compute_bytes if compute_bytes < FLOAT32 else 0)
    return values * (1 + copies)


# Memory of a CUDA device that no tensor holds. None of it was measured here: it is why a run may fill nine tenths of
# a device by its plan, and it is listed so that a reader can set it against that tenth.
MIB = 2**20

CONTEXT = 512 * MIB
"""Allowance for CUDA's context and the kernels that are loaded with it, which differ by driver and device [bytes]."""

COMMUNICATOR = 256 * MIB
"""Allowance for the buffers of one NCCL communicator [bytes]: 4 MiB for each channel and each protocol that uses them.

Source: NCCL_BUFFSIZE, 4 MiB by default, docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

WORKSPACE = 32 * MIB
"""Workspace of cuBLAS for a stream, as PyTorch gives it on Hopper; less on older devices [bytes].

Source: docs.pytorch.org/docs/stable/notes/cuda.html, "cuBLAS workspaces".
"""

LARGE_SEGMENT, SMALL_SEGMENT = 20 * MIB, 2 * MIB
"""Block that the allocator takes from the driver for one request of up to 10 MiB, and for requests up to 1 MiB [bytes].

The rest of the last one of each is what it cannot use at worst, where segments grow; tensors themselves are rounded up
to 512 bytes. Source: c10/core/AllocatorConfig.h of torch 2.13, kLargeBuffer and kSmallBuffer.
"""


def allowances(communicators: int) -> dict[str, int]:
    """List the memory that a CUDA device holds beside tensors [bytes].

    Attention needs no entry: what its backward works on, in float32 and of the queries' shape, exists when the gated
    product of the same block is gone, which is larger.

    Args:
        communicators: groups of processes that this one exchanges with; 0 for a lone one.

    >>> sum(allowances(communicators=0).values()) // 2**20
    566
    """
    parts = {"CUDA context": CONTEXT, "cuBLAS workspace": WORKSPACE}
    if communicators:
        parts["communicators"] = communicators * COMMUNICATOR
    return {**parts, "allocator's last segments": LARGE_SEGMENT + SMALL_SEGMENT}
