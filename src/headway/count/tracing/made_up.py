"""Integers and booleans that unknown floats decide, made up so that they are possible."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def integers(packet: Any, args: tuple[Any, ...], value: torch.Tensor) -> torch.Tensor:
    """Make up integers or booleans that unknown floats decide; what is picked from a row is picked once.

    Args:
        packet: the operation.
        args: its operands.
        value: its result, on shapes alone; one with data is returned as it is.
    """
    if not value.is_meta:
        return value
    if packet is aten.ne:  # unknown floats do not happen to be the number that code looks for
        return torch.ones(value.shape, dtype=value.dtype)
    if packet not in (aten.topk, aten.sort, aten.argsort) or not value.dim():
        return torch.zeros(value.shape, dtype=value.dtype)
    axis = 2 if packet is aten.topk else 1
    dim = args[axis] if len(args) > axis and not isinstance(args[axis], bool) else -1
    forced = args[0].forced
    if forced is not None and dim % value.dim() == value.dim() - 1:
        order = torch.arange(args[0].shape[-1]).expand(args[0].shape).scatter(-1, forced, -1)
        return order.argsort(dim=-1, stable=True)[..., : value.shape[-1]].to(value.dtype)
    size = [1] * value.dim()
    size[dim] = -1
    return torch.arange(value.shape[dim], dtype=value.dtype).view(size).expand(value.shape).clone()
