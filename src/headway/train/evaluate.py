"""Exact match of greedy answers, without generating them.

Greedy decoding emits the gold answer exactly if, after every gold prefix of it, the most likely next token is the gold
one, the closing token included: as long as it has been right so far, its own prefix is the gold prefix. One packed
forward pass over the gold answers therefore decides exact match, with neither a cache nor a token-by-token loop. In a
conversation of several assistant turns each turn follows the gold turns before it, and all must match.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from headway.data import Batch, Budget, Encoder, Sample
from headway.data.blank import Modalities, with_blanks
from headway.data.collate import Collator
from headway.data.plan.budget import over_budget
from headway.data.plan.packer import pack
from headway.data.vision import VisionGeometry
from headway.errors import DataError
from headway.train.ranks import Ranks

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        samples: samples judged.
        exact: samples whose whole greedy answer is the gold one.
        loss: mean cross-entropy over the supervised tokens [nats].
    """

    samples: int
    exact: int
    loss: float

    @property
    def exact_match(self) -> float:
        """Fraction of samples answered exactly."""
        return self.exact / self.samples

    def as_record(self) -> dict[str, float]:
        """Flatten into JSON-ready values."""
        return {"samples": self.samples, "exact": self.exact, "exact_match": self.exact_match, "loss": self.loss}


class EvalSet:
    """Held-out samples, encoded and packed once; the packs stay in memory on the CPU.

    Args:
        samples: what to judge.
        encoder: turns samples into tokens and patches.
        budget: of a pack.
        ranks: each takes its share of the packs.
        geometry: the model's vision geometry, for blank images where other ranks' packs have some.

    Raises:
        DataError: there is no sample, or one exceeds a pack or has nothing to answer.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        encoder: Encoder,
        budget: Budget,
        ranks: Ranks,
        geometry: VisionGeometry | None = None,
    ) -> None:
        encoded = [encoder.encode(sample) for sample in samples]
        if not encoded:
            raise DataError("there is no held-out sample to evaluate; data.eval must hold at least one.")
        for one in encoded:
            if not budget.holds(one.size):
                raise DataError(over_budget(f"{one.where}: the held-out sample", one.size, budget))
        plan = pack([one.size for one in encoded], budget)
        plan += [[]] * (-len(plan) % ranks.num_data_ranks)  # all ranks run equally often
        rows = 1 if encoder.rope_index is None else 3
        collator = Collator(geometry=geometry, pixel_scale=encoder.pixel_scale, position_rows=rows)
        self._packs = []
        for start in range(0, len(plan), ranks.num_data_ranks):
            together = [collator([encoded[i] for i in row]) for row in plan[start : start + ranks.num_data_ranks]]
            needed = Modalities.union([Modalities.of(batch) for batch in together])
            self._packs.append(with_blanks(together[ranks.data_rank], needed, collator))
        self._ranks = ranks

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module, device: torch.device, autocast: Autocast = nullcontext) -> Evaluation:
        """Judge every sample with the model as it is.

        Args:
            model: put into evaluation mode for the time being.
            device: where it lives.
            autocast: context of the forward pass.
        """
        was_training = model.training
        model.eval()
        # samples, exact answers, summed cross-entropy, supervised tokens
        totals_4 = torch.zeros(4, dtype=torch.float64, device=device)
        for batch in self._packs:
            totals_4 += _judge(model, batch.to(device), autocast)
        model.train(was_training)
        self._ranks.sum_(totals_4)
        samples, exact, loss, tokens = totals_4.tolist()
        return Evaluation(int(samples), int(exact), loss / tokens)


def _judge(model: torch.nn.Module, batch: Batch, autocast: Autocast) -> torch.Tensor:
    with autocast():
        logits_TV = model(**batch.model_inputs()).logits[0]
    labels_T = batch.labels_1T[0]
    supervised_T = labels_T >= 0
    loss = F.cross_entropy(logits_TV.float(), labels_T, reduction="sum", ignore_index=-100)
    wrong_T = supervised_T & (logits_TV.argmax(-1) != labels_T)
    # Mistakes in each segment: differences of the running count at the segment boundaries.
    running_T1 = F.pad(wrong_T.long().cumsum(0), (1, 0))
    boundaries_N1 = batch.cu_seqlens_N.long()
    mistakes_N = running_T1[boundaries_N1[1:]] - running_T1[boundaries_N1[:-1]]
    exact = (mistakes_N[: batch.num_segments] == 0).sum()  # padding is no sample
    return torch.stack(
        [torch.full_like(loss, batch.num_segments), exact.to(loss), loss, supervised_T.sum().to(loss)]
    ).double()
