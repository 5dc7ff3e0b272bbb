"""Random initialisation in transformers' own order, the same numbers for sharded and for whole models.

Every process draws each whole parameter in turn from its generator, keeps its slice and forgets the rest. So the same
seed gives the same weights, bit for bit, on one process and on many, and no process ever holds more than one module's
parameters in full.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers import initialization as init

from headway.errors import ConfigError
from headway.models.parallel.mesh import fill
from headway.models.quantised import ByteLayout, layouts_of


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
    stand_ins = _StandIns(device, dtype)
    fresh = {name: parameter for name, parameter in own.items() if parameter not in done}
    for name, parameter in fresh.items():
        value = stand_ins.of(parameter, layouts_of(module).get(name))
        if value.is_floating_point():
            value.fill_(torch.nan)
    with stand_ins:
        owner._init_weights(module)
    for name, parameter in fresh.items():
        _without_rule(stand_ins.of(parameter), owner, f"{path}{name}")
    stand_ins.keep_slices()
    for parameter in tied:
        del parameter._is_hf_initialized  # type: ignore[attr-defined]
    done.update(own.values())


def _without_rule(parameter: torch.Tensor, owner: Any, name: str) -> None:
    """Draw a matrix that transformers forgets (the routers of Qwen3-Next) as it draws those of linear layers."""
    if not parameter.is_floating_point() or not bool(parameter.isnan().any()):
        return
    if not name.endswith("weight") or parameter.ndim < 2:
        raise ConfigError(
            f"{type(owner).__name__} does not say how {name} is initialised, so this model cannot start from random "
            "weights. Give model.path a folder that holds weights, without model.random_init."
        )
    init.normal_(parameter, std=owner.config.get_text_config().initializer_range)


class _StandIns(TorchFunctionMode):
    """Gives a rule whole tensors in place of sharded parameters, and of those that are drawn in another dtype.

    Some rules fill the parameters of a module's children anew: these get their present values first.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._device, self._dtype = device, dtype
        self._whole: dict[torch.Tensor, tuple[torch.Tensor, ByteLayout | None]] = {}

    def of(self, parameter: torch.Tensor, layout: ByteLayout | None = None) -> torch.Tensor:
        """The tensor that is filled for a parameter, without values at first; the parameter itself if it can be."""
        if parameter in self._whole:
            return self._whole[parameter][0]
        shape, drawn_in = parameter.shape, parameter.dtype
        if self._dtype is not None and drawn_in.is_floating_point:
            drawn_in = self._dtype
        if layout is not None:  # bytes, of a weight that is drawn whole
            shape, drawn_in = torch.Size(layout.shape), self._dtype or torch.float32
        if not isinstance(parameter, DTensor) and drawn_in == parameter.dtype:
            return parameter
        self._whole[parameter] = torch.empty(shape, dtype=drawn_in, device=self._device), layout
        return self._whole[parameter][0]

    def keep_slices(self) -> None:
        """Copy this process's slices of the whole tensors into the parameters."""
        for parameter, (values, layout) in self._whole.items():
            fill(parameter, values if layout is None else layout.quantise(values))

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._filled, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) and tensor not in self._whole:
            self._whole[tensor] = tensor.full_tensor().to(self._device), None
        return self._whole[tensor][0] if tensor in self._whole else tensor
