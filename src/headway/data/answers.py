"""Answers of a pack's rows that have several: where each lies, and its log-probability.

Tensor letters: T slots of a pack, A answers, P pairs of a better and a worse answer, B best answers, L slots that this
process computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from headway.data.encoded import EncodedSample
from headway.models.losses import IGNORED


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a pack's rows that have several, and the pairs to compare: the best of each row with each other one.

    Attributes:
        starts_A: first slot of each answer.
        ends_A: one past its last slot.
        supervised_A: targets of each answer [tokens].
        best_B: the best answer of each preference, by its place among the answers.
        chosen_P: the better answer of each pair, likewise.
        rejected_P: the worse one.
        sources_P: number of the pair's source.
        reference_A: log-probability of each answer under the reference [nats]; None where that is not known, and counts
            as 0.
        counts: answers of each preference.
        best_tokens: targets of the best answers together [tokens].
        desirable_A: whether each answer is wished for, where each counts by itself; a pair then is an answer and
            itself.
    """

    starts_A: torch.Tensor
    ends_A: torch.Tensor
    supervised_A: torch.Tensor
    best_B: torch.Tensor
    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    sources_P: torch.Tensor
    reference_A: torch.Tensor | None = None
    counts: tuple[int, ...] = ()
    best_tokens: int = 0
    desirable_A: torch.Tensor | None = None

    @property
    def num_pairs(self) -> int:
        """Pairs of a better and a worse answer."""
        return len(self.chosen_P)

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Answers":
        """The same with every tensor changed: moved, or pinned."""
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        changed = {name: change(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **{**values, **changed})

    def of_slots(self, slots: int) -> torch.Tensor:
        """The answer that each slot of the pack is of, and the number of answers where it is of none, shape (T,)."""
        slot_T = torch.arange(slots, device=self.starts_A.device)
        answer_T = torch.searchsorted(self.starts_A, slot_T, right=True) - 1
        inside_T = (answer_T >= 0) & (slot_T < self.ends_A[answer_T.clamp_min(0)])
        return torch.where(inside_T, answer_T, len(self.starts_A))

    def log_probabilities(self, loss_L: torch.Tensor, of_L: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
        """Sum the log-probabilities of each answer's targets [nats], shape (A,).

        Args:
            loss_L: cross-entropy of each slot, 0 where it is not supervised [nats].
            of_L: the answer of each slot, as `of_slots` gives it.
            group: the processes that compute the pack together.
        """
        # In float64, so that the order in which a device adds does not show.
        sums_A1 = loss_L.new_zeros(len(self.starts_A) + 1, dtype=torch.float64)
        sums_A1.index_add_(0, of_L, loss_L.double())
        if group is not None:
            dist.all_reduce(sums_A1, group=group)
        return -sums_A1[:-1]


def answers_of(samples: Sequence[EncodedSample], sources: Sequence[int]) -> Answers | None:
    """Find the answers of rows that have several; None of a pack without such rows.

    Args:
        samples: of the pack, in order.
        sources: number of each one's source.
    """
    starts, ends, supervised, best = list[int](), list[int](), list[int](), list[int]()
    desirable = [flag for sample in samples for flag in sample.desirable]
    pairs, start = list[tuple[int, int, int]](), 0
    for sample, source in zip(samples, sources, strict=True):
        first = start + sample.tokens - sum(sample.answers)
        if sample.answers:
            best.append(len(starts))
            if sample.desirable:  # each answer stands for itself
                pairs += [(number, number, source) for number in range(best[-1], best[-1] + len(sample.answers))]
            else:
                pairs += [(best[-1], best[-1] + worse, source) for worse in range(1, len(sample.answers))]
        for length in sample.answers:
            begin = first - start
            starts.append(first)
            ends.append(first + length)
            # The first label of a piece is nobody's target: what stands before it is of another answer.
            supervised.append(int((sample.labels_S[begin + 1 : begin + length] != IGNORED).sum()))
            first += length
        start += sample.tokens
    if not best:
        return None
    chosen_P, rejected_P, sources_P = torch.tensor(pairs).T
    return Answers(
        torch.tensor(starts),
        torch.tensor(ends),
        torch.tensor(supervised),
        torch.tensor(best),
        chosen_P,
        rejected_P,
        sources_P,
        counts=tuple(len(sample.answers) for sample in samples if sample.answers),
        best_tokens=sum(supervised[number] for number in best),
        desirable_A=torch.tensor(desirable) if desirable else None,
    )
