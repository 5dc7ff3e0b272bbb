"""Apply the settings of `speed` to a model on this device: compilation, kernels, and blocks to recompute."""

from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from headway.config import SpeedConfig, TrainConfig
from headway.count import CostModel
from headway.errors import ConfigError
from headway.models.blocks import blocks
from headway.models.kernels import use_kernels
from headway.models.precision import Precision
from headway.predict.recipe import fullest_pack, inputs_on_host
from headway.predict.recompute import least_within
from headway.tracing.activations import saved_by_block


def compiles(speed: SpeedConfig, model: PreTrainedModel, device: torch.device) -> tuple[bool, tuple[str, ...]]:
    """Tell whether blocks are compiled.

    With auto they are on CUDA, if Triton is there to compile for it and the model has blocks.

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


def put_in_kernels(
    speed: SpeedConfig, model: PreTrainedModel, device: torch.device, *, is_compiled: bool
) -> tuple[str, ...]:
    """Put in the kernels that `speed.kernels` names.

    With auto these are Liger's on CUDA, if blocks are not compiled, and they are installed and compute anything of the
    model. The loss stays Headway's own then, which never waits for the device, as Liger's does once a pack.

    Returns:
        What was put in, or what would be with a package more, a line each.

    Raises:
        ConfigError: kernels that were asked for cannot run here, or the model has nothing for them.
    """
    if speed.kernels != "auto":
        compiled = [block.module for block in blocks(model)] if is_compiled else []
        return use_kernels(model, speed.kernels, device, compiled)
    plain = use_kernels(model, "torch", device)
    if device.type != "cuda" or is_compiled:
        return plain
    if find_spec("liger_kernel") is None:
        return ("kernels are PyTorch's; for Liger's, which are faster on CUDA: pip install liger-kernel",)
    try:
        return use_kernels(model, "liger", device)
    except ConfigError:  # there is nothing in this model that they compute
        return (f"kernels are PyTorch's: Liger has none for {type(model).__name__}",)


def chosen_recompute(
    config: TrainConfig, model: PreTrainedModel, cost_model: CostModel, precision: Precision, *, fused: bool
) -> str:
    """Name the blocks that are recomputed, as `recompute_blocks` and `CostModel.count` take it.

    A size is held against a pack of `data.tokens_per_pack` and `data.patches_per_pack`; without a budget of patches, of
    as many as those tokens can stand for.

    Args:
        config: of the run.
        model: as it is trained, before it is sharded or compiled.
        cost_model: of it, with what is frozen frozen.
        precision: of its forward.
        fused: whether blocks are compiled.

    Raises:
        PlanError: a size that is too small even with all blocks recomputed.
        TraceError: a size, and the model cannot be traced.
    """
    size = config.speed.recompute_bytes
    if size is None:
        return config.speed.recompute
    saved = saved_by_block(model, autocast=None if precision.params == precision.compute else precision.compute)
    pack = fullest_pack(config, cost_model)
    return least_within(
        cost_model,
        saved,
        pack,
        size,
        fused=fused,
        compute_bytes=precision.compute.itemsize,
        sequence=config.parallel.sequence,
        inputs_on_host=inputs_on_host(config),
    )
