"""Findings that only a row of steps shows: slow first steps, rates that vary or fall, compiling again, uneven ranks.

Each rule reads all steps of a run or a log and gives a finding, or None below its threshold, whose reason stands there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median, quantiles

from headway.explain.explanation import MOST, Finding, num_first_steps
from headway.report import format_duration, format_share

FALLING = "falling-rate"
FALLING_CAUSE = (
    "clocks that fall as the device grows warm or its power is capped, memory that is cut into ever smaller pieces, "
    "experts whose load grows uneven, or a host that does more each step (logs, lists that grow)."
)
FALLING_HINT = (
    "nvidia-smi dmon, which shows clocks, power and temperature; and a run that begins at the last checkpoint: if that "
    "is fast again, it is not the weights."
)
_PROFILE = "a profile (run.profile of `headway train`, `headway.profile` in other loops)"


@dataclass(frozen=True, slots=True)
class SeriesStep:
    """One step as its record or its line of a log tells it.

    Attributes:
        step: its number.
        duration_ns: how long it took [ns].
        mfu: a fraction; None where it is not known.
        rate: work per second without the wait for data, in any unit that is the same for all steps; None if not known.
        waited_ns: part of it in which the device waited for data [ns]; 0 where that is not known.
        tokens: of the step; None where they are not known.
        memory_share: peak memory / the device's, a fraction; None where it is not known.
        has_compiled_again: whether something was compiled again in it.
        imbalance: part of it in which ranks wait for the one with the most work, at least; a fraction.
        heaviest_rank: which rank that is.
        slowest_rank: the rank whose device computes slowest; None where it is not known.
        slowest_speed: its speed / the median of all ranks; None where it is not known.
    """

    step: int
    duration_ns: int
    mfu: float | None = None
    rate: float | None = None
    waited_ns: int = 0
    tokens: float | None = None
    memory_share: float | None = None
    has_compiled_again: bool = False
    imbalance: float = 0.0
    heaviest_rank: int = 0
    slowest_rank: int | None = None
    slowest_speed: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Steps of one run in their order.

    Attributes:
        steps: at least one.
        beside_ns: time of the run outside of its steps, by what it was: "evaluation", "checkpoint", "compile" [ns].
    """

    steps: tuple[SeriesStep, ...]
    beside_ns: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_ns(self) -> int:
        """Time of all steps [ns]."""
        return sum(step.duration_ns for step in self.steps)

    def finding(
        self, id_: str, message: str, cause: str, next_: str, lost_ns: float, *, aside: bool = False
    ) -> Finding:
        """Make a finding of time that is lost over all steps; with `aside` of time outside of the steps."""
        whole_ns = self.total_ns + (sum(self.beside_ns.values()) if aside else 0)
        lost_ns = min(max(round(lost_ns), 0), whole_ns)
        has_mfu = all(step.mfu is not None for step in self.steps)
        useful_ns = sum((step.mfu or 0.0) * step.duration_ns for step in self.steps)
        mfu_from = useful_ns / whole_ns if has_mfu else None
        mfu_to = useful_ns / (whole_ns - lost_ns) if has_mfu and 0 < lost_ns < whole_ns else None
        share = lost_ns / whole_ns
        return Finding(id_, message, cause, next_, lost_ns // len(self.steps), share, mfu_from, mfu_to)


def find_in_series(series: Series, of_each: Sequence[Finding] = ()) -> list[Finding]:
    """Find what a row of steps shows, the dearest first; behind them what names no cause, and what passes by itself.

    Args:
        series: the steps.
        of_each: findings of what single steps show, to stand among them.

    Returns:
        At most five.
    """
    num_first = num_first_steps([step.duration_ns for step in series.steps])
    steady = Series(series.steps[num_first:])
    in_steps = [finding for rule in IN_STEPS if (finding := rule(steady)) is not None]
    of_the_run = [finding for rule in OF_THE_RUN if (finding := rule(series)) is not None]
    ids = {finding.id for finding in (*in_steps, *of_the_run)}
    others = [finding for finding in of_each if finding.id not in ids]
    # what is waited for data is known to all rules
    named_ns = sum(finding.ns for finding in (*in_steps, *others) if not finding.id.startswith("data-"))
    last = (_far_from_compute(steady, named_ns * len(steady.steps)), _first_steps(series, num_first))
    findings = sorted([*in_steps, *of_the_run, *others], key=lambda finding: -finding.ns)
    return [*findings, *(finding for finding in last if finding is not None)][:MOST]


def _far_from_compute(steady: Series, named_ns: int) -> Finding | None:
    """Find time far from compute that no other rule has named: this vague one charges none of it again."""
    if any(step.mfu is None for step in steady.steps):
        return None
    useful_ns = sum((step.mfu or 0.0) * step.duration_ns for step in steady.steps)
    mfu = useful_ns / steady.total_ns
    lost_ns = steady.total_ns - 5 * useful_ns - sum(step.waited_ns for step in steady.steps) - named_ns
    # Kernels of training reach a fifth of the peak even where small: below 5 %, three quarters are no kernels.
    if mfu >= 0.05 or lost_ns < 0.05 * steady.total_ns:
        return None
    memory = max(step.memory_share or 0.0 for step in steady.steps)
    full = f", with {format_share(memory)} of the device's memory in use" if memory else ""
    finding = steady.finding(
        "not-compute-bound",
        f"MFU is {_mfu(mfu)}{full}: kernels at a fifth of the peak would take {format_share(5 * mfu)} of the time.",
        "the device waits most of the time, for data, for the host (Python, launches, synchronisation, compiling) or "
        "for other ranks, or runs kernels without FLOPs; faster products would not help.",
        f"{_PROFILE}, which tells these apart; or some steps of one batch repeated: if they are fast, it was the data.",
        lost_ns,
    )
    return replace(finding, mfu_to=None)  # a fifth of the peak is a bound, not a promise


def _unstable(steady: Series) -> Finding | None:
    rated = [(step.rate, step) for step in steady.steps if step.rate]
    if len(rated) < 3:
        return None
    deciles = quantiles([rate for rate, _ in rated], n=10, method="inclusive")
    low, high = deciles[0], deciles[-1]
    lost_ns = sum(step.duration_ns * (1 - rate / high) for rate, step in rated)
    # Steps of one shape vary by 2 % on a device of their own; on a CPU that others use as well 1.9 times were seen.
    if high < 2 * low or lost_ns < 0.05 * steady.total_ns:
        return None
    slowest, fastest = min(rated, key=lambda pair: pair[0])[1], max(rated, key=lambda pair: pair[0])[1]
    return steady.finding(
        "unstable-steps",
        f"the slowest steps take {high / low:.1f} times as long for the same work as the fastest, such as step "
        f"{slowest.step} beside step {fastest.step}{_alike(steady)}.",
        "something comes and goes that is not the counted work: where shapes vary from step to step, as with images "
        "of any size, modules that are compiled again for each new shape, or a search for kernels (cudnn.benchmark); "
        "otherwise a batch that comes late, work that is not counted, or another process on the machine.",
        f"{_PROFILE} over a fast and a slow step, and TORCH_LOGS=recompiles, which names guards that fail; against "
        "those: dimensions marked as dynamic, sizes rounded up to a few, less that is compiled (speed.compile).",
        lost_ns,
    )


def _slow_now_and_then(steady: Series) -> Finding | None:
    rated = [(step.rate, step) for step in steady.steps if step.rate]
    if len(rated) < 20:  # so that a tenth of them is two
        return None
    usual = median(rate for rate, _ in rated)
    slow = [(rate, step) for rate, step in rated if rate < usual / 2]
    lost_ns = sum(step.duration_ns * (1 - rate / usual) for rate, step in slow)
    if not 0 < len(slow) <= len(rated) / 10 or lost_ns < 0.02 * steady.total_ns:  # less is not worth a search
        return None
    numbers = [step.step for _, step in slow]
    strides = {after - before for before, after in pairwise(numbers)}
    every = f", every {strides.pop()} steps" if len(numbers) > 2 and len(strides) == 1 else ""
    examples = ", ".join(map(str, numbers[:5])) + (", ..." if numbers[5:] else "")
    return steady.finding(
        "slow-steps",
        f"{len(slow)} of {len(rated)} steps took more than twice the usual time for their work{every}: {examples}.",
        "something that is not part of every step: a checkpoint or an evaluation within it, garbage collection of "
        "Python, a shard of data that is opened, the allocator that begins anew.",
        f"{_PROFILE} with one of these steps in its window.",
        lost_ns,
    )


def _drift(steady: Series) -> Finding | None:
    rated = [(step.rate, step) for step in steady.steps if step.rate]
    if len(rated) < 12:  # thirds of at least four
        return None
    third = len(rated) // 3
    parts = (rated[:third], rated[third:-third], rated[-third:])
    first, middle, last = (median(rate for rate, _ in part) for part in parts)
    middles = zip((first, middle, last), parts, strict=True)
    scatter = max(median(abs(rate - usual) for rate, _ in part) for usual, part in middles)
    # Medians of thirds of a steady run agree within 1 %; a fall that goes on and exceeds the scatter is no accident.
    if not (first > middle > last and first - last > max(0.03 * first, 3 * scatter)):
        return None
    return steady.finding(
        FALLING,
        f"the rate of the work fell by {format_share(1 - last / first)} from step {rated[0][1].step} to step "
        f"{rated[-1][1].step}, without a break.",
        FALLING_CAUSE,
        FALLING_HINT,
        sum(step.duration_ns * (1 - rate / first) for rate, step in rated),
    )


def _first_steps(series: Series, num_first: int) -> Finding | None:
    if not num_first:
        return None
    first, others = series.steps[:num_first], series.steps[num_first:]
    usual_ns = median(step.duration_ns for step in others)
    lost_ns = sum(step.duration_ns - usual_ns for step in first)
    if lost_ns < 0.05 * series.total_ns:  # a long run makes up for them
        return None
    which = "the first step" if num_first == 1 else f"the first {num_first} steps"
    took = ", ".join(format_duration(step.duration_ns / 1e9) for step in first[:3])
    return series.finding(
        "first-steps",
        f"{which} of {len(series.steps)} took {took}, the others {format_duration(usual_ns / 1e9)} (median).",
        "start-up: compiling, the first use of each kernel, the allocator, workers that fill their queues.",
        "nothing in a long run, which is to be judged by its later steps; in many short ones, a cache of compiled "
        "code that is kept (TORCHINDUCTOR_CACHE_DIR).",
        lost_ns,
    )


def _compiled_again(series: Series) -> Finding | None:
    again = [step.step for step in series.steps[1:] if step.has_compiled_again]
    compile_ns = series.beside_ns.get("compile", 0)
    # Two or three are the usual ones: the first other shape, then dynamic shapes. More grow with the run.
    if len(again) < 4 or len(again) < 0.05 * len(series.steps):
        return None
    return series.finding(
        "recompilation",
        f"{len(again)} of {len(series.steps)} steps compiled something again, the last one step {again[-1]}; compiling "
        f"took {format_duration(compile_ns / 1e9)} in all.",
        "a size or a flag that compiled code takes for constant changes from step to step.",
        "`recompile_guards` in metrics.jsonl, which names what failed; speed.recompiles: error ends the run at the "
        "first one, speed.compile: false compiles nothing.",
        compile_ns,
        aside=True,
    )


def _compiling(series: Series) -> Finding | None:
    compile_ns = series.beside_ns.get("compile", 0)
    whole_ns = series.total_ns + sum(series.beside_ns.values())
    if compile_ns < 0.05 * whole_ns or _compiled_again(series) is not None:  # below, a longer run makes up for it
        return None
    return series.finding(
        "compiling",
        f"compiling took {format_duration(compile_ns / 1e9)}, the steps {format_duration(series.total_ns / 1e9)}.",
        "the run is short for what compiling costs.",
        "nothing if it goes on for long; otherwise speed.compile: false, or a cache of compiled code that is kept "
        "(TORCHINDUCTOR_CACHE_DIR).",
        compile_ns,
        aside=True,
    )


def _aside(series: Series) -> Finding | None:
    parts = {name: series.beside_ns.get(name, 0) for name in ("evaluation", "checkpoint")}
    lost_ns, whole_ns = sum(parts.values()), series.total_ns + sum(series.beside_ns.values())
    if lost_ns < 0.1 * whole_ns:  # a run that is watched and kept spends some per cent
        return None
    dearest = max(parts, key=lambda name: parts[name])
    setting = {"evaluation": "eval.every, or fewer samples", "checkpoint": "checkpoint.every"}[dearest]
    took = " and ".join(f"{name}s took {format_duration(ns / 1e9)}" for name, ns in parts.items() if ns)
    return series.finding(
        "beside-training",
        f"{took}, the steps {format_duration(series.total_ns / 1e9)}.",
        f"the run stops for its {dearest}s too often, each takes too long, or the run is short.",
        f"a larger {setting}.",
        lost_ns,
        aside=True,
    )


def _uneven_work(steady: Series) -> Finding | None:
    lost_ns = sum(step.imbalance * step.duration_ns for step in steady.steps)
    if lost_ns < 0.05 * steady.total_ns:  # packs that are dealt out well lose 1 to 2 %
        return None
    ranks = {step.heaviest_rank for step in steady.steps}
    which = f"rank {ranks.pop()}, always" if len(ranks) == 1 else "now one rank, now another"
    return steady.finding(
        "heavy-pack",
        f"ranks wait at least {format_share(lost_ns / steady.total_ns)} of the time for the one with the most work "
        f"({which}).",
        "the packs of a step differ in FLOPs: long samples cost more than short ones of as many tokens, images more "
        "than text.",
        "packs that are planned over a length index, which carry equal FLOPs (no data.stream; `headway pack` shows the "
        "plan); or more packs a step (optim.accumulation).",
        lost_ns,
    )


def _slow_rank(steady: Series) -> Finding | None:
    slow = [step for step in steady.steps if step.slowest_speed is not None and step.slowest_speed < 0.9]
    ranks = {step.slowest_rank for step in slow}
    if len(ranks) != 1 or 2 * len(slow) <= len(steady.steps):  # devices of one kind agree within 3 %, and chance varies
        return None
    speed = median(step.slowest_speed or 0.0 for step in slow)
    return steady.finding(
        "slow-rank",
        f"rank {ranks.pop()} computes at {format_share(speed)} of the ranks' median speed, whatever work it is given.",
        "its device is throttled or shared, or its host is.",
        "the run without that machine, once its clocks, temperature and other processes have been looked at.",
        sum((1 - (step.slowest_speed or 1.0)) * step.duration_ns for step in slow),
    )


def _memory_limit(series: Series) -> Finding | None:
    memory = max((step.memory_share or 0.0 for step in series.steps), default=0.0)
    if memory < 0.95:  # the rest goes to libraries, and to pieces too small for a request
        return None
    return series.finding(
        "memory-limit",
        f"peak memory is {format_share(memory)} of the device's.",
        "a step that needs a little more fails, and an allocator near its limit frees and asks again, which waits for "
        "the device.",
        "`headway train --dry-run`, which shows what holds it; speed.recompute, smaller packs (data.tokens_per_pack) "
        "or more shards make room.",
        0,
    )


def _alike(steady: Series) -> str:
    """Say so where nearly all steps have as many tokens: then it was not more work."""
    tokens = [step.tokens for step in steady.steps if step.tokens]
    alike = len(tokens) == len(steady.steps) and usual_tokens(tokens) is not None
    return ", though nearly all have as many tokens" if alike else ""


def usual_tokens(tokens: Sequence[float]) -> float | None:
    """Tokens that three quarters of the steps have, to 5 %; None where steps differ more."""
    usual = median(tokens)
    alike = sum(abs(count / usual - 1) < 0.05 for count in tokens)
    return usual if 4 * alike >= 3 * len(tokens) else None


def _mfu(mfu: float) -> str:
    return format_share(mfu) if mfu >= 0.01 else f"{100 * mfu:.2f} %"


IN_STEPS: tuple[Callable[[Series], Finding | None], ...] = (  # of steps without slow first ones
    _unstable,
    _slow_now_and_then,
    _drift,
    _uneven_work,
    _slow_rank,
)
OF_THE_RUN: tuple[Callable[[Series], Finding | None], ...] = (_compiled_again, _compiling, _aside, _memory_limit)
