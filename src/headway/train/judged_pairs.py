"""Preferences judged outside of a run as the run judges them: by its loss, beside its reference.

A reference that the run stored is that of its initial weights, which are read once more for the rows that are asked
for; one with adapters off is the model itself, where it has them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from headway.answer.evaluate import EvalSet
from headway.config import PreferenceConfig, TrainConfig
from headway.errors import HeadwayError
from headway.models.head import model_with_loss
from headway.models.load import load_model
from headway.models.lora import has_adapters, without_adapters
from headway.models.parallel.ranks import Ranks
from headway.models.precision import Precision
from headway.models.scores import is_scorer
from headway.models.trial import try_packs
from headway.optim import rows_of
from headway.train.preference import judging, plain_losses, preferring_of
from headway.train.reference import Scoring


class PairJudgement(NamedTuple):
    """How pairs are judged.

    Attributes:
        loss: name of the loss; None for that of log-probabilities, without a reference.
        reference: what answers are compared with, as `preference.reference` names it.
        note: the same in words, with the reason where it is not as in the run.
    """

    loss: str | None
    reference: str
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return self._asdict()


def judge_as_in_run(
    config: TrainConfig | None,
    scoring: Scoring,
    precision: Precision,
    ranks: Ranks,
    held_out: Sequence[EvalSet],
) -> PairJudgement | None:
    """Have held-out preferences judged by a run's loss and reference, where these can be had; None of other samples.

    Args:
        config: of the run; None of a model that is of none.
        scoring: of the model that is judged.
        precision: that initial weights are opened in.
        ranks: the processes that judge together.
        held_out: the samples.
    """
    if not all(any(ranks.gather_all(samples.compares)) for samples in held_out):
        return None
    model, settings = scoring.model_with_loss.model, None if config is None else config.preference
    if is_scorer(model.config):
        rewards = settings if settings is not None and settings.row.scores else PreferenceConfig(loss="reward")
        for samples in held_out:
            samples.preferring = preferring_of(rewards, model.config.get_text_config().pad_token_id)
        return PairJudgement(rewards.loss, "none", "scores of a reward model")
    if config is None or settings is None:
        return PairJudgement(None, "none", "log-probabilities alone: the model is of no run on preferences")
    kind, preferring = settings.compares_with, judging(preferring_of(settings))
    if kind == "none":
        note = f"loss {preferring.loss}, which has no reference"
    else:
        try:
            note = f"loss {preferring.loss} beside {_keep_reference(config, kind, scoring, precision, held_out)}"
        except HeadwayError as error:
            return PairJudgement(
                None, "none", f"log-probabilities alone: the run's reference cannot be computed. {error}"
            )
    for samples in held_out:
        samples.preferring = preferring
    return PairJudgement(preferring.loss, kind, note)


def _keep_reference(
    config: TrainConfig, kind: str, scoring: Scoring, precision: Precision, held_out: Sequence[EvalSet]
) -> str:
    """Compute what the reference gives all samples; returns what it is.

    Raises:
        HeadwayError: the initial weights are not there.
    """
    model, chunk = scoring.model_with_loss.model, config.speed.loss_chunk
    if kind == "adapters-off" and has_adapters(model):
        plain = scoring._replace(model_with_loss=plain_losses(scoring.model_with_loss, model, chunk))
        with without_adapters(model):
            for samples in held_out:
                samples.keep_reference(plain.log_probabilities, scoring.device)
        return "the model without its adapters"
    if config.model.random_init:
        raise HeadwayError("It began with random weights, which nobody has kept.")
    if config.model.base is not None:
        raise HeadwayError(f"Its initial weights were held as model.base {config.model.base}.")
    dtype, device, settings = precision.params, scoring.device, config.model
    initial = load_model(settings.path, dtype=dtype, device=device, rows=rows_of(settings), seed=config.run.seed)
    try_packs(initial, tokens=config.data.tokens_per_pack)
    initial.train(False)
    stored = scoring._replace(model_with_loss=model_with_loss(initial, chunk=chunk))
    for samples in held_out:
        samples.keep_reference(stored.log_probabilities, device)
    del initial, stored
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return f"the initial weights, {settings.path}"
