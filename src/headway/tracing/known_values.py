"""Values that stay known beside unknown floats: real data joined to activations, and placeholders for integers.

A mask may ride along with the states as one more channel; cut out again, it is still known. Integers and booleans that
depend on unknown floats, such as the choice of a router, get placeholder values that a real run could have. Which
places a choice takes changes no count; a number or a mask that unknown floats decide would, so these placeholders are
marked, and refused where they reach a mask or a length. Where they select rows, none is selected, and that is told.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.errors import TraceError

aten = torch.ops.aten


@dataclass(eq=False)
class Parts:
    """The known slices of a concatenation of real data and activations."""

    axis: int  # along which they lie, from the end
    parts: list[tuple[int, int, torch.Tensor]]  # first place, place after the last, and data of each

    def within(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the data from one place to another; None where not all of it is known."""
        for first, last, data in self.parts:
            if first <= start and stop <= last:
                return data.narrow(self.axis, start - first, stop - start)
        return None


def follow(packet: Any, args: tuple[Any, ...], results: Sequence[Any]) -> None:
    """Note the known slices of a concatenation, or the data of a slice that is taken out of one."""
    if packet is aten.cat and results:
        results[0].parts = _joined(args)
    source: Any = args[0] if args else None
    parts: Parts | None = getattr(source, "parts", None)
    if parts is None or source.writes or (source.base is not None and source.base.writes):  # written to since
        return
    for result, data in zip(results, _slices(packet, args, parts), strict=False):
        result.constant = result.constant if data is None else data


def _joined(args: tuple[Any, ...]) -> Parts | None:
    tensors, axis = args[0], args[1] if len(args) > 1 else 0
    axis -= max(tensor.dim() for tensor in tensors) if axis >= 0 else 0
    parts, place = [], 0
    for tensor in tensors:
        data = getattr(tensor, "constant", tensor)
        if not tensor.numel():
            continue  # torch takes an empty tensor of one axis beside any others
        if data is not None:
            parts.append((place, place + data.shape[axis], data.clone()))  # a copy: the tensor may be written to later
        place += tensor.shape[axis]
    return Parts(axis, parts) if parts else None


def _slices(packet: Any, args: tuple[Any, ...], parts: Parts) -> list[torch.Tensor | None]:
    """Return the data of each result of an operation that takes places out of a joined tensor; [] for any other."""
    source, axis = args[0], args[2] if packet is aten.split_with_sizes and len(args) > 2 else 0
    if packet in (aten.select, aten.slice):
        axis = args[1] if len(args) > 1 else 0
    axis -= source.dim() if axis >= 0 else 0
    if axis != parts.axis:
        return []
    size = source.shape[axis]
    if packet is aten.select:
        place = args[2] % size
        data = parts.within(place, place + 1)
        return [None if data is None else data.squeeze(axis)]
    if packet is aten.slice and len(args) < 5:
        start, stop, _ = slice(*args[2:]).indices(size)
        return [parts.within(start, stop)]
    if packet is aten.split_with_sizes:
        ends = torch.tensor(args[1]).cumsum(0).tolist()
        return [parts.within(end - length, end) for end, length in zip(ends, args[1], strict=True)]
    return []


# attributes of real integers and booleans: unknown floats decided their values; or they rest on floats having no number
# that code looks for, such as 1.0
_MARKS = ("is_placeholder", "is_assumed")


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Say whether unknown floats decided the values of real integers or booleans."""
    return getattr(tensor, "is_placeholder", False)


def _marked(tensor: torch.Tensor, mark: str = "is_placeholder") -> torch.Tensor:
    setattr(tensor, mark, True)
    return tensor


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors among arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ():
        yield from tensors(part)


def pass_on(args: Any, kwargs: dict[str, Any], results: Any) -> None:
    """Mark a function's results, and tensors it wrote to, if an argument was a placeholder; a mark of its own stays."""
    for mark in _MARKS:
        if any(getattr(t, mark, False) for t in tensors((*args, *kwargs.values()))):
            for tensor in tensors(results if results is not None else args[:1]):
                if getattr(tensor, "constant", tensor) is not None:  # data: a real tensor's, or what a phantom keeps
                    _marked(tensor, mark)


_SELECTING = {"__getitem__", "__setitem__", "masked_select", "nonzero", "argwhere", "where"}  # rows, by booleans


def selects_by_floats(function: Any, args: Any) -> bool:
    """Say whether a function selects rows that floats decide."""
    name = getattr(function, "__name__", "")
    if name not in _SELECTING or (name == "where" and len(args) > 1):
        return False
    is_index = name in ("__getitem__", "__setitem__")  # an index may hold integers too: places, not rows to keep
    masks = [mask for mask in tensors(args[1:2] if is_index else args) if not is_index or mask.dtype == torch.bool]
    return any(getattr(mask, mark, False) and mask.numel() for mask in masks for mark in _MARKS)


def without_rows(value: Any) -> Any:
    """Let placeholders among a function's arguments select nothing."""
    if isinstance(value, tuple | list):
        return type(value)(map(without_rows, value))
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) and is_placeholder(value) else value


def is_empty(results: Any) -> bool:
    """Say whether a result holds no value."""
    return any(not tensor.numel() for tensor in tensors(results))


# functions that read numbers, such as lengths, out of an argument, by its place
_READ_AS_NUMBERS = dict.fromkeys(("tolist", "item", "__int__", "__index__", "unique", "_unique2"), 0)
_READ_AS_NUMBERS |= {"unique_consecutive": 0, "repeat_interleave": 1}


def refuse_lengths(function: Any, args: Any, module: str) -> None:
    """Refuse to hand a model's Python a number, such as a length, that is a placeholder.

    Raises:
        TraceError: it is one.
    """
    place = _READ_AS_NUMBERS.get(getattr(function, "__name__", ""), len(args))
    if any(is_placeholder(tensor) and tensor.dtype != torch.bool for tensor in tensors(args[place : place + 1])):
        raise TraceError(
            f"module {module or '(the model)'} reads a number, such as a length, that depends on floats, but floats "
            "have no data in a trace. Give the number as integers or booleans among the inputs."
        )


# operations that choose places: how many is known, whichever they are
_CHOOSING = (aten.topk, aten.sort, aten.argsort, aten.argmax, aten.argmin, aten.max, aten.min, aten.multinomial)


def integers(packet: Any, args: tuple[Any, ...], value: torch.Tensor) -> torch.Tensor:
    """Make placeholder integers or booleans where unknown floats decide; each place of a row is picked at most once."""
    if not value.is_meta:
        return value
    if packet in (aten.isnan, aten.isinf):
        return torch.zeros(value.shape, dtype=value.dtype)  # unknown floats are finite
    if packet in (aten.eq, aten.ne):
        # unknown floats equal themselves, as no NaN does, and are never the number that code looks for
        equal = len(args) > 1 and args[0] is args[1]
        same = torch.full(value.shape, equal == (packet is aten.eq), dtype=value.dtype)
        return same if equal else _marked(same, "is_assumed")
    if packet not in (aten.topk, aten.sort, aten.argsort) or not value.dim():
        zeros = torch.zeros(value.shape, dtype=value.dtype)
        return zeros if packet in _CHOOSING else _marked(zeros)
    axis = 2 if packet is aten.topk else 1
    dim = args[axis] if len(args) > axis and not isinstance(args[axis], bool) else -1
    forced = args[0].forced
    if forced is not None and dim % value.dim() == value.dim() - 1:
        order = torch.arange(args[0].shape[-1]).expand(args[0].shape).scatter(-1, forced, -1)
        return order.argsort(dim=-1, stable=True)[..., : value.shape[-1]].to(value.dtype)
    size = [1] * value.dim()
    size[dim] = -1
    return torch.arange(value.shape[dim], dtype=value.dtype).view(size).expand(value.shape).clone()
