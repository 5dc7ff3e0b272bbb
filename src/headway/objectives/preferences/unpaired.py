"""Losses of single answers that are wished for or not, as KTO learns from them.

Tensor letters: P answers, each of which counts by itself.
"""

import torch

UNPAIRED = ("kto", "apo_zero_unpaired")
"""Names of these losses; `headway.objectives.preferences.settings.PAIR_LOSSES` has their papers and settings."""


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
