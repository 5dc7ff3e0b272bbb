"""Preferences in the training loop: the reference of each pack, and the factors on its slots' losses.

Tensor letters as in `headway.models.preferences`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from headway.config import PreferenceConfig, TrainConfig
from headway.count import CostModel
from headway.data import Batch, Encoder
from headway.data.feed import Feed, IndexedFeed
from headway.data.index.build import index_folder
from headway.data.samples import Preference, SampleError
from headway.errors import ConfigError
from headway.meter.run_meter import RunMeter
from headway.models.head import ModelWithLoss, model_with_loss
from headway.models.lora import without_adapters
from headway.models.parallel.ranks import Ranks
from headway.models.preferences import PairNumbers, Preferring, Rule
from headway.train.reference import (
    Scoring,
    StoredReference,
    model_key,
    save_reference,
    saved_reference,
    stored_reference,
    with_reference,
)
from headway.train.share import StepShare


def preferring_of(settings: PreferenceConfig) -> Preferring:
    """The loss of pairs, as a run's settings have it."""
    rule = Rule(settings.strength, settings.label_smoothing, settings.gamma)
    return Preferring(settings.loss, rule, settings.sft_weight)


class PackWeights:
    """Factors on the losses of a pack's slots, found once the losses are known; called by the output layer.

    Args:
        preferring: the loss of pairs.
        batch: the pack, on the device, with what the reference gives its answers.
        group: the processes that compute it together.
        per_pair: pairs of the whole step.
        per_token: targets of its best answers [tokens].

    Attributes:
        numbers: of the pack's pairs; None before they are known.
    """

    def __init__(
        self, preferring: Preferring, batch: Batch, group: ProcessGroup | None, per_pair: int, per_token: int
    ) -> None:
        assert batch.answers is not None
        self.numbers: PairNumbers | None = None
        self._preferring, self._answers, self._group = preferring, batch.answers, group
        self._of_L = self._answers.of_slots(batch.slots)[batch.local_slots(group)]
        self._per_pair, self._per_token = per_pair, per_token

    def __call__(self, loss_L: torch.Tensor) -> torch.Tensor:
        """The factor on each slot's loss, shape (L,)."""
        factor_L, self.numbers = self._preferring.weigh(
            self._answers, self._of_L, loss_L, self._group, per_pair=self._per_pair, per_token=self._per_token
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

    def of(self, batch: Batch, meter: RunMeter) -> torch.Tensor:
        """Log-probability of each answer of a pack that is on the device [nats], shape (A,)."""
        eager = torch.compiler.set_stance("force_eager")  # compiled blocks would be compiled again without adapters
        with meter.phase("reference", forward_only=True), without_adapters(self._scoring.model_with_loss.model), eager:
            meter.count(batch.workload, forward_only=True, cost_model=self.cost_model)
            return self._scoring.log_probabilities(batch)


@dataclass(frozen=True)
class PairTraining:
    """How a run's packs of preferences are learnt.

    Attributes:
        preferring: the loss of pairs.
        reference: what answers are compared with; None where with nothing.
    """

    preferring: Preferring
    reference: StoredReference | AdaptersOff | None

    def ready(self, batch: Batch) -> Batch:
        """A pack that is still on the host, with what a stored reference gives its answers."""
        if batch.answers is None or not isinstance(self.reference, StoredReference):
            return batch
        return with_reference(batch, self.reference.of(batch))

    def weights(
        self, batch: Batch, shared: StepShare, group: ProcessGroup | None, meter: RunMeter
    ) -> PackWeights | None:
        """The factors on a pack's losses; None of a pack of padding.

        Args:
            batch: the pack, on the device.
            shared: what all ranks compute in the step.
            group: the processes that compute the pack together.
            meter: counts the forward of a reference that is computed for each pack.
        """
        if isinstance(self.reference, AdaptersOff):
            # Also of padding, as processes that share their weights run equally many forwards.
            values_A = self.reference.of(batch, meter)
            batch = batch if batch.answers is None else with_reference(batch, values_A)
        if batch.answers is None:
            return None
        return PackWeights(self.preferring, batch, group, max(1, sum(shared.pairs)), max(1, shared.best_tokens))


def pair_training(
    config: TrainConfig,
    feed: Feed,
    encoder: Encoder,
    scoring: Scoring,
    ranks: Ranks,
    ledgers: Mapping[str, CostModel],
    *,
    resumes: bool,
) -> PairTraining | None:
    """Prepare a run's training on preferences; None of a run of other samples.

    Args:
        config: everything there is to say.
        feed: of the run.
        encoder: that measured its samples.
        scoring: of the model, with its initial weights unless the run resumes.
        ranks: the processes.
        ledgers: of the model as it trains ("trained") and without adapters ("plain").
        resumes: whether the run goes on from a checkpoint.

    Raises:
        ConfigError: the first rows of a source are of another kind than the configuration says.
        CheckpointError: the run folder has lost its copy of the reference.
        DataError: rows of which the reference cannot be computed.
    """
    settings = config.preference
    check_kinds(feed, compares=settings is not None)
    if settings is None:
        return None
    preferring, model = preferring_of(settings), scoring.model_with_loss.model
    if settings.compares_with == "none":
        return PairTraining(preferring, None)
    if settings.compares_with == "adapters-off":
        plain = _plain_losses(scoring.model_with_loss, model, config.speed.loss_chunk)
        return PairTraining(preferring, AdaptersOff(scoring, ledgers["plain"], plain))
    folder = Path(config.run.folder)
    if resumes:
        return PairTraining(preferring, saved_reference(folder, feed.sources))
    assert isinstance(feed, IndexedFeed)  # the configuration has checked that there is an index
    with without_adapters(model):
        key = model_key(model, model.config.to_dict(), config.run.dtype)
    folders = {source.name: index_folder(source, encoder) for source in feed.sources}
    reference = stored_reference(feed, scoring, ranks, ledgers["trained"], folders, key)
    ranks.by_first(lambda: save_reference(folder, reference))
    return PairTraining(preferring, reference)


def check_kinds(feed: Feed, *, compares: bool) -> None:
    """Make sure that the first usable row of each source is what the configuration trains on.

    Raises:
        ConfigError: preferences without the section `preference`, or the section without them.
    """
    for source in feed.sources:
        for number in range(min(_LOOKED_AT, len(source))):
            try:
                sample = source[number]
            except SampleError:
                continue  # told when it is used
            if isinstance(sample, Preference) == compares:
                break
            if compares:
                raise ConfigError(
                    f"preference is set, and {sample.origin} is no preference, but a "
                    f"{type(sample).__name__.lower()}: rows need the columns chosen and rejected (docs/preferences.md)."
                    " Take the section preference out, or the source."
                )
            raise ConfigError(
                f"{sample.origin} holds answers of which some are better, and nothing says how they are compared: set "
                "preference, such as preference.loss=sigmoid, or learn the chosen answers alone with columns: "
                "{completion: chosen}."
            )


_LOOKED_AT = 20  # rows of a source, to find one that can be used


def _plain_losses(losses: ModelWithLoss, model: PreTrainedModel, chunk: int | None) -> ModelWithLoss:
    """Compute losses of the model without adapters: as ever, unless its head has one."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers leaves it so
    with without_adapters(model):
        if model.get_output_embeddings() is head:  # type: ignore[no-untyped-call]  # likewise
            return losses
        return model_with_loss(model, chunk=chunk)
