"""Lines of other tools' logs as waterfalls: the work that they print, and the rest, which they cannot tell."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway.errors import ConfigError
from headway.explain.explanation import NO_PROFILE_NOTE, PER_SECOND_NOTE, JobExplanation, unprofiled_waterfall
from headway.explain.findings.evidence import RunEvidence, RunStep
from headway.explain.findings.rules import find
from headway.explain.findings.series import usual_tokens
from headway.words import Argument

_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """Step of a log, as one line of it says."""

    step: int  # number of the step
    duration_s: float | None = None  # time of the step, where the line has it [s]
    stamp_s: float | None = None  # moment at which the line was written [s]
    mfu: float | None = None  # MFU as printed, a fraction
    flops_per_s: float | None = None  # rate as printed [FLOP/s], of one device or of all, but the same in all lines
    tokens_per_s: float | None = None  # tokens/s as printed, of one device or of all, but the same in all lines
    memory_share: float | None = None  # peak memory / the device's, a fraction


def explain_log(
    lines: Sequence[LoggedStep], tool: str, source: str, *, step: int | None = None, rank: int | None = None
) -> JobExplanation:
    """Explain the steps of a log: needed work by the MFU that its tool printed, and the rest as one line.

    Args:
        lines: of steps in their order, at least one.
        tool: who wrote them.
        source: the log's name, for errors.
        step: only this one.
        rank: 0 or None: a line stands for the whole job.

    Raises:
        ConfigError: there is no such step or rank.
    """
    if rank:
        raise ConfigError(Argument("rank", rank), f": a line of {source} stands for the whole job. Leave it out.")
    notes = [NO_PROFILE_NOTE]
    # Time comes first: a line that does not tell it has no waterfall.
    durations = _durations(lines, notes)
    waterfalls, run_steps = [], []
    for line, duration_ns in zip(lines, durations, strict=True):
        if duration_ns is None:
            continue
        # A log knows one part of the step, the needed work; the rest stays one line.
        amounts: list[tuple[str, str, int, dict[str, int]]] = []
        if line.mfu is not None:
            amounts.append(("useful", "needed work at peak", round(line.mfu * duration_ns), {}))
        waterfalls.append(unprofiled_waterfall(line.step, duration_ns, amounts, "unknown device"))
        # The rate compares steps with each other, so the best measure that the line has will do.
        rate = line.mfu or line.flops_per_s or line.tokens_per_s
        tokens = line.tokens_per_s * duration_ns / _SECOND_NS if line.tokens_per_s else None
        run_steps.append(RunStep(line.step, duration_ns, line.mfu, rate, tokens=tokens, memory_share=line.memory_share))
    # Rule of the needed work, or the reason why there is none.
    notes.append(
        f"needed work is what {tool} counts by its own rule and peak; `headway audit` restates it."
        if any(line.mfu is not None for line in lines)
        else f"needed work is not known: the lines of {tool} have no MFU; `headway audit` finds it with "
        f"{Argument('model')} and {Argument('device')}."
    )
    if left_out := durations.count(None):
        notes.append(f"{left_out} of {len(lines)} lines do not tell how long their step took, and are left out.")
    findings = find(run=RunEvidence(run_steps))
    chosen = tuple(waterfall for waterfall in waterfalls if step is None or waterfall.step == step)
    if not chosen:
        numbers = f"{waterfalls[0].step} to {waterfalls[-1].step}"
        raise ConfigError(
            Argument("step", step),
            f": {source} has no line of it that tells its time; its steps are {numbers}.",
            choices=[str(waterfall.step) for waterfall in waterfalls],
        )
    return JobExplanation(chosen, tuple(notes), findings)


def _durations(lines: Sequence[LoggedStep], notes: list[str]) -> list[int | None]:
    """Time of each line's step [ns]: as printed, or from one line's stamp to the next one's."""
    if any(line.duration_s for line in lines):
        return [round(line.duration_s * 1e9) or None if line.duration_s else None for line in lines]
    # The first line has no stamp before it; stamps that stand still or go back tell no time.
    times_ns: list[int | None] = [None]
    for before, line in pairwise(lines):
        took_s, steps = (line.stamp_s or 0) - (before.stamp_s or 0), line.step - before.step
        is_timed = line.stamp_s is not None and before.stamp_s is not None and took_s > 0 and steps > 0
        times_ns.append(round(took_s * 1e9 / steps) if is_timed else None)
    if times_ns.count(None) == len(lines):
        notes.append(PER_SECOND_NOTE)
        return [_SECOND_NS] * len(lines)
    notes.append("a step is the time from one line's stamp to the next one's, per step where lines were left out.")
    # The first step's time can still be had from its rate, where all steps have about as many tokens.
    first = lines[0]
    tokens = [ns * line.tokens_per_s for ns, line in zip(times_ns, lines, strict=True) if ns and line.tokens_per_s]
    if first.tokens_per_s and tokens:
        usual = usual_tokens(tokens)
        if usual is not None:
            times_ns[0] = round(usual / first.tokens_per_s)
            notes.append(
                f"step {first.step} is the first line: its time is that of the other steps' tokens at its rate."
            )
    return times_ns
