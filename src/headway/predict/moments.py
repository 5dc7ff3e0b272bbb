"""Moments of a training step and the bytes that one device holds at each of them, by part.

`built` is the model before its first pack. The first step's moments come before the optimizer has state, which its
update makes; those of later steps find it there. A part's number of bytes may differ from moment to moment: autograd
has let go of what backward has passed, and gradients come as it goes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.predict.recompute import BlockBytes

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""

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
    "recomputing": "activations of the block that is computed again",
    "passing": "gradients of what the block computes that backward is in",
    "head": "logits at hand, and the gradients made with them",
    "updating": "float32 copies that the optimizer works on",
}
"""Parts of memory, each in words."""

_NORM = 5
"""Float32 tensors of the residual stream's shape in the backward of a norm written out: the gradients of its output, of
what it normalised and of the squares' mean, and two products on their way to their sum."""


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
class Unit:
    """Buffers of the weights that FSDP2 gathers together, in one unit [bytes]; of a lone process, nothing.

    Each block is a unit, and so are what is left of a vision tower, the input embedding, the head, and the root with
    the rest. Spread experts are a unit within their block. In a step,

    * forward gathers a unit into one buffer and copies the whole weights out of it. The buffer stays until the next
      unit is gathered, so the last one's is there as forward ends;
    * behind a unit its weights are let go of, but for root and head, and but for all of them without resharding;
    * backward gathers the unit again and, while it computes, the one before it;
    * the unit's gradients come whole (`arriving`). Then its weights are let go of, and the gradients are laid out for
      their sum over the processes (`summing`), which stay until those of the next unit have come.

    Source: `foreach_all_gather_copy_out` and `foreach_reduce` in torch/distributed/fsdp/_fully_shard (torch 2.13).
    """

    gathered: int = 0  # weights, whole, in the dtype of the products, with the filling of slices
    arriving: int = 0  # gradients of the unit as backward makes them, whole, without the filling
    summing: int = 0  # the same, laid out for their sum over the processes, with the filling


NO_UNIT = Unit()
"""Nothing is gathered."""


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


def fullest_of_backward(blocks: Sequence[BackwardBlock], ends: Ends) -> dict[str, int]:
    """Find the parts at the fullest point of a backward.

    Backward goes from the last block to the first. As it enters a block, the blocks before it hold what they kept, this
    one all that it saves, and the blocks after it have turned into gradients. Of the inputs that wait in the host's
    memory, the last is there as backward begins, and each is fetched as backward enters the block behind it. Weights
    are gathered, and gradients summed, as `Unit` says; spread experts of a block are a unit that backward passes before
    the rest of the block.

    Args:
        blocks: in the order of forward.
        ends: what stands around them.

    Returns:
        Bytes of activations, recomputing, passing, casts, gradients, gathered and reducing.
    """
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
        # the block's spread experts go first, and let go of what their products saved
        if block.spread.gathered:
            freed = min(block.by_spread, again or block.activations)
            point["recomputing" if again else "activations"] -= freed
            points += _reduced(point, block.spread, after)
            gathered, after = gathered - block.spread.gathered, block.spread
        # behind the block: what it kept is gone, its gradients are there
        activations -= block.activations
        casts -= 0 if block.is_recomputed else block.casts
        gradients += block.gradients
        point = {**point, "activations": activations + inputs[-1], "recomputing": 0}
        point |= {"casts": casts, "gradients": gradients}
        points += _reduced({**point, "gathered": gathered}, block.unit, after)
        after = block.unit
        staying -= block.gathered
    # the input embedding, whose gradient is added to the head's where weights are tied
    last = ends.embedding_unit
    points.append({
        "activations": activations, "passing": ends.stream + ends.tied, "casts": casts,
        "gradients": gradients + ends.other_gradients,
        "gathered": ends.root + last.gathered, "reducing": last.arriving + last.summing,
    })  # fmt: skip
    return max(points, key=lambda point: sum(point.values()))


def _reduced(point: Mapping[str, int], unit: Unit, after: Unit) -> list[dict[str, int]]:
    """Two points at which the gradients of a unit have come: before its weights are let go of, and after.

    Args:
        point: what is held beside gradients on their way.
        unit: whose weights are whole.
        after: the unit that backward passed before, whose gradients are let go of in between.
    """
    let_go = {"gathered": point["gathered"] - unit.gathered, "reducing": unit.arriving + unit.summing}
    return [{**point, "reducing": after.summing + unit.arriving}, {**point, **let_go}]
