"""Rules that join a processor's tensors of samples' images to the tensors of a pack.

The rule is read off the processor: it is run on two samples apart and together, and the tensor of both is compared with
those of each. Tensor letter: X stands for any axes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from headway.errors import DataError


class Joining(NamedTuple):
    """Rule by which the tensors of several samples become one.

    Attributes:
        axis: they stand one after the other along it; None where all samples have the same tensor.
        fill: value that fills up the other axes to the largest sample; None where that was not seen to happen.
    """

    axis: int | None
    fill: float | None = None


class Joinable(NamedTuple):
    """One sample's tensor and how it joins others.

    Attributes:
        tensor_X: as the model's processor gives it.
        rule: how it joins others.
    """

    tensor_X: torch.Tensor
    rule: Joining


def joining_of(parts: Sequence[torch.Tensor], together: torch.Tensor) -> Joining | None:
    """Find the rule by which samples' tensors make the one of all; None where there is none.

    Args:
        parts: of several samples.
        together: of the samples together, in their order.

    >>> joining_of([torch.ones(1, 3), torch.ones(2, 2)], torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 1, 0]]))
    Joining(axis=0, fill=0.0)
    """
    if any(part.dim() != together.dim() for part in parts):
        return None
    for axis in range(together.dim()):
        if _shape(parts, axis) != together.shape:
            continue
        covered = _placed([torch.ones_like(part, dtype=torch.bool) for part in parts], axis, False)
        uncovered = together[~covered]
        rule = Joining(axis, uncovered[0].item() if len(uncovered) else None)
        if torch.equal(pack_tensor(parts, rule), together):
            return rule
    return Joining(None) if all(torch.equal(part, together) for part in parts) else None


def pack_tensor(parts: Sequence[torch.Tensor], rule: Joining) -> torch.Tensor:
    """One tensor for a pack.

    Args:
        parts: of its samples, in order; at least one.
        rule: how they join.

    Raises:
        DataError: the tensors do not fit each other, and no value is known that would fill them up.
    """
    if rule.axis is None or len(parts) == 1:
        if not all(torch.equal(part, parts[0]) for part in parts):
            raise DataError(
                "The model's processor gave a sample another value of what all samples shared when it was tried: "
                f"{parts[0].tolist()} and others. Put one sample into each pack (data.samples_per_pack: 1)."
            )
        return parts[0]
    filled = sum(part.numel() for part in parts) < torch.Size(_shape(parts, rule.axis)).numel()
    if filled and rule.fill is None:
        raise DataError(
            f"Images of a pack give tensors of shapes {[tuple(part.shape) for part in parts]}, which only fit each "
            "other if the smaller ones are filled up, and the model's processor was not seen to do that. Put one "
            "sample into each pack (data.samples_per_pack: 1)."
        )
    return _placed(parts, rule.axis, rule.fill) if filled else torch.cat(list(parts), dim=rule.axis)


def joined_tensors(samples: Sequence[Mapping[str, Joinable]]) -> dict[str, Joinable]:
    """The tensors of several samples by their names, each joined as the model's processor joins them."""
    by_name: dict[str, list[Joinable]] = {}
    for sample in samples:
        for name, joinable in sample.items():
            by_name.setdefault(name, []).append(joinable)
    return {
        name: Joinable(pack_tensor([joinable.tensor_X for joinable in parts], parts[0].rule), parts[0].rule)
        for name, parts in by_name.items()
    }


def _shape(parts: Sequence[torch.Tensor], axis: int) -> tuple[int, ...]:
    """Shape of the parts one after the other along an axis, each filled up to the largest on other axes."""
    sides = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    sides[axis] = sum(part.shape[axis] for part in parts)
    return tuple(sides)


def _placed(parts: Sequence[torch.Tensor], axis: int, fill: float | None) -> torch.Tensor:
    full_tensor = parts[0].new_full(_shape(parts, axis), fill)  # type: ignore[arg-type]
    start = 0
    for part in parts:
        place = [slice(0, side) for side in part.shape]
        place[axis] = slice(start, start + part.shape[axis])
        full_tensor[tuple(place)] = part
        start = place[axis].stop
    return full_tensor
