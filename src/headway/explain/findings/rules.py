"""The engine of findings: it asks the rules of all subjects, and orders their findings.

To add a finding is to write a function from evidence to an `Observation` in the file of its subject, and to name it in
the `RULES` of that file with the least share that is worth a word.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from headway.explain.events import NONE
from headway.explain.explanation import MOST, Finding
from headway.explain.findings import device, host, loops, patterns, pauses, products, ranks, rollout, series
from headway.explain.findings.evidence import RunEvidence, StepEvidence
from headway.explain.findings.gaps import StepPauses, pauses_of
from headway.explain.findings.patterns import dearest_parts
from headway.explain.findings.rule import (
    OF_A_WHOLE_RUN,
    FindingPlace,
    Observation,
    Rule,
    RuleObserver,
    TimeOf,
    as_it_came,
    observe,
)
from headway.explain.measurement import MATMUL
from headway.report import format_ms
from headway.report.step_lines import NAMES, SLOW
from headway.words import Argument

_SUBJECTS = (host, pauses, loops, patterns, products, device, ranks, rollout, series)
RULES: tuple[Rule, ...] = tuple(rule for subject in _SUBJECTS for rule in subject.RULES)
LEAST = 0.20  # part of the steps from which a loss without a named cause is a finding
_NO_LOSS = ("useful", MATMUL, "ceiling")
_OF_KERNELS = ("memory", "optimizer", "unexplained", f"{SLOW}.")  # lines whose time is operators' alone
_COVERED = 0.25  # part of a loss from which other findings explain it


def find(steps: StepEvidence | None = None, run: RunEvidence | None = None) -> tuple[Finding, ...]:
    """Find the largest losses of a job's steps, and say which remedy to try first.

    Args:
        steps: waterfalls of a trace, or of a run's records without the slow first ones.
        run: all steps of a run, as its records or its log tell them; None of a trace.

    Returns:
        At most five. Those that name a cause come first, the largest before the others; then what a run chose, what
        costs nothing yet, what names no cause, and what passes by itself.
    """
    findings: dict[str, tuple[FindingPlace, Finding]] = {}
    covered: list[tuple[str, int]] = []  # findings so far: the lines that the loss lies in, and the loss [ns]
    named_ns = 0  # time in the steps that findings so far name a cause of, without the wait for data
    for name, observer, evidence in _asked(steps, run):
        observation = None if name in findings else observer.look(evidence)
        if observation is None:
            continue
        time, place = observation.time or observer.time, observer.place
        counted = run.steady if evidence is run and time not in OF_A_WHOLE_RUN else evidence
        # A loss between the steps is a part of the steps and the time between them together.
        beside_ns = sum(counted.beside_ns.values()) if time is TimeOf.BESIDE else 0
        total_ns = beside_ns + (counted.full_ns if time is TimeOf.MACHINE else counted.duration_ns)
        least_ns = observer.least * total_ns
        observation, once = as_it_came(observation, {step.step for step in counted.steps}, least_ns)
        place = FindingPlace.PASSING if once else place
        lost_ns = max(0, observation.ns - (named_ns if place is FindingPlace.VAGUE else 0))
        # A single pause while others had the core is theirs as well as the loop's.
        if lost_ns < least_ns or (once and evidence is steps and steps.is_crowded):
            continue
        finding = _finding(name, place, observation, counted, lost_ns, total_ns, beside_ns)
        # A single pause tells no rate of other steps.
        when = once or observation.when
        findings[name] = place, replace(finding, when=when, mfu_to=None) if when else finding
        named_ns += finding.ns * counted.num_steps if time is TimeOf.STEPS else 0
        covered += [(line, round(lost_ns)) for line in observer.lines]
    if steps is not None and steps.num_steps and (observation := largest_loss(steps, covered)) is not None:
        name, place = "largest-loss", FindingPlace.UNEXPLAINED
        findings[name] = place, _finding(name, place, observation, steps, observation.ns, steps.duration_ns)
    in_order = sorted(findings.values(), key=lambda placed: (placed[0], -placed[1].ns, placed[1].id))
    return tuple(finding for _, finding in in_order[:MOST])


def _asked(
    steps: StepEvidence | None, run: RunEvidence | None
) -> list[tuple[str, RuleObserver[Any], StepEvidence | RunEvidence]]:
    """List the observers that have evidence, each with its rule's name, of two of a rule that of records first."""
    observers: list[tuple[str, RuleObserver[Any], StepEvidence | RunEvidence]] = []
    for rule in RULES:
        if rule.in_records is not None and run is not None and run.num_steps:
            evidence = run if rule.in_records.time in OF_A_WHOLE_RUN else run.steady
            observers.append((rule.name, rule.in_records, evidence))
        if rule.in_trace is not None and steps is not None and steps.num_steps:
            observers.append((rule.name, rule.in_trace, steps))
    # Vague ones last, which are charged with what the others leave.
    return sorted(observers, key=lambda row: row[1].place is FindingPlace.VAGUE)


def _finding(
    name: str,
    place: FindingPlace,
    observation: Observation,
    evidence: StepEvidence | RunEvidence,
    lost_ns: float,
    total_ns: int,
    beside_ns: int = 0,
) -> Finding:
    """Make the finding of an observation: its loss as a share of a time, and MFU with and without it."""
    mfu_ns = evidence.full_ns + beside_ns  # MFU is that of the steps as they were measured
    lost_ns, useful_ns, mfu_to = max(round(lost_ns), 0), evidence.useful_ns, None
    # Losses of findings at these places are bounds.
    is_promise = place not in (FindingPlace.VAGUE, FindingPlace.UNEXPLAINED)
    if is_promise and useful_ns is not None and 0 < lost_ns < total_ns:
        mfu_to = min(evidence.most_mfu, useful_ns / (mfu_ns - lost_ns))
    advice = observation.next
    if observation.setting and isinstance(evidence, StepEvidence) and evidence.is_headway_train:
        advice = f"{advice.removesuffix('.')}; here: {observation.setting}."
    return Finding(
        id=name,
        seen=observation.message,
        cause=observation.cause,
        next=advice,
        ns=evidence.of_a_step(lost_ns),
        share=lost_ns / total_ns,
        mfu_from=None if useful_ns is None else useful_ns / mfu_ns,
        mfu_to=mfu_to,
    )


def largest_loss(evidence: StepEvidence, covered: Collection[tuple[str, int]]) -> Observation | None:
    """State the facts of the largest loss, if it is large and no finding, by line and loss [ns], is about it."""
    if not evidence.spent_by_step:
        return None
    lines = Counter({key: evidence.ns_of(key) for key in evidence.keys if not key.startswith(_NO_LOSS)})
    if evidence.is_crowded:
        lines = Counter({key: ns for key, ns in lines.items() if not key.startswith(_OF_KERNELS)})
    if not lines:
        return None
    ((key, ns),) = lines.most_common(1)
    named_ns = sum(loss for line, loss in covered if key.startswith(line))
    if ns < LEAST * evidence.duration_ns or named_ns >= _COVERED * ns:
        return None
    options = {f"by_{by}": Argument("by", example=by) for by in ("module", "kernel", "gemm")}
    if key.startswith("idle"):
        facts = _gaps(evidence, key)
    elif key.startswith(f"{SLOW}."):
        facts = f"most of it in {dearest_parts(evidence, MATMUL)} of all products"
    else:
        facts = f"most of it in {dearest_parts(evidence, key.partition('.')[0])}"
    name = NAMES.get(key) or f"{SLOW}: {key.removeprefix(f'{SLOW}.')}"
    if evidence.is_cpu:
        name = name.replace("kernels", "operators").replace("idle: host late (launches)", "Python between operators")
    kind = "/idle" * key.startswith("idle")
    return observe(evidence, f"largest-loss{kind}", ns, name=name, facts=facts, **options)


def _gaps(evidence: StepEvidence, key: str) -> str:
    steps = pauses_of(evidence)
    gaps = [(step, gap) for step in steps for gap in step.gaps] if key == "idle.launch" else []
    if key == "idle.other":
        return _launched_before(steps)
    if not gaps:
        parts = evidence.parts(key).most_common(2)
        return (
            "most of it " + ", ".join(f"{name} ({evidence.share(ns)})" for name, ns in parts) if parts else "no parts"
        )
    step, longest = max(gaps, key=lambda pair: pair[1].ns)
    around = step.surrounding(longest)
    place = step.measured.trace.names[step.host.name[around]] if around != NONE else ""
    where = f"while the host was in {place}" if place else "while the trace shows nothing that the host did"
    return f"{len(gaps) / len(steps):,.0f} gaps a step, the longest of {format_ms(longest.ns)} ms {where}"


def _launched_before(steps: list[StepPauses]) -> str:
    gaps = [(step, gap) for step in steps for gap in step.waiting_gaps]
    if not gaps:
        return "its gaps lie between the events of several streams"
    step, (ns, event) = max(gaps, key=lambda pair: pair[1][0])
    attribution, trace = step.measured.attribution, step.measured.trace
    launch = int(attribution.launch[event])
    name = trace.names[trace.device.name[event]][:60]
    text = f"{len(gaps) / len(steps):,.0f} gaps a step, the longest of {format_ms(ns)} ms before the kernel {name}"
    if launch == NONE:
        return f"{text}, whose launch the trace does not have"
    before_ns = int(trace.device.start_ns[event]) - int(trace.host.start_ns[launch])
    call = trace.names[trace.host.name[launch]]
    return f"{text}, which {call} had launched {format_ms(before_ns)} ms before: the device waited for itself"
