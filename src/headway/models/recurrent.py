"""Segments of a pack that are kept apart: in a model's recurrent layers, or in all of it.

Linear attention and state-space layers carry a state, and a short convolution, from token to token. Where functions in
forms that are known here carry all that a layer keeps in the model's cache, the layer runs once over the pack: the
packages' kernels take boundaries, and `headway.models.delta_rule` stands in for transformers' PyTorch code, which takes
none. Through any other layer each segment runs by itself. A model that mixes the tokens of a pack in other ways runs
each segment by itself as a whole.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
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


@dataclass(frozen=True)
class _Form:
    """Functions of transformers that carry something from token to token in one call, known by their parameters.

    Attributes:
        first: names of their first parameters.
        has: the name of another.
        state: method of transformers' cache that keeps what they carry.
        argument: brings boundaries to a package's kernel that takes the function's place.
        over_pack: does the same over a pack, in PyTorch's own operations.
        name: of what they compute.
    """

    first: tuple[str, ...]
    has: str
    state: str
    argument: str
    over_pack: Callable[..., Any]
    name: str


_FORMS = (
    _Form(
        ("hidden_states", "weight"), "bias", "update_conv_state", "seq_idx", packed_convolution, "the short convolution"
    ),
    _Form(
        ("query", "key", "value", "g", "beta"),
        "chunk_size",
        "update_recurrent_state",
        "cu_seqlens",
        packed_gated_delta_rule,
        "the gated delta rule",
    ),
)
# Methods of transformers' cache, by which a layer keeps a state or a convolution's last tokens instead of keys.
_STATES = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache", "conv_cache"})
# Arguments that tell a function of a running layer the boundaries of its pack, by name; empty outside of one.
_boundaries: ContextVar[Mapping[str, torch.Tensor]] = ContextVar("boundaries", default=MappingProxyType({}))


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
        at_once = runs_at_once(module)
        if at_once:
            _teach_boundaries(module)
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
        return "pack" if runs_at_once(module) else "segment"

    def over_pack(function: Callable[..., Any]) -> Callable[..., Any] | None:
        form = _form_of(function)
        return None if form is None else form.over_pack

    return RunningCode(way_of, over_pack, packages)


def runs_at_once(module: nn.Module) -> bool:
    """Tell whether known functions carry all that a recurrent layer keeps in the cache, so that it runs over a pack."""
    states = {form.state for _, form in _carriers(module)}
    return bool(states) and names_read(module) & _STATES <= states


def code_of(module: nn.Module) -> str:
    """Name the code that runs a recurrent layer of a model which is ready for packs."""
    if not runs_at_once(module):
        return "each segment of a pack by itself"
    namespace = vars(sys.modules[type(module).__module__])
    ours = {form.name: namespace[name].over_pack is form.over_pack for name, form in _carriers(module)}
    return " and ".join(
        f"{name} by {'PyTorch operations of Headway over the pack' if is_ours else 'the kernel of a package'}"
        for name, is_ours in sorted(ours.items())
    )


def _carriers(module: nn.Module) -> list[tuple[str, _Form]]:
    """Functions in known forms that a layer calls: the name and the form of each."""
    namespace = vars(sys.modules[type(module).__module__])
    functions = {name: namespace.get(name) for name in names_read(module)}
    forms = {name: _form_of(function) for name, function in functions.items() if inspect.isfunction(function)}
    return [(name, form) for name, form in forms.items() if form is not None]


def _form_of(function: Callable[..., Any]) -> _Form | None:
    parameters = tuple(inspect.signature(function).parameters)
    return next((f for f in _FORMS if parameters[: len(f.first)] == f.first and f.has in parameters), None)


def _teach_boundaries(module: nn.Module) -> None:
    """Make the functions that carry a layer's state take the boundaries of the pack that it runs on."""
    namespace = vars(sys.modules[type(module).__module__])
    for name, form in _carriers(module):
        if not hasattr(namespace[name], "over_pack"):
            namespace[name] = _taking(namespace[name], form)


def has_kernel(function: Any) -> bool:
    """Tell whether one of transformers' functions runs a package's kernel, not its own PyTorch code."""
    return bool(inspect.getclosurevars(function).nonlocals.get("is_new_implementation", True))


def _taking(function: Any, form: _Form) -> Any:
    """Wrap a function of transformers so that it keeps apart the segments of the pack that its layer runs on."""
    over_pack = function if has_kernel(function) else form.over_pack
    parameters = inspect.signature(form.over_pack).parameters

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        boundaries = _boundaries.get()
        if not boundaries:
            return function(*args, **options)
        options = {name: option for name, option in options.items() if name in parameters}
        return over_pack(*args, **options | {form.argument: boundaries[form.argument]})

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
    token = _boundaries.set({"cu_seqlens": cu_seqlens_N, "seq_idx": numbers_1T})
    try:
        return forward(hidden_states=hidden_1TH, **others)
    finally:
        _boundaries.reset(token)


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
