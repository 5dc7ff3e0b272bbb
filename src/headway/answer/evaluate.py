"""Judging held-out samples: loss and exact match of greedy answers without generating them, or as an objective does.

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
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from headway.config import TrainConfig
from headway.data import Batch, Budget, Encoder, Sample
from headway.data.blank_media import vision_kinds, with_blanks
from headway.data.collate import Collator
from headway.data.encoders import collator_of
from headway.data.samples import supervised
from headway.errors import DataError
from headway.models.head import ModelWithLoss
from headway.models.parallel.ranks import Ranks
from headway.models.precision import Precision
from headway.models.vision import VisionGeometry
from headway.packing.bins import pack
from headway.packing.budget import over_budget
from headway.plugins import objectives

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        samples: samples judged.
        exact: samples whose whole greedy answer is the gold one.
        loss: mean cross-entropy over the supervised tokens [nats]; where answers are compared, the mean loss of pairs.
        tokens: supervised tokens [tokens].
        pairs: pairs of a better and a worse answer; 0 where answers are not compared.
        right: pairs whose better answer has the larger reward.
        margin: mean difference of the rewards of a pair.
        answers: whether any sample has an answer that could be exact; a document, of which all is learnt, has none.
    """

    samples: int
    exact: int
    loss: float
    tokens: int
    pairs: int = 0
    right: int = 0
    margin: float = 0.0
    answers: bool = True

    @property
    def exact_match(self) -> float:
        """Fraction of samples answered exactly; NaN without answers."""
        return self.exact / self.samples if self.answers else math.nan

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
            DataError: some compare answers, and others do not.
        """
        tokens, pairs = sum(part.tokens for part in parts), sum(part.pairs for part in parts)
        if pairs and not all(part.pairs for part in parts):
            raise DataError(
                "samples with compared answers and other samples must be evaluated apart, because their losses have no "
                "common mean."
            )
        loss = sum(part.loss * (part.pairs or part.tokens) for part in parts) / (pairs or tokens)
        margin = sum(part.margin * part.pairs for part in parts) / max(pairs, 1)
        samples, exact, right = (sum(getattr(part, name) for part in parts) for name in ("samples", "exact", "right"))
        return cls(samples, exact, loss, tokens, pairs, right, margin, any(part.answers for part in parts))

    def to_dict(self) -> dict[str, float | None]:
        """Flatten into JSON-ready values."""
        if self.pairs:
            numbers = {"samples": self.samples, "pairs": self.pairs, "accuracy": self.accuracy, "margin": self.margin}
            return {**numbers, "loss": self.loss}
        exact, exact_match = (self.exact, self.exact_match) if self.answers else (None, None)
        return {"samples": self.samples, "exact": exact, "exact_match": exact_match, "loss": self.loss}


class JudgedModel(NamedTuple):
    """The model that is judged, and where.

    Attributes:
        model_with_loss: runs it on a pack.
        device: where it lives.
        precision: of its parameters and products.
        ranks: the processes that judge together.
        group: the processes that compute each pack together; None where each pack is one process's.
    """

    model_with_loss: ModelWithLoss
    device: torch.device
    precision: Precision
    ranks: Ranks
    group: dist.ProcessGroup | None = None


class Judge:
    """Judges packs of held-out samples; this one by the loss and the exact match of greedy answers.

    Attributes:
        note: how, in words; empty for this way.
        facts: the same for machines.
    """

    note: str = ""
    facts: Mapping[str, Any] = MappingProxyType({})

    def check(self, samples: Sequence[Sample]) -> None:
        """Refuse samples that it cannot judge.

        Raises:
            DataError: one has answers that are not all right.
        """
        for sample in samples:
            supervised(sample)

    def prepare(self, packs: Sequence[Batch]) -> None:
        """Compute the values that are needed once, before the first evaluation.

        Args:
            packs: all of this process's, on the CPU.
        """

    def totals(
        self, model_with_loss: ModelWithLoss, batch: Batch, autocast: Autocast, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """This process's summands of the totals of a pack, in float64, as many for every pack, shape (X,).

        Args:
            model_with_loss: of a model in evaluation mode.
            batch: on the model's device.
            autocast: context of the forward pass.
            group: the processes that compute the pack together. What only all of them know, the first one counts.
        """
        return exact_match(model_with_loss, batch, autocast, group)

    def evaluation(self, totals: Sequence[float]) -> Evaluation:
        """The result, from the totals over all packs and processes."""
        samples, exact, loss, tokens = totals
        return Evaluation(int(samples), int(exact), loss / max(tokens, 1), int(tokens))


def judge_for(samples: Sequence[Sample], config: TrainConfig | None, model: JudgedModel) -> Judge:
    """Choose how held-out samples are judged outside of a run: as the objective does that knows their kind, or as ours.

    Args:
        samples: what to judge.
        config: of the run that the model is of; None of a model that is of none.
        model: that is judged.

    Raises:
        DataError: the samples are of several kinds, or of one that the model cannot be judged by.
    """
    for plugin in objectives():
        judge_of = plugin.hook("judge")
        judge: Judge | None = None if judge_of is None else judge_of(samples, config, model)
        if judge is not None:
            return judge
    return Judge()


class EvalSet:
    """Held-out samples, encoded and packed once; the packs stay in memory on the CPU.

    Attributes:
        packs: of this process.

    Args:
        samples: what to judge.
        encoder: turns samples into tokens and patches.
        budget: of a pack.
        ranks: each takes its share of the packs.
        geometry: the model's vision geometry, for blank images where other ranks' packs have some.
        group: the processes that compute each pack together; None where each pack is one process's.
        judge: judges the packs.

    Raises:
        DataError: there is no sample, or one exceeds a pack, has nothing to answer or cannot be judged.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        encoder: Encoder,
        budget: Budget,
        ranks: Ranks,
        geometry: VisionGeometry | None = None,
        group: dist.ProcessGroup | None = None,
        judge: Judge | None = None,
    ) -> None:
        self._judge = judge or Judge()
        self._judge.check(samples)
        # each sample is encoded once; an evaluation must see all of them, so none may exceed a pack
        encoded = [encoder.encode(sample) for sample in samples]
        if not encoded:
            raise DataError("there is no held-out sample to evaluate. data.eval must hold at least one sample.")
        for sample in encoded:
            if not budget.holds(sample.size):
                raise DataError(over_budget(f"{sample.where}: the held-out sample", sample.size, budget))
        self._answers = any(sample.num_supervised < sample.tokens - 1 for sample in encoded)
        plan = pack([sample.size for sample in encoded], budget)
        plan += [[]] * (-len(plan) % ranks.num_data_ranks)  # all ranks run equally often
        # in each round a pack for each rank; all of a round have blanks of the kinds of input that one of them has
        collator = eval_collator(encoder, geometry, ranks)
        self.packs: list[Batch] = []
        for start in range(0, len(plan), ranks.num_data_ranks):
            together = [collator([encoded[i] for i in row]) for row in plan[start : start + ranks.num_data_ranks]]
            needed = frozenset[str]().union(*map(vision_kinds, together))
            batch = with_blanks(together[ranks.data_rank], needed, collator)
            self.packs.append(batch.noised(seed=0, step=0).dealt(group))  # the same at every evaluation
        self._ranks = ranks
        self._group = group

    @torch.no_grad()
    def evaluate(
        self, model_with_loss: ModelWithLoss, device: torch.device, autocast: Autocast = nullcontext
    ) -> Evaluation:
        """Judge every sample with the model's present weights; the model is in evaluation mode for the time being."""
        model = model_with_loss.model
        was_training = model.training
        model.train(False)
        totals_X = sum(
            self._judge.totals(model_with_loss, batch.to(device), autocast, self._group) for batch in self.packs
        )
        assert isinstance(totals_X, torch.Tensor)  # every process has a pack
        model.train(was_training)
        self._ranks.sum_(totals_X)
        return replace(self._judge.evaluation(totals_X.tolist()), answers=self._answers)


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


def exact_match(
    model_with_loss: ModelWithLoss, batch: Batch, autocast: Autocast, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Judge a pack by greedy answers: this process's summands of the totals; L are its slots.

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
        pack_loss = model_with_loss(batch.model_inputs(), labels_L, judge=True, labelled_K=batch.labelled_K)
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
    exact = (mistakes_N[:samples] == 0).sum()  # only the first process of a group counts exact samples
    return torch.stack([torch.full_like(loss, samples), exact.to(loss), loss, supervised_L.sum().to(loss)]).double()
