"""Rules about pauses of the host: each names a cause only where a trace or records show it.

A few long gaps are pauses: an allocation, the first use of a kernel, a graph that is replayed late, garbage that is
collected, something else than training, or whatever the host's stack tells.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from headway.explain.attribution import Phase
from headway.explain.findings import loops
from headway.explain.findings.evidence import RunEvidence, StepEvidence
from headway.explain.findings.gaps import (
    ANNOTATION,
    ENGINE,
    Pause,
    StepPauses,
    collected_ns,
    is_allocation,
    pauses_of,
    purpose_of,
    recorded_pause,
    stacks_of,
)
from headway.explain.findings.rule import Observation, Rule, RuleObserver, TimeOf, most_common, observe
from headway.meter.pauses import PURPOSES

_OWN_CODE = "code of the loop that calls no operator of PyTorch runs between the operators."
_OFTEN = 0.10  # part of the time from which checkpoints are too frequent
_LOOKED_AT = 40  # longest pauses of a job that are looked at one by one


def garbage_collection(evidence: StepEvidence) -> Observation | None:
    """Collections of Python's garbage while nothing else ran."""
    steps = pauses_of(evidence)
    ns = collected_ns(steps) if evidence.is_cpu else sum(gap.collected_ns for step in steps for gap in step.gaps)
    number = sum(len(step.collections) for step in steps)
    if not ns:
        return None
    by_step: Counter[int] = Counter()
    for step in steps:
        by_step[step.step.window.step] += collected_ns([step])
    return observe(evidence, "garbage-collection", ns, by_step=by_step, number=number / evidence.num_steps)


def recorded_collections(evidence: RunEvidence) -> Observation | None:
    """Python's garbage collections, for which all its threads stand still."""
    ns = sum(step.collection_ns for step in evidence.steps)
    by_step = {step.step: step.collection_ns for step in evidence.steps}
    return observe(evidence, "garbage-collection", ns, by_step=by_step)


def _classed(evidence: StepEvidence, kind: str) -> tuple[int, Counter[str], list[tuple[StepPauses, Pause]]]:
    """Long pauses of one cause: their time [ns], the host's surroundings, and the pauses themselves."""
    of_loops = {id(gap) for gap in loops.pauses_in_loop(evidence)}
    pauses = [
        (step, gap) for step in pauses_of(evidence) for gap in step.gaps if gap.is_long and id(gap) not in of_loops
    ]
    pauses.sort(key=lambda pair: -pair[1].own_ns)
    ns, places, members = 0, Counter[str](), []
    for step, gap in pauses[:_LOOKED_AT]:
        cause, place = step.cause(gap)
        if cause == "pause":
            # A pause that the stacks show to be a chore is that chore, announced to the meter or not.
            stacks = stacks_of(evidence, step, gap)
            stack = stacks.most_common(1)[0][0] if stacks else ()
            purpose = purpose_of(stack)
            cause = purpose.name if purpose.is_chore else cause
            # Between operators of backward no code of the loop runs: there it waits for a thread that lost its core.
            if gap.preempted_ns and ENGINE.match(" ".join(stack)):
                continue
        if cause == kind:
            ns += gap.own_ns
            places[place] += gap.own_ns
            members.append((step, gap))
    return ns, places, members


def host_pause(evidence: StepEvidence) -> Observation | None:
    """A few long gaps, and the host's surroundings in them."""
    ns, places, members = _classed(evidence, "pause")
    if not members:
        return None
    stacks = _stacks(evidence, members)
    values: dict[str, Any] = {
        "idle": "called no operator" if evidence.is_cpu else "launched nothing",
        "number": len(members) / evidence.num_steps,
        "longest": max(gap.ns for _, gap in members),
        "place": most_common(places, ""),
    }
    kind = ("/annotation" if values["place"].startswith(ANNOTATION) else "/event") if values["place"] else ""
    # The stack that the pauses were in longest names the code; the host's annotation the part of the loop.
    if stacks:
        stack, stack_ns = stacks.most_common(1)[0]
        kind, words = "/code", purpose_of(stack).in_trace
        values |= {**words, "cause": words["cause"] or _OWN_CODE, "place": _frames(stack)}
        values["part"] = stack_ns / stacks.total()
    return observe(evidence, f"host-pause{kind}", ns, by_step=_by_step(members), **values)


def _by_step(members: Sequence[tuple[StepPauses, Pause]]) -> Counter[int]:
    """Time of pauses in each step [ns], by its number."""
    by_step: Counter[int] = Counter()
    for step, gap in members:
        by_step[step.step.window.step] += gap.own_ns
    return by_step


def chore(evidence: StepEvidence, phase: Phase) -> Observation | None:
    """Time within the steps in which the loop does something else than training."""
    parts = evidence.parts("aside")
    names = phase.value, f"{phase.value}, idle"
    # Long gaps in which stacks show a chore that nobody announced to the meter count as well.
    paused_ns, _, members = _classed(evidence, phase.value)
    stacks, by_step = _stacks(evidence, members), _by_step(members)
    place = _frames(stacks.most_common(1)[0][0]) if stacks else ""
    ns = sum(parts[name] for name in names) + paused_ns
    for step in evidence.steps:
        by_step[step.step] += sum(
            line.parts.get(name, 0) for line in step.lines if line.key == "aside" for name in names
        )
    words = PURPOSES[phase.value].in_trace
    values = {**words, "what": words["message"], "place": place}
    return observe(evidence, f"chore{'/code' * bool(place)}", ns, by_step=by_step, **values)


def beside(evidence: RunEvidence, what: str) -> Observation | None:
    """Evaluations, or checkpoints, between the steps."""
    ns = evidence.beside_ns.get(what, 0)
    by_step = evidence.beside_by_step.get(what, {})
    return observe(evidence, f"chore/{what}", ns, by_step=by_step, steps=evidence.duration_ns)


def _stacks(evidence: StepEvidence, members: Sequence[tuple[StepPauses, Pause]]) -> Counter[tuple[str, ...]]:
    """Time of each stack of the loop's thread in pauses [ns]."""
    stacks: Counter[tuple[str, ...]] = Counter()
    for step, gap in members:
        stacks.update(stacks_of(evidence, step, gap))
    return stacks


def _frames(stack: Sequence[str]) -> str:
    """Name the innermost frame, and the first of the loop's own code that led to it."""
    innermost = stack[0].removeprefix("~")
    own = next((frame for frame in stack if not frame.startswith("~")), None)
    return innermost if own is None or own == innermost else f"{innermost}, called by {own}"


def allocation(evidence: StepEvidence) -> Observation | None:
    """Memory that is asked of the device, or given back, within the step."""
    ns, places, _ = _classed(evidence, "allocation")
    for call, waited_ns in evidence.parts("idle.sync").items():
        if is_allocation(call):
            ns += waited_ns
            places[call] += waited_ns
    if not ns:
        return None
    return observe(evidence, "allocation", ns, place=most_common(places))


def paused_by(evidence: StepEvidence, cause: str, name: str) -> Observation | None:
    """Libraries and kernels that are loaded when they are first needed, or a graph that the host replays late."""
    ns, places, _ = _classed(evidence, cause)
    return observe(evidence, name, ns, place=most_common(places, "code that the trace does not show")) if ns else None


def recorded_checkpoints(evidence: RunEvidence) -> Observation | None:
    """Checkpoints within the steps of a run, if these are worth a word, else checkpoints between the steps."""
    steady = evidence.steady
    within = recorded_pause(steady, "checkpoint")
    if within is not None and within.ns >= _OFTEN * steady.duration_ns:
        return within._replace(time=TimeOf.STEPS)
    return beside(evidence, "checkpoint")


_LATE, _CHORE = ("idle.launch",), ("aside", "idle.launch")  # announced to the meter, or seen in stacks
RULES = (
    # A pause is one gap that is a fiftieth of the step; 5 % is more than one that comes now and then. A loop zeroes
    # gradients, counts and logs a line between the phases; a tenth of the time is more than that.
    Rule(
        "host-pause",
        RuleObserver(host_pause, 0.05, lines=_LATE),
        RuleObserver(partial(recorded_pause, purpose=""), 0.10),
    ),
    # Collections of young objects take some thousandths of the time in every program.
    Rule(
        "garbage-collection",
        RuleObserver(garbage_collection, 0.05, lines=_LATE),
        RuleObserver(recorded_collections, 0.05),
    ),
    # Allocations and first uses belong to the first steps; a few in later steps are worth a word.
    Rule("allocation", RuleObserver(allocation, 0.03, lines=(*_LATE, "idle.sync"))),
    *(
        Rule(name, RuleObserver(partial(paused_by, cause=cause, name=name), 0.05, lines=_LATE))
        for cause, name in (("first-use", "first-use"), ("graph", "graph-late"))
    ),
    # A line of numbers costs the host a millisecond or two, and several ranks wait for each other to write it.
    Rule(
        "logging",
        RuleObserver(partial(chore, phase=Phase.LOGGING), 0.10, lines=_CHORE),
        RuleObserver(partial(recorded_pause, purpose="logging"), 0.05),
    ),
    # Young's formula puts a checkpoint's cost at a few per cent where devices fail daily; more is too often.
    Rule(
        "checkpoint",
        RuleObserver(partial(chore, phase=Phase.CHECKPOINT), _OFTEN, lines=_CHORE),
        RuleObserver(recorded_checkpoints, _OFTEN, TimeOf.BESIDE),
    ),
    # Judging is useful work, but a fifth of the time is much of it.
    Rule(
        "evaluation",
        RuleObserver(partial(chore, phase=Phase.EVALUATION), 0.20, lines=_CHORE),
        RuleObserver(partial(beside, what="evaluation"), 0.20, TimeOf.BESIDE),
    ),
)
