"""Logs of other tools as waterfalls of their steps: losses, the work that lines print, and the rest as one line."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from headway.audit.rows import Log, LogRow, PhasedStep, Reading, near
from headway.errors import ConfigError
from headway.explain.explanation import (
    NO_PROFILE_NOTE,
    UNTIMED_NOTE,
    JobExplanation,
    StepWaterfall,
    unprofiled_waterfall,
)
from headway.explain.findings.evidence import RunEvidence, RunStep
from headway.explain.findings.rules import find
from headway.explain.findings.series import usual_tokens
from headway.explain.phases import PhaseLine
from headway.integrations.rl import TRAINERS
from headway.log.losses import learning_sentence
from headway.meter.step_phases import REST
from headway.report import format_duration, format_share
from headway.report.quantity import quantity
from headway.words import Argument

_SECOND_NS = 1_000_000_000


class _Step(NamedTuple):
    """One step of a log, with its time, or its length beside that of other steps."""

    row: LogRow
    ns: int
    is_timed: bool = True
    phased: PhasedStep | None = None


def explain_log(log: Log, source: str, *, step: int | None = None, rank: int | None = None) -> JobExplanation:
    """Explain the steps of a log: losses, useful work by the MFU that its tool printed, and the rest as one line.

    Args:
        log: what a tool printed.
        source: the log's name, for errors.
        step: only this one.
        rank: 0 or None: a line stands for the whole job.

    Raises:
        ConfigError: there is no such step or rank, or the log tells neither a rate nor a time nor a loss.
    """
    if rank:
        raise ConfigError(Argument("rank", rank), f": a line of {source} stands for the whole job. Leave it out.")
    notes: list[str] = []
    # Time comes first: a line that tells none has no waterfall, unless no line tells one.
    timed = _steps(log, notes)
    if not timed:
        raise ConfigError(f"{source} has no line that tells a step's time, its rate or its loss.")
    waterfalls, run_steps = [], []
    for logged in timed:
        row, duration_ns = logged.row, logged.ns
        # A log knows one part of the step, the useful work; the rest stays one line.
        amounts: list[tuple[str, str, int, dict[str, int]]] = []
        mfu, tokens_per_s = printed_number(row.mfu), printed_number(row.tokens_per_s)
        if mfu is not None:
            amounts.append(("useful", "useful work at peak", round(mfu * duration_ns), {}))
        phases = () if logged.phased is None else _phase_lines(logged.phased, duration_ns)
        waterfall = unprofiled_waterfall(row.step, duration_ns, amounts, "unknown device")
        waterfalls.append(replace(waterfall, phases=phases, is_timed=logged.is_timed))
        # The rate compares steps with each other, so the best measure that the line has will do.
        rate = mfu or printed_number(row.flops_per_s) or tokens_per_s
        tokens = tokens_per_s * duration_ns / _SECOND_NS if tokens_per_s and logged.is_timed else None
        run_steps.append(
            RunStep(row.step, duration_ns, mfu, rate, tokens=tokens, memory_share=row.memory_share, loop_phases=phases)
        )
    chosen = tuple(waterfall for waterfall in waterfalls if step is None or waterfall.step == step)
    if not chosen:
        numbers = f"{waterfalls[0].step} to {waterfalls[-1].step}"
        raise ConfigError(
            Argument("step", step),
            f": {source} has no line with the time of this step. Its steps are {numbers}.",
            choices=[str(waterfall.step) for waterfall in waterfalls],
        )
    is_timed = all(waterfall.is_timed for waterfall in waterfalls)
    findings = find(run=RunEvidence(run_steps, losses=log.losses, is_timed=is_timed))
    if not is_timed:  # shares hold, times do not
        findings = tuple(replace(finding, ns=0) for finding in findings)
    is_known = is_timed or any(waterfall.mfu is not None for waterfall in waterfalls)
    notes = [*([NO_PROFILE_NOTE] if is_known else []), *notes, *_notes(log, waterfalls), *_about(log)]
    return JobExplanation(chosen, tuple(notes), findings, learning=learning_sentence(log.losses))


def _notes(log: Log, waterfalls: Sequence[StepWaterfall]) -> list[str]:
    """Remarks on the rule of the useful work, on running means and on lines that are left out."""
    if any(waterfall.mfu is not None for waterfall in waterfalls):
        notes = [
            f"useful work is what {log.tool} counts by its own rule and peak. `headway audit` recomputes useful work."
        ]
    elif any(waterfall.phases for waterfall in waterfalls):
        notes = [
            f"MFU stands at the phases for which {log.tool} prints an MFU, by its own rule. `headway audit` "
            f"recomputes all phases with {Argument('model')} and {Argument('device')}."
        ]
    elif log.rows:
        notes = [
            f"useful work is not known, because the lines of {log.tool} have no MFU. `headway audit` computes useful "
            f"work with {Argument('model')} and {Argument('device')}."
        ]
    else:
        notes = []
    return notes


def _about(log: Log) -> list[str]:
    notes = [] if log.rows else [*log.notes]
    notes += [f"the MFU of {log.tool} is a running mean, not that of its step."] if log.smoothed else []
    return notes + [f"{count:,} lines are left out: {why}." for why, count in log.skipped.items()]


def _phase_lines(step: PhasedStep, duration_ns: int) -> tuple[PhaseLine, ...]:
    """The phases of a step, which add up to its time: what they leave is the rest."""
    trainer = TRAINERS[step.trainer]
    names = [name for name in step.times if name != trainer.total]
    lines = [(name, min(duration_ns, round(step.times[name] * _SECOND_NS))) for name in names]
    lines.append((REST, duration_ns - sum(ns for _, ns in lines)))
    # Lengths of the answers stand at the phase that makes them.
    lengths = (
        {} if step.answer is None else {"mean_answer": step.answer.mean, "longest_answer": step.answer.most or 0.0}
    )
    return tuple(
        PhaseLine(
            name, ns, ns / duration_ns, ns, mfu=step.mfu.get(name),
            quantities=lengths if "answers" in trainer.phases.get(name, ()) else {},
        )
        for name, ns in lines
    )  # fmt: skip


def records_of(log: Log, explanation: JobExplanation) -> list[dict[str, float]]:
    """Make a record of each explained step of a log; a line stands for the steps since the one before."""
    rows, losses = {row.step: row for row in log.rows}, {row.step: row for row in log.losses}
    records, before = [], None
    for waterfall in explanation.steps:
        step = waterfall.step
        row, learnt = rows.get(step, LogRow(step)), losses.get(step)
        facts = {"mfu": waterfall.mfu, "tokens_per_s": printed_number(row.tokens_per_s)}
        facts["step_s"] = waterfall.duration_ns / 1e9 if waterfall.is_timed else None
        if learnt is not None:
            facts |= {"loss": learnt.loss, "grad_norm": learnt.grad_norm}
        num_steps = 1 if before is None else max(1, step - before)
        records.append({"step": step, "num_steps": num_steps} | {k: v for k, v in facts.items() if v is not None})
        before = step
    return records


def printed_number(reading: Reading | None) -> float | None:
    """A number of a log; None without one, or for a number that no step could have."""
    return None if reading is None else quantity(reading.value)


def _steps(log: Log, notes: list[str]) -> list[_Step]:
    """Steps of a log with their times: by phase, as printed or stamped, else beside each other by their rates."""
    if log.mean_step_s is not None:
        notes.append(_mean_note(log, log.mean_step_s))
    elif steps := _phased(log):
        return steps
    elif log.rows:
        durations = _durations(log.rows, notes)
        if durations is None:
            notes.append(UNTIMED_NOTE)
            return _by_rate(log.rows)
        if left_out := durations.count(None):
            notes.append(f"{left_out} of {len(log.rows)} lines do not tell how long their step took, and are left out.")
        return [_Step(row, ns) for row, ns in zip(log.rows, durations, strict=True) if ns]
    return [_Step(LogRow(row.step), _SECOND_NS, is_timed=False) for row in log.losses] or [
        _Step(row, round((log.mean_step_s or 0) * _SECOND_NS) or _SECOND_NS, is_timed=bool(log.mean_step_s))
        for row in log.rows
    ]


def _phased(log: Log) -> list[_Step]:
    """Steps that the log tells by phase; the rates of their lines are those of one phase, so tokens stand for them."""
    rows, steps = {row.step: row for row in log.rows}, []
    for phased in log.phased:
        seconds = quantity(phased.times.get(TRAINERS[phased.trainer].total) or sum(phased.times.values())) or 0.0
        if (ns := round(seconds * _SECOND_NS)) > 0:
            row = rows.get(phased.step, LogRow(phased.step))
            rate = _exactly(phased.tokens / seconds if phased.tokens else None)
            row = LogRow(phased.step, tokens_per_s=rate, memory_share=row.memory_share)
            steps.append(_Step(row, ns, phased=phased))
    return steps


def _exactly(value: float | None) -> Reading | None:
    return None if value is None else near(value, 1e-9)


def _mean_note(log: Log, mean_step_s: float) -> str:
    mfu = printed_number(log.rows[-1].mfu) if log.rows else None
    at = "" if mfu is None else f", at an MFU of {format_share(mfu)}"
    return (
        f"over the whole run a step took {format_duration(mean_step_s)}{at}, including the time between the steps. "
        "The file does not tell the time of each step."
    )


def _by_rate(rows: Sequence[LogRow]) -> list[_Step]:
    """Lengths of steps beside each other, if all do as much work: the usual one is a second in no sense."""
    readings = ([printed_number(getattr(row, name)) for row in rows] for name in ("tokens_per_s", "flops_per_s", "mfu"))
    rates = next((rates for rates in readings if all(rates)), [1.0] * len(rows))
    usual = median(rate or 1.0 for rate in rates)
    return [
        _Step(row, max(1, round(_SECOND_NS * usual / (rate or 1.0))), is_timed=False)
        for row, rate in zip(rows, rates, strict=True)
    ]


def _durations(rows: Sequence[LogRow], notes: list[str]) -> list[int | None] | None:
    """Time of each line's step [ns]: as printed, or from one line's stamp to the next one's; None if none tells it."""
    printed_s = [printed_number(row.step_s) for row in rows]
    if any(printed_s):
        return [round(seconds * 1e9) or None if seconds else None for seconds in printed_s]
    # The first line has no stamp before it; stamps that stand still or go back tell no time.
    times_ns: list[int | None] = [None]
    for before, row in pairwise(rows):
        took_s, steps = (row.stamp_s or 0) - (before.stamp_s or 0), row.step - before.step
        is_timed = row.stamp_s is not None and before.stamp_s is not None and took_s > 0 and steps > 0
        times_ns.append(round(took_s * 1e9 / steps) if is_timed else None)
    if times_ns.count(None) == len(rows):
        return None
    notes.append("a step is the time from one line's stamp to the next one's, per step where lines were left out.")
    # The first step's time can still be had from its rate, where all steps have about as many tokens.
    rates = [printed_number(row.tokens_per_s) for row in rows]
    tokens = [ns * rate for ns, rate in zip(times_ns, rates, strict=True) if ns and rate]
    if rates[0] and tokens:
        usual = usual_tokens(tokens)
        if usual is not None:
            times_ns[0] = round(usual / rates[0])
            notes.append(
                f"step {rows[0].step} is the first line, so its time is computed from its rate and the other "
                "steps' tokens."
            )
    return times_ns
