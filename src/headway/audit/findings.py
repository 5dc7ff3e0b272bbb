"""What an audit remarks on: numbers that cannot be right, with likely causes, and what else the log says."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.audit.factors import Factor
    from headway.audit.identify import Identified
    from headway.audit.rows import Log, RestatedRow
    from headway.devices import Peak

_AGREEMENT = 0.005  # factors must multiply to the reported over the useful MFU this closely
_PEAK_AGREEMENT = 0.01  # peaks further apart than this are those of two devices


def warnings(
    rows: Sequence[RestatedRow],
    found: Identified,
    device: Peak | None,
    factors: Sequence[Factor],
    ratio: float | None,
) -> tuple[str, ...]:
    """Say what cannot be right, and why that may be.

    Args:
        rows: restated.
        found: what was identified.
        device: the device that was stated, if any.
        factors: of the difference.
        ratio: of the reported to the useful mean.
    """
    said = []
    for row in rows:
        printed = row.row.mfu.value if row.row.mfu else 0.0
        if max(printed, row.mfu or 0.0) > 1:
            what = f"reports an MFU of {printed:.1%}" if printed > 1 else f"has a useful MFU of {row.mfu or 0:.1%}"
            said.append(
                f"step {row.row.step} {what}, which no device can reach, so some number is wrong. Likely causes: "
                "tokens/s of the whole job taken for that of one device (--ranks), another device than the tool or "
                "--device named, another --model, or a clock that does not wait for the device."
            )
            break
    peak = found.peak_flops_per_s
    if device is not None and peak is not None and abs(peak.middle / device.flops_per_s - 1) > _PEAK_AGREEMENT:
        said.append(
            f"the log divides by {peak.low / 1e12:.1f} to {peak.high / 1e12:.1f} TFLOP/s, but {device.name} "
            f"has {device.flops_per_s / 1e12:.1f}: the tool took it for another, or --device is not the one that ran."
        )
    if not found.consistent:
        said.append(
            "no single number of FLOPs per token explains all rows: the log mixes runs, or its rule depends on each "
            "step's samples."
        )
    product = math.prod(factor.ratio for factor in factors)
    if factors and ratio and found.fit and abs(product / ratio - 1) > _AGREEMENT:
        said.append(
            f"the factors multiply to {product:.4f}, the means' ratio is {ratio:.4f}: the printed numbers are too "
            "coarse, or do not belong together."
        )
    return tuple(said)


def notes(log: Log, seconds: Sequence[float], seq_len: int) -> tuple[str, ...]:
    """Say what else the numbers give away.

    Args:
        log: rows of one device.
        seconds: time that each row stands for [s].
        seq_len: the configured row length [tokens].
    """
    said = [*log.notes]
    said += [
        f"{count:,} {'lines are' if count > 1 else 'line is'} left out: {why}" for why, count in log.skipped.items()
    ]
    if log.whole_job:
        said.append("the log's rates are those of all devices together: --ranks N gives each device's, and its MFU")
    rates = [row.tokens_per_s.value for row in log.rows if row.tokens_per_s]
    stamped = all(row.stamp_s and not row.step_s for row in log.rows)
    if stamped and len(rates) == len(log.rows) > 2:
        tokens = [rate * duration for rate, duration in zip(rates[1:], seconds[1:], strict=True)]
        if max(tokens) < seq_len or min(tokens) < 0.95 * max(tokens):
            said.append(
                f"tokens/s x the time between lines gives {min(tokens):,.0f} to {max(tokens):,.0f} tokens per step, "
                f"while attention is billed for rows of {seq_len:,}"
            )
    if len(seconds) > 3 and seconds[0] > 2 * median(seconds):
        said.append(
            f"the first row stands for {seconds[0] / sum(seconds):.0%} of the time (start-up, compilation); --skip 1 "
            "leaves it out of the means"
        )
    return tuple(said)
