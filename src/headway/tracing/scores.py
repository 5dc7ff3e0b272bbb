"""Follow hidden attention scores, in attention written by hand and in masks of floats.

A mask is laid over scores, or over a bias that is added to them, by a few operations: a sum with -inf where a pair is
hidden, a fill, a choice. What they lay is real data, so the pairs that stay are known. Whatever moves unknown floats
about by position could hide a pair that nobody can name; scores that meet such a tensor are unclear.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from headway.tracing import known_values
from headway.tracing.phantom import Phantom, Stays, aten

UNCLEAR: Stays = "unclear"  # something may be hidden, and nobody can say which pairs
HIDDEN = -9e3  # masks hide by -1e4 or far below it; a bias, learnt or of distance, stays above

_SUMS = (aten.add, aten.add_, aten.sub, aten.sub_)
_FILLS = (aten.masked_fill, aten.masked_fill_)
_PRODUCTS = (aten.mul, aten.mul_)
# operations that move a tensor's elements, hiding none
_LAYOUT: dict[Any, Any] = {
    aten.view: torch.Tensor.reshape,
    aten._unsafe_view: torch.Tensor.reshape,
    **{
        packet: packet
        for packet in (aten.transpose, aten.permute, aten.slice, aten.select, aten.squeeze, aten.unsqueeze, aten.expand)
    },
}
# operations that place unknown floats by position
_PLACING = {
    aten.triu, aten.tril, aten.triu_, aten.tril_, aten.scatter, aten.scatter_, aten.index_put, aten.index_put_,
    aten.index_fill, aten.index_fill_, aten.index_copy, aten.index_copy_, aten.select_scatter, aten.slice_scatter,
    aten.masked_scatter,
}  # fmt: skip


def known_data(value: Any) -> torch.Tensor | None:
    """Return an operand's data: a real tensor itself, a constant phantom's known data, None for other phantoms."""
    if isinstance(value, Phantom):
        return value.constant
    return value if isinstance(value, torch.Tensor) else None


def remaining_pairs(packet: Any, args: tuple[Any, ...], out: torch.Tensor) -> Stays:
    """Say which pairs stay in the result of an operation, given what stays in its operands and what is laid here.

    Args:
        packet: the operation; not a product.
        args: its operands.
        out: its result, of which only the shape is read.

    Returns:
        A boolean mask (queries, keys), with axes before these where heads or blocks are masked differently; None where
        nothing is hidden, or `UNCLEAR`.
    """
    if out.dim() < 2:
        return None
    stays: Stays = None
    for value in args:
        if isinstance(value, Phantom) and value.stays is not None:
            stays = common_pairs(stays, _moved(packet, args, value, out))
    if packet in _PLACING or any(_made_on_shapes(value, out) for value in args) or _placeholder_hides(packet, args):
        return UNCLEAR
    for mask in _laid(packet, args):
        stays = common_pairs(stays, _plane(mask, out))
    return stays


def common_pairs(left: Stays, right: Stays) -> Stays:
    """Combine the pairs that two operands leave visible."""
    if left is None or right is None:
        return right if left is None else left
    return left & right if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) else UNCLEAR


def pairs_under(mask: torch.Tensor) -> Stays:
    """Say which pairs stay under a mask: true ones, or those that are not hidden by what is added."""
    real = known_data(mask)
    if real is None:
        return mask.stays if isinstance(mask, Phantom) else UNCLEAR
    return real if real.dtype == torch.bool else torch.gt(real, HIDDEN)


def mask_driver(mask: torch.Tensor) -> str:
    """Name the driver of a mask (queries, keys) if each query sees the keys of a known kind of mask, else "".

    Keys beyond the queries' own are compressed ones; the two parts' drivers are then joined by a plus.

    >>> mask_driver(torch.ones(5, 5, dtype=torch.bool).tril())
    'pairs:causal'
    >>> mask_driver(torch.ones(5, 5, dtype=torch.bool).tril().triu(-1))
    'pairs:sliding:2'
    """
    queries, keys = mask.shape
    if keys > queries:
        parts = (mask_driver(mask[:, :queries]), _compressed_driver(mask[:, queries:]))
        return "+".join(parts) if all(parts) else ""
    if keys < queries:
        return _compressed_driver(mask)
    counts, place = _keys_of_queries(mask), torch.arange(1, queries + 1)
    most = int(counts.max())
    falls = (counts.diff() < 0).nonzero()
    # size of a block or chunk: one more than the keys that are lost from its last token to the next
    size = 1 - int(counts.diff()[falls[0, 0]]) if len(falls) else 1
    if not most:
        return ""
    banded = bool(mask[-1, -most:].all())
    kinds = {
        "pairs:causal": place,
        "pairs:full": torch.full_like(place, queries),
        f"pairs:{'sliding' if banded else 'topk'}:{most}": place.clamp(max=most),
        f"pairs:chunked:{size}": (place - 1) % size + 1,
        f"pairs:blocks:{size}:{most // size}": place.minimum(most - size + (place - 1) % size + 1),
        f"pairs:pools:{size}:{most // size}": place.minimum(most // size * size + place % size),
    }
    return next((driver for driver, expected in kinds.items() if torch.equal(counts, expected)), "")


def _keys_of_queries(mask: torch.Tensor) -> torch.Tensor:
    """Count the keys that each query sees; numpy adds booleans twenty times as fast as torch."""
    return torch.from_numpy(np.count_nonzero(mask.numpy(), axis=-1))


def _compressed_driver(mask: torch.Tensor) -> str:
    """Name a mask over keys that each stand for some tokens before the query."""
    counts = _keys_of_queries(mask)
    most = int(counts.max())
    if most == 0:
        return ""
    rate = int((counts > 0).int().argmax()) + 1
    complete = torch.arange(1, len(mask) + 1) // rate  # compressed keys whose tokens all lie before the query
    if bool((counts == complete).all()):
        return f"pairs:compressed:{rate}"
    return f"pairs:compressed:topk:{rate}:{most}" if bool((counts == complete.clamp(max=most)).all()) else ""


def _made_on_shapes(value: Any, out: torch.Tensor) -> bool:
    """Say whether an operand is a constant over scores whose data was lost: it depends on no batch and no weight."""
    unknown = isinstance(value, Phantom) and value.constant is None and not value.fed and not value.sources
    return unknown and value.dim() >= 2 and value.shape[-2:] == out.shape[-2:]


def _moved(packet: Any, args: tuple[Any, ...], value: Phantom, out: torch.Tensor) -> Stays:
    """Move an operand's mask of visible pairs through an operation that may reshape it."""
    mask = value.stays
    if not isinstance(mask, torch.Tensor):
        return mask
    if mask.dim() > 2:
        return _moved_planes(packet, args, mask, value.shape, out)
    if packet in (aten.transpose, aten.permute, aten.t):
        order = list(range(value.dim()))
        if packet is aten.permute:
            order = [axis % value.dim() for axis in args[1]]
        else:
            first, second = args[1:3] if packet is aten.transpose else (0, 1)
            order[first], order[second] = order[second], order[first]
        last = tuple(axis - value.dim() for axis in order[-2:])
        if {*last} == {-2, -1}:
            return mask if last == (-2, -1) else mask.T
    if packet is aten.slice:
        axis = args[1] if len(args) > 1 else 0
        axis -= value.dim() if axis >= 0 else 0
        return mask if axis < -2 else torch.ops.aten.slice(mask, axis, *args[2:])
    if value.shape[-2:] == out.shape[-2:]:
        return mask
    return _moved_planes(packet, args, mask, value.shape, out)


def _moved_planes(packet: Any, args: tuple[Any, ...], mask: torch.Tensor, shape: Any, out: torch.Tensor) -> Stays:
    """Move a mask of visible pairs that also differs along axes before the last two, as between heads."""
    if packet in _LAYOUT:
        moved = _LAYOUT[packet](mask.expand(shape), *args[1:])
        return _plane(moved, out) if moved.shape == out.shape else UNCLEAR
    return mask if shape == out.shape else UNCLEAR


def _plane(mask: torch.Tensor, out: torch.Tensor) -> Stays:
    """Reduce a mask that broadcasts to the result to its queries and keys, and those axes along which it differs."""
    if mask.numpy().all():  # stops at the first pair that is hidden
        return None
    if mask.dim() > out.dim():
        return UNCLEAR
    full = mask[(None,) * (max(2, out.dim()) - mask.dim())]
    for axis in range(full.dim() - 2):
        first = full.narrow(axis, 0, 1)
        if full.shape[axis] > 1 and (full.stride(axis) == 0 or bool((full == first).all())):
            full = first
    full = full.expand(*full.shape[:-2], *out.shape[-2:])
    return full.reshape(full.shape[-2:]) if math.prod(full.shape[:-2]) == 1 else full


def _placeholder_hides(packet: Any, args: tuple[Any, ...]) -> bool:
    """Say whether a mask whose values unknown floats decided may hide pairs here."""
    if not any(isinstance(a, torch.Tensor) and known_values.is_placeholder(a) for a in args):
        return False
    phantom = next((a for a in args if isinstance(a, Phantom)), None)
    if packet in _FILLS:
        return phantom is not None and _hides(args[2], phantom)
    return packet in _SUMS or packet is aten.where


def _laid(packet: Any, args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Find the real masks that an operation lays over phantoms: true where a pair stays."""
    phantom = next((a for a in args if isinstance(a, Phantom) and a.constant is None), None)
    if phantom is None:
        return
    if packet in _SUMS:
        negated = packet in (aten.sub, aten.sub_)
        for position, value in enumerate(args[:2]):
            real = known_data(value)
            if real is not None and real.dim():
                # this trace hands out booleans where models expect floats
                yield real if real.dtype == torch.bool else torch.gt(-real if negated and position else real, HIDDEN)
    elif packet in _FILLS and _hides(args[2], phantom):
        yield ~args[1].bool()
    elif packet is aten.where and len(args) == 3:
        condition, first, second = args[0].bool(), args[1], args[2]
        if first is not phantom and _hides(first, phantom):
            yield ~condition
        elif first is phantom and _hides(second, phantom):
            yield condition
    elif packet in _PRODUCTS and _is_normalised(phantom):
        for value in args[:2]:
            real = known_data(value)
            if real is not None and real.dim():
                yield real != 0


def _is_normalised(phantom: Phantom) -> bool:
    """Say whether a phantom holds normalised scores, of which a zero hides a value."""
    return phantom.scores is not None and phantom.scores.kind == "attention"


def _hides(fill: Any, phantom: Phantom) -> bool:
    """Say whether a fill value hides the pair of the score that it replaces."""
    value = known_data(fill) if isinstance(fill, torch.Tensor) else fill
    if value is None:
        return False  # another score or bias
    largest = float(value.max()) if isinstance(value, torch.Tensor) else float(value)
    return largest == 0 if _is_normalised(phantom) else largest <= HIDDEN
