"""Losses of preferences: functions of the log-probabilities of answers, and of what a reference gives them.

`LOSSES` names those of pairs; a new one is a function here and a row of `settings.PAIR_LOSSES`. What a pack's slots are
weighed by follows from the slope of the loss along each answer's log-probability, so that the output layer
makes gradients as for any other loss.

Tensor letters: A answers of a pack, P pairs of a better and a worse answer, B best answers, L slots that this process
computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from headway.data.answers import Answers
from headway.objectives.preferences.settings import PreferenceConfig


class Pairs(NamedTuple):
    """Pairs of answers, as losses see them; log-probabilities are sums over the targets of an answer [nats].

    Attributes:
        chosen_P: log-probability of the better answer.
        rejected_P: that of the worse one.
        chosen_reference_P: log-probability of the better answer under the reference; 0 without a reference.
        rejected_reference_P: that of the worse one.
        chosen_tokens_P: targets of the better answer [tokens].
        rejected_tokens_P: those of the worse one [tokens].
    """

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    chosen_reference_P: torch.Tensor
    rejected_reference_P: torch.Tensor
    chosen_tokens_P: torch.Tensor
    rejected_tokens_P: torch.Tensor

    @property
    def chosen_ratio(self) -> torch.Tensor:
        """log(policy / reference) of the better answer [nats], shape (P,)."""
        return self.chosen_P - self.chosen_reference_P

    @property
    def rejected_ratio(self) -> torch.Tensor:
        """log(policy / reference) of the worse answer [nats], shape (P,)."""
        return self.rejected_P - self.rejected_reference_P

    @property
    def margin(self) -> torch.Tensor:
        """Difference of the two [nats], shape (P,)."""
        return self.chosen_ratio - self.rejected_ratio

    @property
    def mean_chosen(self) -> torch.Tensor:
        """Log-probability of the better answer per target [nats per token], shape (P,)."""
        return self.chosen_P / self.chosen_tokens_P

    @property
    def mean_rejected(self) -> torch.Tensor:
        """Log-probability of the worse answer per target [nats per token], shape (P,)."""
        return self.rejected_P / self.rejected_tokens_P

    @property
    def mean_margin(self) -> torch.Tensor:
        """Difference of log(policy / reference) per target [nats per token], shape (P,)."""
        return self.chosen_ratio / self.chosen_tokens_P - self.rejected_ratio / self.rejected_tokens_P


PairFunction = Callable[[Pairs, PreferenceConfig], torch.Tensor]
"""Gives the loss of each pair, shape (P,)."""


def sigmoid(pairs: Pairs, settings: PreferenceConfig) -> torch.Tensor:
    """Negative log-likelihood of the order; with smoothing, of both orders in their shares."""
    return _smoothed(settings.strength * pairs.margin, settings.label_smoothing)


def robust(pairs: Pairs, settings: PreferenceConfig) -> torch.Tensor:
    """The loss of true orders, estimated without bias from orders of which a share is wrong."""
    logit_P, wrong = settings.strength * pairs.margin, settings.label_smoothing
    return -((1 - wrong) * F.logsigmoid(logit_P) - wrong * F.logsigmoid(-logit_P)) / (1 - 2 * wrong)


def hinge(pairs: Pairs, settings: PreferenceConfig) -> torch.Tensor:
    """Distance of the margin below 1 / beta, times beta."""
    return F.relu(1 - settings.strength * pairs.margin)


def ipo(pairs: Pairs, settings: PreferenceConfig) -> torch.Tensor:
    """Squared distance of the margin per token from 1 / (2 beta)."""
    return (pairs.mean_margin - 1 / (2 * settings.strength)).square()


def sigmoid_norm(pairs: Pairs, settings: PreferenceConfig) -> torch.Tensor:
    """`sigmoid` of log-ratios per token."""
    return _smoothed(settings.strength * pairs.mean_margin, settings.label_smoothing)


def orpo(pairs: Pairs, settings: PreferenceConfig) -> torch.Tensor:
    """Negative log-likelihood of the order by the odds of the answers, per token; goes with an SFT term."""
    chosen_P, rejected_P = pairs.mean_chosen, pairs.mean_rejected
    log_odds_P = (chosen_P - rejected_P) - (_log1mexp(chosen_P) - _log1mexp(rejected_P))
    return -settings.strength * F.logsigmoid(log_odds_P)


def simpo(pairs: Pairs, settings: PreferenceConfig) -> torch.Tensor:
    """Negative log-likelihood of the order by log-probabilities per token, less a margin."""
    logit_P = settings.strength * (pairs.mean_chosen - pairs.mean_rejected) - settings.gamma
    return _smoothed(logit_P, settings.label_smoothing)


def _smoothed(logit_P: torch.Tensor, wrong: float) -> torch.Tensor:
    return -F.logsigmoid(logit_P) * (1 - wrong) - F.logsigmoid(-logit_P) * wrong


def reward(pairs: Pairs, settings: PreferenceConfig) -> torch.Tensor:
    """Negative log-likelihood of the order by the scores of a reward model, which stand for log-probabilities."""
    total_P = pairs.chosen_P + pairs.rejected_P
    return -F.logsigmoid(pairs.chosen_P - pairs.rejected_P) + settings.center * total_P.square()


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) of x below 0, exact on both sides of log(1/2).

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))", equation 7.
    """
    x = x.clamp_max(-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )


LOSSES: Mapping[str, PairFunction] = {
    "sigmoid": sigmoid,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "sigmoid_norm": sigmoid_norm,
    "orpo": orpo,
    "simpo": simpo,
    "reward": reward,
}
"""Losses of pairs by their names; `settings.PAIR_LOSSES` has their papers and settings."""


def unpaired_loss(
    ratio_P: torch.Tensor,
    desirable_P: torch.Tensor,
    kl: torch.Tensor | float,
    beta: float,
    weights: tuple[float, float],
) -> torch.Tensor:
    """One less the value of each answer, times the weight of its kind, shape (P,).

    An answer's value is the sigmoid of how far its reward is above what is expected, or below it if the answer is not
    wished for.

    Args:
        ratio_P: log(policy / reference) of each answer [nats].
        desirable_P: whether it is wished for.
        kl: what is expected of that, the estimated divergence of the policy from the reference [nats]; 0 of
            `apo_zero_unpaired`.
        beta: strength of the pull to the reference.
        weights: of answers that are wished for, and of the others.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equation 7; D'Oosterlinck et al. 2024, arXiv:2408.06266, APO-zero
    of answers without a pair, as in TRL 1.16.
    """
    excess_P = torch.where(desirable_P, ratio_P - kl, kl - ratio_P)
    desirable_weight, undesirable_weight = (ratio_P.new_tensor(weight) for weight in weights)
    weight_P = torch.where(desirable_P, desirable_weight, undesirable_weight)
    return weight_P * torch.sigmoid(-beta * excess_P)


class PairNumbers(NamedTuple):
    """Numbers of a pack's pairs, without gradient.

    Attributes:
        loss_P: loss of each pair.
        rewards_2P: beta times log(policy / reference) of the better and the worse answers, or its mean over their
            targets.
        log_p_2P: their log-probabilities [nats].
        nll: summed cross-entropy of the best answers [nats].
        desirable: answers that are wished for, where each counts by itself; then rewards and log-probabilities of
            answers that are not of the row's kind are 0.
    """

    loss_P: torch.Tensor
    rewards_2P: torch.Tensor
    log_p_2P: torch.Tensor
    nll: torch.Tensor
    desirable: torch.Tensor | None = None


@dataclass(frozen=True)
class Preferring:
    """Loss of the pairs of a run.

    Attributes:
        settings: of the run: the loss of each pair, and its numbers.
        padding: the token that a reward model takes for padding; None where it takes none.
    """

    settings: PreferenceConfig
    padding: int | None = None

    def of_slots(self, answers: Answers, ids_T: torch.Tensor) -> torch.Tensor:
        """The answer that each slot of a pack tells something of, and the number of answers if of none, shape (T,).

        Args:
            answers: of the pack, on the device.
            ids_T: its tokens.
        """
        of_T = answers.of_slots(len(ids_T))
        if not self.settings.row.scores:
            return of_T
        # A reward model is read at the last token of an answer that is none of padding, as transformers reads it.
        slot_T = torch.arange(len(ids_T), device=ids_T.device)
        read_T = slot_T if self.padding is None else torch.where(ids_T == self.padding, -1, slot_T)
        last_A1 = slot_T.new_full((len(answers.ends_A) + 1,), -1).scatter_reduce(0, of_T, read_T, "amax")
        return torch.where(slot_T == last_A1[of_T], of_T, len(answers.ends_A))

    def weigh(
        self,
        answers: Answers,
        of_L: torch.Tensor,
        loss_L: torch.Tensor,
        group: ProcessGroup | None = None,
        *,
        per_pair: int = 1,
        per_token: int = 1,
        kl: torch.Tensor | float = 0.0,
    ) -> tuple[torch.Tensor, PairNumbers]:
        """Find the factor on each slot's cross-entropy whose weighted sum has the gradients of the loss.

        Args:
            answers: of the pack, on the device.
            of_L: the answer of each slot, as `of_slots` gives it.
            loss_L: cross-entropy of each slot, 0 where it is not supervised [nats]; of a reward model its score, with
                the sign turned; without gradient.
            group: the processes that compute the pack together.
            per_pair: what the summed losses of pairs are divided by, such as the pairs of a whole step.
            per_token: what the summed cross-entropy of best answers is divided by.
            kl: divergence of the policy from the reference, where each answer counts by itself [nats].

        Returns:
            The factors, shape (L,), and the numbers of the pairs.
        """
        log_p_A = answers.log_probabilities(loss_L.detach(), of_L, group).requires_grad_()
        with torch.enable_grad(), torch.autocast(loss_L.device.type, enabled=False):
            pairs = self.pairs(answers, log_p_A)
            loss_P = self._loss(answers, pairs, kl)
            (slope_A,) = torch.autograd.grad(loss_P.sum() / per_pair, log_p_A)
        # Cross-entropies are negative log-probabilities; those of the best answers also count by themselves.
        factor_A1 = F.pad(-slope_A, (0, 1))
        factor_A1[answers.best_B] += self.settings.sft_weight / per_token
        nll = -log_p_A.detach()[answers.best_B].sum()
        return factor_A1.to(loss_L.dtype)[of_L], self._numbers(answers, pairs, loss_P.detach(), nll)

    def first_loss(self, desirable: float = 1.0) -> float:
        """Mean loss of pairs under a policy that is still its reference, such as ln 2 of `sigmoid`.

        Args:
            desirable: share of the answers that are wished for, where each counts by itself.
        """
        zero_P, one_P = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        if not self.settings.row.unpaired:
            return float(LOSSES[self.settings.loss](Pairs(zero_P, zero_P, zero_P, zero_P, one_P, one_P), self.settings))
        losses = (
            float(unpaired_loss(zero_P, one_P * side == 1, 0.0, self.settings.strength, self.settings.weights))
            for side in (1, 0)
        )
        return sum(loss * share for loss, share in zip(losses, (desirable, 1 - desirable), strict=True))

    def _loss(self, answers: Answers, pairs: Pairs, kl: torch.Tensor | float) -> torch.Tensor:
        if not self.settings.row.unpaired:
            return LOSSES[self.settings.loss](pairs, self.settings)
        assert answers.desirable_A is not None
        desirable_P = answers.desirable_A[answers.chosen_P]
        return unpaired_loss(pairs.chosen_ratio, desirable_P, kl, self.settings.strength, self.settings.weights)

    def _numbers(self, answers: Answers, pairs: Pairs, loss_P: torch.Tensor, nll: torch.Tensor) -> PairNumbers:
        rewards_2P = torch.stack([pairs.chosen_ratio, pairs.rejected_ratio]).detach() * self.settings.strength
        if self.settings.row.per_token:
            rewards_2P = rewards_2P / torch.stack([pairs.chosen_tokens_P, pairs.rejected_tokens_P])
        log_p_2P = torch.stack([pairs.chosen_P, pairs.rejected_P]).detach()
        if not self.settings.row.unpaired:
            return PairNumbers(loss_P, rewards_2P, log_p_2P, nll)
        assert answers.desirable_A is not None
        desirable_P = answers.desirable_A[answers.chosen_P]
        of_kind_2P = torch.stack([desirable_P, ~desirable_P])
        return PairNumbers(loss_P, rewards_2P * of_kind_2P, log_p_2P * of_kind_2P, nll, desirable_P.sum())

    def pairs(self, answers: Answers, log_p_A: torch.Tensor) -> Pairs:
        """Put the answers of a pack into pairs."""
        reference_A = torch.zeros_like(log_p_A) if answers.reference_A is None else answers.reference_A
        columns = (log_p_A, reference_A.to(log_p_A.dtype), answers.supervised_A.to(log_p_A.dtype))
        return Pairs(*(column[side] for column in columns for side in (answers.chosen_P, answers.rejected_P)))
