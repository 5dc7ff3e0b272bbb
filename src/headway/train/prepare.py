"""Build the parts of a run: devices and ranks, model, optimizer, meter, feed; and bring them to where they left off."""

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from headway.count import trace
from headway.data import Encoder, read_samples
from headway.data.feed import Feed
from headway.data.vision import vision_geometry, vision_tower
from headway.devices import peak_for
from headway.errors import CheckpointError, ConfigError
from headway.meter import StepMeter
from headway.models.draw import draw_weights
from headway.models.load import Processor, load_config, load_model, load_processor, rope_index
from headway.models.lora import initialise_adapters, without_adapters, write_adapter_config
from headway.models.materialise import make_room, read_weights
from headway.models.parallel import Mesh, MeshShape, build_mesh, model_name, shard_model
from headway.train.answers import Questions
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
from headway.train.config import ParallelConfig, TrainConfig
from headway.train.config.sections import changed
from headway.train.data import budget_of, make_collator, open_feed
from headway.train.device import Precision, choose_device, choose_precision
from headway.train.evaluate import EvalSet
from headway.train.optim import Optimizer, WeightAverage, adapt, freeze, make_optimizer
from headway.train.ranks import Ranks, join_ranks
from headway.train.record import CHECKPOINTS, EXPORTS, RUN, describe_software, has_run, open_run_folder, write_json


@dataclass(frozen=True)
class Run:
    """The parts of a run, ready to go."""

    device: torch.device
    precision: Precision
    ranks: Ranks
    mesh: Mesh | None
    model: PreTrainedModel
    processor: Processor
    optimizer: Optimizer
    ema: WeightAverage | None
    meter: StepMeter
    feed: Feed
    eval_set: EvalSet | None
    questions: Questions | None
    resumes: bool
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
            f"{model_name(self.model)}: {params.total / 1e6:.2f} M parameters, {params.trainable / 1e6:.2f} M "
            f"trained, {self.precision.name} on {self.device}",
            f"peak {peak.flops_per_s / 1e9:,.1f} GFLOP/s a device, {peak.kind} of {peak.name} ({peak.source})",
        ]
        return lines + ([f"resumed from {self.checkpoint.folder}"] if self.checkpoint else [])

    def write_model(self, folder: Path) -> None:
        """Write what a model folder holds besides weights."""
        self.model.config.save_pretrained(folder)
        if self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(folder)
        write_adapter_config(self.model, folder)
        self.processor.save_pretrained(folder)


def prepare(config: TrainConfig, *, resume: bool | None) -> Run:
    """Build the parts of a run and bring them to where the newest checkpoint left them.

    Args:
        config: everything there is to say.
        resume: whether the run folder holds a run that goes on; None to look.

    Raises:
        HeadwayError: as in `train`.
    """
    device = choose_device(config.run)
    precision = choose_precision(config.run, device)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    ranks = join_ranks(device, config.parallel.sequence, watchdog_s=config.run.watchdog_s)
    mesh = make_mesh(config.parallel, ranks, device)
    if resume is None:  # before anything is written there, and the same on all ranks
        resume = ranks.gather(has_run(config.run.folder))[0]
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
    model = build_model(config, checkpoint, precision.params, device if mesh is None else torch.device("meta"))
    processor = load_processor(config.model.path)
    cost_model = adapt(model, freeze(model, trace(model), config.model.freeze), config.model)
    meter = StepMeter(cost_model, peak_for(device, precision.compute), world_size=ranks.size)
    if mesh is not None:
        distribute(model, mesh, config, checkpoint, precision, device)
    initialise_adapters(model, config.run.seed, torch.device("cpu") if config.parallel.offload else device)
    optimizer = make_optimizer(model, config.optim, cost_model)
    ema = WeightAverage(model, config.optim.ema) if config.optim.ema is not None else None

    encoder = Encoder(processor, rope_index(model))
    feed = open_feed(config, encoder, model, cost_model, ranks, pin_memory=device.type == "cuda")
    eval_set = questions = None
    if config.data.eval is not None:
        samples = read_samples(config.data.eval)[: config.eval.max_samples]
        eval_set = EvalSet(samples, encoder, budget_of(config.data), ranks, vision_geometry(model))
        if config.eval.generate is not None:
            collator = make_collator(config.data, encoder, model)
            questions = Questions(
                samples,
                encoder,
                budget_of(config.data),
                collator,
                ranks,
                count=config.eval.generate,
                max_new_tokens=config.eval.max_new_tokens,
            )

    if checkpoint is not None:
        restore(checkpoint, model, optimizer, ema)
        feed.load_state_dict(checkpoint.position())
        restore_random_state(checkpoint.random_state(ranks.rank))
    saving = config.checkpoint
    # Adapters alone refer to a folder or Hub name with the weights beside them, which random ones have not.
    exports = Exports(config.run.folder / EXPORTS, saving.export, saving.keep, merge_adapters=config.model.random_init)
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
        mesh,
        model,
        processor,
        optimizer,
        ema,
        meter,
        feed,
        eval_set,
        questions,
        resume,
        checkpoint,
        saver,
        exports,
    )
    if ranks.is_first:
        write_json(config.run.folder / RUN, _facts(run))
    return run


def make_mesh(parallel: ParallelConfig, ranks: Ranks, device: torch.device) -> Mesh | None:
    """The mesh of a run's processes; None for a lone one, which trains a plain model.

    Raises:
        ConfigError: the processes do not fit the mesh, or a setting has no effect with as many as there are.
    """
    shape = MeshShape.of(
        ranks.size,
        replicate=parallel.replicate,
        shard=parallel.shard,
        sequence=parallel.sequence,
        expert=parallel.expert,
    )
    idle = sorted(changed(parallel) & {"reshard", "reduce", "reduce_dtype", "offload"})
    if ranks.size == 1 and idle:
        raise ConfigError(
            f"parallel.{idle[0]} has no effect on one process, which keeps its model whole. Take it out, or start more "
            "with torchrun --nproc-per-node N -m headway train ..."
        )
    if parallel.offload and device.type == "cpu":
        raise ConfigError("parallel.offload has no effect on a CPU, whose memory is the host's. Take it out.")
    return build_mesh(shape, device.type) if ranks.size > 1 else None


def build_model(
    config: TrainConfig, checkpoint: Checkpoint | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The configured model: with saved weights or at random; what a checkpoint is read into, if there is one.

    Args:
        config: everything there is to say.
        checkpoint: where the run left off.
        dtype: the parameters' floating-point type.
        device: where the model lives; on the meta device it has no weights yet, see `distribute`.

    Raises:
        CheckpointError: the checkpoint holds another model, or `model.path` is a half-written checkpoint.
    """
    refuse_half_written(Path(config.model.path))
    if checkpoint is not None:
        _refuse_another_model(config, checkpoint)
    # A checkpoint's weights come later, when there is an optimizer too; until then any will do.
    random_init = config.model.random_init or checkpoint is not None or device.type == "meta"
    return load_model(config.model.path, dtype=dtype, device=device, random_init=random_init)


def distribute(
    model: PreTrainedModel,
    mesh: Mesh,
    config: TrainConfig,
    checkpoint: Checkpoint | None,
    precision: Precision,
    device: torch.device,
) -> None:
    """Shard a model that has no weights yet, and give every process its slices of them, or room for a checkpoint's.

    Raises:
        CheckpointError: the weights are not whole, or of another model.
    """
    parallel = config.parallel
    shard_model(
        model,
        mesh,
        compute_dtype=precision.compute,
        reduce_dtype=getattr(torch, parallel.reduce_dtype),
        reshard=parallel.reshard,
        offload=parallel.offload,
        vision=vision_tower(model),
    )
    keep_on = torch.device("cpu") if parallel.offload else device
    with without_adapters(model):  # which have weights of their own later
        if checkpoint is not None:
            make_room(model, device, keep_on=keep_on)
        elif config.model.random_init:
            draw_weights(model, device, keep_on=keep_on)
        else:
            read_weights(model, config.model.path, device, keep_on=keep_on)


def _refuse_another_model(config: TrainConfig, checkpoint: Checkpoint) -> None:
    wanted, found = _architecture(config.model.path), _architecture(str(checkpoint.model_folder))
    if wanted != found:
        keys = [key for key in sorted(wanted.keys() | found.keys()) if wanted.get(key) != found.get(key)]
        raise CheckpointError(
            f"the checkpoint {checkpoint.folder} holds another model than {config.model.path}: they differ in "
            f"{', '.join(keys)}. Put the model's folder back as it was, or start a new run in another run.folder."
        )


def save(run: Run, step: int) -> None:
    """Begin to save everything after a step, all ranks together.

    Raises:
        CheckpointError: the checkpoint before could not be written, or this one.
    """
    position = run.feed.merged(run.ranks.gather(run.feed.state_dict()))
    tensors = training_tensors(run.model, run.optimizer, run.ema)
    shape = MeshShape() if run.mesh is None else run.mesh.shape
    run.saver.save(step, Contents(tensors, random_state(), position, asdict(shape), run.write_model))


def _facts(run: Run) -> dict[str, Any]:
    """What the run is made of, for run.json."""
    params, peak = run.meter.cost_model.params, run.meter.peak
    return {
        "software": describe_software(),
        "device": {"name": peak.name, "kind": str(run.device), "threads": torch.get_num_threads()},
        "ranks": run.ranks.size,
        "mesh": None if run.mesh is None else asdict(run.mesh.shape),
        "precision": run.precision.name,
        "peak": {"flops_per_s": peak.flops_per_s, "dtype": peak.dtype, "kind": peak.kind, "source": peak.source},
        "model": {"class": model_name(run.model), "parameters": params.total, "trainable": params.trainable},
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
