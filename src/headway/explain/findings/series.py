"""Rules about the steps of a run in a row: rates that vary or fall, slow first steps, and time between the steps."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import median, quantiles

import numpy as np

from headway.explain.attribution import Phase
from headway.explain.findings.evidence import SHARED, RunEvidence, RunStep, StepEvidence
from headway.explain.findings.pauses import chore
from headway.explain.findings.rule import FindingPlace, Observation, Rule, RuleObserver, TimeOf, observe
from headway.report import format_duration, format_share

FALLING = "falling-rate"
_FEWEST, _LEAST_CHANGE, _MOST_STRAY = 6, 1.25, 0.1  # steps of a part; ratio of the parts; steps on the wrong side
_MOST_SKIPPED = 0.01  # part of the steps; a dynamic loss scale tries a larger value every one or two thousand steps
CHANGED = "changed-speed"
_MOST_STAGES = 8  # stages of a run; sources that come and go more often are a mixture


def changed(evidence: RunEvidence) -> Observation | None:
    """A speed that falls once and stays low; a speed that rises had slow steps before it (`first_steps`)."""
    return _speed_change(evidence, is_slower=True)


def _speed_change(evidence: RunEvidence, *, is_slower: bool) -> Observation | None:
    rated = _of_stages(evidence)
    place = _change([rate for rate, _ in rated])
    if place is None:
        return None
    before, after = rated[:place], rated[place:]
    # The faster part says what steps can take; the slower one is charged with the difference.
    usual_before, usual_after = (median(rate for rate, _ in part) for part in (before, after))
    if is_slower != (usual_after < usual_before):
        return None
    factor = max(usual_before, usual_after) / min(usual_before, usual_after)
    fast, slow = (usual_before, after) if is_slower else (usual_after, before)
    # Another change at the same step is the likely cause; without one the cause lies outside of the loop.
    steps = [step for _, step in before], [step for _, step in after]
    differences, alike = _differences(*steps)
    changes = f"; {_list(differences)} changed there" if differences else ""
    changes += f"; {_list(alike)} did not change" if alike else ""
    return observe(
        evidence,
        "/".join(filter(None, [CHANGED, " ".join(["faster"] * (not is_slower) + ["loop"] * bool(differences))])),
        sum(step.duration_ns * (1 - rate / fast) for rate, step in slow),
        first=steps[0][0].step,
        last=steps[1][-1].step,
        at=steps[1][0].step,
        factor=factor,
        changes=changes + _slower_part(*(steps if is_slower else steps[::-1])),
        differences=_list(differences),
    )


def _rated(evidence: RunEvidence) -> list[tuple[float, RunStep]]:
    """Steps with their rates; a speed that changed once, or with a stage of the run, is taken out of them."""
    rated = _of_stages(evidence)
    place = _change([rate for rate, _ in rated])
    if place is None:
        return rated
    before, after = (median(rate for rate, _ in part) for part in (rated[:place], rated[place:]))
    return [(rate * (before / after if number >= place else 1), step) for number, (rate, step) in enumerate(rated)]


def _of_stages(evidence: RunEvidence) -> list[tuple[float, RunStep]]:
    """Steps with their rates, scaled to the median of the run's first stage, since stages differ in work.

    None of a run on a crowded machine: rates leave out the waits of the loop's thread, but it waits for other ranks and
    threads too, which wait for cores themselves.
    """
    rated = [] if evidence.is_crowded else [(step.rate, step) for step in evidence.steps if step.rate]
    begins = [0] + [n for n in range(1, len(rated)) if rated[n][1].stage != rated[n - 1][1].stage]
    if not 1 < len(begins) <= _MOST_STAGES:
        return rated
    parts = [rated[begin:end] for begin, end in pairwise([*begins, len(rated)])]
    usual = median(rate for rate, _ in parts[0])
    return [
        (rate * usual / stage_rate, step)
        for part in parts
        for stage_rate in [median(rate for rate, _ in part)]
        for rate, step in part
    ]


def _change(rates: Sequence[float]) -> int | None:
    """Find the one place from which on rates differ for good; None without such a place.

    The place is where two means describe the logarithms of the rates best. It is told if the two differ by a quarter
    and by more than the steps of either part scatter, and if a fall that goes on all the time explains them worse.
    """
    count = len(rates)
    if count < 2 * _FEWEST:
        return None
    logs = np.log(np.asarray(rates))
    # Squares that remain around the means of both parts, for each place to divide at.
    sums, places = np.cumsum(logs), np.arange(1, count)
    remaining = (logs**2).sum() - sums[:-1] ** 2 / places - (sums[-1] - sums[:-1]) ** 2 / (count - places)
    place = int(np.argmin(remaining[_FEWEST - 1 : count - _FEWEST])) + _FEWEST
    before, after = logs[:place], logs[place:]
    apart = abs(np.median(before) - np.median(after))
    scatter = max(float(np.median(np.abs(part - np.median(part)))) for part in (before, after))
    if apart < math.log(_LEAST_CHANGE) or apart < 4 * scatter:
        return None
    # A slope over all steps is a drift, with a finding of its own.
    slope = np.polyfit(np.arange(count), logs, 1)
    drift = float(((logs - np.polyval(slope, np.arange(count))) ** 2).sum())
    # Steps that change back, as where another process comes and goes, lie on both sides of the middle.
    middle = (np.median(before) + np.median(after)) / 2
    stray = (
        float(np.mean((before > middle) != (np.median(before) > middle))),
        float(np.mean((after > middle) != (np.median(after) > middle))),
    )
    return place if remaining[place - 1] < drift / 2 and max(stray) <= _MOST_STRAY else None


def _differences(before: Sequence[RunStep], after: Sequence[RunStep]) -> tuple[list[str], list[str]]:
    """Name the loop's own numbers that changed between two parts of a run, with their sizes, and those that stayed."""
    parts = before, after
    tokens = [median(counts) for part in parts if (counts := [step.tokens for step in part if step.tokens])]
    waits = [sum(step.waited_ns for step in part) / sum(step.duration_ns for step in part) for part in parts]
    again = sum(step.has_compiled_again for step in after)
    facts = [  # name, whether it changed, and how
        (
            "data",
            abs(waits[1] - waits[0]) > 0.1,
            f"waiting for data ({format_share(waits[0])} and {format_share(waits[1])} of the time)",
        ),
        ("compiling", again > max(2, 0.05 * len(after)), f"compiling (in {again} steps)"),
    ]
    if len(tokens) == 2:  # both parts have tokens
        lengths = f"lengths ({tokens[0]:,.0f} and {tokens[1]:,.0f} tokens a step)"
        facts.insert(0, ("lengths", abs(tokens[1] / tokens[0] - 1) > 0.1, lengths))
    return [text for _, changes, text in facts if changes], [name for name, changes, _ in facts if not changes]


def _slower_part(fast: Sequence[RunStep], slow: Sequence[RunStep]) -> str:
    """Say whether one phase of the step or all became slower; "" if phases are unknown."""
    means = [
        {name: sum(step.phases_ns[name] for step in timed) / len(timed) for name in timed[0].phases_ns}
        for part in (fast, slow)
        if (timed := [step for step in part if step.phases_ns])
    ]
    if len(means) < 2:
        return ""
    added = {name: ns - means[0].get(name, 0.0) for name, ns in means[1].items()}
    total, (name, most) = sum(added.values()), max(added.items(), key=lambda item: item[1])
    if total > 0 and most > 0.8 * total:
        return f"; nearly all of it is in the phase '{name}'"
    return "; all phases became slower" if total > 0 else ""


def _list(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)


def unstable(evidence: RunEvidence) -> Observation | None:
    """Steps that take twice as long as other steps for the same work."""
    rated = _rated(evidence)
    if len(rated) < 3:
        return None
    deciles = quantiles([rate for rate, _ in rated], n=10, method="inclusive")
    low, high = deciles[0], deciles[-1]
    # Steps of one shape vary by 2 % on a device of their own; on a CPU that others use as well 1.9 times were seen.
    if high < 2 * low:
        return None
    # Ranks wait for each other, and so for the cores that any of them waits for; which one, nobody counts.
    is_job = any(step.late_rank is not None or step.imbalance for step in evidence.steps)
    if is_job and evidence.core_wait_ns >= SHARED * evidence.full_ns:
        return None
    # An unsteady speed crosses the middle more than once; a speed that changes once has another finding.
    sides = [rate > (low + high) / 2 for rate, _ in rated]
    if sum(before != after for before, after in pairwise(sides)) < 2:
        return None
    slowest, fastest = min(rated, key=lambda pair: pair[0])[1], max(rated, key=lambda pair: pair[0])[1]
    return observe(
        evidence,
        "unstable-steps",
        sum(step.duration_ns * (1 - rate / high) for rate, step in rated),
        times=high / low,
        slowest=slowest.step,
        fastest=fastest.step,
        alike=_alike(evidence),
    )


def slow_now_and_then(evidence: RunEvidence) -> Observation | None:
    """A few steps that take over twice the usual time for their work."""
    rated = _rated(evidence)
    if len(rated) < 20:  # a tenth of the steps must be two at least
        return None
    usual = median(rate for rate, _ in rated)
    slow = [(rate, step) for rate, step in rated if rate < usual / 2]
    if not 0 < len(slow) <= len(rated) / 10:  # more are no exceptions
        return None
    numbers = [step.step for _, step in slow]
    strides = {after - before for before, after in pairwise(numbers)}
    every = f", every {strides.pop()} steps" if len(numbers) > 2 and len(strides) == 1 else ""
    examples = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if numbers[5:] else "")
    ns = sum(step.duration_ns * (1 - rate / usual) for rate, step in slow)
    values = {"number": len(slow), "all": len(rated), "every": every, "steps": examples}
    return observe(evidence, "slow-steps", ns, **values)


def drift(evidence: RunEvidence) -> Observation | None:
    """A rate that falls from the first third of the run to the last, without a break."""
    rated = _rated(evidence)
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
    ns = sum(step.duration_ns * (1 - rate / first) for rate, step in rated)
    steps = {"first": rated[0][1].step, "last": rated[-1][1].step}
    return observe(evidence, FALLING, ns, fall=1 - last / first, **steps)


def first_steps(evidence: RunEvidence) -> Observation | None:
    """Slow steps that the run begins with: a few far slower ones, or all up to some step."""
    num_first = evidence.num_first
    if not num_first:
        return _speed_change(evidence.steady, is_slower=False)
    first, others = evidence.steps[:num_first], evidence.steps[num_first:]
    usual_ns = median(step.duration_ns for step in others)
    which = "the first step" if num_first == 1 else f"the first {num_first} steps"
    took = ", ".join(format_duration(step.duration_ns / 1e9) for step in first[:3])
    comparison = f"{took}, the others {format_duration(usual_ns / 1e9)} (median)"
    if not evidence.is_timed:
        ratios = ", ".join(f"{step.duration_ns / usual_ns:.1f}" for step in first[:3])
        comparison = f"{ratios} times as long as the others"
    ns, number = sum(step.duration_ns - usual_ns for step in first), len(evidence.steps)
    return observe(evidence, "first-steps", ns, which=which, took=comparison, all=number)


def compiled_again(evidence: RunEvidence) -> Observation | None:
    """Code that is compiled anew all along the run."""
    every = sorted([*evidence.steps, *evidence.left_out], key=lambda step: step.step)
    again = [step.step for step in every[1:] if step.has_compiled_again]
    compile_ns = evidence.beside_ns.get("compile", 0)
    # Two or three are the usual ones: the first other shape, then dynamic shapes. More grow with the run.
    if len(again) < 4 or len(again) < 0.05 * len(every):
        return None
    return observe(evidence, "recompilation", compile_ns, number=len(again), last=again[-1], all=len(every))


def compiling(evidence: RunEvidence) -> Observation | None:
    """Compiling that takes long beside the steps, though it is over after the first ones."""
    compile_ns = evidence.beside_ns.get("compile", 0)
    if compiled_again(evidence) is not None:  # compiling again has a finding of its own
        return None
    return observe(evidence, "compiling", compile_ns, steps=evidence.duration_ns)


def compiled(evidence: StepEvidence, *, again: bool) -> Observation | None:
    """Compiling within the steps of a trace; whether it comes again, a single step does not tell."""
    return chore(evidence, Phase.COMPILE) if again == (len({step.step for step in evidence.steps}) > 1) else None


def memory_limit(evidence: RunEvidence) -> Observation | None:
    """Memory of the device that is nearly full, which costs no time yet."""
    memory = max((step.memory_share or 0.0 for step in evidence.steps), default=0.0)
    if memory < 0.95:  # the rest goes to libraries, and to pieces too small for a request
        return None
    return observe(evidence, "memory-limit", 0, memory=memory)


def far_from_compute(evidence: RunEvidence) -> Observation | None:
    """Time in which the device is far from computing at its rate, for whatever reason."""
    useful_ns = evidence.useful_ns
    # On a CPU whose phases are known there is nothing that this could add.
    if all(step.phases_ns and step.lead_ns is None for step in evidence.steps):
        return None
    # Kernels of training reach a fifth of the peak even where small: below 5 %, three quarters are no kernels.
    if useful_ns is None or useful_ns / evidence.duration_ns >= 0.05:
        return None
    mfu = useful_ns / evidence.duration_ns
    ns = evidence.duration_ns - 5 * useful_ns - sum(step.waited_ns for step in evidence.steps)
    return observe(evidence, "not-compute-bound", ns, mfu=_mfu(mfu), least=5 * mfu)


def broken_losses(evidence: RunEvidence) -> Observation | None:
    """A loss that is NaN or infinite, from some step on or now and then."""
    lines = [row for row in evidence.losses if row.loss is not None or row.num_nan]
    broken = [row for row in lines if row.is_broken]
    if not broken:
        return None
    first, last = broken[0].step, lines[-1].step
    kind = "infinite" if broken[0].loss is not None and math.isinf(broken[0].loss) else "NaN"
    stays = all(row.is_broken for row in lines if row.step >= first)
    when = f"from step {first:,} on" if stays and len(broken) > 1 else f"at step {first:,}"
    if not stays and len(broken) > 1:
        when = f"in {len(broken):,} of {len(lines):,} lines, first at step {first:,}"
    until = f", to step {last:,}, the last" if stays and len(broken) > 1 else ""
    return observe(evidence, "loss-not-finite", 0, when=when, kind=kind, until=until, step=first)


def broken_gradients(evidence: RunEvidence) -> Observation | None:
    """Norms of gradients that are NaN or infinite, or that have grown tenfold for good."""
    lines = [(row.step, row.grad_norm) for row in evidence.losses if row.grad_norm is not None]
    broken = [step for step, norm in lines if not math.isfinite(norm)]
    if broken and any(row.is_broken and row.step <= broken[0] for row in evidence.losses):
        return None  # gradients of a broken loss have no cause of their own
    if broken:
        when = f"in {len(broken):,} of {len(lines):,} lines, first at step {broken[0]:,}"
        return observe(evidence, "unstable-gradients/broken", 0, when=when)
    if len(lines) < 4 * _FEWEST:
        return None
    usual, end = (median(norm for _, norm in part) for part in (lines, lines[-max(3, len(lines) // 10) :]))
    if end <= 10 * usual or usual <= 0:
        return None
    step = next(step for step, norm in lines if norm > 10 * usual)
    values = {"end": end, "usual": usual, "step": step}
    return observe(evidence, "unstable-gradients", 0, when=f"from step {step:,} on", **values)


def rising_loss(evidence: RunEvidence) -> Observation | None:
    """A loss that rose and has not come back to where it was."""
    lines = [(row.step, row.loss) for row in evidence.losses if row.loss is not None and math.isfinite(row.loss)]
    if len(lines) < 4 * _FEWEST or min(loss for _, loss in lines) <= 0:
        return None
    window = max(3, len(lines) // 20)
    levels = [median(loss for _, loss in lines[n : n + window]) for n in range(len(lines) - window + 1)]
    lowest = min(range(len(levels)), key=levels.__getitem__)
    jumps = [abs(after - before) for (_, before), (_, after) in pairwise(lines)]
    # A fifth, and more than steps scatter: data of several kinds move a loss by some per cent.
    if levels[-1] < 1.2 * levels[lowest] or levels[-1] - levels[lowest] < 4 * median(jumps):
        return None
    middle = (levels[-1] + levels[lowest]) / 2
    step = next(step for step, loss in lines[lowest:] if loss > middle)
    values = {"low": levels[lowest], "first": lines[lowest][0], "end": levels[-1], "step": step}
    return observe(evidence, "rising-loss", 0, when=f"from about step {step:,} on", **values)


def skipped_updates(evidence: RunEvidence) -> Observation | None:
    """Updates that were left out, more than a loss scale that looks for its value does."""
    skipping = [row for row in evidence.losses if row.num_skipped]
    count = sum(row.num_skipped for row in skipping)
    num_steps = max(len(evidence.losses), evidence.losses[-1].step - evidence.losses[0].step) if skipping else 0
    if count < max(2, _MOST_SKIPPED * num_steps):
        return None
    first = skipping[0].step
    when = f"{count:,} times, first by step {first:,}"
    return observe(evidence, "skipped-updates", 0, when=when, number=count, step=first)


def _alike(evidence: RunEvidence) -> str:
    """Remark that nearly all steps have as many tokens, so that their work is the same; "" if they differ."""
    tokens = [step.tokens for step in evidence.steps if step.tokens]
    alike = len(tokens) == len(evidence.steps) and usual_tokens(tokens) is not None
    return ", though nearly all have as many tokens" if alike else ""


def usual_tokens(tokens: Sequence[float]) -> float | None:
    """Tokens that three quarters of the steps have, to 5 %; None if steps differ more."""
    usual = median(tokens)
    alike = sum(abs(count / usual - 1) < 0.05 for count in tokens)
    return usual if 4 * alike >= 3 * len(tokens) else None


def _mfu(mfu: float) -> str:
    return format_share(mfu) if mfu >= 0.01 else f"{100 * mfu:.2f} %"


RULES = (
    Rule("loss-not-finite", in_records=RuleObserver(broken_losses, 0.0, TimeOf.RUN, FindingPlace.LEARNING)),
    Rule("unstable-gradients", in_records=RuleObserver(broken_gradients, 0.0, TimeOf.RUN, FindingPlace.LEARNING)),
    Rule("skipped-updates", in_records=RuleObserver(skipped_updates, 0.0, TimeOf.RUN, FindingPlace.LEARNING)),
    Rule("rising-loss", in_records=RuleObserver(rising_loss, 0.0, TimeOf.RUN, FindingPlace.LEARNING)),
    # After the first steps nothing should be compiled at all; of a run their number counts.
    Rule(
        "recompilation",
        RuleObserver(partial(compiled, again=True), 0.02, lines=("aside",)),
        RuleObserver(compiled_again, 0.0, TimeOf.BESIDE),
    ),
    # Below, a longer run makes up for it.
    Rule(
        "compiling",
        RuleObserver(partial(compiled, again=False), 0.05, lines=("aside",)),
        RuleObserver(compiling, 0.05, TimeOf.BESIDE),
    ),
    # Other work on a machine makes steps some per cent slower now and then; below, nobody looks for a reason.
    Rule(CHANGED, in_records=RuleObserver(changed, 0.05)),
    Rule("unstable-steps", in_records=RuleObserver(unstable, 0.05)),
    # Less is not worth a search.
    Rule("slow-steps", in_records=RuleObserver(slow_now_and_then, 0.02)),
    Rule(FALLING, in_records=RuleObserver(drift, 0.0)),
    Rule("memory-limit", in_records=RuleObserver(memory_limit, 0.0, TimeOf.RUN, FindingPlace.LIMIT)),
    Rule("not-compute-bound", in_records=RuleObserver(far_from_compute, 0.05, place=FindingPlace.VAGUE)),
    # A long run makes up for them.
    Rule("first-steps", in_records=RuleObserver(first_steps, 0.05, TimeOf.RUN, FindingPlace.PASSING)),
)
