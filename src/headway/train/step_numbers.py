"""Numbers of a step that the device computes: summed over the ranks in one message, read by name once they arrive.

Tensor letters: S sources, M further loss terms, K numbers of a step, L slots that this process computes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headway.meter.clock import HostCopy
from headway.models.head import PackLoss
from headway.models.preferences import PairNumbers
from headway.models.router import RouterSummary

TERMS = {"flow": "drawn"}
"""Losses beside that of tokens, and the driver of the workload that counts what each is a mean over."""


PAIR_TERMS = ("nll", "reward_chosen", "reward_rejected", "right", "log_p_chosen", "log_p_rejected")
"""Sums over the pairs of preferences: cross-entropy of the best answers [nats], rewards (beta times the log of policy /
reference), pairs whose better answer has the larger reward, and log-probabilities of the answers [nats]."""

SCORE_TERMS = PAIR_TERMS[1:4]
"""Those of a reward model, whose rewards are its scores."""

UNPAIRED_TERMS = ("reward_chosen", "reward_rejected", "log_p_chosen", "log_p_rejected", "desirable", "kl", "mismatched")
"""Sums over answers that are wished for (chosen) and not (rejected): rewards, log-probabilities [nats], and how many
are wished for; log-ratios of answers behind other prompts [nats], and how many these are."""


class StepNumbers(NamedTuple):
    """Numbers of one step over all ranks, on the host.

    Attributes:
        losses: summed cross-entropies of each source [nats], or losses of its pairs.
        terms: summed errors of further losses, by their names in `TERMS`; sums over pairs, by `PAIR_TERMS`.
        recompiles: guards of compiled code that failed.
        grad_norm: norm of the gradient before it was clipped.
        router: how evenly experts were used; None without experts.
    """

    losses: Sequence[float]
    terms: dict[str, float]
    recompiles: int
    grad_norm: float
    router: RouterSummary | None

    @property
    def is_finite(self) -> bool:
        """Whether all losses and the gradient are finite."""
        return all(map(math.isfinite, (*self.losses, *self.terms.values(), self.grad_norm)))


@dataclass(frozen=True)
class DeviceNumbers:
    """The same numbers on the device, where they may not have been computed yet.

    Attributes:
        loss_S: summed cross-entropies of each source.
        term_M: summed errors of further losses.
        recompiles_1: guards that failed.
        grad_norm_1: norm of the gradient.
        router_3: numbers of a `RouterSummary`; shape (0,) without experts.
        terms: names of the further losses.
    """

    loss_S: torch.Tensor
    term_M: torch.Tensor
    recompiles_1: torch.Tensor
    grad_norm_1: torch.Tensor
    router_3: torch.Tensor
    terms: Sequence[str]

    def vector(self) -> torch.Tensor:
        """All numbers, end to end, shape (K,)."""
        return torch.cat([self.loss_S, self.term_M, self.recompiles_1, self.grad_norm_1, self.router_3])

    def arriving(self) -> Callable[[], StepNumbers]:
        """Send the numbers to the host; returns what reads them, and waits where the device has not passed them."""
        sizes = [len(self.loss_S), len(self.term_M), 1, 1, len(self.router_3)]
        copy = HostCopy(self.vector())

        def read_numbers() -> StepNumbers:
            values = iter(copy.read())
            losses, terms, recompiles, grad_norm, router = ([next(values) for _ in range(size)] for size in sizes)
            summary = RouterSummary(router[0], router[1], int(router[2])) if router else None
            by_name = dict(zip(self.terms, terms, strict=True))
            return StepNumbers(losses, by_name, round(recompiles[0]), grad_norm[0], summary)

        return read_numbers


class StepSums:
    """Sums to which the packs of a step add, on the device.

    Args:
        num_sources: of the data.
        terms: names of the further losses that the model has, of `TERMS`; or `PAIR_TERMS`, `SCORE_TERMS` or
            `UNPAIRED_TERMS`.
        device: of the model.
    """

    def __init__(self, num_sources: int, terms: Sequence[str], device: torch.device) -> None:
        self._terms = terms
        self._loss_S = torch.zeros(num_sources, device=device)
        self._term_M = torch.zeros(len(terms), device=device)

    def add(self, pack: PackLoss, source_L: torch.Tensor) -> None:
        """Add a pack's losses; `source_L` is the number of the source that each slot is of."""
        self._loss_S.index_add_(0, source_L, pack.loss_T)
        if pack.drawn_K is not None:
            self._term_M += pack.drawn_K.sum()

    def add_pairs(self, numbers: PairNumbers, source_P: torch.Tensor) -> None:
        """Add the numbers of a pack's pairs, on one of the processes that compute it together.

        Args:
            numbers: of the pairs.
            source_P: number of the source that each is of.
        """
        self._loss_S.index_add_(0, source_P, numbers.loss_P.to(self._loss_S.dtype))
        rewards_2P = numbers.rewards_2P
        right = (rewards_2P[0] > rewards_2P[1]).sum().to(numbers.nll)
        sums = (numbers.nll, *rewards_2P.sum(1), right, *numbers.log_p_2P.sum(1))
        by_name = dict(zip(PAIR_TERMS, sums, strict=True))
        if numbers.desirable is not None:
            by_name |= {"desirable": numbers.desirable.to(right), "kl": 0.0 * right, "mismatched": 0.0 * right}
        self._term_M += torch.stack([by_name[name] for name in self._terms]).to(self._term_M.dtype)

    def add_mismatches(self, sums_2: torch.Tensor) -> None:
        """Add the log-ratios of all ranks' answers behind other prompts and their number, on one of the processes."""
        self._term_M[self._terms.index("kl") :] += sums_2.to(self._term_M.dtype)

    def over_ranks(
        self,
        recompiles: int,
        sum_: Callable[[torch.Tensor], None],
        *,
        norm: Callable[[], torch.Tensor],
        router: Callable[[Callable[[torch.Tensor], None]], torch.Tensor],
    ) -> DeviceNumbers:
        """Sum over the ranks, in one message; then take the gradient's norm and the routers' numbers.

        Args:
            recompiles: guards that failed on this rank.
            sum_: replaces a tensor by its sum over the ranks.
            norm: gives the norm of the gradients.
            router: gives the numbers of a `RouterSummary`, summed by what it is given.
        """
        recompiles_1 = torch.full((1,), recompiles, device=self._loss_S.device)
        sums = torch.cat([self._loss_S, self._term_M, recompiles_1])
        sum_(sums)
        loss_S, term_M, recompiles_1 = torch.split(sums, [len(self._loss_S), len(self._term_M), 1])
        return DeviceNumbers(loss_S, term_M, recompiles_1, norm().to(sums)[None], router(sum_), self._terms)
