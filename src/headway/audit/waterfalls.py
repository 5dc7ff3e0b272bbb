"""Logs of other tools as waterfalls of their steps: the work that lines print, and the rest, which they cannot tell."""

from collections.abc import Sequence
from itertools import pairwise

from headway.audit.rows import Log, LogRow, Reading
from headway.errors import ConfigError
from headway.explain.explanation import NO_PROFILE_NOTE, PER_SECOND_NOTE, JobExplanation, unprofiled_waterfall
from headway.explain.findings.evidence import RunEvidence, RunStep
from headway.explain.findings.rules import find
from headway.explain.findings.series import usual_tokens
from headway.report.quantity import quantity
from headway.words import Argument

_SECOND_NS = 1_000_000_000


def explain_log(log: Log, source: str, *, step: int | None = None, rank: int | None = None) -> JobExplanation:
    """Explain the steps of a log: needed work by the MFU that its tool printed, and the rest as one line.

    Args:
        log: what a tool printed.
        source: the log's name, for errors.
        step: only this one.
        rank: 0 or None: a line stands for the whole job.

    Raises:
        ConfigError: there is no such step or rank, or the log has times of phases alone.
    """
    if not log.rows:
        raise ConfigError(
            f"{source} has the times of phases and no line that tells a step's rate. Run `headway audit` on it, "
            "which shows the phases."
        )
    if rank:
        raise ConfigError(Argument("rank", rank), f": a line of {source} stands for the whole job. Leave it out.")
    notes = [NO_PROFILE_NOTE]
    # Time comes first: a line that does not tell it has no waterfall.
    durations = _durations(log.rows, notes)
    waterfalls, run_steps = [], []
    for row, duration_ns in zip(log.rows, durations, strict=True):
        if duration_ns is None:
            continue
        # A log knows one part of the step, the needed work; the rest stays one line.
        amounts: list[tuple[str, str, int, dict[str, int]]] = []
        mfu, tokens_per_s = printed_number(row.mfu), printed_number(row.tokens_per_s)
        if mfu is not None:
            amounts.append(("useful", "needed work at peak", round(mfu * duration_ns), {}))
        waterfalls.append(unprofiled_waterfall(row.step, duration_ns, amounts, "unknown device"))
        # The rate compares steps with each other, so the best measure that the line has will do.
        rate = mfu or printed_number(row.flops_per_s) or tokens_per_s
        tokens = tokens_per_s * duration_ns / _SECOND_NS if tokens_per_s else None
        run_steps.append(RunStep(row.step, duration_ns, mfu, rate, tokens=tokens, memory_share=row.memory_share))
    # Rule of the needed work, or the reason why there is none.
    notes.append(
        f"needed work is what {log.tool} counts by its own rule and peak; `headway audit` restates it."
        if any(printed_number(row.mfu) is not None for row in log.rows)
        else f"needed work is not known: the lines of {log.tool} have no MFU; `headway audit` finds it with "
        f"{Argument('model')} and {Argument('device')}."
    )
    if left_out := durations.count(None):
        notes.append(f"{left_out} of {len(log.rows)} lines do not tell how long their step took, and are left out.")
    findings = find(run=RunEvidence(run_steps))
    chosen = tuple(waterfall for waterfall in waterfalls if step is None or waterfall.step == step)
    if not chosen:
        numbers = f"{waterfalls[0].step} to {waterfalls[-1].step}"
        raise ConfigError(
            Argument("step", step),
            f": {source} has no line of it that tells its time; its steps are {numbers}.",
            choices=[str(waterfall.step) for waterfall in waterfalls],
        )
    # Notes on an MFU that is a running mean, and on lines that are left out.
    notes += [f"the MFU of {log.tool} is a running mean, not that of its step."] if log.smoothed else []
    notes += [f"{count:,} lines are left out: {why}." for why, count in log.skipped.items()]
    return JobExplanation(chosen, tuple(notes), findings)


def records_of(log: Log, explanation: JobExplanation) -> list[dict[str, float]]:
    """Make a record of each explained step of a log; a line stands for the steps since the one before."""
    by_step = {row.step: row for row in log.rows}
    records, before = [], None
    for waterfall in explanation.steps:
        row, step = by_step[waterfall.step], waterfall.step
        facts = {"mfu": printed_number(row.mfu), "tokens_per_s": printed_number(row.tokens_per_s)}
        if PER_SECOND_NOTE not in explanation.notes:
            facts["step_s"] = waterfall.duration_ns / 1e9
        num_steps = 1 if before is None else max(1, step - before)
        records.append({"step": step, "num_steps": num_steps} | {k: v for k, v in facts.items() if v is not None})
        before = step
    return records


def printed_number(reading: Reading | None) -> float | None:
    """A number of a log; None without one, or for a number that no step could have."""
    return None if reading is None else quantity(reading.value)


def _durations(rows: Sequence[LogRow], notes: list[str]) -> list[int | None]:
    """Time of each line's step [ns]: as printed, or from one line's stamp to the next one's."""
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
        notes.append(PER_SECOND_NOTE)
        return [_SECOND_NS] * len(rows)
    notes.append("a step is the time from one line's stamp to the next one's, per step where lines were left out.")
    # The first step's time can still be had from its rate, where all steps have about as many tokens.
    rates = [printed_number(row.tokens_per_s) for row in rows]
    tokens = [ns * rate for ns, rate in zip(times_ns, rates, strict=True) if ns and rate]
    if rates[0] and tokens:
        usual = usual_tokens(tokens)
        if usual is not None:
            times_ns[0] = round(usual / rates[0])
            notes.append(
                f"step {rows[0].step} is the first line: its time is that of the other steps' tokens at its rate."
            )
    return times_ns
