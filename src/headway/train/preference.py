"""Preferences in the training loop: the reference of each pack, and the factors on its slots' losses.

Tensor letters as in `headway.models.preferences`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from headway.answer.evaluate import EvalSet
from headway.config import PreferenceConfig, TrainConfig
from headway.count import CostModel
from headway.data import Batch, Encoder
from headway.data.feed import Feed, IndexedFeed
from headway.data.index.build import index_folder
from headway.data.samples import Chat, Preference, SampleError
from headway.errors import CheckpointError, ConfigError
from headway.log.run_files import write_json
from headway.meter.run_meter import RunMeter
from headway.models.head import ModelWithLoss, model_with_loss
from headway.models.lora import without_adapters
from headway.models.parallel.ranks import Ranks
from headway.models.parallel.shard import reshard
from headway.models.preferences import PairNumbers, PairSettings, Preferring
from headway.models.scores import name_padding
from headway.models.unpaired import UNPAIRED
from headway.train.build import Trained, without_keys
from headway.train.mismatches import Mismatches, saved_mismatches, stored_mismatches
from headway.train.reference import (
    FOLDER,
    Scoring,
    StoredReference,
    reference_key,
    save_reference,
    saved_reference,
    stored_reference,
    with_reference,
)
from headway.train.share import StepShare

# Shares of the first loss by which rounding may change it; products of 16 bits round each token's loss to 1e-2.
_ROUNDING, _ROUNDING_OF_HALVES = 1e-3, 2e-2


def preferring_of(settings: PreferenceConfig, padding: int | None = None) -> Preferring:
    """The loss of pairs, as a run's settings have it.

    Args:
        settings: of the run.
        padding: token that a reward model takes for padding.
    """
    weights = settings.desirable_weight, settings.undesirable_weight
    numbers = PairSettings(settings.strength, settings.label_smoothing, settings.gamma, settings.center, weights)
    return Preferring(settings.loss, numbers, settings.sft_weight, padding if settings.row.scores else None)


def judging(preferring: Preferring) -> Preferring:
    """How held-out pairs are judged: by the run's loss, or by that of DPO where answers have no pairs in training."""
    return replace(preferring, loss="sigmoid") if preferring.loss in UNPAIRED else preferring


class PackWeights:
    """Factors on the losses of a pack's slots, found once the losses are known; called by the output layer.

    Args:
        preferring: the loss of pairs.
        batch: the pack, on the device, with what the reference gives its answers.
        group: the processes that compute it together.
        per_pair: pairs of the whole step.
        per_token: targets of its best answers [tokens].
        kl: divergence of the policy from the reference in the step [nats].

    Attributes:
        numbers: of the pack's pairs; None before they are known.
    """

    def __init__(
        self,
        preferring: Preferring,
        batch: Batch,
        group: ProcessGroup | None,
        per_pair: int,
        per_token: int,
        kl: torch.Tensor | float = 0.0,
    ) -> None:
        assert batch.answers is not None
        self.numbers: PairNumbers | None = None
        self._preferring, self._answers, self._group = preferring, batch.answers, group
        self._of_L = preferring.of_slots(self._answers, batch.input_ids_1T[0])[batch.local_slots(group)]
        self._per_pair, self._per_token, self._kl = per_pair, per_token, kl

    def __call__(self, loss_L: torch.Tensor) -> torch.Tensor:
        """The factor on each slot's loss, shape (L,)."""
        factor_L, self.numbers = self._preferring.weigh(
            self._answers,
            self._of_L,
            loss_L,
            self._group,
            per_pair=self._per_pair,
            per_token=self._per_token,
            kl=self._kl,
        )
        return factor_L


class AdaptersOff:
    """The reference that a model with adapters is without them, computed for each pack.

    Args:
        scoring: of the model.
        cost_model: of the model without adapters.
        plain: computes its losses without adapters.
    """

    def __init__(self, scoring: Scoring, cost_model: CostModel, plain: ModelWithLoss) -> None:
        self._scoring, self.cost_model = scoring._replace(model_with_loss=plain), cost_model

    def of(self, batch: Batch) -> torch.Tensor:
        """Log-probability of each answer of a pack that is on the device [nats], shape (A,)."""
        eager = torch.compiler.set_stance("force_eager")  # compiled blocks would be compiled again without adapters
        with without_adapters(self._scoring.model_with_loss.model), eager:
            return self._scoring.log_probabilities(batch)

    def metered(self, batch: Batch, meter: RunMeter) -> torch.Tensor:
        """The same as a phase of a step, with its FLOPs counted."""
        with meter.phase("reference", forward_only=True):
            meter.count(batch.workload, forward_only=True, cost_model=self.cost_model)
            return self.of(batch)


@dataclass(frozen=True)
class PairTraining:
    """How a run's packs of preferences are learnt.

    Attributes:
        preferring: the loss of pairs.
        reference: what answers are compared with; None where with nothing.
        mismatches: estimates KTO's divergence; None of other losses.
    """

    preferring: Preferring
    reference: StoredReference | AdaptersOff | None
    mismatches: Mismatches | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on the reference for the start of the run."""
        notes = [self.reference.note] if isinstance(self.reference, StoredReference) else []
        notes += [self.mismatches.note] if self.mismatches is not None else []
        return tuple(note for note in notes if note)

    @property
    def ledgers(self) -> tuple[CostModel, ...]:
        """Ledgers of what steps run beside the trained model."""
        return (self.reference.cost_model,) if isinstance(self.reference, AdaptersOff) else ()

    def fault_of_first(self, record: Mapping[str, Any], *, exact: bool) -> str:
        """Say what is wrong with a run's first step if policy and reference are not of one function; "" if they are.

        Args:
            record: of the step, before which the policy is its reference.
            exact: whether the model computes in float32, so that rounding hardly shows.
        """
        pairs = record.get("preference")
        if self.reference is None or pairs is None:
            return ""
        loss = record["loss"] - self.preferring.sft * pairs.get("nll", 0.0)
        expected = self.preferring.first_loss(pairs["desirable"] / pairs["rows"] if "rows" in pairs else 1.0)
        if abs(loss - expected) <= expected * (_ROUNDING if exact else _ROUNDING_OF_HALVES):
            return ""
        return (
            f"the first step's loss of preferences is {loss:.4f}, and {expected:.4f} if the model is its reference, as "
            "it is before the first update. The two forwards are not of one function: the model draws random numbers "
            "in training, or the reference was computed of other rows, pictures or weights. Delete the run's folder "
            "and the stored reference beside the length index, or use preference.reference=none."
        )

    def ready(self, batch: Batch) -> Batch:
        """A pack that is still on the host, with what a stored reference gives its answers."""
        if batch.answers is None or not isinstance(self.reference, StoredReference):
            return batch
        return with_reference(batch, self.reference.of(batch))

    def weights(
        self,
        batch: Batch,
        shared: StepShare,
        group: ProcessGroup | None,
        meter: RunMeter,
        kl: torch.Tensor | float = 0.0,
    ) -> PackWeights | None:
        """The factors on a pack's losses; None of a pack of padding.

        Args:
            batch: the pack, on the device.
            shared: what all ranks compute in the step.
            group: the processes that compute the pack together.
            meter: counts the forward of a reference that is computed for each pack.
            kl: divergence of the policy from the reference in the step [nats].
        """
        if isinstance(self.reference, AdaptersOff):
            # Also of padding, as processes that share their weights run equally many forwards.
            values_A = self.reference.metered(batch, meter)
            batch = batch if batch.answers is None else with_reference(batch, values_A)
        if batch.answers is None:
            return None
        return PackWeights(self.preferring, batch, group, max(1, sum(shared.pairs)), max(1, shared.best_tokens), kl)


def pair_training(
    config: TrainConfig,
    trained: Trained,
    feed: Feed,
    encoder: Encoder,
    eval_set: EvalSet | None,
    scoring: Scoring,
    ranks: Ranks,
    *,
    resumes: bool,
) -> PairTraining | None:
    """Prepare a run's training on preferences; None of a run of other samples.

    Args:
        config: everything there is to say.
        trained: the model and its ledgers.
        feed: of the run.
        encoder: that measured its samples.
        eval_set: the held-out samples, if there are any, which are then judged by the run's loss and reference.
        scoring: of the model, with its initial weights unless the run resumes.
        ranks: the processes.
        resumes: whether the run goes on from a checkpoint.

    Raises:
        ConfigError: the first rows of a source are of another kind than the configuration says.
        CheckpointError: the run folder has lost its copy of the reference.
        DataError: rows of which the reference cannot be computed.
    """
    settings = config.preference
    check_kinds(feed, settings)
    pairs = None
    if settings is not None:
        if getattr(trained.model, "draws", False):
            raise ConfigError("preference has no effect on a model that draws images. Take it out.")
        reference = _reference(config, trained, feed, encoder, scoring, ranks, resumes=resumes)
        padding = name_padding(trained.model.config, encoder.tokenizer) if settings.row.scores else None
        mismatches = None
        if settings.loss == "kto":
            mismatches = _mismatches(config, reference, feed, scoring, ranks, resumes=resumes)
        pairs = PairTraining(preferring_of(settings, padding), reference, mismatches)
    _compare_held_out(pairs, eval_set, scoring, ranks, config.run.folder, resumes=resumes)
    reshard(trained.model)  # the loop takes the model's parameters, which are to be slices
    return pairs


def _reference(
    config: TrainConfig,
    trained: Trained,
    feed: Feed,
    encoder: Encoder,
    scoring: Scoring,
    ranks: Ranks,
    *,
    resumes: bool,
) -> StoredReference | AdaptersOff | None:
    assert config.preference is not None
    kind, model, folder = config.preference.compares_with, trained.model, config.run.folder
    if kind == "none":
        return None
    if kind == "adapters-off":
        plain = plain_losses(trained.model_with_loss, model, config.speed.loss_chunk)
        return AdaptersOff(scoring, trained.plain_cost_model, plain)
    if resumes:
        return saved_reference(folder, feed.sources)
    assert isinstance(feed, IndexedFeed)  # the configuration has checked that there is an index
    with without_adapters(model):
        key = reference_key(model, _reference_settings(config, model, scoring.device))
    folders = {source.name: index_folder(source, encoder) for source in feed.sources}
    reference = stored_reference(feed, scoring, ranks, trained.cost_model, folders, key)
    ranks.by_first(lambda: save_reference(folder, reference))
    return reference


def _reference_settings(config: TrainConfig, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """Settings that log-probabilities of a row's answers depend on, beside its encoding."""
    policies = {part.overlong or config.data.overlong for stage in config.data.played for part in stage.parts}
    return {
        "config": without_keys(model.config.to_dict(), ("_name_or_path",)),
        "precision": f"{config.run.dtype} on {device.type}",
        "kernels": [config.speed.attention, config.speed.kernels],
        "cut": config.data.tokens_per_pack if "truncate" in policies else None,
    }


def _mismatches(
    config: TrainConfig,
    reference: StoredReference | AdaptersOff | None,
    feed: Feed,
    scoring: Scoring,
    ranks: Ranks,
    *,
    resumes: bool,
) -> Mismatches:
    """What estimates the divergence of a run by KTO."""
    if isinstance(reference, AdaptersOff):
        return Mismatches(scoring, reference.metered)
    if resumes:
        return saved_mismatches(scoring, config.run.folder)
    assert isinstance(feed, IndexedFeed)  # as for the reference of the answers themselves
    steps = feed.steps_left(config.optim.steps)
    steps = config.optim.steps if steps is None else steps
    assert steps is not None  # the configuration has checked that epochs can be counted
    return stored_mismatches(feed, scoring, ranks, steps, config.run.folder)


def _compare_held_out(
    pairs: PairTraining | None,
    eval_set: EvalSet | None,
    scoring: Scoring,
    ranks: Ranks,
    folder: Path,
    *,
    resumes: bool,
) -> None:
    """Have held-out preferences judged by a run's loss and reference; refuse those of another kind."""
    if eval_set is None:
        return
    if any(ranks.gather_all(eval_set.compares)) != (pairs is not None):
        kinds = ("preferences", "none") if pairs is None else ("none", "preferences")
        raise ConfigError(
            f"data.eval holds {kinds[0]}, and the run trains on {kinds[1]}: give held-out samples of the same kind."
        )
    if pairs is None:
        return
    eval_set.preferring = judging(pairs.preferring)
    if isinstance(pairs.reference, AdaptersOff):
        eval_set.refer = pairs.reference.of
    elif pairs.reference is not None:
        path = folder / FOLDER / "eval.json"
        if not resumes:
            scoring.model_with_loss.model.train(False)  # as it is evaluated; the loop puts it into training mode
            parts = ranks.gather_all(eval_set.keep_reference(scoring.log_probabilities, scoring.device))
            ranks.by_first(lambda: write_json(path, {place: row for part in parts for place, row in part.items()}))
        eval_set.use_reference(_kept(path))


def _kept(path: Path) -> dict[str, list[float]]:
    try:
        values_of: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} with the reference's log-probabilities of held-out samples cannot be read: {error}. Put it back, "
            "or go on without data.eval."
        ) from error
    return values_of


def check_kinds(feed: Feed, settings: PreferenceConfig | None) -> None:
    """Make sure that the first usable row of each source is what the configuration trains on.

    Args:
        feed: of the run.
        settings: how it learns from preferences; None of a run on other samples.

    Raises:
        ConfigError: preferences without the section `preference`, or the section without them.
    """
    compares, takes_labels = settings is not None, settings is not None and settings.row.unpaired
    for source in feed.sources:
        for number in range(min(_LOOKED_AT, len(source))):
            try:
                sample = source[number]
            except SampleError:
                continue  # told when it is used
            has_label = isinstance(sample, Chat) and sample.desirable is not None
            if isinstance(sample, Preference) == compares or (takes_labels and has_label):
                break
            if takes_labels:
                raise ConfigError(
                    f"{sample.origin} does not say whether its answer is wished for, as preference.loss "
                    f"{settings.loss if settings else ''} needs it: give label, true or false, or chosen and rejected "
                    "answers (docs/data.md)."
                )
            if compares:
                raise ConfigError(
                    f"preference is set, and {sample.origin} is no preference, but a "
                    f"{type(sample).__name__.lower()}: rows need answers to compare, as prompt, "
                    "chosen and rejected (docs/data.md). Take the section preference out, or the source."
                )
            raise ConfigError(
                f"{sample.origin} holds answers of which some are better, and nothing says how they are compared: set "
                "preference, such as preference.loss=sigmoid, or learn the chosen answers alone with columns: "
                "{completion: chosen}."
            )


_LOOKED_AT = 20  # rows of a source, to find one that can be used


def plain_losses(losses: ModelWithLoss, model: PreTrainedModel, chunk: int | None) -> ModelWithLoss:
    """Compute losses of the model without adapters: as ever, unless its head has one."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers leaves it so
    with without_adapters(model):
        if model.get_output_embeddings() is head:  # type: ignore[no-untyped-call]  # likewise
            return losses
        return model_with_loss(model, chunk=chunk)
