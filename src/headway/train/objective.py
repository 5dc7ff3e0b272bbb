"""Objectives of a run: the loop asks its objective for the loss of each pack; the core's own is cross-entropy.

An objective says what a pack needs beside its tokens (`begin`), what its loss is and which whole numbers divide it
(`counts`, `pack_loss`), and what the record of a step has of it (`record`). The gradient and the log divide by the same
numbers: those of all ranks, which `StepShare` holds.

Tensor letters: S sources, L slots that this process computes, N losses of a pack.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from headway.answer.evaluate import Judge
from headway.config import TrainConfig
from headway.config.objective import ObjectiveConfig
from headway.count import CostModel
from headway.data import Batch, Encoder
from headway.data.feed import Feed
from headway.errors import ConfigError
from headway.meter.meter import Meter
from headway.models.head import ModelWithLoss
from headway.models.load import load_model
from headway.models.parallel.ranks import Ranks
from headway.models.precision import Precision
from headway.models.trial import try_packs
from headway.plugins import family_hook, objective_of
from headway.tracing import trace
from headway.train.build import Trained
from headway.train.share import Counts, StepShare
from headway.train.step_numbers import PackSums, StepNumbers, StepSums


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Parts of a run that an objective is made of.

    Attributes:
        config: all settings.
        trained: the model and its ledgers; with its initial weights unless the run resumes.
        feed: hands out the packs.
        encoder: that measured the samples.
        ranks: all processes.
        device: where this one computes.
        precision: of parameters and products.
        group: the processes that compute each pack together; None where each pack is one process's.
        resumes: whether the run goes on from a checkpoint.
    """

    config: TrainConfig
    trained: Trained
    feed: Feed
    encoder: Encoder
    ranks: Ranks
    device: torch.device
    precision: Precision
    group: ProcessGroup | None
    resumes: bool

    @property
    def model_with_loss(self) -> ModelWithLoss:
        """The trained model, run on a pack up to the cross-entropy of its slots."""
        return self.trained.model_with_loss

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of a forward: the dtype of its products."""
        return self.precision.autocast()


class LoopStep(NamedTuple):
    """One optimizer step, as an objective sees it.

    Attributes:
        number: of the step, from 1.
        share: what all ranks compute in it.
        sums: where this rank's numbers are added up.
        meter: counts what is computed.
    """

    number: int
    share: StepShare
    sums: StepSums
    meter: Meter

    @contextmanager
    def forward(
        self, name: str, batch: Batch, cost_model: CostModel | None = None, *, skips_unlabelled: bool = False
    ) -> Iterator[None]:
        """Count and time a forward that has no backward, as a phase of the step.

        Args:
            name: of the phase, in records.
            batch: the pack.
            cost_model: of the model that runs; one of the objective's `ledgers`, or None for the trained model.
            skips_unlabelled: whether its head runs on labelled tokens alone, as `ModelWithLoss.skips_unlabelled` says.
        """
        workload = batch.workload.with_counts(logits=batch.num_supervised if skips_unlabelled else None)
        with self.meter.phase(name, forward_only=True):
            self.meter.count(workload, forward_only=True, cost_model=cost_model)
            yield


class FrozenModel(NamedTuple):
    """A second model that does not learn.

    Attributes:
        model: with weights, on the run's device.
        cost_model: its ledger, for `Objective.ledgers` and `LoopStep.forward`.
    """

    model: PreTrainedModel
    cost_model: CostModel


class Objective:
    """Goal that a run learns by; here the cross-entropy of its supervised tokens.

    Subclass it to learn by something else, and name the class in the configuration, as `objective: mine.py:Mine`.

    Args:
        parts: of the run.
        **options: of the configuration's `objective.options`, for a subclass that takes some.

    Attributes:
        parts: of the run.
        terms: names of sums beside the losses, which `pack_loss` gives and `record` gets over all ranks.
        ledgers: of models that run beside the trained one, as `LoopStep.forward` takes them.
        notes: lines for the start of the run.
        digest: of the file of a user's own objective, for checkpoints; "" of all others.
    """

    terms: Sequence[str] = ()
    ledgers: Sequence[CostModel] = ()
    notes: Sequence[str] = ()
    digest: str = ""

    def __init__(self, parts: RunParts) -> None:
        self.parts = parts

    def counts(self, batch: Batch) -> Counts:
        """Whole numbers of a pack by which the step's losses are divided, once they are summed over all ranks."""
        units = dict.fromkeys(self.parts.feed.names, 0)
        for origin, targets in zip(batch.origins, batch.supervised, strict=True):
            units[origin.source] += targets
        return Counts(tuple(units.values()))

    def begin(self, batches: Sequence[Batch], step: LoopStep) -> list[Batch]:
        """Make this rank's packs of a step ready, before the first is on the device.

        Args:
            batches: as the feed gave them.
            step: about to be computed.

        Returns:
            The packs as they run: with a step's noise, and of packs that several processes share the slots of this one.
        """
        seed = self.parts.config.run.seed
        return [batch.noised(seed, step.number).dealt(self.parts.group) for batch in batches]

    def pack_loss(self, batch: Batch, step: LoopStep) -> PackSums:
        """Run the model forward on a pack and give its loss.

        Args:
            batch: the pack, on the device.
            step: that it is of; `step.share.divisor` is what the losses of all ranks are divided by. Give a factor on
                each slot's loss as `factor_T` of the model with loss: gradient and logged losses both have it.

        Returns:
            What is differentiated, and the losses to be logged.
        """
        local = batch.local_slots(self.parts.group)
        with self.parts.autocast():
            pack = self.parts.model_with_loss(
                batch.model_inputs(), batch.labels_1T[0, local], per=step.share.divisor, labelled_K=batch.labelled_K
            )
        return PackSums(pack.total, pack.loss_T, batch.source_of_slots()[local])

    def record(self, numbers: StepNumbers, share: StepShare) -> dict[str, Any]:
        """Entries of the objective in the record of a step, as JSON takes them.

        Args:
            numbers: sums over all ranks; finite.
            share: what all ranks computed.

        Returns:
            At least "loss", which is what the step has differentiated; None where there was nothing to learn from.
        """
        return {"loss": sum(numbers.losses) / share.divisor if any(share.units) else None}

    def judge(self) -> Judge:
        """Judge of held-out samples; by cross-entropy and exact match unless a subclass says otherwise."""
        return Judge()

    def first_fault(self, record: Mapping[str, Any]) -> str:  # noqa: ARG002 - for subclasses
        """Fault that the record of the first step shows; "" if it shows none."""
        return ""

    def frozen_model(self, path: str) -> FrozenModel:
        """Open a second model, such as a teacher, which runs forward on the same packs.

        Every process holds all of its weights.

        Args:
            path: a model folder, or a name on the Hugging Face Hub.

        Raises:
            ConfigError: several processes share each pack, or the model cannot be run on packs.
            UnknownModelError: nothing of that name.
        """
        if self.parts.group is not None:
            raise ConfigError(
                f"the model {path} runs beside the trained model and needs whole packs, but parallel.sequence "
                f"{self.parts.config.parallel.sequence} splits packs over processes. Set it to 1."
            )
        model = load_model(path, dtype=self.parts.precision.params, device=self.parts.device)
        try_packs(model, tokens=self.parts.config.data.tokens_per_pack)
        model.requires_grad_(requires_grad=False).train(mode=False)
        return FrozenModel(model, trace(model))


def make_objective(parts: RunParts) -> Objective:
    """Make the objective of a run: a class of the user's own, that of a section, that of the model's family, or ours.

    Raises:
        ConfigError: the user's class cannot be had or made.
        HeadwayError: as the objective's own set-up has them.
    """
    config = parts.config
    if config.objective is not None:
        return _own_objective(config.objective, parts)
    plugin = objective_of(config.objective_name)
    if plugin is not None:
        kind: Callable[[RunParts], Objective] | None = plugin.hook("objective")
        assert kind is not None  # every section has one
        return kind(parts)
    kind = family_hook(parts.trained.model.config, "objective")
    return Objective(parts) if kind is None else kind(parts)


def _own_objective(settings: ObjectiveConfig, parts: RunParts) -> Objective:
    """The user's own objective, whose file is run because the configuration names it."""
    path, _, name = settings.path.rpartition(":")
    try:
        if path.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"objective_{Path(path).stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(path)
    except Exception as error:
        raise ConfigError(f"objective {settings.path} cannot be imported: {type(error).__name__}: {error}.") from error
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Objective) and value.__module__ == module.__name__
        ]
        raise ConfigError(
            f"objective {settings.path} names no subclass of headway.train.objective.Objective. {path} has "
            f"{', '.join(classes) or 'none'}."
        )
    try:
        inspect.signature(kind).bind(parts, **settings.options)  # an error within the class is told as it is
    except TypeError as error:
        raise ConfigError(
            f"objective {settings.path} does not take the options {sorted(settings.options)}: {error}."
        ) from error
    objective = kind(parts, **settings.options)
    objective.digest = settings.digest
    return objective
