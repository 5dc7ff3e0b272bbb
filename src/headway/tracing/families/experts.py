"""Experts known by name, whose code runs rows that their router did not choose."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headway.tracing.record import Recorder


def _two_experts(
    module: Any, _recorder: Recorder, hidden_states: torch.Tensor, _mask: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Stand in for NLLB-MoE's experts, which take two for each token.

    transformers makes its mask of first choices one-hot a second time, so that its first expert multiplies each token
    once for every expert that was not chosen; rows beyond the two have a weight of zero.
    """
    out = torch.zeros_like(hidden_states)
    every = torch.arange(len(hidden_states))
    for number, expert in enumerate(list(module.values())[:2]):
        out.index_add_(0, every, expert(hidden_states[every]) * weights[:, number, None])
    return out


def unchosen_rows(module: nn.Module, experts: int, chosen: int) -> str | None:
    """Explain why every token meets all experts of a module; None where its class is not known to do that."""
    if (type(module).__name__, "forward") not in METHODS:
        return None
    return (
        f"transformers makes NLLB-MoE's choices one-hot twice, and runs {experts} rows for each token; those beyond "
        f"the {chosen} chosen have no weight"
    )


# methods that run experts otherwise than their model means: (class, method)
METHODS: dict[tuple[str, str], Callable[..., Any]] = {("NllbMoeExperts", "forward"): _two_experts}
