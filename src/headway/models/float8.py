"""Linear layers that multiply in float8, by torchao: e4m3 forward, e5m2 gradients, one scale for each tensor.

Weights, their gradients and the optimizer stay as they are; only the operands of a converted layer's three matrix
products are cast. Every linear layer of the repeated blocks whose sizes are multiples of 16 is converted, routers
apart; the output layer, the embeddings, the mergers, attention and grouped experts compute as before.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from headway.count import CostModel
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
            return sizes_fit and f"{at}.{name}" not in routers

        names += [f"{block.name}.{name}" for name, module in block.module.named_modules() if is_wanted(module, name)]
        convert_to_float8_training(block.module, module_filter_fn=is_wanted, config=config)
    if not names:
        raise ConfigError(
            f"run.dtype 'float8' converts linear layers whose sizes are multiples of {MULTIPLE}, and "
            f"{type(model).__name__} has none in its blocks; use bfloat16-autocast."
        )
    return tuple(names)
