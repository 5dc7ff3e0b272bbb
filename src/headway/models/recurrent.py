"""Recurrent layers in a pack: the state of one segment does not go over into the next.

Linear attention and state-space layers carry a state, and a short convolution, from token to token. transformers tells
only some of their kernels where segments begin, and its own PyTorch code none. So each segment runs through such a
layer by itself.
"""

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from headway.errors import ConfigError
from headway.models.waits import on_pack


def separate_segments(model: nn.Module) -> None:
    """Have every recurrent layer of a model run segment by segment where it is given a pack's boundaries.

    A layer is recurrent if its forward takes hidden states and the cache of a state (`cache_params`), as those of
    transformers do. One that other arguments do not reach refuses a pack.
    """
    for module in model.modules():
        if not _is_recurrent(module) or any(_is_recurrent(part) for part in module.modules() if part is not module):
            continue
        vars(module)["forward"] = _separated(module.forward)


def _is_recurrent(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters
    return "hidden_states" in parameters and "cache_params" in parameters


def _separated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(hidden_states: torch.Tensor, *args: Any, pack_cu_seqlens: torch.Tensor | None = None, **others: Any) -> Any:
        if pack_cu_seqlens is None:
            if on_pack():
                raise ConfigError(
                    "This model's recurrent layers are not told where a pack's segments begin, and would carry their "
                    "state from one sample into the next, so it cannot be trained on packs. docs/models.md lists the "
                    "families that can."
                )
            return forward(hidden_states, *args, **others)
        if args or others.get("attention_mask") is not None or others.get("pack_split") is not None:
            raise ConfigError(
                "This model's recurrent layers need whole segments: a pack cannot be shared by several processes, nor "
                "its rows be padded. Set parallel.sequence to 1."
            )
        return _each(forward, hidden_states, pack_cu_seqlens, others)

    return run


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped; boundaries are read on the host
def _each(
    forward: Callable[..., Any], hidden_1TH: torch.Tensor, cu_seqlens_N: torch.Tensor, others: dict[str, Any]
) -> torch.Tensor:
    spans = [span for span in pairwise(cu_seqlens_N.tolist()) if span[1] > span[0]]
    return torch.cat([forward(hidden_1TH[:, first:last], **others) for first, last in spans], dim=1)
