"""Identities between FLOPs, time, tokens and MFU, one function each; FLOPs are useful ones.

Source: the definitions in MaxText's "Performance Metrics" page (AI-Hypercomputer/maxtext, 2025-07): MFU is the optimal
over the measured step time, which is the measured over the optimal tokens/s.
"""

from __future__ import annotations


def optimal_step_s(step_flops: float, num_chips: float, peak_flops_per_s: float) -> float:
    """Time of a step at the peak of all chips [s].

    Args:
        step_flops: FLOPs of a step, all chips together.
        num_chips: chips that share it.
        peak_flops_per_s: dense peak of one chip [FLOP/s].

    >>> optimal_step_s(989.4e12, 1, 989.4e12)
    1.0
    """
    return step_flops / (num_chips * peak_flops_per_s)


def mfu_of_step(step_flops: float, step_s: float, num_chips: float, peak_flops_per_s: float) -> float:
    """MFU of a measured step, a fraction: its optimal over its measured time.

    >>> mfu_of_step(400e12, 2.0, 1, 1000e12)
    0.2
    """
    return optimal_step_s(step_flops, num_chips, peak_flops_per_s) / step_s


def mfu_of_rate(tokens_per_s_per_chip: float, flops_per_token: float, peak_flops_per_s: float) -> float:
    """MFU of a measured rate, a fraction: tokens/s of one chip over those at its peak.

    >>> mfu_of_rate(10_000, 50e9, 1000e12)
    0.5
    """
    return tokens_per_s_per_chip * flops_per_token / peak_flops_per_s


def training_time_s(total_flops: float, mfu: float, num_chips: float, peak_flops_per_s: float) -> float:
    """Time to spend a number of FLOPs [s].

    >>> training_time_s(1e21, 0.5, 100, 1000e12)
    20000.0
    """
    return total_flops / (mfu * num_chips * peak_flops_per_s)


def training_cost(time_s: float, num_chips: float, price_per_chip_hour: float) -> float:
    """Cost of chips for a time, in the currency of the price.

    >>> training_cost(7200, 8, 2.5)
    40.0
    """
    return time_s / 3600 * num_chips * price_per_chip_hour
