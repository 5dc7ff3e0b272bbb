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
from transformers import PreTrainedModel

from headway.errors import ConfigError
from headway.models.waits import on_pack

_NO_BOUNDARIES_MESSAGE = (
    "This model's recurrent layers are not told where a pack's segments begin, and would carry their state from one "
    "sample into the next, so it cannot be trained on packs. docs/models.md lists the families that can."
)


# Methods of transformers' cache, by which a layer keeps a state or a convolution's last tokens instead of keys.
_STATES = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache", "conv_cache"})


def separate_segments(model: nn.Module) -> None:
    """Have every recurrent layer of a model run segment by segment where it is given a pack's boundaries.

    A layer is recurrent if its forward takes hidden states and the cache of a state (`cache_params`), as those of
    transformers do, or hidden states, and its code keeps a state in the model's cache (LFM2's convolutions, MiniMax).
    One that other arguments do not reach refuses a pack, and so do one that attends too, and a model that says that it
    keeps a state (`_is_stateful`) where no such layer is found.
    """
    recurrent = [
        module
        for module in model.modules()
        if _is_recurrent(module) and not any(_is_recurrent(part) for part in module.modules() if part is not module)
    ]
    for module in recurrent:
        if "ALL_ATTENTION_FUNCTIONS" in names_read(module):
            module.register_forward_pre_hook(_refuse_pack, with_kwargs=True)
        else:
            vars(module)["forward"] = _separated(module.forward)
    if not recurrent and any(_says_so(module) for module in model.modules()):
        model.register_forward_pre_hook(_refuse_pack, with_kwargs=True)


def _says_so(module: nn.Module) -> bool:
    """Whether a model says that it keeps a state; one around another model only says that it may."""
    around = any(isinstance(part, PreTrainedModel) for part in module.modules() if part is not module)
    return bool(getattr(module, "_is_stateful", False)) and not around


def _is_recurrent(module: nn.Module) -> bool:
    parameters, names = inspect.signature(module.forward).parameters, names_read(module)
    return "hidden_states" in parameters and ("cache_params" in parameters or not _STATES.isdisjoint(names))


def names_read(module: nn.Module) -> set[str]:
    """Global names and attributes that the code of a module's class reads, its bases' above nn.Module included."""
    kind = type(module)
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    methods = (inspect.unwrap(value) for base in bases for value in vars(base).values() if inspect.isfunction(value))
    return {name for method in methods for name in method.__code__.co_names}


def _refuse_pack(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("pack_cu_seqlens") is not None:
        raise ConfigError(_NO_BOUNDARIES_MESSAGE)


def _separated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(hidden_states: torch.Tensor, *args: Any, pack_cu_seqlens: torch.Tensor | None = None, **others: Any) -> Any:
        if pack_cu_seqlens is None:
            if on_pack():
                raise ConfigError(_NO_BOUNDARIES_MESSAGE)
            return forward(hidden_states, *args, **others)
        if args or others.get("attention_mask") is not None or others.get("pack_split") is not None:
            raise ConfigError(
                "This model's recurrent layers need whole segments: a pack cannot be shared by several processes, nor "
                "its rows be padded. Set parallel.sequence to 1."
            )
        return _segment_by_segment(forward, hidden_states, pack_cu_seqlens, others)

    return run


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped; boundaries are read on the host
def _segment_by_segment(
    forward: Callable[..., Any], hidden_1TH: torch.Tensor, cu_seqlens_N: torch.Tensor, others: dict[str, Any]
) -> Any:
    """Run every segment; of a layer that returns several things (attention weights, mostly None), the first is cut."""
    spans = [span for span in pairwise(cu_seqlens_N.tolist()) if span[1] > span[0]]
    parts = [forward(hidden_1TH[:, first:last], **others) for first, last in spans]
    if isinstance(parts[0], tuple):
        return torch.cat([part[0] for part in parts], dim=1), *parts[0][1:]
    return torch.cat(parts, dim=1)
