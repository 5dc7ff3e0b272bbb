"""Build the parts of a run: devices and ranks, model, optimizer, meter, feed; and bring them to where they left off."""

import math
import random
import socket
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from headway.answer.answers import GenerationEval
from headway.answer.evaluate import EvalSet
from headway.answer.model_folder import make_encoder
from headway.checkpoint import (
    Checkpoint,
    CheckpointSaver,
    Contents,
    find_checkpoint,
    newest_sound,
    random_state,
    restore,
    restore_random_state,
    training_tensors,
)
from headway.checkpoint.export import Exports
from headway.checkpoint.folder import BEST, OBJECTIVE
from headway.checkpoint.spelling import keep_spelling
from headway.config import ParallelConfig, TrainConfig
from headway.config.advice import warnings
from headway.config.model import family_settings
from headway.config.sections import settings_off_default
from headway.count.recompute import with_head
from headway.data import Encoder
from headway.data.chat import stop_ids_of
from headway.data.chat_settings import ChatSettings
from headway.data.encoders import prepare_encoder
from headway.data.feed import Feed
from headway.data.processor_settings import ProcessorSettings
from headway.data.sources.opening import samples_of
from headway.data.stops import with_stops
from headway.devices import peak_for
from headway.errors import ConfigError, RunCompleteError
from headway.log.run_files import CHECKPOINTS, EXPORTS, RUN, write_json
from headway.meter.batch_share import BatchShare
from headway.meter.environment import bandwidth_of
from headway.meter.meter import Meter
from headway.models.experts import RouterLoad
from headway.models.load import Processor, load_model_config, load_processor
from headway.models.lora import write_adapter_config
from headway.models.new_rows import embedding_rows
from headway.models.parallel.mesh import Mesh, build_mesh
from headway.models.parallel.ranks import Ranks, join_ranks
from headway.models.parallel.shard import model_name, reshard
from headway.models.precision import Precision, choose_device, choose_precision
from headway.models.vision import vision_geometry
from headway.optim import Optimizer, WeightAverage, make_optimizer
from headway.packing.mesh import MeshShape
from headway.plugins import lays_out_packs
from headway.report import format_count
from headway.stores import shown
from headway.train.agreement import agree, agreed_files, model_facts, settings_facts
from headway.train.best import BestEvaluation, Measure
from headway.train.build import Trained, build_trained
from headway.train.data import budget_of, make_collator, open_dataset, open_feed
from headway.train.objective import Objective, RunParts, make_objective
from headway.train.record import describe_software
from headway.train.run_folder import RunFolder, from_weights_of
from headway.train.watch import LoopPhase


class Place(NamedTuple):
    """Where a process stands after a step: what a checkpoint holds of it besides tensors.

    Attributes:
        step: number of the step.
        feed: its place in the data, as `Feed.state_dict` gives it.
        random: the state of its random generators.
    """

    step: int
    feed: dict[str, Any]
    random: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run, ready to go."""

    device: torch.device
    precision: Precision
    ranks: Ranks
    mesh: Mesh | None
    trained: Trained
    processor: Processor
    base: str
    optimizer: Optimizer
    ema: WeightAverage | None
    meter: Meter
    feed: Feed
    steps: int
    notes: tuple[str, ...]
    router_load: RouterLoad
    eval_set: EvalSet | None
    best: BestEvaluation
    generation_eval: GenerationEval | None
    objective: Objective
    resumes: bool
    damaged: tuple[str, ...]
    checkpoint: Checkpoint | None
    saver: CheckpointSaver
    exports: Exports

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        return self.trained.model

    def weights_to_judge(self) -> AbstractContextManager[None]:
        """While the model is evaluated: its averaged weights, if there are any."""
        return nullcontext() if self.ema is None else self.ema.in_place()

    def describe(self) -> list[str]:
        """Lines that describe the run on the screen."""
        params, peak = self.meter.cost_model.params, self.meter.peak
        lines = [
            f"{model_name(self.model)}: {params.total / 1e6:.2f} M parameters, {params.trainable / 1e6:.2f} M "
            f"trained, {self.precision.name} on {self.device}",
            f"peak {peak.flops_per_s / 1e9:,.1f} GFLOP/s a device, {peak.kind} of {peak.name} ({peak.source})",
        ]
        lines += [*self.trained.notes, *self.optimizer.notes, *self.notes]
        lines += [
            f"warning: {fault} Headway sets the checkpoint aside and repeats the steps since." for fault in self.damaged
        ]
        return lines + ([f"resumed from {shown(self.checkpoint.folder)}"] if self.checkpoint else [])

    def place(self, step: int) -> Place:
        """Where this process stands now, after a step."""
        return Place(step, self.feed.state_dict(), random_state())

    def write_model(self, folder: Path) -> None:
        """Write config, generation config, adapter config and processor, in the base's own spelling too."""
        self.model.config.save_pretrained(folder)
        if (generation := getattr(self.model, "generation_config", None)) is not None:
            with_stops(generation, stop_ids_of(self.processor)).save_pretrained(folder)
        write_adapter_config(self.model, folder)
        self.processor.save_pretrained(folder)
        keep_spelling(folder, self.base, self.model.config)


def prepare(config: TrainConfig, *, resume: bool | None, phase: LoopPhase, folder: RunFolder) -> Run:
    """Build the parts of a run and bring them to where the newest checkpoint left them.

    Args:
        config: everything there is to say.
        resume: whether the run folder holds a run that goes on; None to look.
        phase: set as the set-up goes on.
        folder: the run's; held by the first process from here on.

    Raises:
        HeadwayError: as in `train`.
    """
    device = choose_device(config.run)
    ranks = _joined(config, device, phase, resume=resume)
    precision = choose_precision(config.run, device)
    mesh = make_mesh(config.parallel, ranks, device)
    phase.at("opening the run folder")
    resumes = folder.open_together(config, ranks, resume=resume)
    phase.at("checking the newest checkpoint")
    checkpoint, damaged = _checkpoint(config, ranks, resumes=resumes, resume=resume)
    position = checkpoint.position() if checkpoint is not None else {}

    phase.at("comparing the model folders of the ranks")
    reads_weights = checkpoint is None and not config.model.random_init
    agree(ranks, lambda: model_facts(config, reads_weights=reads_weights))
    phase.at("building the model")
    _seed_everything(config.run.seed)  # the same on every rank, which gives the same random weights
    trained = build_trained(config, mesh, checkpoint, precision, device)
    encoder, trained, apart = _with_encoder(config, trained, checkpoint)
    model, cost_model = trained.model, trained.cost_model
    optimizer = make_optimizer(model, config.optim, cost_model, ranks)
    ema = WeightAverage(model, config.optim.ema) if config.optim.ema is not None else None

    phase.at("reading and measuring the data", watched=False)  # a first index takes as long as the data are large
    feed = open_feed(config, encoder, model, cost_model, ranks, pin_memory=device.type == "cuda", position=position)
    phase.at("preparing the objective", watched=False)  # the objective may run a model on all of the data
    parts = RunParts(
        config=config,
        trained=trained,
        feed=feed,
        encoder=encoder,
        ranks=ranks,
        device=device,
        precision=precision,
        group=_sequence_group(mesh),
        resumes=checkpoint is not None,
    )
    objective = make_objective(parts)
    eval_set, generation_eval = _held_out(parts, objective)
    reshard(model)  # the loop takes the model's parameters, which are to be slices

    phase.at("restoring the checkpoint")
    if checkpoint is not None:
        restore(checkpoint, model, optimizer, ema)
        feed.load_state_dict(position, config.data.verify)
        restore_random_state(checkpoint.random_state(ranks.rank))
    phase.at("counting the steps", watched=False)  # a run to the end of its data plans all of its steps here
    steps, notes = _length(config, feed, checkpoint)
    if ranks.is_first:
        notes += tuple(f"warning: {note}" for source in feed.sources for note in source.notes())
    feed.needed = steps - (checkpoint.step if checkpoint is not None else 0)
    phase.at("set-up")
    saving, exports = config.checkpoint, exports_of(config)
    saver = CheckpointSaver(
        config.run.folder / CHECKPOINTS,
        ranks,
        keep=saving.keep,
        keep_best=bool(saving.keep_best),
        asynchronous=saving.asynchronous,
        export=exports.make if saving.export == "every" else None,
        before_manifest=folder.mirror.send if folder.mirror is not None else None,
    )
    run = Run(
        device=device,
        precision=precision,
        ranks=ranks,
        mesh=mesh,
        trained=trained,
        processor=encoder.processor,
        base=config.model.path,
        optimizer=optimizer,
        ema=ema,
        meter=_meter(parts, optimizer, objective, checkpoint),
        feed=feed,
        steps=steps,
        notes=(*notes, *apart, *objective.notes),
        router_load=RouterLoad(model, device),
        eval_set=eval_set,
        best=_best_so_far(config, position),
        generation_eval=generation_eval,
        objective=objective,
        resumes=resumes,
        damaged=damaged,
        checkpoint=checkpoint,
        saver=saver,
        exports=exports,
    )
    if ranks.is_first:
        write_json(config.run.folder / RUN, _facts(run) | {"recipe": config.recipe.to_dict()})
    return run


def _checkpoint(
    config: TrainConfig, ranks: Ranks, *, resumes: bool, resume: bool | None
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The checkpoint that a run goes on from, and the faults of newer ones; None for a run that begins."""
    root, checkpoint, damaged = config.run.folder / CHECKPOINTS, None, tuple[str, ...]()
    if resumes and resume is None:  # a job that restarts by itself goes on from what is there
        checkpoint, damaged = newest_sound(root, ranks)
    elif resumes:
        checkpoint = find_checkpoint(root, ranks)
    if checkpoint is not None and config.optim.steps is not None and checkpoint.step >= config.optim.steps:
        raise _nothing_left(config, checkpoint)
    if checkpoint and config.objective and checkpoint.position().get(OBJECTIVE, "") != config.objective.digest:
        raise ConfigError(
            f"the run began with another {config.objective.path}, but a resumed run must repeat an uninterrupted run "
            "exactly. Put the file back, or start another run."
        )
    return checkpoint, damaged


def _joined(config: TrainConfig, device: torch.device, phase: LoopPhase, *, resume: bool | None) -> Ranks:
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    phase.at("joining the other ranks", watched=False)  # the meeting gives up by itself, and says whom it missed
    ranks = join_ranks(device, config.parallel.sequence, watchdog_s=config.run.watchdog_s)
    phase.at("comparing the settings of the ranks")
    agree(ranks, lambda: settings_facts(config, resume=resume, device=device.type))
    return ranks


def _meter(parts: RunParts, optimizer: Optimizer, objective: Objective, checkpoint: Checkpoint | None) -> Meter:
    config, trained, device, ranks = parts.config, parts.trained, parts.device, parts.ranks
    peak = peak_for(device, parts.precision.peak_dtype)
    if not config.model.flops:  # a share of the peak would be 0
        peak = replace(peak, flops_per_s=math.nan, source="model.flops is false")
    return Meter(
        trained.model,
        cost_model=trained.cost_model,
        peak=peak,
        device=device,
        optimizer=optimizer if math.isfinite(bandwidth_of(device)) else None,
        recompute=with_head(trained.recompute) if config.weighs_losses else trained.recompute,
        packing_length=config.data.tokens_per_pack,
        batch_ranks=BatchShare(ranks.sequence, is_first=ranks.bills),
        steps_before=checkpoint.step if checkpoint is not None else 0,
        others=tuple(objective.ledgers),
        watch=False,
        by_messages=True,
    )


def exports_of(config: TrainConfig) -> Exports:
    """The model folders that a run writes."""
    # Adapters alone refer to a folder or Hub name with the weights beside them, which random ones have not.
    merges = config.model.random_init
    return Exports(config.run.folder / EXPORTS, config.checkpoint.export, config.checkpoint.keep, merge_adapters=merges)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global state is what other libraries draw from
    torch.manual_seed(seed)


def _held_out(parts: RunParts, objective: Objective) -> tuple[EvalSet | None, GenerationEval | None]:
    """The held-out samples whose loss is measured, and those of them that are answered; None where not asked for."""
    config, encoder, ranks = parts.config, parts.encoder, parts.ranks
    if config.data.eval is None or not config.eval.evaluates:
        return None, None
    source = open_dataset(config.data.eval)
    if ranks.size > 1:
        agreed_files([source], config.data.verify, ranks)
    samples = list(samples_of(source))[: config.eval.max_samples]
    budget, model = budget_of(config.data), parts.trained.model
    judge = objective.judge()
    eval_set = EvalSet(samples, encoder, budget, ranks, vision_geometry(model), parts.group, judge)
    judge.prepare(eval_set.packs)
    if config.eval.generate is None:
        return eval_set, None
    collator = make_collator(config.data, encoder, model, ranks)
    answered, longest = config.eval.generate, config.eval.max_new_tokens
    return eval_set, GenerationEval(
        samples, encoder, budget, collator, ranks, parts.group, count=answered, max_new_tokens=longest
    )


def _length(config: TrainConfig, feed: Feed, checkpoint: Checkpoint | None) -> tuple[int, tuple[str, ...]]:
    """Steps of the whole run, those before a resume included, and what is to be told of settings that they outdo."""
    limit, done = config.optim.steps, checkpoint.step if checkpoint is not None else 0
    left, notes = feed.steps_left(None if limit is None else limit - done), list[str]()
    if left is None:
        assert limit is not None  # the configuration has checked that epochs can be counted
        steps = limit
    else:
        steps = done + left
        if checkpoint is not None and not left:
            raise _nothing_left(config, checkpoint)
        if limit is None:
            notes = [f"{config.optim.epochs:g} epochs are {format_count(steps)} steps"]
        elif steps < limit:
            notes = [
                f"warning: the data end after {format_count(steps)} of {format_count(limit)} steps, and so do the "
                "run and its schedule. Set optim.epochs instead of optim.steps to say how often the data play"
            ]
    return steps, (*notes, *(f"warning: {text}" for text in (*warnings(config, steps), *feed.warnings)))


def _nothing_left(config: TrainConfig, checkpoint: Checkpoint) -> RunCompleteError:
    folder = shown(config.run.folder)
    return RunCompleteError(
        f"the run in {folder} has finished all of its {checkpoint.step} steps, so there is nothing to resume. Raise "
        f"optim.steps or optim.epochs to go on, or start another run {from_weights_of(config.run.folder)}."
    )


def _best_so_far(config: TrainConfig, position: Mapping[str, Any]) -> BestEvaluation:
    """The best evaluation before a checkpoint; an error where as many as ended the run have not bettered it."""
    measure: Measure = "exact_match" if config.checkpoint.keep_best == "exact_match" else "loss"
    best = BestEvaluation.of(measure, position.get(BEST))
    if best.has_ended(config.eval.stop_after):
        folder = shown(config.run.folder)
        raise RunCompleteError(
            f"the run in {folder} ended early: {best.since} evaluations were no better than {best.text}, and "
            f"eval.stop_after is {config.eval.stop_after}. Raise eval.stop_after to go on, or set it to null."
        )
    return best


def _sequence_group(mesh: Mesh | None) -> ProcessGroup | None:
    return None if mesh is None or mesh.sequence is None else mesh.sequence.get_group()


def make_mesh(parallel: ParallelConfig, ranks: Ranks, device: torch.device) -> Mesh | None:
    """The mesh of a run's processes; None for a lone one, which trains a plain model.

    Raises:
        ConfigError: the processes do not fit the mesh, or a setting has no effect with as many as there are.
    """
    shape = parallel.mesh_shape(ranks.size)
    idle = sorted(settings_off_default(parallel) & {"reshard", "reduce", "reduce_dtype", "offload"})
    if ranks.size == 1 and idle:
        raise ConfigError(
            f"parallel.{idle[0]} has no effect on one process, because one process holds the whole model. Take the "
            "setting out, or start more processes with torchrun --nproc-per-node N --no-python headway train ..."
        )
    if parallel.offload and device.type == "cpu":
        raise ConfigError(
            "parallel.offload has no effect on a CPU, because a CPU computes in the host's memory. Take it out."
        )
    return build_mesh(shape, device.type) if ranks.size > 1 else None


def begin_checkpoint(run: Run, place: Place, history: Mapping[str, Any], *, goes_on: bool = True) -> None:
    """Begin to save everything after a step, all ranks together.

    Args:
        run: its parts.
        place: where this process stood after the step.
        history: what the run has behind it, for the recorder of a continuation.
        goes_on: whether training may go on meanwhile.

    Raises:
        CheckpointError: the checkpoint before could not be written, or this one.
    """
    position = {**run.feed.merged(run.ranks.gather(place.feed)), **history}
    if run.objective.digest:
        position[OBJECTIVE] = run.objective.digest
    if run.eval_set is not None:
        position[BEST] = run.best.to_dict()
    tensors = training_tensors(run.model, run.optimizer, run.ema)
    shape = MeshShape() if run.mesh is None else run.mesh.shape
    contents = Contents(tensors, place.random, position, asdict(shape), run.write_model)
    run.saver.save(place.step, contents, goes_on=goes_on)


def _facts(run: Run) -> dict[str, Any]:
    params, peak = run.meter.cost_model.params, run.meter.peak
    return {
        "software": describe_software(),
        "command": sys.argv,
        "host": socket.gethostname(),
        "device": {"name": peak.name, "kind": str(run.device), "threads": torch.get_num_threads()},
        "ranks": run.ranks.size,
        "steps": run.steps,
        "mesh": None if run.mesh is None else asdict(run.mesh.shape),
        "precision": run.precision.name,
        "compiled": run.trained.compiles,
        "peak": {"flops_per_s": peak.flops_per_s, "dtype": peak.dtype, "kind": peak.kind, "source": peak.source},
        "model": {"class": model_name(run.model), "parameters": params.total, "trainable": params.trainable},
        "resumed_from": str(run.checkpoint.folder) if run.checkpoint else None,
    }


def _with_encoder(
    config: TrainConfig, trained: Trained, checkpoint: Checkpoint | None
) -> tuple[Encoder, Trained, tuple[str, ...]]:
    """The encoder of a run, the model with ledgers of what it encodes, and a line on prompts for the start."""
    encoder = encoder_of_run(config, trained.model, checkpoint)
    apart = prepare_encoder(config, trained.model, trained.cost_model, encoder)
    return encoder, trained.under_splits() if encoder.shares_prompts else trained, apart


def encoder_of_run(config: TrainConfig, model: PreTrainedModel, checkpoint: Checkpoint | None = None) -> Encoder:
    """The encoder of a run, by its chat template: the one that it began with."""
    settings = ProcessorSettings.of(**config.of_processor())
    if settings.chats != ChatSettings() and lays_out_packs(model.config):
        raise ConfigError(
            f"model.chat_template and model.chat_template_kwargs have no effect on {model_name(model)}, because "
            "models of its family take no chat template. Leave them out."
        )
    processor = load_processor(config.model.path)
    settings.write_into(processor, embedding_rows(load_model_config(config.model.path)))
    if checkpoint is not None:
        _check_same_template(processor, checkpoint.model_folder)
    return make_encoder(
        processor,
        model,
        **config.data.limits,
        family=family_settings(config.model.family, model.config),
    )


def _check_same_template(processor: Any, before: Path) -> None:
    """Make sure that a resumed run renders chats as it began: the file of a template may have changed meanwhile."""
    file, now = before / "chat_template.jinja", getattr(processor, "chat_template", None)
    if file.is_file() and isinstance(now, str) and file.read_text(encoding="utf-8") != now:
        raise ConfigError(
            f"the run began with another chat template (in {file}), but a resumed run must repeat an uninterrupted "
            "run exactly. Put the template back, for example with model.chat_template, or start another run."
        )
