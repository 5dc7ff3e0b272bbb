"""Random initialisation in transformers' own order, the same numbers for sharded and for whole models.

Every process draws each whole parameter in turn from its generator, keeps its slice and forgets the rest. So the same
seed gives the same weights, bit for bit, on one process and on many, and no process ever holds more than one module's
parameters in full.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers import initialization as init

from headway.errors import ConfigError
from headway.models.parallel import fill
from headway.models.quantised import layouts_of

Home = tuple[nn.Module, str]
"""A module and the name of one of its own parameters."""


@torch.no_grad()
def init_weights(
    model: PreTrainedModel,
    device: torch.device | str,
    *,
    keep_on: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Give a model that was built on the meta device random weights.

    Args:
        model: sharded or not; changed in place.
        device: where weights are drawn, from torch's global generator there, and where buffers stay.
        keep_on: where parameters stay, for those that are offloaded; `device` if not given.
        dtype: that floats are drawn in, whatever they are held in; each parameter's own if not given.

    Raises:
        ConfigError: transformers has no rule for a parameter of this model.
    """
    to_memory(model, device, keep_on)
    with init.guard_torch_init_functions():
        _walk(model, model, torch.device(device), dtype, "", set())


def to_memory(model: PreTrainedModel, device: torch.device | str, keep_on: torch.device | str | None = None) -> None:
    """Give a model that was built on the meta device memory without values; arguments as in `init_weights`."""
    model.to_empty(device=device if keep_on is None else keep_on)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    model.tie_weights(recompute_mapping=False)  # `to_empty` makes two of a tied one


def _walk(
    module: nn.Module,
    owner: Any,
    device: torch.device,
    dtype: torch.dtype | None,
    path: str,
    done: set[nn.Parameter],
) -> None:
    """Fill children before their parent, each by the rule of the innermost model around it, as transformers does."""
    for name, child in module.named_children():
        _walk(child, child if isinstance(child, PreTrainedModel) else owner, device, dtype, f"{path}{name}.", done)
    own = dict(module.named_parameters(recurse=False))
    tied = [parameter for parameter in own.values() if parameter in done]
    for parameter in tied:
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' rules leave it alone then
    fresh = [(module, name) for name, parameter in own.items() if parameter not in done]
    _fill(module, owner, device, dtype, path, fresh)
    for parameter in tied:
        del parameter._is_hf_initialized  # type: ignore[attr-defined]
    done.update(own.values())


def _fill(
    module: nn.Module,
    owner: Any,
    device: torch.device,
    dtype: torch.dtype | None,
    path: str,
    fresh: Sequence[Home],
) -> None:
    """Run a model's initialisation rule on a module, with whole tensors in place of sharded parameters meanwhile."""
    full_tensors: dict[Home, torch.Tensor] = {}
    for home, name in fresh:
        parameter: Any = home._parameters[name]
        shape, held_in = (None, None) if parameter is None else (parameter.shape, parameter.dtype)
        drawn_in = dtype if dtype is not None and held_in is not None and held_in.is_floating_point else held_in
        if name in layouts_of(home):  # bytes, of a weight that is drawn whole
            shape, drawn_in = layouts_of(home)[name].shape, dtype or torch.float32
        if shape is not None and (isinstance(parameter, DTensor) or drawn_in != held_in):
            full_tensors[home, name] = torch.empty(shape, dtype=drawn_in, device=device)
        value = full_tensors.get((home, name), parameter)
        if value is not None and value.is_floating_point():
            value.fill_(torch.nan)
    before = _generator_state(device)
    while True:
        try:
            with _standing_in(full_tensors), _SlicesAreTouched():
                owner._init_weights(module)
                for home, name in fresh:
                    _without_rule(home._parameters[name], owner, f"{path}{name}")
            return
        except _Touched as touched:  # some rules fill the parameters of a module's children anew
            _set_generator_state(device, before)
            full_tensors[_home(module, touched.parameter)] = touched.parameter.full_tensor().to(device)


def _without_rule(parameter: torch.Tensor | None, owner: Any, name: str) -> None:
    """Draw a matrix that transformers forgets (the routers of Qwen3-Next) as it draws those of linear layers."""
    if parameter is None or not parameter.is_floating_point() or not bool(parameter.isnan().any()):
        return
    if not name.endswith("weight") or parameter.ndim < 2:
        raise ConfigError(
            f"{type(owner).__name__} does not say how {name} is initialised, so this model cannot start from random "
            "weights. Give model.path a folder that holds weights, without model.random_init."
        )
    init.normal_(parameter, std=owner.config.get_text_config().initializer_range)


@contextmanager
def _standing_in(full_tensors: Mapping[Home, torch.Tensor]) -> Iterator[None]:
    """Put whole tensors in place of sharded parameters; afterwards copy this process's slices of them back."""
    slices: dict[Home, Any] = {(module, name): module._parameters[name] for module, name in full_tensors}
    try:
        for (module, name), values in full_tensors.items():
            module._parameters[name] = nn.Parameter(values, requires_grad=False)
        yield
        for (module, name), values in full_tensors.items():
            layout = layouts_of(module).get(name)
            fill(slices[module, name], values if layout is None else layout.quantise(values))
    finally:
        for (module, name), parameter in slices.items():
            module._parameters[name] = parameter


class _Touched(Exception):  # noqa: N818 - no error: it says what to make whole
    def __init__(self, parameter: DTensor) -> None:
        super().__init__()
        self.parameter = parameter


class _SlicesAreTouched(TorchFunctionMode):
    """Interrupts a rule before it touches a sharded parameter, whose slice would get other numbers than the whole."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, DTensor):
                    raise _Touched(value)
        return func(*args, **(kwargs or {}))


def _home(module: nn.Module, parameter: Any) -> Home:
    for part in module.modules():
        for name, own in part.named_parameters(recurse=False):
            if own is parameter:
                return part, name
    raise AssertionError(f"{type(module).__name__} fills a parameter that is not below it")


def _generator_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
