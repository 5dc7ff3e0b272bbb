"""Linear layers that multiply in float8, by torchao: e4m3 forward, e5m2 gradients, one scale for each tensor.

Weights, their gradients and the optimizer stay as they are; only the operands of a converted layer's three matrix
products are cast. Every linear layer of the repeated blocks whose sizes are multiples of 16 is converted, routers and
adapters apart; the output layer, the embeddings, the mergers, attention and grouped experts compute as before.

Where FSDP2 shards them, converted weights are cast by each process before they are gathered, a byte for a number, with
scales over all processes that one all-reduce a forward finds. torchao keeps such weights in a subclass of tensors from
their construction on; here its instance only looks at the memory of a slice and lends FSDP2 its functions, so that
drawing, reading, updating and saving weights go on with plain tensors.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from headway.count import CostModel
from headway.count.adapters import is_adapter
from headway.errors import ConfigError
from headway.models.blocks import blocks

MULTIPLE = 16  # sizes that float8 matrix products take
_LEAST_CAPABILITY = (8, 9)  # Ada and Hopper; NVIDIA, CUDA C++ Programming Guide, table of arithmetic by capability


def check_float8(device: torch.device) -> None:
    """Make sure that a device multiplies in float8.

    Raises:
        ConfigError: it does not, or torchao is not installed.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"run.dtype 'float8' takes effect on CUDA devices of compute capability 8.9 or newer, and the run is on "
            f"{device}; use float32 or auto."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"run.dtype 'float8' needs compute capability 8.9 or newer (Ada, Hopper, Blackwell); "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. Use bfloat16-autocast."
        )
    try:
        import torchao.float8  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError(
            "run.dtype 'float8' needs torchao; install it with `pip install torchao`, or use bfloat16-autocast."
        ) from error


def use_float8(model: PreTrainedModel, cost_model: CostModel, *, emulate: bool = False) -> tuple[str, ...]:
    """Convert a model's linear layers in place; parameters keep their names.

    Args:
        model: on any device, weights or not.
        cost_model: traced from it; says which modules route tokens to experts.
        emulate: compute the same rounding with ordinary products, on any device and slowly.

    Returns:
        Names of the converted layers.

    Raises:
        ConfigError: there is nothing to convert.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    routers = {p.name.removesuffix(".weight") for p in cost_model.parameters if p.component.endswith(".router")}
    # Weight gradients multiply along the slots, whose number is any: torchao pads them to a multiple of 16.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    names: list[str] = []
    for block in blocks(model):

        def is_wanted(module: nn.Module, name: str, at: str = block.name) -> bool:
            sizes_fit = isinstance(module, nn.Linear) and not any(size % MULTIPLE for size in module.weight.shape)
            return sizes_fit and f"{at}.{name}" not in routers and not is_adapter(name)

        names += [f"{block.name}.{name}" for name, module in block.module.named_modules() if is_wanted(module, name)]
        convert_to_float8_training(block.module, module_filter_fn=is_wanted, config=config)
    if not names:
        raise ConfigError(
            f"run.dtype 'float8' converts linear layers whose sizes are multiples of {MULTIPLE}, and "
            f"{type(model).__name__} has none in its blocks; use bfloat16-autocast."
        )
    return tuple(names)


def gather_in_float8(model: PreTrainedModel) -> int:
    """Let FSDP2 gather the weights of converted layers in float8; after they have memory, before the first forward.

    Args:
        model: sharded by `shard_model`, weights on the device that computes.

    Returns:
        Number of weights.
    """
    from torchao.float8.float8_utils import amax_to_scale
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    looks, kind = [], torch.float8_e4m3fn
    for parameter, layer in _sharded(model):
        parameter.reset_sharded_param()  # memory may have come after sharding; nothing makes new tensors later
        padded = parameter._sharded_param_data.view(parameter.padded_sharded_param_size)
        kind = layer.config.cast_config_weight.target_dtype
        look = WeightWithDynamicFloat8CastTensor(padded.detach(), layer.linear_mm_config, kind)
        own: Any = parameter._sharded_local_tensor
        own.fsdp_pre_all_gather, own.fsdp_post_all_gather = look.fsdp_pre_all_gather, look.fsdp_post_all_gather
        parameter._init_extensions()
        looks.append((look, padded, parameter.sharded_param))
    if not looks:
        return 0
    spread = looks[0][-1]
    cut = [dim for dim, place in enumerate(spread.placements) if not place.is_replicate()]

    @torch.no_grad()
    def set_scales(*_: Any) -> None:
        largest_W = torch.stack(torch._foreach_norm([padded for _, padded, _ in looks], math.inf))
        for dim in cut:
            dist.all_reduce(largest_W, dist.ReduceOp.MAX, group=spread.device_mesh.get_group(dim))
        for (look, _, _), scale in zip(looks, amax_to_scale(largest_W, kind).unbind(), strict=True):
            look._precomputed_scale = scale

    model.register_forward_pre_hook(set_scales, prepend=True)
    return len(looks)


def _sharded(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """FSDP2's record of each converted layer's weight, and the layer."""
    from torchao.float8.float8_linear import Float8Linear

    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in () if group is None else group.fsdp_params:
            layer = parameter._module_info.module
            if isinstance(layer, Float8Linear) and parameter._module_info.param_name == "weight":
                yield parameter, layer
