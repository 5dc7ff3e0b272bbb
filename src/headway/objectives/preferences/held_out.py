"""Held-out preferences: how often the better answer is preferred, by the loss and the reference of the run.

Outside of a run they are judged as in it. A reference that the run stored is that of its initial weights, which are
read once more for the rows that are asked for; one with adapters off is the model itself, where it has them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from headway.answer.evaluate import Autocast, Evaluation, Judge, JudgedModel
from headway.config import TrainConfig
from headway.data import Batch, Sample
from headway.data.samples import Preference
from headway.errors import ConfigError, DataError, HeadwayError
from headway.models.head import ModelWithLoss, model_with_loss
from headway.models.load import load_model
from headway.models.lora import has_adapters, without_adapters
from headway.models.scores import is_scorer
from headway.models.trial import try_packs
from headway.objectives.preferences.losses import Preferring
from headway.objectives.preferences.reference import Scoring, plain_losses
from headway.objectives.preferences.settings import PreferenceConfig
from headway.optim import rows_for_new_tokens

Refer = Callable[[Batch], torch.Tensor]
"""Gives the log-probabilities of the answers of a pack on the device under a reference [nats], shape (A,)."""

Values = Mapping[str, Sequence[float]]
"""Log-probabilities of a row's answers under the reference [nats], by the row's file and place."""

_ALONE = Preferring(PreferenceConfig(beta=1.0))  # rewards are log-probabilities


def judging(preferring: Preferring) -> Preferring:
    """Loss by which held-out pairs are judged: the run's, or that of DPO if answers have no pairs in training."""
    settings = preferring.settings
    return Preferring(settings.model_copy(update={"loss": "sigmoid"})) if settings.row.unpaired else preferring


class PairJudge(Judge):
    """Judges pairs of answers: their mean loss, and how many are in the right order.

    Args:
        preferring: the loss and rewards of pairs.
        refer: computes the reference anew for each pack; None where it is computed once, or there is none.
        values: computes it once for all packs of this process; likewise.
        reference: name of what answers are compared with, as `preference.reference` has it.
        note: how pairs are judged, in words.
    """

    def __init__(
        self,
        preferring: Preferring,
        *,
        refer: Refer | None = None,
        values: Callable[[Sequence[Batch]], Values] | None = None,
        loss: str | None = None,
        reference: str = "none",
        note: str = "",
    ) -> None:
        self._preferring, self._refer, self._make_values = preferring, refer, values
        self._values: Values | None = None
        self.note, self.facts = note, {"loss": loss, "reference": reference, "note": note}

    def check(self, samples: Sequence[Sample]) -> None:
        """Refuse samples that have no answers to compare; see `Judge.check`."""
        if not all(isinstance(sample, Preference) for sample in samples):
            raise ConfigError(
                "data.eval holds samples that are no preferences, but the run trains on preferences. Give held-out "
                "samples of the same kind."
            )

    def prepare(self, packs: Sequence[Batch]) -> None:
        """Compute the reference's values of all answers; see `Judge.prepare`.

        Raises:
            DataError: a sample has none.
        """
        if self._make_values is None:
            return
        self._values, self._make_values = self._make_values(packs), None
        if lacking := [place for batch in packs for place in batch.sources if place not in self._values]:
            raise DataError(
                "the run folder holds no reference for this held-out sample, because the sample was added after the "
                "run began. Put data.eval back as it was.",
                where=lacking[0],
            )

    def totals(
        self, model_with_loss: ModelWithLoss, batch: Batch, autocast: Autocast, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """Samples, right pairs, summed loss, targets, pairs and summed margin of a pack, shape (6,)."""
        values_A = None if self._refer is None else self._refer(batch)
        if self._values is not None and batch.answers is not None:
            values = [value for place in batch.sources for value in self._values[place]]
            values_A = torch.tensor(values, dtype=torch.float64, device=batch.input_ids_1T.device)
        local = batch.local_slots(group)
        with autocast():
            losses = model_with_loss(batch.model_inputs(), batch.labels_1T[0, local], labelled_K=batch.labelled_K)
        totals_6 = losses.loss_T.new_zeros(6, dtype=torch.float64)
        if batch.answers is None:
            return totals_6
        answers = batch.answers if values_A is None else replace(batch.answers, reference_A=values_A)
        of_L = self._preferring.of_slots(answers, batch.input_ids_1T[0])[local]
        _, pairs = self._preferring.weigh(answers, of_L, losses.loss_T, group)
        if group is not None and dist.get_rank(group):
            return totals_6  # the first process counts what all know
        better_P, worse_P = pairs.rewards_2P
        loss = pairs.loss_P.sum()
        counts = [batch.num_samples, (better_P > worse_P).sum(), loss, batch.num_supervised, len(better_P)]
        return torch.stack(
            [torch.as_tensor(n, device=loss.device).double() for n in (*counts, (better_P - worse_P).sum())]
        )

    def evaluation(self, totals: Sequence[float]) -> Evaluation:
        """The result; see `Judge.evaluation`."""
        samples, right, loss, tokens, pairs, margin = totals
        return Evaluation(int(samples), 0, loss / pairs, int(tokens), int(pairs), int(right), margin / pairs)


def values_of(packs: Sequence[Batch], refer: Refer, device: torch.device) -> dict[str, list[float]]:
    """Compute a reference's values of each answer of some packs."""
    by_place: dict[str, list[float]] = {}
    for batch in packs:
        values = iter(refer(batch.to(device)).tolist())
        for place, number in zip(batch.sources, batch.num_answers, strict=False):
            by_place[place] = [next(values) for _ in range(number)]
    return by_place


def judge_of(  # noqa: PLR0911 - a way to judge each
    samples: Sequence[Sample], config: TrainConfig | None, judged: JudgedModel
) -> PairJudge | None:
    """Judge held-out preferences by a run's loss and reference, where these can be had; None for other samples.

    Args:
        samples: all that is judged together.
        config: of the run; None of a model that is of none.
        judged: the model.

    Raises:
        DataError: only some samples are preferences, or none is, and the model scores answers.
    """
    model = judged.model_with_loss.model
    compares = {isinstance(sample, Preference) for sample in samples}
    if len(compares) > 1:
        raise DataError(
            "only some of the held-out samples are preferences. Evaluate preferences and other samples apart, "
            "from separate files."
        )
    if compares != {True}:
        if is_scorer(model.config):
            raise DataError(
                "a reward model compares answers, but the held-out samples are no preferences. Give preferences."
            )
        return None
    settings = None if config is None else config.objective_section
    settings = settings if isinstance(settings, PreferenceConfig) else None
    if is_scorer(model.config):
        rewards = settings if settings is not None and settings.row.scores else PreferenceConfig(loss="reward")
        preferring = Preferring(rewards, model.config.get_text_config().pad_token_id)
        return PairJudge(preferring, loss=rewards.loss, note="scores of a reward model")
    if config is None or settings is None:
        return PairJudge(_ALONE, note="log-probabilities alone: the model is of no run on preferences")
    kind, preferring = settings.compares_with, judging(Preferring(settings))
    facts: dict[str, Any] = {"loss": preferring.settings.loss, "reference": kind}
    if kind == "none":
        return PairJudge(preferring, **facts, note=f"loss {preferring.settings.loss}, which has no reference")
    if kind == "adapters-off" and has_adapters(model):
        scoring = Scoring(judged.model_with_loss, judged.device, judged.precision.autocast, judged.group)
        plain = scoring._replace(model_with_loss=plain_losses(scoring.model_with_loss, model, config.speed.loss_chunk))

        def off(packs: Sequence[Batch]) -> Values:
            with without_adapters(model):
                return values_of(packs, plain.log_probabilities, judged.device)

        note = f"loss {preferring.settings.loss} beside the model without its adapters"
        return PairJudge(preferring, values=off, **facts, note=note)
    try:
        initial = _initial_scoring(config, judged)
    except HeadwayError as error:
        return PairJudge(_ALONE, note=f"log-probabilities alone: the run's reference cannot be computed. {error}")
    note = f"loss {preferring.settings.loss} beside the initial weights, {config.model.path}"
    return PairJudge(preferring, values=initial, **facts, note=note)


def _initial_scoring(config: TrainConfig, judged: JudgedModel) -> Callable[[Sequence[Batch]], Values]:
    """Open the initial weights of a run; what is returned computes with them, once, and lets them go.

    Raises:
        HeadwayError: they are not there.
    """
    if config.model.random_init:
        raise HeadwayError("The run began with random weights, which were not saved.")
    if config.model.base is not None:
        raise HeadwayError(f"Its initial weights were held as model.base {config.model.base}.")
    dtype, device, settings = judged.precision.params, judged.device, config.model
    initial = load_model(
        settings.path, dtype=dtype, device=device, rows=rows_for_new_tokens(settings), seed=config.run.seed
    )
    try_packs(initial, tokens=config.data.tokens_per_pack)
    initial.train(False)
    losses = model_with_loss(initial, chunk=config.speed.loss_chunk)
    holder = [Scoring(losses, device, judged.precision.autocast, judged.group)]
    del initial, losses

    def values(packs: Sequence[Batch]) -> Values:
        by_place = values_of(packs, holder[0].log_probabilities, device)
        holder.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return by_place

    return values
