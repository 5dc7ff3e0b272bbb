"""Device and precision of a run, and linear layers that multiply in float8.

In float8, by torchao, products are e4m3 forward, with e5m2 gradients and one scale for each tensor. Weights, their
gradients and the optimizer stay as they are; only the operands of a converted layer's three matrix products are cast.
Every linear layer of the repeated blocks whose sizes are multiples of 16 is converted, routers and adapters apart; the
output layer, the embeddings, the mergers, attention and grouped experts compute as before.

Where FSDP2 shards them, converted weights are cast by each process before they are gathered, a byte for a number, with
scales over all processes that one all-reduce a forward finds. torchao keeps such weights in a subclass of tensors from
their construction on; here its instance only looks at the memory of a slice and lends FSDP2 its functions, so that
drawing, reading, updating and saving weights go on with plain tensors.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from headway.config import RunConfig
from headway.count import CostModel
from headway.count.adapters import is_adapter
from headway.errors import ConfigError
from headway.models.blocks import blocks
from headway.models.parallel.ranks import launched, whole_variable
from headway.words import Argument


@dataclass(frozen=True)
class Precision:
    """Dtypes in which numbers are held and multiplied.

    Attributes:
        name: as in `run.dtype`.
        params: dtype of the parameters, their gradients and the optimizer's moments.
        compute: dtype of the matrix products outside of float8 layers.
        device_type: "cuda" or "cpu".
    """

    name: str
    params: torch.dtype
    compute: torch.dtype
    device_type: str

    @property
    def is_float8(self) -> bool:
        """True if the blocks' linear layers multiply in float8."""
        return self.name == "float8"

    @property
    def peak_dtype(self) -> torch.dtype:
        """Dtype whose peak MFU refers to: the fastest that the step uses."""
        return torch.float8_e4m3fn if self.is_float8 else self.compute

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of a forward pass."""
        if self.params == self.compute:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.compute)


def choose_device(run: RunConfig) -> torch.device:
    """Choose this process's device as `run.device` says; under torchrun, each process its own CUDA device.

    Raises:
        ConfigError: no such device here.
        UsageError: a launcher's variable that cannot be understood.
    """
    name = run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{Argument('run.device')} {run.device!r} is no device. Use auto, cpu, cuda or cuda:N."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{Argument('run.device')} {run.device!r} is not supported. Use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda":
        grow_segments()
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = device.index
        if name == "cuda":  # each process of a machine takes another one
            index = whole_variable("LOCAL_RANK", 0, 2**31 - 1, unset=None if count > 1 < launched()[1] else 0)
        if index >= count:
            raise ConfigError(
                f"{Argument('run.device')} is {run.device!r}, but PyTorch {torch.__version__} sees {count} CUDA "
                f"devices here. Set {Argument('run.device', 'cpu')}, or install a CUDA build of PyTorch on a machine "
                "with a GPU."
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def grow_segments() -> None:
    """Let PyTorch's allocator on CUDA map memory to segments that grow, unless the environment says something else.

    Packs differ in size, and blocks of fixed sizes would leave memory between them that none of them fits. Takes effect
    before CUDA is first used; torch 2.11 and 2.13 read both names.
    """
    if sys.platform == "linux" and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def choose_precision(run: RunConfig, device: torch.device) -> Precision:
    """The precision that `run.dtype` names, on this device.

    Raises:
        ConfigError: bfloat16 on a CPU, where it would be slower than what it replaces and unlike what a GPU computes;
            float32 on CUDA, where attention has no kernel for it; float8 where the device has none.
    """
    name: str = run.dtype
    if name == "auto":
        name = "bfloat16-autocast" if device.type == "cuda" else "float32"
    if name == "float8":
        check_float8(device)
    if name != "float32" and device.type != "cuda":
        raise ConfigError(
            f"run.dtype {name!r} takes effect on CUDA only, but the run is on {device}. Use float32 or auto."
        )
    if name == "float32" and device.type == "cuda":
        raise ConfigError(
            f"run.dtype 'float32' takes effect on a CPU only, but the run is on {device}. There the kernels of "
            "attention within segments compute in bfloat16 or float16. Set run.dtype=bfloat16-autocast (also auto), "
            "which keeps parameters, gradients and moments in float32."
        )
    params = torch.bfloat16 if name == "bfloat16-params" else torch.float32
    compute = torch.float32 if name == "float32" else torch.bfloat16
    return Precision(name, params, compute, device.type)


MULTIPLE = 16  # sizes that float8 matrix products take
_LEAST_CAPABILITY = (8, 9)  # Ada and Hopper; NVIDIA, CUDA C++ Programming Guide, table of arithmetic by capability


def check_float8(device: torch.device) -> None:
    """Make sure that a device multiplies in float8.

    Raises:
        ConfigError: it does not, or torchao is not installed.
    """
    if device.type != "cuda":
        raise ConfigError(
            "run.dtype 'float8' takes effect on CUDA devices of compute capability 8.9 or newer, but the run is on "
            f"{device}. Use float32 or auto."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            "run.dtype 'float8' needs compute capability 8.9 or newer (Ada, Hopper, Blackwell), but "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. Use bfloat16-autocast."
        )
    try:
        import torchao.float8  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError(
            "run.dtype 'float8' needs torchao. Install it with `pip install torchao`, or use bfloat16-autocast."
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
            f"run.dtype 'float8' converts linear layers whose sizes are multiples of {MULTIPLE}, but "
            f"{type(model).__name__} has none in its blocks. Use bfloat16-autocast."
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
    from torchao.float8.float8_linear import Float8Linear

    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in () if group is None else group.fsdp_params:
            layer = parameter._module_info.module
            if isinstance(layer, Float8Linear) and parameter._module_info.param_name == "weight":
                yield parameter, layer
