"""Moments of a training step and what one device holds at each of them, by part.

`built` is the model before its first pack. The first step's moments come before the optimizer has state, which its
update makes; those of later steps find it there. A part's number of bytes may differ from moment to moment: autograd
has let go of what backward has passed, and gradients come as it goes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.plan.recompute import BlockBytes

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""

MOMENTS = ("built", "first forward", "first backward", "first update", "forward", "backward", "update")
"""Names of the moments, in their order; the last three are those of later steps."""

PARTS = {
    "weights": "this device's share, as the optimizer sees them",
    "gradients": "this device's share, of what backward has passed",
    "optimizer": "moments",
    "average": "moving average of the weights",
    "casts": "copies of weights in the dtype of the products",
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
    """What a device holds at the fullest point of a moment."""

    name: str  # one of `MOMENTS`
    parts: Mapping[str, int]  # bytes by name, in the order of `PARTS`; none is 0

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def moment(name: str, **parts: int) -> Moment:
    """Make a moment of parts; those of no size are left out.

    >>> moment("built", optimizer=0, weights=8).parts
    {'weights': 8}
    """
    return Moment(name, {part: parts[part] for part in PARTS if parts.get(part)})


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that FSDP2 gathers together [bytes]; of a lone process, nothing."""

    gathered: int = 0  # whole, in the dtype of the products
    arriving: int = 0  # its gradients as backward makes them, whole
    summing: int = 0  # the same, laid out for their sum over the processes


@dataclass(frozen=True, slots=True)
class Passed:
    """What the backward of one block needs and leaves [bytes]."""

    size: BlockBytes
    kept: int  # from forward
    casts: int  # copies of its weights, which exist from forward on, or, where it is recomputed, in its backward alone
    is_recomputed: bool
    gradients: int  # of its weights, on this device, once backward has passed it
    passing: int  # gradients of activations at its fullest point
    unit: Unit


@dataclass(frozen=True, slots=True)
class Ends:
    """What stands around the blocks in backward [bytes]."""

    outside: int  # activations that no block saved
    stream: int  # the residual stream in float32, whose last norm backward passes first
    head: int  # gradient of the head's weight, which backward begins with
    rest: int  # gradients of weights in no block, the head's not among them, which come last
    tied: int  # the input embedding's gradient, where it is added to the head's
    root: int = 0  # gathered weights that stay
    head_unit: Unit = Unit()
    embedding_unit: Unit = Unit()
    stay_gathered: bool = False  # whether units that forward gathered stay so until backward has passed them


def fullest_of_backward(blocks: Sequence[Passed], ends: Ends) -> dict[str, int]:
    """Find the parts at the fullest point of a backward.

    Backward goes from the last block to the first. As it enters a block, the blocks before it hold what they kept, this
    one all that it saves, and the blocks after it have turned into gradients. FSDP2 has the block's weights whole and
    fetches those of the block before; the gradients of the block after are on their way until this one's follow, and
    as they do, they exist twice, as they came and laid out for the sum.

    Args:
        blocks: in the order of forward.
        ends: what stands around them.

    Returns:
        Bytes of activations, recomputing, passing, casts, gradients, gathered and reducing.
    """
    kept = ends.outside + sum(block.kept for block in blocks)
    casts = sum(block.casts for block in blocks if not block.is_recomputed)
    staying = ends.embedding_unit.gathered + sum(block.unit.gathered for block in blocks)
    gradients, after, head = ends.head, ends.head_unit, ends.head_unit
    points = [{
        "activations": kept, "passing": _NORM * ends.stream, "casts": casts, "gradients": gradients,
        "gathered": ends.root + head.gathered + (staying if ends.stay_gathered else 0),
        "reducing": head.arriving + head.summing,
    }]  # fmt: skip
    for number, block in reversed(list(enumerate(blocks))):
        again = block.size.whole - block.kept if block.is_recomputed else 0
        before = blocks[number - 1].unit if number else ends.embedding_unit
        whole = staying if ends.stay_gathered else block.unit.gathered + before.gathered
        enters = {
            "activations": kept, "recomputing": again, "passing": block.passing + ends.stream, "gradients": gradients,
            "casts": casts + (block.casts if block.is_recomputed else 0), "gathered": ends.root + whole,
            "reducing": after.summing,
        }  # fmt: skip
        kept -= block.kept
        casts -= 0 if block.is_recomputed else block.casts
        gradients += block.gradients
        after = block.unit
        leaves = {
            **enters, "activations": kept, "recomputing": 0, "passing": ends.stream, "casts": casts,
            "gradients": gradients, "reducing": after.arriving + after.summing,
        }  # fmt: skip
        points += [enters, leaves]
        staying -= block.unit.gathered
    last = ends.embedding_unit
    points.append({
        "activations": kept, "passing": ends.stream + ends.tied, "casts": casts, "gradients": gradients + ends.rest,
        "gathered": ends.root + last.gathered, "reducing": last.arriving + last.summing,
    })  # fmt: skip
    return max(points, key=lambda point: sum(point.values()))
