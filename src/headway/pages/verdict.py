"""The first sentence of a report: the run's results, their time, and the first thing to mend."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headway.explain.explanation import UNSEPARATED, Finding, MeanWaterfall
from headway.log.run_files import LossTally
from headway.report import format_count, format_duration, format_share
from headway.report.numbers import number

_SAME = 0.005  # a loss that changed by less stayed as it was


def first_sentence(
    records: Sequence[Mapping[str, Any]],
    mean: MeanWaterfall,
    findings: Sequence[Finding],
    *,
    summary: Mapping[str, Any],
    judged: Mapping[str, Any],
    wall_s: float | None,
    is_unfinished: bool,
) -> str:
    """Say the run's results and the first thing to mend.

    Args:
        records: of steps, at least one.
        mean: its mean step.
        findings: what to mend, the first one first.
        summary: of a run that ended, as summary.json has it; empty without one.
        judged: the last evaluation's record; empty without one.
        wall_s: time of the run [s]; None where it is not known.
        is_unfinished: whether it neither ended nor was stopped, as far as its folder says.
    """
    num_steps = round(sum(number(record.get("num_steps", 1)) or 1.0 for record in records))
    # Loss and score first, then what they took, then how well the hardware was used.
    took = f"{format_count(num_steps)} {'step' if num_steps == 1 else 'steps'}"
    took += f" and {format_duration(wall_s)}" if wall_s is not None else ""
    learnt, score = _learnt(records), scores(judged)
    reached = f"{learnt} in {took}" if learnt else f"the run took {took}"
    if score:
        reached = f"{learnt} ({score}) in {took}" if learnt else f"{reached} ({score})"
    if not learnt and any(record.get("skipped") for record in records):
        reached += ", all without an update, since their numbers were not finite,"
    mfu = [value for record in records if (value := number(record.get("mfu"))) is not None]
    if mfu:
        reached += f" at MFU {format_share(float(np.median(mfu)))} (median)"
    beginning = _state(summary, is_unfinished=is_unfinished)
    text = f"{beginning}: {reached}" if beginning else reached[0].upper() + reached[1:]
    if not mfu:
        text += "; MFU is not known"
    if findings:
        first = findings[0]
        share = f" (up to {format_share(first.share)} of the time)" if first.share > 0 else ""
        return f"{text}; first finding, {first.id}{share}: {first.seen.removesuffix('.')}."
    return f"{text}{_largest_loss(mean)}."


def _state(summary: Mapping[str, Any], *, is_unfinished: bool) -> str:
    """End of a run that did not take all its steps, in words; "" for a complete run, or if the end is unknown."""
    if is_unfinished:
        return "Unfinished run"
    done, planned = number(summary.get("steps")), number(summary.get("planned_steps"))
    if summary.get("ended_early") is True and done is not None and planned is not None:
        return f"Ended early after step {done:,.0f} of {planned:,.0f}, as evaluations no longer got better"
    if summary.get("complete") is False and done is not None and planned is not None:
        return f"Stopped after step {done:,.0f} of {planned:,.0f}"
    return ""


def _learnt(records: Sequence[Mapping[str, Any]]) -> str:
    """Course of the loss, in words; "" if it is unknown."""
    tally = LossTally()
    for record in records:
        numbers = {key: number(value) for key, value in record.items() if key == "loss" or key.endswith("_loss")}
        tally.add({**numbers, "kind": "step", "empty": record.get("empty")})
    first, last = tally.first, tally.last
    if first is not None and last is not None:
        stayed = abs(last - first) <= _SAME * abs(first)
        return f"the loss stayed at {last:.4g}" if stayed else f"the loss went from {first:.4g} to {last:.4g}"
    further = [f"the {name} loss came to {value:.4g}" for name, value in tally.last_further.items()]
    return further[0] if further else ""


def scores(judged: Mapping[str, Any]) -> str:
    """Loss, exact answers and right pairs of one evaluation in words; "" without any."""
    loss, exact = number(judged.get("loss")), number(judged.get("exact_match"))
    parts = [] if loss is None else [f"{loss:.4g} on held-out samples"]
    parts += [] if exact is None else [f"{format_share(exact)} of the held-out answers exact"]
    right = number(judged.get("accuracy"))
    parts += [] if right is None else [f"{format_share(right)} of the held-out pairs right"]
    return ", ".join(parts)


def _largest_loss(mean: MeanWaterfall) -> str:
    """The largest loss of a run without a finding."""
    lost = [(line.ns, line.key, line.name) for line in mean.lines if line.key != "useful" and line.ns > 0]
    if not lost or all(line.key != "useful" for line in mean.lines):
        return "; no rule finds anything to mend"
    ns, key, name = max(lost)
    share = format_share(ns / mean.duration_ns)
    if key == UNSEPARATED:
        return f"; {share} of the mean step are kernels and waiting that only a profile tells apart"
    return f"; no rule finds anything to mend, and the largest loss of the mean step is {share}: {name}"
