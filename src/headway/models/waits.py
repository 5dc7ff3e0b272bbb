"""Avoid the host's waits in transformers' forward passes: the collator gives answers that models ask the device for.

An answer that depends on numbers on the device makes the host wait for all that was launched before. Two questions are
left in the forward pass of a pack, and their gradients ask again:

* where the placeholders of images and videos are. Models look for them with a mask, scatter features by it and, with
  features for several layers, index by it. The collator says where they are (`Placeholders`), and the model's
  `get_placeholder_mask` gives masks that know (`PlacedMask`): rows are copied by index, to the same bits.
* whether positions restart in a row, which in a pack they do.

Both hold only while a model runs on a pack, that is with `pack_cu_seqlens` among its arguments.

Tensor letters: T slots of the pack, V placeholders, H hidden size.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils

_GIVEN = "pack_placeholders"
Segments = tuple[tuple[int, int], ...]
"""Length of each segment of a pack, and its number of positions: one more than the largest [tokens]."""


@dataclass(slots=True)
class RunningPack:
    """The pack that a model runs on.

    Attributes:
        boundaries_N: of its segments, where the pack is.
        segments: what the host knows of them; None where nobody said.
        local: its slots that this process computes; None for all of them.
    """

    boundaries_N: torch.Tensor
    segments: Segments | None = None
    local: slice | None = None

    def spans(self, positions_RT: torch.Tensor) -> list[tuple[int, int, int]]:
        """First slot of each segment among this process's slots, one past the last, and the segment's positions.

        Args:
            positions_RT: of this process's slots; read on the host if it was not told of the segments.
        """
        segments = self.segments
        if segments is None:
            segments = segments_of(self.boundaries_N, positions_RT)
        local = self.local or slice(0, sum(length for length, _ in segments))
        spans, start = [], 0
        for length, positions in segments:
            first, last = (min(max(slot, local.start), local.stop) for slot in (start, start + length))
            start += length
            if first < last:
                spans.append((first - local.start, last - local.start, positions))
        return spans


_pack: ContextVar[RunningPack | None] = ContextVar("pack", default=None)


@dataclass(frozen=True, slots=True)
class Places:
    """Slots of a pack, ascending.

    Attributes:
        host_V: on the CPU, int64.
        device_V: the same where the pack is.
    """

    host_V: torch.Tensor
    device_V: torch.Tensor

    @classmethod
    def of(cls, mask_T: torch.Tensor) -> "Places":
        """Find the places where a mask on the CPU is true."""
        places_V = mask_T.nonzero()[:, 0]
        return cls(places_V, places_V)


class Placeholders(NamedTuple):
    """Places of the placeholders of a pack's images and of its videos."""

    images: Places
    videos: Places

    @classmethod
    def of(cls, ids_T: torch.Tensor, image_token: int, video_token: int) -> "Placeholders":
        """Find them among token ids on the CPU."""
        return cls(Places.of(ids_T == image_token), Places.of(ids_T == video_token))

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Placeholders":
        """The same with the device's half changed, by a copy to the device or into page-locked memory."""
        return Placeholders(*(Places(places.host_V, move(places.device_V)) for places in self))


class PlacedMask:
    """A mask over the slots of one pack that knows where it is true, of shape (1, T, ...), (1, T) or (T,).

    What models do with such masks is done by index; for anything else the real mask stands in.

    Args:
        places: where it is true.
        real: makes the real mask.
        axis: the axis of the slots in what `x[mask]` selects from.
    """

    def __init__(self, places: Places, real: Callable[[], torch.Tensor], axis: int = 1) -> None:
        self.places, self.axis = places, axis
        self._real = real

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """The real mask."""
        return self._real()

    def to(self, *_args: Any, **_options: Any) -> "PlacedMask":
        """Itself: it is where the pack is."""
        return self

    def sum(self) -> torch.Tensor:
        """Number of slots that the mask selects, a number on the host."""
        return torch.tensor(len(self.places.host_V))

    def __getitem__(self, index: Any) -> Any:
        if index == (..., 0):
            return PlacedMask(self.places, lambda: self.mask[..., 0])
        if isinstance(index, PlacedMask):  # slots of the other mask's choice that this mask selects too
            pairs = zip(_both(index.places), _both(self.places), strict=True)
            within = Places(*(torch.searchsorted(whole_W, part_V) for whole_W, part_V in pairs))
            return PlacedMask(within, lambda: self.mask[index.mask], axis=0)
        return self.mask[index]

    def __or__(self, other: Any) -> Any:
        if not isinstance(other, PlacedMask):
            return self.mask | other
        pairs = zip(_both(self.places), _both(other.places), strict=True)
        return PlacedMask(Places(*(torch.cat(pair).sort().values for pair in pairs)), lambda: self.mask | other.mask)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.mask, name)

    def cut(self, local: slice) -> "tuple[PlacedMask, slice]":
        """The mask of some of the slots, and which of all that it selects are among them."""
        bounds = torch.searchsorted(self.places.host_V, torch.tensor([local.start, local.stop])).tolist()
        among = slice(*bounds)
        places = Places(*(places_V[among] - local.start for places_V in _both(self.places)))
        return PlacedMask(places, lambda: self.mask[:, local]), among

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run torch's function on a mask."""
        if func is torch.Tensor.masked_scatter and len(args) == 3 and isinstance(args[1], cls):
            return args[1]._written(args[0].clone(), args[2])
        mask = _selecting(args[1]) if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else None
        if mask is None:
            return func(*map(_real, args), **{name: _real(value) for name, value in (kwargs or {}).items()})
        if func is torch.Tensor.__getitem__:
            return args[0].index_select(mask.axis, mask.places.device_V).flatten(0, mask.axis)
        mask._written(args[0], args[2])
        return None

    def _written(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Write rows into the slots of `x` that the mask selects; autograd saves only the indices."""
        index: Any = (*[slice(None)] * self.axis, self.places.device_V)
        x[index] = rows.reshape(*x.shape[: self.axis], -1, *x.shape[self.axis + 1 :])
        return x


def answer_ahead(model: PreTrainedModel) -> None:
    """Have a model take the places of placeholders from its arguments, where it would ask the device.

    Args:
        model: transformers' own; its forward takes `pack_placeholders`, as `Batch.model_inputs` gives it.
    """
    masking: Any = masking_utils  # typed as if nobody replaced its functions
    if not hasattr(masking.find_packed_sequence_indices, "__wrapped__"):
        masking.find_packed_sequence_indices = _known_to_restart(masking.find_packed_sequence_indices)
    model.register_forward_pre_hook(_before, with_kwargs=True)
    model.register_forward_hook(_after, always_call=True)


def on_pack() -> bool:
    """Tell whether a model is running on a pack just now."""
    return _pack.get() is not None


def running_pack() -> RunningPack | None:
    """The pack that a model is running on just now; None while there is none."""
    return _pack.get()


def segments_of(boundaries_N: torch.Tensor, positions_RT: torch.Tensor) -> Segments:
    """Lengths and positions of a pack's segments, read on the host."""
    lengths = boundaries_N.diff().tolist()
    highest_T = positions_RT.reshape(-1, positions_RT.shape[-1]).amax(0)
    parts = torch.split(highest_T, lengths)
    return tuple((length, int(part.max()) + 1) for length, part in zip(lengths, parts, strict=True))


def keep_on_host(model: nn.Module) -> None:
    """Keep FSDP2 from copying a sharded model's host tensors to the device; after `answer_ahead`.

    FSDP2 copies all tensors among the arguments to its device. Grids are only listed by the model, so each would be
    copied twice, and the host would wait.
    """
    model.register_forward_pre_hook(_hide, prepend=True, with_kwargs=True)


@dataclass(frozen=True, slots=True)
class _KeptOnHost:
    """Wraps a tensor so that FSDP2, which looks for tensors among arguments, does not copy it to the device."""

    tensor: torch.Tensor


def _hide(_model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def hidden(value: Any) -> Any:
        return _KeptOnHost(value) if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value

    return args, {name: hidden(value) for name, value in options.items()}


def _known_to_restart(find: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    @functools.wraps(find)
    def packed(position_ids: torch.Tensor) -> Any:
        if torch.compiler.is_compiling() or not on_pack():
            return find(position_ids)
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)  # the value of `find`, unless that sees a single segment

    return packed


def _before(model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs: dict[str, Any] = {
        name: value.tensor if isinstance(value, _KeptOnHost) else value for name, value in options.items()
    }
    placeholders, segments = inputs.pop(_GIVEN, None), inputs.pop("pack_segments", None)
    if (boundaries_N := inputs.get("pack_cu_seqlens")) is not None:
        _pack.set(RunningPack(boundaries_N, segments))
        for part in _that_look_for_placeholders(model) if placeholders is not None else ():
            vars(part)["get_placeholder_mask"] = _placed(part.get_placeholder_mask, placeholders)
    return args, inputs


def _after(model: nn.Module, *_: Any) -> None:
    _pack.set(None)
    for part in _that_look_for_placeholders(model):
        vars(part).pop("get_placeholder_mask", None)


def _that_look_for_placeholders(model: Any) -> list[Any]:
    return [part for part in {model, model.base_model} if hasattr(part, "get_placeholder_mask")]


def _placed(find: Callable[..., Any], placeholders: Placeholders) -> Callable[..., Any]:
    def masks(*args: Any, **kwargs: Any) -> tuple[PlacedMask, PlacedMask]:
        cached_masks = functools.cache(lambda: find(*args, **kwargs))
        return PlacedMask(placeholders.images, lambda: cached_masks()[0]), PlacedMask(
            placeholders.videos, lambda: cached_masks()[1]
        )

    return masks


def _both(places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    return places.host_V, places.device_V


def _selecting(index: Any) -> PlacedMask | None:
    """The PlacedMask in `x[mask]` or `x[mask, :]`, if the index is one."""
    first, *others = index if isinstance(index, tuple) else (index,)
    return first if isinstance(first, PlacedMask) and all(other == slice(None) for other in others) else None


def _real(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_real, value))
    return value.mask if isinstance(value, PlacedMask) else value
