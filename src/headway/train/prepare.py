"""Build the parts of a run: devices and ranks, model, optimizer, meter, feed; and bring them to where they left off."""

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from headway.count import trace
from headway.data import Encoder, read_samples
from headway.data.feed import Feed
from headway.devices import peak_for
from headway.errors import CheckpointError, ConfigError
from headway.meter import StepMeter
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.load import Processor, load_config, load_model, load_processor, rope_index
from headway.models.recompute import recompute_blocks
from headway.train.checkpoint import (
    Checkpoint,
    CheckpointSaver,
    Contents,
    find_checkpoint,
    random_state,
    refuse_half_written,
    restore,
    restore_random_state,
    training_tensors,
)
from headway.train.checkpoint.export import Exports
from headway.train.config import TrainConfig
from headway.train.data import budget_of, open_feed
from headway.train.device import Precision, choose_device, choose_precision
from headway.train.evaluate import EvalSet
from headway.train.optim import WeightAverage, freeze, make_optimizer
from headway.train.ranks import Ranks, join_ranks
from headway.train.recompute import chosen_recompute
from headway.train.record import CHECKPOINTS, EXPORTS, RUN, describe_software, open_run_folder, write_json


@dataclass(frozen=True)
class Run:
    """The parts of a run, ready to go."""

    device: torch.device
    precision: Precision
    ranks: Ranks
    model: PreTrainedModel
    processor: Processor
    optimizer: torch.optim.Optimizer
    ema: WeightAverage | None
    meter: StepMeter
    compile_watch: CompileWatch
    feed: Feed
    eval_set: EvalSet | None
    checkpoint: Checkpoint | None
    saver: CheckpointSaver
    exports: Exports

    def weights_to_judge(self) -> AbstractContextManager[None]:
        """While the model is evaluated: its averaged weights, if there are any and `optim.ema.evaluate` asks for it."""
        return nullcontext() if self.ema is None or not self.ema.is_judged else self.ema.in_place()

    def describe(self) -> list[str]:
        """A few lines on what is about to happen."""
        params, peak = self.meter.cost_model.params, self.meter.peak
        lines = [
            f"{type(self.model).__name__}: {params.total / 1e6:.2f} M parameters, {params.trainable / 1e6:.2f} M "
            f"trained, {self.precision.name} on {self.device}",
            f"peak {peak.flops_per_s / 1e9:,.1f} GFLOP/s a device, {peak.kind} of {peak.name} ({peak.source})",
        ]
        return lines + ([f"resumed from {self.checkpoint.folder}"] if self.checkpoint else [])

    def write_model(self, folder: Path) -> None:
        """Write what a model folder holds besides weights."""
        self.model.config.save_pretrained(folder)
        if self.model.can_generate() and self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(folder)
        self.processor.save_pretrained(folder)


def prepare(config: TrainConfig, *, resume: bool) -> Run:
    """Build the parts of a run and bring them to where the newest checkpoint left them.

    Args:
        config: everything there is to say.
        resume: whether the run folder holds a run that goes on.

    Raises:
        HeadwayError: as in `train`.
    """
    device = choose_device(config.run)
    precision = choose_precision(config.run, device)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    ranks = join_ranks(device)
    if ranks.is_first:
        open_run_folder(config, resume=resume)
    ranks.wait()
    checkpoint = find_checkpoint(config.run.folder / CHECKPOINTS, ranks) if resume else None
    if checkpoint is not None and checkpoint.step >= config.optim.steps:
        raise ConfigError(
            f"the run in {config.run.folder} has taken all of its {config.optim.steps} steps, so there is nothing to "
            f"resume. Its last checkpoint is {checkpoint.folder}."
        )

    # The same seed on every rank gives the same random weights.
    random.seed(config.run.seed)
    np.random.seed(config.run.seed)  # noqa: NPY002 - the global state is what other libraries draw from
    torch.manual_seed(config.run.seed)
    model = build_model(config, checkpoint, precision.params, device)
    processor = load_processor(config.model.path)
    cost_model = freeze(model, trace(model), config.model.freeze)
    recompute = chosen_recompute(config, model, cost_model, precision)
    recompute_blocks(model, recompute)
    compile_watch = CompileWatch(is_strict=config.speed.recompiles == "error")
    if config.speed.compile:
        compile_blocks(model, compile_watch)
    meter = StepMeter(cost_model, peak_for(device, precision.compute), recompute=recompute, world_size=ranks.size)
    optimizer = make_optimizer(model, config.optim, cost_model)
    ema = WeightAverage(model, config.optim.ema) if config.optim.ema is not None else None

    encoder = Encoder(processor, rope_index(model))
    budget = budget_of(config.data)
    feed = open_feed(config, encoder, model, cost_model, ranks, pin_memory=device.type == "cuda")
    eval_set = None
    if config.data.eval is not None:
        eval_set = EvalSet(read_samples(config.data.eval)[: config.eval.max_samples], encoder, budget, ranks)

    if checkpoint is not None:
        restore(checkpoint, model, optimizer, ema)
        feed.load_state_dict(checkpoint.position())
        restore_random_state(checkpoint.random_state(ranks.rank))
    saving = config.checkpoint
    exports = Exports(config.run.folder / EXPORTS, saving.export, saving.keep)
    saver = CheckpointSaver(
        config.run.folder / CHECKPOINTS,
        ranks,
        keep=saving.keep,
        asynchronous=saving.asynchronous,
        export=exports.make if saving.export == "every" else None,
    )
    run = Run(
        device,
        precision,
        ranks,
        model,
        processor,
        optimizer,
        ema,
        meter,
        compile_watch,
        feed,
        eval_set,
        checkpoint,
        saver,
        exports,
    )
    if ranks.is_first:
        write_json(config.run.folder / RUN, _facts(run))
    return run


def build_model(
    config: TrainConfig, checkpoint: Checkpoint | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The configured model: with saved weights or at random; what a checkpoint is read into, if there is one.

    Raises:
        CheckpointError: the checkpoint holds another model, or `model.path` is a half-written checkpoint.
    """
    refuse_half_written(Path(config.model.path))
    if checkpoint is None:
        return load_model(config.model.path, dtype=dtype, device=device, random_init=config.model.random_init)
    wanted, found = _architecture(config.model.path), _architecture(str(checkpoint.model_folder))
    if wanted != found:
        keys = [key for key in sorted(wanted.keys() | found.keys()) if wanted.get(key) != found.get(key)]
        raise CheckpointError(
            f"the checkpoint {checkpoint.folder} holds another model than {config.model.path}: they differ in "
            f"{', '.join(keys)}. Put the model's folder back as it was, or start a new run in another run.folder."
        )
    return load_model(config.model.path, dtype=dtype, device=device, random_init=True)  # the weights come later


def save(run: Run, step: int) -> None:
    """Begin to save everything after a step, all ranks together.

    Raises:
        CheckpointError: the checkpoint before could not be written, or this one.
    """
    position = run.feed.merged(run.ranks.gather(run.feed.state_dict()))
    tensors = training_tensors(run.model, run.optimizer, run.ema)
    run.saver.save(step, Contents(tensors, random_state(), position, {"data": run.ranks.size}, run.write_model))


def _facts(run: Run) -> dict[str, Any]:
    """What the run is made of, for run.json."""
    params, peak = run.meter.cost_model.params, run.meter.peak
    return {
        "software": describe_software(),
        "device": {"name": peak.name, "kind": str(run.device), "threads": torch.get_num_threads()},
        "ranks": run.ranks.size,
        "precision": run.precision.name,
        "peak": {"flops_per_s": peak.flops_per_s, "dtype": peak.dtype, "kind": peak.kind, "source": peak.source},
        "model": {"class": type(run.model).__name__, "parameters": params.total, "trainable": params.trainable},
        "resumed_from": str(run.checkpoint.folder) if run.checkpoint else None,
    }


def _architecture(path: str) -> dict[str, Any]:
    """A model's configuration without what saving adds to it."""
    volatile = ("transformers_version", "_name_or_path", "dtype", "architectures")

    def clean(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: clean(value) for key, value in node.items() if key not in volatile}
        return node

    cleaned: dict[str, Any] = clean(load_config(path).to_dict())
    return cleaned
