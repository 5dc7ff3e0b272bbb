"""Exact match of greedy answers, without generating them; of preferences, how often the better answer is preferred.

Greedy decoding emits the gold answer exactly if, after every gold prefix of it, the most likely next token is the gold
one, the closing token included: as long as it has been right so far, its own prefix is the gold prefix. One packed
forward pass over the gold answers therefore decides exact match, with neither a cache nor a token-by-token loop. In a
conversation of several assistant turns each turn follows the gold turns before it, and all must match.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from headway.data import Batch, Budget, Encoder, Sample
from headway.data.blank_media import vision_kinds, with_blanks
from headway.data.collate import Collator
from headway.data.encoders import collator_of
from headway.data.samples import Preference, supervised
from headway.errors import DataError
from headway.models.head import ModelWithLoss
from headway.models.parallel.ranks import Ranks
from headway.models.preferences import PairSettings, Preferring
from headway.models.scores import is_scorer
from headway.models.vision import VisionGeometry
from headway.packing.bins import pack
from headway.packing.budget import over_budget

Autocast = Callable[[], AbstractContextManager[Any]]
Refer = Callable[[Batch], torch.Tensor]
"""Gives the log-probabilities of a pack's answers under a reference [nats], shape (A,)."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        samples: samples judged.
        exact: samples whose whole greedy answer is the gold one.
        loss: mean cross-entropy over the supervised tokens [nats]; of preferences the mean loss of their pairs.
        tokens: supervised tokens [tokens].
        pairs: pairs of a better and a worse answer; 0 where samples are no preferences.
        right: pairs whose better answer has the larger reward.
        margin: mean difference of the rewards of a pair.
    """

    samples: int
    exact: int
    loss: float
    tokens: int
    pairs: int = 0
    right: int = 0
    margin: float = 0.0

    @property
    def exact_match(self) -> float:
        """Fraction of samples answered exactly."""
        return self.exact / self.samples

    @property
    def accuracy(self) -> float:
        """Fraction of pairs whose better answer has the larger reward; NaN without pairs."""
        return self.right / self.pairs if self.pairs else math.nan

    @property
    def score(self) -> float:
        """Fraction that is right: of pairs where there are any, else of samples."""
        return self.accuracy if self.pairs else self.exact_match

    @property
    def perplexity(self) -> float:
        """exp(loss): the number of tokens, all equally likely, that would have the same loss."""
        return math.exp(min(self.loss, 700.0))  # e**710 is no float any more

    @classmethod
    def total(cls, parts: "Sequence[Evaluation]") -> "Evaluation":
        """Several evaluations as one, every supervised token or pair counting the same; at least one.

        Raises:
            DataError: some are of preferences, and others not.
        """
        tokens, pairs = sum(part.tokens for part in parts), sum(part.pairs for part in parts)
        if pairs and not all(part.pairs for part in parts):
            raise DataError("preferences and other samples are evaluated apart: their losses have no common mean.")
        loss = sum(part.loss * (part.pairs or part.tokens) for part in parts) / (pairs or tokens)
        margin = sum(part.margin * part.pairs for part in parts) / max(pairs, 1)
        samples, exact, right = (sum(getattr(part, name) for part in parts) for name in ("samples", "exact", "right"))
        return cls(samples, exact, loss, tokens, pairs, right, margin)

    def to_dict(self) -> dict[str, float]:
        """Flatten into JSON-ready values."""
        if self.pairs:
            numbers = {"samples": self.samples, "pairs": self.pairs, "accuracy": self.accuracy, "margin": self.margin}
            return {**numbers, "loss": self.loss}
        return {"samples": self.samples, "exact": self.exact, "exact_match": self.exact_match, "loss": self.loss}


class EvalSet:
    """Held-out samples, encoded and packed once; the packs stay in memory on the CPU.

    Attributes:
        preferring: the loss and rewards of pairs, where samples are preferences.
        refer: computes what they are compared with anew in each evaluation; None where it is kept, or there is none.

    Args:
        samples: what to judge.
        encoder: turns samples into tokens and patches.
        budget: of a pack.
        ranks: each takes its share of the packs.
        geometry: the model's vision geometry, for blank images where other ranks' packs have some.
        group: the processes that compute each pack together; None where each pack is one process's.

    Raises:
        DataError: there is no sample, or one exceeds a pack, has nothing to answer or is graded as a bad answer.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        encoder: Encoder,
        budget: Budget,
        ranks: Ranks,
        geometry: VisionGeometry | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # each sample is encoded once; an evaluation must see all of them, so none may exceed a pack
        encoded = [
            encoder.encode(sample if isinstance(sample, Preference) else supervised(sample)) for sample in samples
        ]
        if not encoded:
            raise DataError("there is no held-out sample to evaluate; data.eval must hold at least one.")
        for sample in encoded:
            if not budget.holds(sample.size):
                raise DataError(over_budget(f"{sample.where}: the held-out sample", sample.size, budget))
        plan = pack([sample.size for sample in encoded], budget)
        plan += [[]] * (-len(plan) % ranks.num_data_ranks)  # all ranks run equally often
        # in each round a pack for each rank; all of a round have blanks of the kinds of input that one of them has
        collator = eval_collator(encoder, geometry, ranks)
        if len({bool(sample.answers) for sample in encoded}) > 1:
            raise DataError("the held-out samples are preferences and others; keep them in files of their own.")
        self._packs = []
        for start in range(0, len(plan), ranks.num_data_ranks):
            together = [collator([encoded[i] for i in row]) for row in plan[start : start + ranks.num_data_ranks]]
            needed = frozenset[str]().union(*map(vision_kinds, together))
            batch = with_blanks(together[ranks.data_rank], needed, collator)
            self._packs.append(batch.noised(seed=0, step=0).dealt(group))  # the same at every evaluation
        self._ranks = ranks
        self._group = group
        self.preferring = Preferring("sigmoid", PairSettings(beta=1.0))  # rewards are log-probabilities
        self.refer: Refer | None = None

    @property
    def compares(self) -> bool:
        """Whether the samples are preferences."""
        return any(batch.answers is not None for batch in self._packs)

    def keep_reference(self, refer: Refer, device: torch.device) -> dict[str, list[float]]:
        """Compute what a reference gives each answer, once, to compare with in every evaluation.

        Args:
            refer: gives the log-probabilities of a pack on the device.
            device: of the model.

        Returns:
            The log-probabilities of this process's samples by file and place [nats].
        """
        values_of: dict[str, list[float]] = {}
        for batch in self._packs:
            values = iter(refer(batch.to(device)).tolist())
            for origin, number in zip(batch.sources, batch.num_answers, strict=True):
                values_of[origin] = [next(values) for _ in range(number)]
        self.use_reference(values_of)
        return values_of

    def use_reference(self, values_of: Mapping[str, list[float]]) -> None:
        """Take over what `keep_reference` gave, by whichever process.

        Raises:
            DataError: a sample is not among them.
        """
        for number, batch in enumerate(self._packs):
            if batch.answers is None:
                continue
            if lacking := [place for place in batch.sources if place not in values_of]:
                raise DataError(
                    "the run folder holds no reference of this held-out sample, which was not among those that the run "
                    "began with. Put data.eval back as it was.",
                    where=lacking[0],
                )
            values_A = torch.tensor(
                [value for place in batch.sources for value in values_of[place]], dtype=torch.float64
            )
            self._packs[number] = replace(batch, answers=replace(batch.answers, reference_A=values_A))

    @torch.no_grad()
    def evaluate(
        self, model_with_loss: ModelWithLoss, device: torch.device, autocast: Autocast = nullcontext
    ) -> Evaluation:
        """Judge every sample with the model's present weights.

        Args:
            model_with_loss: its model is put into evaluation mode for the time being.
            device: where it lives.
            autocast: context of the forward pass.
        """
        model = model_with_loss.model
        was_training = model.training
        model.train(False)
        # samples, exact answers, summed cross-entropy, supervised tokens; of preferences as `_judge_pairs` has them
        compares = any(self._ranks.gather_all(self.compares))  # a pack of padding may be all that this process has
        if not compares and is_scorer(model.config):
            raise DataError("a reward model scores answers to compare, and the held-out samples are no preferences.")
        totals_X = torch.zeros(6 if compares else 4, dtype=torch.float64, device=device)
        for batch in self._packs:
            if compares:
                totals_X += self._judge_pairs(model_with_loss, batch.to(device), autocast)
            else:
                totals_X += judge(model_with_loss, batch.to(device), autocast, self._group)
        model.train(was_training)
        self._ranks.sum_(totals_X)
        samples, exact, loss, tokens, *of_pairs = totals_X.tolist()
        if not compares:
            return Evaluation(int(samples), int(exact), loss / max(tokens, 1), int(tokens))
        pairs, margin = of_pairs
        return Evaluation(int(samples), 0, loss / pairs, int(tokens), int(pairs), int(exact), margin / pairs)

    def _judge_pairs(self, model_with_loss: ModelWithLoss, batch: Batch, autocast: Autocast) -> torch.Tensor:
        """Evaluate a pack of preferences: samples, right pairs, their summed loss, targets, pairs, summed margin."""
        if self.refer is not None:
            values_A = self.refer(batch)
            if batch.answers is not None:
                batch = replace(batch, answers=replace(batch.answers, reference_A=values_A))
        local = batch.local_slots(self._group)
        with autocast():
            losses = model_with_loss(batch.model_inputs(), batch.labels_1T[0, local])
        totals_6 = losses.loss_T.new_zeros(6, dtype=torch.float64)
        if batch.answers is None:
            return totals_6
        of_L = self.preferring.of_slots(batch.answers, batch.input_ids_1T[0])[local]
        _, pairs = self.preferring.weigh(batch.answers, of_L, losses.loss_T, self._group)
        if self._group is not None and dist.get_rank(self._group):
            return totals_6  # the first process counts what all know
        better_P, worse_P = pairs.rewards_2P
        loss = pairs.loss_P.sum()
        counts = [batch.num_samples, (better_P > worse_P).sum(), loss, batch.num_supervised, len(better_P)]
        return torch.stack(
            [torch.as_tensor(n, device=loss.device).double() for n in (*counts, (better_P - worse_P).sum())]
        )


def eval_collator(encoder: Encoder, geometry: VisionGeometry | None, ranks: Ranks) -> Collator:
    """Lay held-out samples into packs that are padded no more than the processes that share them need."""
    rows = 1 if encoder.rope_index is None else 3
    return collator_of(
        encoder,
        geometry=geometry,
        pixel_scale=encoder.pixel_scale,
        position_rows=rows,
        blank=encoder.blank_image(),
        bucket_tokens=ranks.sequence,
        shares_prompts=encoder.shares_prompts,
    )


def judge(
    model_with_loss: ModelWithLoss, batch: Batch, autocast: Autocast, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Evaluate a pack: this process's summands of the totals; L are its slots.

    Args:
        model_with_loss: of a model in evaluation mode.
        batch: on the model's device.
        autocast: context of the forward pass.
        group: the processes that compute the pack together. What only all of them know, whether an answer is right
            from beginning to end, the first one counts.

    Returns:
        Samples, exact answers, summed cross-entropy [nats] and supervised tokens, shape (4,).
    """
    local = batch.local_slots(group)
    labels_L = batch.labels_1T[0, local]
    with autocast():
        pack_loss = model_with_loss(batch.model_inputs(), labels_L, judge=True)
    assert pack_loss.right_T is not None
    loss, supervised_L = pack_loss.loss_T.sum(), labels_L >= 0
    wrong_T = torch.zeros(batch.slots, dtype=torch.long, device=loss.device)
    wrong_T[local] = (supervised_L & ~pack_loss.right_T).long()
    # Mistakes in each sample: differences of the running count at the samples' boundaries; padding comes behind them.
    running_T1 = F.pad(wrong_T.cumsum(0), (1, 0))
    boundaries_N1 = torch.tensor([0, *accumulate(batch.sample_tokens)], device=running_T1.device)
    mistakes_N = running_T1[boundaries_N1[1:]] - running_T1[boundaries_N1[:-1]]
    samples = batch.num_samples
    if group is not None:
        dist.all_reduce(mistakes_N, group=group)
        samples = samples if dist.get_rank(group) == 0 else 0
    exact = (mistakes_N[:samples] == 0).sum()  # which the first process alone counts
    return torch.stack([torch.full_like(loss, samples), exact.to(loss), loss, supervised_L.sum().to(loss)]).double()
