"""Backward of a pack on one device: what each block needs and leaves, and the fullest point of the walk through them.

Autograd lets go of what backward has passed, and gradients come as it goes. FSDP2 gathers weights, and lays gradients
out for their sum, unit by unit.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headway.count import CostModel, Workload, drivers
from headway.count.activations import SavedActivations
from headway.count.units import chosen_blocks, remembered
from headway.predict.activations import BlockBytes, block_bytes, padding_of_sums
from headway.predict.recipe import Sharing, State
from headway.predict.weights import (
    NO_UNIT,
    Holding,
    Unit,
    cast_weights,
    dequantised_by_block,
    shared,
    trained_by_block,
    units_of,
    values_of_experts,
    values_of_spread,
)

_NORM = 5
"""Float32 tensors of the residual stream's shape in the backward of a norm written out: the gradients of its output, of
what it normalised and of the squares' mean, and two products on their way to their sum."""


@dataclass(frozen=True, slots=True)
class BackwardBlock:
    """Backward of one block: the bytes that it needs and leaves [bytes]."""

    size: BlockBytes
    activations: int  # from forward, on the device
    casts: int  # copies of its weights, which exist from forward on, or, where it is recomputed, in its backward alone
    is_recomputed: bool
    gradients: int  # gradients of the block's weights, on this device, once backward has passed the block
    passing: int  # gradients of activations at its fullest point
    unit: Unit = NO_UNIT  # without its spread experts
    spread: Unit = NO_UNIT  # spread experts of the block, which backward passes before the rest
    # Copy that the largest product makes of a weight in 4 or 8 bits, for as long as the product takes.
    dequantised: int = 0
    by_spread: int = 0  # part of the saved bytes that products of spread experts read and give
    input: int = 0  # input of the block, if it waits in the host's memory; no part of `activations`

    @property
    def gathered(self) -> int:
        """Its weights where they are whole."""
        return self.unit.gathered + self.spread.gathered


@dataclass(frozen=True, slots=True)
class Ends:
    """Parts around the blocks in backward [bytes]."""

    outside: int  # activations that no block saved
    last_norm: int  # part of `outside` that the norm before the head saved, which backward passes first
    stream: int  # the residual stream in float32, whose last norm backward passes first
    head: int  # gradient of the head's weight, which backward begins with
    other_gradients: int  # gradients of weights in no block, the head's not among them, which come last
    tied: int  # the input embedding's gradient, where it is added to the head's
    root: int = 0  # gathered weights that stay
    head_unit: Unit = NO_UNIT
    embedding_unit: Unit = NO_UNIT
    stay_gathered: bool = False  # whether units that forward gathered stay so until backward has passed them


def _reduced(point: Mapping[str, int], unit: Unit, after: Unit) -> list[dict[str, int]]:
    """Two points at which the gradients of a unit have come: before its weights are let go of, and after.

    Backward passed the unit `after` before, whose gradients are let go of in between.
    """
    let_go = {"gathered": point["gathered"] - unit.gathered, "reducing": unit.arriving + unit.summing}
    return [{**point, "reducing": after.summing + unit.arriving}, {**point, **let_go}]


def casts_weights(state: State, sharing: Sharing) -> bool:
    """Tell whether autocast makes copies of weights in the dtype of the products."""
    return not sharing.gathers and state.compute_bytes < state.weight_bytes


@remembered
def backward_blocks(
    cost_model: CostModel, saved: SavedActivations, pack: Workload, state: State, sharing: Sharing
) -> list[BackwardBlock]:
    """List the backward of each block, in the order of forward: towers before the language model.

    Args:
        cost_model: the model.
        saved: what autograd saves of it.
        pack: the largest micro-batch.
        state: dtypes, and which blocks are recomputed.
        sharing: of the model among processes.
    """
    holding = Holding.of(state, sharing)
    in_slices = holding.slices(cost_model)
    # everything that a block has a share of, by its name
    units = units_of(cost_model, saved, holding)
    chosen = chosen_blocks(state.recompute, cost_model, saved)
    compute, sequence = state.compute_bytes, sharing.sequence
    sizes = block_bytes(cost_model, saved, pack, fused=state.fused, compute_bytes=compute, sequence=sequence)
    padding = padding_of_sums(cost_model, saved, pack, state.padded, compute) if state.padded else {}
    for name in padding.keys() & sizes.keys():  # each process of a sequence group has its heads
        size, own = sizes[name], padding[name] // sequence
        sizes = {**sizes, name: replace(size, saved=size.saved + own, attention=size.attention + own)}
    gradients = trained_by_block(in_slices, saved)
    casts = cast_weights(cost_model, saved) if casts_weights(state, sharing) else Counter[str]()
    dequantised = dequantised_by_block(cost_model, saved, holding)
    by_spread = values_of_spread(in_slices, saved, sharing.expert)
    # largest result of a block's products [values], whose gradient exists beside the one that it is made of;
    # a product's FLOPs are 2 for each result and input feature
    widest: Counter[str] = Counter()
    gated, towers = set[str](), set[str]()  # blocks in which it is of a gated product; those of a vision tower
    amounts = {driver: drivers.parse_driver(driver)(pack) for driver in {row.driver for row in cost_model.rows}}
    for row in cost_model.rows:
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
        passing[name] = max(passing.get(name, 0), (2 + casts_weights(state, sharing)) * values * pack.slots)
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
            unit=units.get((name, False), NO_UNIT),
            spread=units.get((name, True), NO_UNIT),
            by_spread=state.compute_bytes * pack.slots * by_spread[name] // sharing.sequence,
        )
        for name in order
    ]


@remembered
def fullest_of_backward(
    cost_model: CostModel,
    saved: SavedActivations,
    pack: Workload,
    state: State,
    sharing: Sharing,
    ends: Ends,
    makes_gradients: bool,
) -> dict[str, int]:
    """Find the parts at the fullest point of a backward.

    Backward goes from the last block to the first. As it enters a block, the blocks before it hold what they kept, this
    one all that it saves, and the blocks after it have turned into gradients. Of the inputs that wait in the host's
    memory, the last is there as backward begins, and each is fetched as backward enters the block behind it. Weights
    are gathered, and gradients summed, as `Unit` says; spread experts of a block are a unit that backward passes before
    the rest of the block.

    `ends` stands around the blocks, which make gradients or add to waiting ones; the rest is as for `backward_blocks`.

    Returns:
        Bytes of activations, recomputing, passing, casts, gradients, gathered and reducing.
    """
    blocks = backward_blocks(cost_model, saved, pack, state, sharing)
    # Bytes as backward begins; each block below takes its own out.
    activations = ends.outside + sum(block.activations for block in blocks)
    casts = sum(block.casts for block in blocks if not block.is_recomputed)
    staying = ends.embedding_unit.gathered + sum(block.gathered for block in blocks)
    gradients, after, head = ends.head, ends.head_unit, ends.head_unit
    # Inputs that wait in the host's memory; the last one is still on the device.
    inputs = [0, *(block.input for block in blocks if block.input)]
    point = {
        "activations": activations + inputs[-1], "passing": _NORM * ends.stream, "casts": casts, "gradients": gradients,
        "gathered": ends.root + head.gathered + (staying if ends.stay_gathered else 0),
    }  # fmt: skip
    # behind the head: the last norm's backward, then the head's gradients on their way to their sum
    points = _reduced(point, head, NO_UNIT)
    activations -= ends.last_norm
    for number, block in reversed(list(enumerate(blocks))):
        # entering the block: what it saves is there, computed again where it was not kept; the block before is gathered
        again = block.size.saved - block.activations if block.is_recomputed else 0
        before = blocks[number - 1].unit if number else ends.embedding_unit
        gathered = ends.root + (staying if ends.stay_gathered else block.gathered + before.gathered)
        if block.input:
            inputs.pop()
        point = {
            "activations": activations + inputs[-1], "recomputing": again, "passing": block.passing + ends.stream,
            "casts": casts + (block.casts if block.is_recomputed else 0) + block.dequantised, "gradients": gradients,
            "gathered": gathered, "reducing": after.summing,
        }  # fmt: skip
        points.append(point)
        point = {**point, "passing": ends.stream}
        # backward of the block's spread experts comes first, and frees what their products saved
        if block.spread.gathered:
            freed = min(block.by_spread, again or block.activations)
            point["recomputing" if again else "activations"] -= freed
            points += _reduced(point, block.spread, after)
            gathered, after = gathered - block.spread.gathered, block.spread
        # behind the block: what it kept is gone, its gradients are there
        activations -= block.activations
        casts -= 0 if block.is_recomputed else block.casts
        gradients += block.gradients if makes_gradients else 0
        point = {**point, "activations": activations + inputs[-1], "recomputing": 0}
        point |= {"casts": casts, "gradients": gradients}
        points += _reduced({**point, "gathered": gathered}, block.unit, after)
        after = block.unit
        staying -= block.gathered
    # the input embedding; if weights are tied, its gradient is added to the head's
    last = ends.embedding_unit
    points.append({
        "activations": activations, "passing": ends.stream + ends.tied, "casts": casts,
        "gradients": gradients + ends.other_gradients,
        "gathered": ends.root + last.gathered, "reducing": last.arriving + last.summing,
    })  # fmt: skip
    return max(points, key=lambda point: sum(point.values()))
