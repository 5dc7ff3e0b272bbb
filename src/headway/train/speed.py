"""What `auto` means in `speed`, on this device and for this model."""

from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from headway.errors import ConfigError
from headway.models.blocks import blocks
from headway.models.kernels import use_kernels
from headway.train.config.speed import SpeedConfig


def compiles(speed: SpeedConfig, model: PreTrainedModel, device: torch.device) -> tuple[bool, tuple[str, ...]]:
    """Whether blocks are compiled.

    With auto they are on CUDA, if Triton is there to compile for it and the model has blocks.

    Args:
        speed: the settings.
        model: that will be compiled.
        device: where it will run.

    Returns:
        The answer, and what a user of CUDA should know of it, a line each.
    """
    if speed.compile != "auto":
        return speed.compile, ()
    if device.type != "cuda":
        return False, ()
    if find_spec("triton") is None:
        return False, ("blocks are not compiled: torch.compile needs Triton on CUDA, and it is not installed",)
    try:
        count = len(blocks(model))
    except ConfigError as error:
        return False, (f"nothing is compiled: {error}",)
    return True, (f"{count} blocks are compiled by torch.compile; speed.compile=false switches that off",)


def put_in_kernels(speed: SpeedConfig, model: PreTrainedModel, device: torch.device) -> tuple[str, ...]:
    """Put in the kernels that `speed.kernels` names.

    With auto these are Liger's on CUDA, if they are installed and compute anything of the model. The loss stays
    Headway's own then, which never waits for the device, as Liger's does once a pack.

    Args:
        speed: the settings.
        model: changed in place.
        device: where it will run.

    Returns:
        What was put in, or what would be with a package more, a line each.

    Raises:
        ConfigError: kernels that were asked for cannot run here, or the model has nothing for them.
    """
    if speed.kernels != "auto":
        return use_kernels(model, speed.kernels, device)
    plain = use_kernels(model, "torch", device)
    if device.type != "cuda":
        return plain
    if find_spec("liger_kernel") is None:
        return ("kernels are PyTorch's; for Liger's, which are faster on CUDA: pip install liger-kernel",)
    try:
        return use_kernels(model, "liger", device)
    except ConfigError:  # there is nothing in this model that they compute
        return (f"kernels are PyTorch's: Liger has none for {type(model).__name__}",)
