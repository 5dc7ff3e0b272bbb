"""Segments of a pack that are kept apart: in a model's recurrent layers, or in all of it.

Linear attention and state-space layers carry a state, and a short convolution, from token to token. Where transformers
hands boundaries on to the functions that do, as to gated delta rules, the layer runs once over the pack: the packages'
kernels take boundaries, and `headway.models.delta_rule` stands in for its PyTorch code, which takes none. Through any
other layer each segment runs by itself. A model that mixes the tokens of a pack in other ways runs each segment by
itself as a whole.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headway.errors import ConfigError
from headway.models.attention import use_attention
from headway.models.blocks import decoder_of
from headway.models.delta_rule import packed_convolution, packed_gated_delta_rule, segment_numbers
from headway.models.waits import on_pack
from headway.tracing.launches import RunningCode, Way

_NO_BOUNDARIES_MESSAGE = (
    "Headway cannot train this model on packs, because its recurrent layers would carry their state from one sample "
    "into the next. docs/models.md lists the families that can."
)


# transformers' functions that take boundaries where a package has their kernel: the argument that brings them, and the
# same function over a pack
_TAKE_BOUNDARIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "torch_chunk_gated_delta_rule": ("cu_seqlens", packed_gated_delta_rule),
    "causal_conv1d_fn": ("seq_idx", packed_convolution),
}
# Methods of transformers' cache, by which a layer keeps a state or a convolution's last tokens instead of keys.
_STATES = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache", "conv_cache"})


def separate_segments(model: nn.Module) -> None:
    """Have every recurrent layer of a model keep segments apart where it is given a pack's boundaries.

    A layer is recurrent if its forward takes hidden states and the cache of a state (`cache_params`), as those of
    transformers do, or hidden states, and its code keeps a state in the model's cache (LFM2's convolutions, MiniMax).
    One that other arguments do not reach refuses a pack, and so do one that attends too, and a model that says that it
    keeps a state (`_is_stateful`) where no such layer is found.
    """
    recurrent = recurrent_layers(model)
    for module in recurrent:
        if "ALL_ATTENTION_FUNCTIONS" in names_read(module):
            module.register_forward_pre_hook(_refuse_pack, with_kwargs=True)
            continue
        at_once = hands_boundaries_on(module)
        if at_once:
            _teach_boundaries(vars(sys.modules[type(module).__module__]))
        vars(module)["forward"] = _separated(module.forward, at_once=at_once)
    if not recurrent and any(_says_so(module) for module in model.modules()):
        model.register_forward_pre_hook(_refuse_pack, with_kwargs=True)


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """List a model's recurrent layers, none of which holds another."""
    return [
        module
        for module in model.modules()
        if _is_recurrent(module) and not any(_is_recurrent(part) for part in module.modules() if part is not module)
    ]


def running_code(packages: frozenset[str]) -> RunningCode:
    """Describe the code that runs recurrent layers on a machine with some packages of kernels."""

    def way_of(module: nn.Module) -> Way:
        if module not in recurrent_layers(module):
            return ""
        return "pack" if hands_boundaries_on(module) else "segment"

    over_pack = {name: function for name, (_, function) in _TAKE_BOUNDARIES.items()}
    return RunningCode(way_of, over_pack, packages)


def hands_boundaries_on(module: nn.Module) -> bool:
    """Tell whether a recurrent layer hands boundaries on to its functions, so that it runs over a pack at once."""
    return "cu_seq_lens_q" in inspect.unwrap(type(module).forward).__code__.co_consts


def _teach_boundaries(namespace: dict[str, Any]) -> None:
    """Make the functions of a module of transformers that have no kernel here take boundaries."""
    for name, (argument, over_pack) in _TAKE_BOUNDARIES.items():
        function = namespace.get(name)
        if function is not None and not hasattr(function, "over_pack") and not has_kernel(function):
            namespace[name] = _taking(function, argument, over_pack)


def has_kernel(function: Any) -> bool:
    """Tell whether one of transformers' functions runs a package's kernel, not its own PyTorch code."""
    return bool(inspect.getclosurevars(function).nonlocals.get("is_new_implementation", True))


def _taking(function: Any, argument: str, over_pack: Any) -> Any:
    """Wrap a function of transformers so that it runs another one where it is given boundaries."""
    parameters = inspect.signature(over_pack).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if options.get(argument) is None:
            return function(*args, **options)
        return over_pack(*args, **{name: option for name, option in options.items() if takes_all or name in parameters})

    vars(run)["over_pack"] = over_pack
    return run


def run_apart(model: PreTrainedModel) -> None:
    """Have a model's decoder run each segment of a pack by itself, with its own attention, as it runs a sample alone.

    Boundaries do not reach the decoder. Towers before it, and the output layer behind it, run once, on all of the pack.
    """
    boundaries = list[torch.Tensor]()
    decoder: Any = decoder_of(model)
    forward, names = decoder.forward, tuple(inspect.signature(decoder.forward).parameters)

    def take_boundaries(_model: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cu_seqlens_N = inputs.get("pack_cu_seqlens")
        boundaries[:] = [] if cu_seqlens_N is None else [cu_seqlens_N]
        return args, {name: value for name, value in inputs.items() if not name.startswith("pack_")}

    @functools.wraps(forward)
    def run(*args: Any, **inputs: Any) -> Any:
        if not boundaries:
            return forward(*args, **inputs)
        inputs |= dict(zip(names, args, strict=False))
        return _segment_by_segment(forward, inputs, boundaries[0])

    # before the hooks that prepare a model for packs: what the decoder sees is none
    model.register_forward_pre_hook(take_boundaries, prepend=True, with_kwargs=True)
    vars(decoder)["forward"] = run
    use_attention(decoder, "eager")


def _says_so(module: nn.Module) -> bool:
    """Tell whether a model says that it keeps a state; one around another model only says that it may."""
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


def _separated(forward: Callable[..., Any], *, at_once: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(hidden_states: torch.Tensor, *args: Any, pack_cu_seqlens: torch.Tensor | None = None, **others: Any) -> Any:
        if pack_cu_seqlens is None:
            if on_pack():
                raise ConfigError(_NO_BOUNDARIES_MESSAGE)
            return forward(hidden_states, *args, **others)
        if args or others.get("attention_mask") is not None or others.get("pack_split") is not None:
            raise ConfigError(
                "This model's recurrent layers need whole segments, so several processes cannot share a pack, and "
                "rows cannot be padded. Set parallel.sequence to 1."
            )
        if at_once:
            return _at_once(forward, hidden_states, pack_cu_seqlens, others)
        spans = functools.partial(forward, **others)  # the other arguments hold for the whole pack
        return _segment_by_segment(spans, {"hidden_states": hidden_states}, pack_cu_seqlens)

    return run


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped; packages' kernels do not compile
def _at_once(forward: Any, hidden_1TH: torch.Tensor, cu_seqlens_N: torch.Tensor, others: dict[str, Any]) -> Any:
    numbers_1T = segment_numbers(cu_seqlens_N, hidden_1TH.shape[1])
    return forward(hidden_states=hidden_1TH, cu_seq_lens_q=cu_seqlens_N, seq_idx=numbers_1T, **others)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped; boundaries are read on the host
def _segment_by_segment(forward: Callable[..., Any], inputs: dict[str, Any], cu_seqlens_N: torch.Tensor) -> Any:
    """Run every segment and join the outputs; of several outputs (attention weights, mostly None) the first."""
    boundaries = cu_seqlens_N.tolist()

    def cut(value: Any, span: tuple[int, int]) -> Any:
        if not isinstance(value, torch.Tensor) or boundaries[-1] not in value.shape[1:]:
            return value
        return value.narrow(1 + value.shape[1:].index(boundaries[-1]), span[0], span[1] - span[0])

    spans = [span for span in pairwise(boundaries) if span[1] > span[0]]
    parts = [forward(**{name: cut(value, span) for name, value in inputs.items()}) for span in spans]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts, dim=1)
    hidden_1TH = torch.cat([part[0] for part in parts], dim=1)
    if isinstance(parts[0], tuple):
        return hidden_1TH, *parts[0][1:]
    parts[0][next(iter(parts[0]))] = hidden_1TH  # transformers' outputs are mappings, the hidden states first
    return parts[0]
