"""Build a run's model: open it, trace it, apply the settings, and shard it over the processes."""

import copy
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig, PreTrainedModel

from headway.checkpoint import Checkpoint, refuse_half_written
from headway.config import SpeedConfig, TrainConfig
from headway.config.model import family_settings
from headway.count import CostModel
from headway.count.recompute import choice_in_words
from headway.count.rows import Parameter
from headway.errors import CheckpointError, ConfigError, TraceError
from headway.meter.slow_code import installed_kernels
from headway.models.attention.cuda_kernel import choose_kernel
from headway.models.blocks import blocks
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.head import ModelWithLoss, model_with_loss
from headway.models.init_weights import init_weights
from headway.models.kernels import align_widths, gated_mlps, use_kernels
from headway.models.load import load_model, load_model_config
from headway.models.lora import initialise_adapters, without_adapters
from headway.models.materialise import allocate, read_weights
from headway.models.offload import offload_inputs
from headway.models.parallel.experts import spread_experts
from headway.models.parallel.mesh import Mesh
from headway.models.parallel.sequence import share_packs
from headway.models.parallel.shard import shard_model
from headway.models.precision import Precision, gather_in_float8, use_float8
from headway.models.quantised import hold_frozen, quantise_base
from headway.models.recompute import recompute_blocks
from headway.models.recurrent import code_of, recurrent_layers, running_code
from headway.models.scores import scoring_config
from headway.models.trial import try_packs
from headway.models.vision import tower_of_all
from headway.optim import adapt, freeze, rows_for_new_tokens
from headway.predict.recipe import fullest_pack, inputs_on_host
from headway.predict.recompute import least_within
from headway.report.format import format_count
from headway.tracing import trace
from headway.tracing.activations import saved_by_block
from headway.tracing.unwrap import lies_within

_RANDOM = re.compile(r"drop|jitter|mask_(time|feature)_prob")  # masks of SpecAugment, in towers that hear


@dataclass(frozen=True)
class Trained:
    """A model ready to be trained.

    Attributes:
        model: with weights, unless a checkpoint's are still to come.
        cost_model: its ledger, as it trains.
        plain_cost_model: its ledger without adapters.
        model_with_loss: runs a pack through the model and its loss.
        recompute: which blocks are computed again in backward, as `CostModel.count` takes it.
        compiles: whether its blocks are compiled.
        compile_watch: sees what is compiled.
        notes: lines on kernels and recomputation for the start of the run.
    """

    model: PreTrainedModel
    cost_model: CostModel
    plain_cost_model: CostModel
    model_with_loss: ModelWithLoss
    recompute: str
    compiles: bool
    compile_watch: CompileWatch
    notes: tuple[str, ...]

    def under_splits(self) -> "Trained":
        """The same with ledgers that count packs whose answers share prompts."""
        ledgers = (self.cost_model.with_splits(), self.plain_cost_model.with_splits())
        return replace(self, cost_model=ledgers[0], plain_cost_model=ledgers[1])


def build_trained(
    config: TrainConfig,
    mesh: Mesh | None,
    checkpoint: Checkpoint | None,
    precision: Precision,
    device: torch.device,
) -> Trained:
    """Build a run's model; the order matters: what changes modules comes before what looks at them.

    Args:
        config: everything there is to say.
        mesh: of several processes; None for a lone one.
        checkpoint: where the run left off; its weights are read later.
        precision: of parameters and products.
        device: where it computes.

    Raises:
        ConfigError: a setting that cannot take effect on this model or device.
        CheckpointError: weights that are not whole, or a checkpoint of another model.
    """
    if device.type == "cuda":  # transformers compares numbers of tokens on the device, and would wait for each
        os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")
    # values wait until it is known which weights learn, if frozen weights are held in fewer bits
    later = mesh is not None or config.model.base is not None or _holds_frozen(config, precision)
    model = build_model(config, checkpoint, precision.params, torch.device("meta") if later else device)
    notes = try_packs(model, tokens=config.data.tokens_per_pack, is_shared=mesh is not None)
    plain_cost_model = freeze(model, _ledger(model, is_counted=config.model.flops), config.model.freeze)
    cost_model = adapt(model, plain_cost_model, config.model)
    switch_dropout(model, is_on=config.drops)
    is_compiled, lines = compiles(config.speed, model, device)
    notes += lines
    recompute = chosen_recompute(config, model, cost_model, precision, fused=is_compiled)
    if config.speed.recompute_bytes is not None:
        notes += (f"{config.speed.recompute} {choice_in_words(recompute, cost_model.block_towers)}",)
    notes += recurrences_line(model, config, precision, fused=is_compiled)
    if later:
        hold_frozen(model, cost_model, precision.params, precision.compute, gathers=mesh is not None)
    if config.model.base is not None:
        notes += quantise_base(model, cost_model, config.model.base)
    notes += choose_kernel(config.speed.attention, device)
    if device.type == "cuda":
        notes += align_widths(gated_mlps(model), precision.compute)
    notes += put_in_kernels(config.speed, model, device, is_compiled=is_compiled)
    with_loss = model_with_loss(
        model,
        chunk=config.speed.loss_chunk,
        liger=config.speed.kernels == "liger",
        family=family_settings(config.model.family, model.config),
    )
    if precision.is_float8:
        notes += (f"{len(use_float8(model, cost_model))} linear layers multiply in float8",)
    recompute_blocks(model, recompute, cost_model.block_towers, cost_model.rows)
    compile_watch = CompileWatch(is_strict=config.speed.recompiles == "error")
    if is_compiled:
        compile_blocks(model, compile_watch)
    if config.speed.offload == "inputs":
        memory = "the host's memory" if device.type != "cpu" else "the same memory (this is a CPU)"
        notes += (f"the inputs of {offload_inputs(model)} recomputed blocks wait in {memory} for backward",)
    if mesh is not None:
        distribute(model, mesh, config, precision)
    if later:
        give_weights(model, config, checkpoint, device, precision.params)
    initialise_adapters(model, config.run.seed, torch.device("cpu") if config.parallel.offload else device)
    if mesh is not None and precision.is_float8 and mesh.shape.fsdp > 1 and not config.parallel.offload:
        notes += (f"{gather_in_float8(model)} weights are gathered in float8",)
    return Trained(model, cost_model, plain_cost_model, with_loss, recompute, is_compiled, compile_watch, notes)


def switch_dropout(model: PreTrainedModel, *, is_on: bool) -> None:
    """Leave dropout on, or have a model compute in training what it computes when it is judged.

    Layers have the probability as dropout modules, as numbers of their own, or read it in a configuration as they run.
    They get copies of that, as the model's own is exported.

    Args:
        model: with adapters in place, whose dropout is switched too; changed in place.
        is_on: whether it stays as the model and the adapters have it; else nothing is dropped and no noise is added.
    """
    copies: dict[int, Any] = {}
    for module in () if is_on else model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        own: Any = vars(module).get("config")
        if isinstance(own, PreTrainedConfig) and module is not model and _drawn(own):
            module.config = copies.setdefault(id(own), copy.copy(own))
            vars(module.config).update(dict.fromkeys(_drawn(own), 0.0))
        vars(module).update(dict.fromkeys(_drawn(module), 0.0))


def _drawn(holder: Any) -> list[str]:
    """Names of the probabilities and sizes by which a layer draws random numbers in training."""
    return [name for name, value in vars(holder).items() if isinstance(value, float) and value and _RANDOM.search(name)]


def _ledger(model: PreTrainedModel, *, is_counted: bool) -> CostModel:
    """The ledger of a model; one without rows where FLOPs are not counted.

    Raises:
        TraceError: the model cannot be traced.
    """
    if is_counted:
        try:
            return trace(model)
        except TraceError as error:
            raise TraceError(f"{error} To train it without FLOPs and MFU, set model.flops to false.") from error
    parameters = [Parameter(name, p.numel(), p.numel(), "other") for name, p in model.named_parameters()]
    return CostModel(type(model).__name__, (), tuple(parameters), unknown=("all of it",))


def build_model(
    config: TrainConfig, checkpoint: Checkpoint | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build the configured model: with saved weights, random ones, or none yet for a checkpoint's.

    Args:
        config: everything there is to say.
        checkpoint: where the run left off.
        dtype: the parameters' floating-point type.
        device: where the model lives; on the meta device it has no weights yet, see `give_weights`.

    Raises:
        CheckpointError: the checkpoint holds another model, or `model.path` is a half-written checkpoint.
    """
    refuse_half_written(Path(config.model.path))
    if checkpoint is not None:
        _refuse_another_model(config, checkpoint)
    # A checkpoint's weights come later, when there is an optimizer too; until then any will do.
    random_init = config.model.random_init or checkpoint is not None or device.type == "meta"
    rows, seed = rows_for_new_tokens(config.model), config.run.seed
    return load_model(
        config.model.path,
        dtype=dtype,
        device=device,
        random_init=random_init,
        rows=rows,
        seed=seed,
        scores=config.model.scores,
    )


def _holds_frozen(config: TrainConfig, precision: Precision) -> bool:
    """True if some weights are frozen, and are held in the dtype of the products for that reason."""
    partly = config.model.lora is not None or bool(config.model.freeze)
    return partly and precision.params != precision.compute


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
        return False, (
            "blocks are not compiled, because torch.compile needs Triton on CUDA and Triton is not installed",
        )
    try:
        count = len(blocks(model))
    except ConfigError as error:
        return False, (f"nothing is compiled: {error}",)
    return True, (f"{count} blocks are compiled by torch.compile. Set speed.compile=false to switch compilation off",)


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
        return ("kernels are PyTorch's. Liger's are faster on CUDA: pip install liger-kernel",)
    try:
        return use_kernels(model, "liger", device)
    except ConfigError:  # there is nothing in this model that they compute
        return (f"kernels are PyTorch's, because Liger has none for {type(model).__name__}",)


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


def recurrences_line(
    model: PreTrainedModel, config: TrainConfig, precision: Precision, *, fused: bool
) -> tuple[str, ...]:
    """Say which code runs a model's recurrent layers, and how many operators a step launches in their blocks.

    Args:
        model: before its layers are compiled or sharded.
        config: of the run.
        precision: of its forward.
        fused: whether blocks are compiled.

    Returns:
        A line, counted as the plan counts, without the number if the model cannot be traced; none of a model without
        such layers.
    """
    recurrent = recurrent_layers(model)
    if not recurrent:
        return ()
    line = f"{len(recurrent)} recurrent layers run {'; '.join(sorted({code_of(layer) for layer in recurrent}))}"
    autocast = None if precision.params == precision.compute else precision.compute
    try:
        saved = saved_by_block(model, autocast=autocast, code=running_code(installed_kernels()))
    except TraceError:  # a run without FLOPs may train it all the same
        return (line,)
    paths = [path for path, module in model.named_modules() if any(module is layer for layer in recurrent)]
    holders = [block for name, block in saved.blocks.items() if name and any(lies_within(p, [name]) for p in paths)]
    tokens, phases = config.data.tokens_per_pack, ("forward", "backward")
    in_a_pack = sum(block.num_launches(phase, tokens, 1, fused=fused) for block in holders for phase in phases)
    launches = format_count(round(config.optim.accumulation * in_a_pack))
    return (f"{line}. Their blocks launch {launches} operators a step for packs of one segment",)


def distribute(model: PreTrainedModel, mesh: Mesh, config: TrainConfig, precision: Precision) -> None:
    """Shard a model that has no weights yet."""
    parallel = config.parallel
    if mesh.expert is not None:
        spread_experts(model, mesh.expert)
    if mesh.sequence is not None:
        share_packs(model, mesh.sequence.get_group())
    shard_model(
        model,
        mesh,
        compute_dtype=precision.compute,
        reduce_dtype=getattr(torch, parallel.reduce_dtype),
        reshard=parallel.reshard,
        offload=parallel.offload,
        vision=tower_of_all(model),
    )


def give_weights(
    model: PreTrainedModel,
    config: TrainConfig,
    checkpoint: Checkpoint | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give a model that was built on the meta device, sharded or not, its weights, or memory for a checkpoint's.

    Args:
        model: changed in place.
        config: everything there is to say.
        checkpoint: where the run left off.
        device: where it computes.
        dtype: that weights are drawn or read in, whatever they are held in.

    Raises:
        CheckpointError: the weights are not whole, or of another model.
    """
    keep_on = torch.device("cpu") if config.parallel.offload else device
    with without_adapters(model):  # adapters have weights of their own later
        if checkpoint is not None:
            allocate(model, device, keep_on=keep_on)
        elif config.model.random_init:
            init_weights(model, device, keep_on=keep_on, dtype=dtype)
        else:
            seed = config.run.seed
            read_weights(model, config.model.path, device, keep_on=keep_on, dtype=dtype, seed=seed)


def _refuse_another_model(config: TrainConfig, checkpoint: Checkpoint) -> None:
    wanted = _architecture(config.model.path, rows_for_new_tokens(config.model), scores=config.model.scores)
    saved = _architecture(str(checkpoint.model_folder), scores=config.model.scores)
    if wanted != saved:
        keys = [key for key in sorted(wanted.keys() | saved.keys()) if wanted.get(key) != saved.get(key)]
        raise CheckpointError(
            f"the checkpoint {checkpoint.folder} holds another model than {config.model.path}. The two differ in "
            f"{', '.join(keys)}. Put the model's folder back as it was, or start a new run in another run.folder."
        )


def _architecture(path: str, rows: int = 0, *, scores: bool = False) -> dict[str, Any]:
    """Configuration of a model without the keys that saving adds, with so many rows of its vocabulary or more.

    Args:
        path: of the model.
        rows: of its vocabulary.
        scores: whether a reward model is made of it.
    """
    volatile = ["transformers_version", "_name_or_path", "dtype", "architectures"]
    volatile += ["pad_token_id"] if scores else []  # a reward model has its padding from its tokenizer

    architecture = scoring_config(load_model_config(path)) if scores else load_model_config(path)
    text = architecture.get_text_config()
    text.vocab_size = max(text.vocab_size, rows)
    cleaned: dict[str, Any] = without_keys(architecture.to_dict(), volatile)
    return cleaned


def without_keys(node: Any, names: Collection[str]) -> Any:
    """A configuration as plain types without some keys, in its inner parts too."""
    if isinstance(node, dict):
        return {key: without_keys(value, names) for key, value in node.items() if key not in names}
    return node
