"""The objective of preferences, which the training loop asks for the loss of packs of compared answers.

The loss of a step is a mean over its pairs, whose slopes weigh the cross-entropies of the answers' tokens.

Tensor letters as in `losses.py`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from headway.config import TrainConfig
from headway.count import CostModel
from headway.data import Batch
from headway.data.feed import IndexedFeed
from headway.data.index.build import index_folder
from headway.errors import CheckpointError
from headway.log.run_files import write_json
from headway.models.head import ModelWithLoss
from headway.models.lora import without_adapters
from headway.models.scores import name_padding
from headway.objectives.preferences.held_out import PairJudge, Values, judging, values_of
from headway.objectives.preferences.losses import PairNumbers, Preferring
from headway.objectives.preferences.mismatches import Mismatches, divergence, saved_mismatches, stored_mismatches
from headway.objectives.preferences.reference import (
    FOLDER,
    Scoring,
    StoredReference,
    plain_losses,
    reference_key,
    save_reference,
    saved_reference,
    stored_reference,
    with_reference,
)
from headway.objectives.preferences.settings import PreferenceConfig
from headway.train.build import without_keys
from headway.train.objective import LoopStep, Objective, RunParts
from headway.train.share import Counts, StepShare
from headway.train.step_numbers import PackSums, StepNumbers

PAIR_TERMS = ("nll", "reward_chosen", "reward_rejected", "right", "log_p_chosen", "log_p_rejected")
"""Sums over the pairs of preferences: cross-entropy of the best answers [nats], rewards (beta times the log of policy /
reference), pairs whose better answer has the larger reward, and log-probabilities of the answers [nats]."""

SCORE_TERMS = PAIR_TERMS[1:4]
"""Those of a reward model, whose rewards are its scores."""

UNPAIRED_TERMS = ("reward_chosen", "reward_rejected", "log_p_chosen", "log_p_rejected", "desirable", "kl", "mismatched")
"""Sums over answers that are wished for (chosen) and not (rejected): rewards, log-probabilities [nats], and how many
are wished for; log-ratios of answers behind other prompts [nats], and how many these are."""

# Shares of the first loss by which rounding may change it; products of 16 bits round each token's loss to 1e-2.
_ROUNDING, _ROUNDING_OF_HALVES = 1e-3, 2e-2


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

    def metered(self, batch: Batch, step: LoopStep) -> torch.Tensor:
        """The same as a phase of a step, with its FLOPs counted."""
        skips = self._scoring.model_with_loss.skips_unlabelled
        with step.forward("reference", batch, self.cost_model, skips_unlabelled=skips):
            return self.of(batch)


class Preferences(Objective):
    """Learns from answers of which some are better than others, or of which each is wished for or not.

    Args:
        parts: of the run.

    Raises:
        CheckpointError: the run folder has lost its copy of the reference.
        DataError: rows of which the reference cannot be computed.
    """

    def __init__(self, parts: RunParts) -> None:
        super().__init__(parts)
        settings = parts.config.objective_section
        assert isinstance(settings, PreferenceConfig)
        self._settings = settings
        self._scoring = Scoring(parts.model_with_loss, parts.device, parts.autocast, parts.group)
        self._reference = self._make_reference()
        config, tokenizer = parts.trained.model.config, parts.encoder.tokenizer
        self._preferring = Preferring(settings, name_padding(config, tokenizer) if settings.row.scores else None)
        self._mismatches = self._make_mismatches() if settings.loss == "kto" else None
        self._divergence: torch.Tensor | float = 0.0  # divergence of the policy from the reference in the step [nats]
        self.terms = SCORE_TERMS if settings.row.scores else UNPAIRED_TERMS if settings.row.unpaired else PAIR_TERMS
        self.ledgers = [self._reference.cost_model] if isinstance(self._reference, AdaptersOff) else []
        notes = [self._reference.note] if isinstance(self._reference, StoredReference) else []
        notes += [self._mismatches.note] if self._mismatches is not None else []
        self.notes = [note for note in notes if note]

    def counts(self, batch: Batch) -> Counts:
        """Pairs of each source; targets of the best answers."""
        units = [0] * len(self.parts.feed.names)
        for number in batch.answers.sources_P.tolist() if batch.answers is not None else ():
            units[number] += 1
        return Counts(tuple(units), (0 if batch.answers is None else batch.answers.best_tokens,))

    def begin(self, batches: Sequence[Batch], step: LoopStep) -> list[Batch]:
        """Give each pack a stored reference's values of its answers; for KTO, estimate the step's divergence too."""
        ready = [self._referred(batch) for batch in super().begin(batches, step)]
        if self._mismatches is not None:
            # KTO learns with how far the policy is from the reference, over all packs of the step.
            sums_2 = self._mismatches.sums(ready, step, self.parts.feed, self.parts.ranks)
            self._divergence = divergence(sums_2)
            if self.parts.ranks.is_first:
                step.sums.add_terms({"kl": sums_2[0], "mismatched": sums_2[1]})
        return ready

    def pack_loss(self, batch: Batch, step: LoopStep) -> PackSums:
        """Run a pack with factors on its slots, whose sum has the gradients of the loss of its pairs."""
        if isinstance(self._reference, AdaptersOff):
            # Also of padding, as processes that share their weights run equally many forwards.
            values_A = self._reference.metered(batch, step)
            batch = batch if batch.answers is None else with_reference(batch, values_A)
        weights, group = None, self.parts.group
        if batch.answers is not None:
            (best_tokens,) = step.share.counts.others
            per_pair, per_token = step.share.divisor, max(1, best_tokens)
            weights = PackWeights(self._preferring, batch, group, per_pair, per_token, self._divergence)
        with self.parts.autocast():
            labels_L = batch.labels_1T[0, batch.local_slots(group)]
            pack = self.parts.model_with_loss(
                batch.model_inputs(), labels_L, weigh=weights, labelled_K=batch.labelled_K
            )
        if weights is None or not self.parts.ranks.bills:  # processes that share a pack all know its pairs
            return PackSums(pack.total)
        assert weights.numbers is not None
        assert batch.answers is not None
        return PackSums(pack.total, weights.numbers.loss_P, batch.answers.sources_P, self._sums(weights.numbers))

    def record(self, numbers: StepNumbers, share: StepShare) -> dict[str, Any]:
        """The loss that the step has differentiated, and means over its pairs or answers."""
        if not any(share.units):
            return {"loss": None}
        means = _of_pairs(numbers.terms, share)
        loss = sum(numbers.losses) / share.divisor
        if self._settings.sft_weight:
            loss += self._settings.sft_weight * means["nll"]
        return {"loss": loss, "objective": "preference", "preference": means}

    def first_fault(self, record: Mapping[str, Any]) -> str:
        """Say what is wrong with a run's first step if policy and reference are not of one function; "" if they are."""
        pairs = record.get("preference")
        if self._reference is None or pairs is None:
            return ""
        loss = record["loss"] - self._settings.sft_weight * pairs.get("nll", 0.0)
        expected = self._preferring.first_loss(pairs["desirable"] / pairs["rows"] if "rows" in pairs else 1.0)
        exact = self.parts.precision.compute == torch.float32  # rounding hardly shows in float32
        if abs(loss - expected) <= expected * (_ROUNDING if exact else _ROUNDING_OF_HALVES):
            return ""
        return (
            f"the first step's preference loss is {loss:.4f}, but should be {expected:.4f}, because the model equals "
            "its reference before the first update. Likely causes: the model draws random numbers in training, or "
            "the reference was computed from other rows, pictures or weights. Delete the run's folder and the stored "
            "reference beside the length index, or use preference.reference=none."
        )

    def judge(self) -> PairJudge:
        """Judge held-out pairs by the run's loss and reference."""
        if isinstance(self._reference, AdaptersOff):
            return PairJudge(judging(self._preferring), refer=self._reference.of)
        values = None if self._reference is None else self._values_of_held_out
        return PairJudge(judging(self._preferring), values=values)

    def _sums(self, numbers: PairNumbers) -> dict[str, torch.Tensor]:
        rewards_2P = numbers.rewards_2P
        right = (rewards_2P[0] > rewards_2P[1]).sum()
        sums = dict(zip(PAIR_TERMS, (numbers.nll, *rewards_2P.sum(1), right, *numbers.log_p_2P.sum(1)), strict=True))
        if numbers.desirable is not None:
            sums["desirable"] = numbers.desirable
        return {name: total for name, total in sums.items() if name in self.terms}

    def _referred(self, batch: Batch) -> Batch:
        if batch.answers is None or not isinstance(self._reference, StoredReference):
            return batch
        return with_reference(batch, self._reference.of(batch))

    def _values_of_held_out(self, packs: Sequence[Batch]) -> Values:
        """Values of the stored reference for held-out answers of all processes; computed once, then read."""
        path, ranks, scoring = self.parts.config.run.folder / FOLDER / "eval.json", self.parts.ranks, self._scoring
        if not self.parts.resumes:
            scoring.model_with_loss.model.train(False)  # evaluation mode; the loop puts the model into training mode
            gathered = ranks.gather_all(values_of(packs, scoring.log_probabilities, scoring.device))
            ranks.by_first(lambda: write_json(path, {place: row for part in gathered for place, row in part.items()}))
        return _kept_values(path)

    def _make_reference(self) -> StoredReference | AdaptersOff | None:
        parts, kind, folder = self.parts, self._settings.compares_with, self.parts.config.run.folder
        trained, feed, scoring = parts.trained, parts.feed, self._scoring
        if kind == "none":
            return None
        if kind == "adapters-off":
            plain = plain_losses(trained.model_with_loss, trained.model, parts.config.speed.loss_chunk)
            return AdaptersOff(scoring, trained.plain_cost_model, plain)
        if parts.resumes:
            return saved_reference(folder, feed.sources)
        assert isinstance(feed, IndexedFeed)  # the configuration has checked that there is an index
        with without_adapters(trained.model):
            key = reference_key(trained.model, _reference_settings(parts.config, trained.model, scoring.device))
        folders = {source.name: index_folder(source, parts.encoder) for source in feed.sources}
        reference = stored_reference(feed, scoring, parts.ranks, trained.cost_model, folders, key)
        parts.ranks.by_first(lambda: save_reference(folder, reference))
        return reference

    def _make_mismatches(self) -> Mismatches:
        parts = self.parts
        if isinstance(self._reference, AdaptersOff):
            return Mismatches(self._scoring, self._reference.metered)
        if parts.resumes:
            return saved_mismatches(self._scoring, parts.config.run.folder)
        assert isinstance(parts.feed, IndexedFeed)  # the configuration has checked that there is an index
        steps = parts.feed.steps_left(parts.config.optim.steps)
        steps = parts.config.optim.steps if steps is None else steps
        assert steps is not None  # the configuration has checked that epochs can be counted
        return stored_mismatches(parts.feed, self._scoring, parts.ranks, steps, parts.config.run.folder)


def _reference_settings(config: TrainConfig, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """Settings that log-probabilities of a row's answers depend on, beside its encoding."""
    policies = {part.overlong or config.data.overlong for stage in config.data.played for part in stage.parts}
    return {
        "config": without_keys(model.config.to_dict(), ("_name_or_path",)),
        "precision": f"{config.run.dtype} on {device.type}",
        "kernels": [config.speed.attention, config.speed.kernels],
        "cut": config.data.tokens_per_pack if "truncate" in policies else None,
    }


def _kept_values(path: Path) -> dict[str, list[float]]:
    try:
        values: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} with the reference's log-probabilities of held-out samples cannot be read: {error}. Put the "
            "file back, or go on without data.eval."
        ) from error
    return values


def _of_pairs(sums: Mapping[str, float], share: StepShare) -> dict[str, Any]:
    pairs = sum(share.units)
    if "desirable" in sums:
        return _of_answers(sums, pairs)
    names = ("reward_chosen", "reward_rejected", "log_p_chosen", "log_p_rejected")
    means = {name: sums[name] / pairs for name in names if name in sums}
    margin = means["reward_chosen"] - means["reward_rejected"]
    nll = {"nll": sums["nll"] / max(1, *share.counts.others)} if "nll" in sums else {}
    return {"pairs": pairs, "accuracy": sums["right"] / pairs, "margin": margin, **means, **nll}


def _of_answers(sums: Mapping[str, float], rows: int) -> dict[str, float | None]:
    """Likewise where each answer counts by itself: means over those that are wished for, and over the others."""
    desirable = round(sums["desirable"])
    means = {
        f"{name}_{kind}": sums[f"{name}_{side}"] / count if count else None
        for kind, side, count in (("desirable", "chosen", desirable), ("undesirable", "rejected", rows - desirable))
        for name in ("reward", "log_p")
    }
    kl = max(0.0, sums["kl"] / max(1.0, sums["mismatched"]))
    return {"rows": rows, "desirable": desirable, **means, "kl": kl, "mismatched": round(sums["mismatched"])}
