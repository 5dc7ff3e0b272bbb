"""How models that write attention by hand hide scores: the operations that lay a mask over them, and what stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headway.count.tracing.phantom import Phantom, aten

if TYPE_CHECKING:
    from collections.abc import Callable


def covers(value: Any, scores: torch.Tensor) -> bool:
    """Say whether an operand lies over the queries and keys of scores."""
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[-2:] == scores.shape[-2:]


def _added(mask: torch.Tensor, _args: Any) -> torch.Tensor:
    """Read a mask that is added: this trace hands out booleans where models expect floats; -inf, or nearly, hides."""
    return mask if mask.dtype == torch.bool else torch.gt(mask, -1e4)


def _filled(mask: torch.Tensor, _args: Any) -> torch.Tensor:
    return ~mask.bool()


def _chosen(mask: torch.Tensor, args: Any) -> torch.Tensor:
    """Read the condition of a `where`: scores stay where it is true if they are its first choice."""
    if mask is not args[0]:
        return torch.ones(mask.shape, dtype=torch.bool)  # what is put in place of hidden scores
    condition: torch.Tensor = mask.bool()
    return condition if isinstance(args[1], Phantom) and args[1].scores is not None else ~condition


# what each operation does with scores and a real tensor over them, as the mask of the scores that stay
MASKING: dict[Any, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    aten.add: _added,
    aten.add_: _added,
    aten.masked_fill: _filled,
    aten.masked_fill_: _filled,
    aten.where: _chosen,
}
