"""Restate the phases of a trainer that generates: useful FLOPs of each from the lengths that its log tells.

A log tells means. What grows with tokens is exact by them; pairs of attention are fewest where all samples are as long
as the mean, and most where each is as long as the shortest or the longest. Both ends are given.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headway.audit.rows import LengthSpread, Log, PhasedStep
from headway.count import CostModel, Workload
from headway.devices import Peak
from headway.integrations.rl import TRAINERS, TrainerPhases
from headway.words import Argument

_MOST_SAMPLES, _MOST_TOKENS = 1_000_000, 10**8  # bounds of a step and of a sample; no log has larger numbers
_ANY_PEAK = Peak("not stated", 1.0, "", "not stated")


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase of one step, restated."""

    step: int
    phase: str  # the trainer's name of it; "rest" for what none claims
    seconds: float
    share: float  # fraction of the step's time
    printed_mfu: float | None  # fraction
    printed_flops_per_s: float | None  # FLOP/s of one device
    # useful FLOPs of all devices together, at least and at most; None where the log does not tell lengths. The same
    # number where all samples are equally long, and None for the most where it tells no longest sample
    flops: tuple[int, int | None] | None
    flops_per_s: float | None  # FLOP/s of one device at least; None where the number of devices is not known
    mfu: tuple[float, float | None] | None  # useful, at least and at most; None without a peak


def restated(
    log: Log, cost_model: CostModel | None, peak: Peak | None, num_ranks: int | None, mean_sample: int | None
) -> tuple[tuple[PhaseRow, ...], tuple[str, ...]]:
    """Restate the phases of a log's steps.

    Args:
        log: as `read_log` gives it.
        cost_model: of the policy, if it is known; scoring and the reference are taken to be of it too.
        peak: of one device, for MFU.
        num_ranks: devices of the job; what the log implies when None.
        mean_sample: mean length of prompt and answer together [tokens], where the log does not tell.

    Returns:
        Rows, and remarks on what they rest on.
    """
    rows: list[PhaseRow] = []
    remarks = Counter[str]()
    for step in log.phased:
        sized = _sized(step, mean_sample) if cost_model is not None else None
        if sized is None:
            remarks[
                "steps have times without lengths or a number of samples: "
                f"{Argument('mean_segment', example='L')} gives the mean of prompt and answer together"
            ] += 1
        rows += _rows(step, sized, cost_model, peak, num_ranks or step.num_devices)
    counted = tuple(f"{count:,} {remark}" for remark, count in remarks.items())
    return tuple(rows), (*counted, *_remarks(log, rows))


def sample_workload(log: Log) -> Workload | None:
    """Samples of a log's first step that tells their lengths, all as long as the mean."""
    sized = next((sized for step in log.phased if (sized := _sized(step, None))), None)
    if sized is None:
        return None
    prompts, answers = _even(sized, least=True), _even(sized, least=False)
    return Workload([p + a for p, a in zip(prompts, answers, strict=True)])


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Samples of a step."""

    number: int
    prompt_tokens: int
    answer_tokens: int
    prompt: LengthSpread
    answer: LengthSpread


def _sized(step: PhasedStep, mean_sample: int | None) -> _Sizes | None:
    """Put the lengths of a step together from what its log tells; None where that is too little, or no sizes."""
    answer, prompt, number = step.answer, step.prompt, step.num_samples
    if answer is None:
        return None
    if prompt is None and mean_sample is not None:
        prompt = LengthSpread(mean_sample - answer.mean)
    if prompt is None and step.tokens and number:
        prompt = LengthSpread(step.tokens / number - answer.mean)
    if prompt is None or prompt.mean < 1 or not 0 <= answer.mean <= _MOST_TOKENS or prompt.mean > _MOST_TOKENS:
        return None
    if number is None and step.tokens:
        number = round(step.tokens / (prompt.mean + answer.mean))
    if not number or number > _MOST_SAMPLES:
        return None
    answer_tokens = round(number * answer.mean)
    prompt_tokens = (step.tokens or round(number * (prompt.mean + answer.mean))) - answer_tokens
    return None if prompt_tokens < number else _Sizes(number, prompt_tokens, answer_tokens, prompt, answer)


def _rows(
    step: PhasedStep, sized: _Sizes | None, cost_model: CostModel | None, peak: Peak | None, num_devices: int | None
) -> list[PhaseRow]:
    trainer = TRAINERS[step.trainer]
    times = {name: seconds for name, seconds in step.times.items() if name != trainer.total}
    step_s = step.times.get(trainer.total) or sum(times.values())
    runs = {name: [run for run in trainer.phases[name] if not run.startswith("critic")] for name in times}
    computed = [name for name in times if runs[name]]
    ends: list[dict[str, int]] = []
    if sized is not None and cost_model is not None and computed:
        phases = TrainerPhases(step.trainer, cost_model, _ANY_PEAK, prefix="own")
        for prompts, answers in _lengths(sized):
            window = phases.window(dict.fromkeys(computed, 1.0), prompts, answers)
            ends.append({name: window.phases[name].flops.total for name in computed})

    def row(name: str, seconds: float) -> PhaseRow:
        work = [end[name] for end in ends] if name in computed else []
        flops = (work[0], work[1] if len(work) > 1 else None) if work else None
        device_s = seconds * num_devices if num_devices else None
        rates = [flop / device_s for flop in work] if device_s else []
        shares = [rate / peak.flops_per_s for rate in rates] if peak is not None else []
        return PhaseRow(
            step.step, name, seconds, seconds / step_s if step_s else 0.0, step.mfu.get(name),
            step.flops_per_s.get(name), flops, rates[0] if rates else None,
            (shares[0], shares[1] if len(shares) > 1 else None) if shares else None,
        )  # fmt: skip

    rest_s = step_s - sum(times.values())
    return [row(name, seconds) for name, seconds in times.items()] + ([row("rest", rest_s)] if rest_s > 0 else [])


def _lengths(sized: _Sizes) -> Iterable[tuple[list[int], list[int]]]:
    """Give prompts and answers all alike, and, where their ends are known, as unlike as these allow."""
    yield _even(sized, least=True), _even(sized, least=False)
    prompts = _unlike(sized.number, sized.prompt_tokens, sized.prompt)
    answers = _unlike(sized.number, sized.answer_tokens, sized.answer)
    if prompts is not None and answers is not None:
        yield prompts, answers  # the longest prompt has the longest answer


def _even(sized: _Sizes, *, least: bool) -> list[int]:
    """Lengths that differ by one token at most; long prompts (`least`) have the short answers."""
    total = sized.prompt_tokens if least else sized.answer_tokens
    short, more = divmod(total, sized.number)
    lengths = [short + 1] * more + [short] * (sized.number - more)
    return lengths if least else lengths[::-1]


def _unlike(number: int, total: int, lengths: LengthSpread) -> list[int] | None:
    """Lengths of a sum between two ends that differ the most: each at one end, but for one of them."""
    if lengths.least is None or lengths.most is None:
        return None
    least, most = int(lengths.least), int(lengths.most)
    if not 0 <= least * number <= total <= most * number or most > _MOST_TOKENS:
        return None
    num_long, over = divmod(total - least * number, most - least) if most > least else (0, 0)
    between = [least + over] if num_long < number else []
    return [most] * num_long + between + [least] * (number - num_long - len(between))


def _remarks(log: Log, rows: list[PhaseRow]) -> list[str]:
    remarks = []
    flops = [row.flops for row in rows if row.flops is not None]
    if flops:
        remarks.append(
            "FLOPs of phases are of mean lengths: what grows with tokens is exact to the printed digits; pairs of "
            "attention are at least those"
            + ("; at most those of the shortest and longest samples" if any(most for _, most in flops) else "")
        )
        remarks.append("prompts are billed once for each answer; an engine that caches them computes fewer")
    if any("critic" in run for name in {row.phase for row in rows} for run in _runs(log, name)):
        remarks.append("work of a critic, if there is one, is left out: the log does not tell its model")
    if flops and not any(row.flops_per_s for row in rows):
        remarks.append(f"the log does not tell how many devices there are: {Argument('num_ranks', example='N')}")
    return remarks


def _runs(log: Log, phase: str) -> tuple[str, ...]:
    return TRAINERS[log.phased[0].trainer].phases.get(phase, ()) if log.phased else ()
