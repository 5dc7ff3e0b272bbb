"""Rules about pauses of the host: each names a cause only where a trace or records show it.

A few long gaps are pauses: an allocation, the first use of a kernel, a graph that is replayed late, garbage that is
collected, something else than training, or whatever the host's stack tells.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial

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
from headway.explain.findings.rule import Observation, Rule, RuleObserver, TimeOf
from headway.meter.pauses import PURPOSES
from headway.report import format_duration, format_ms, format_share

_NOT_KNOWN_MESSAGE = (
    "not known: code outside of PyTorch, such as logging, a checkpoint, an evaluation, collecting garbage, a callback, "
    "or another process that had its core."
)
_COLLECTED = "Python collected garbage for {}"
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
    return Observation(
        ns,
        f"Python collected garbage {number / evidence.num_steps:,.1f} times a step, for {evidence.share(ns)} of the "
        "time, in which the loop stood still.",
        "gc.collect() is called in the step, or the collector runs often over many objects that live long.",
        "gc.freeze() after the start and gc.disable() with a collection every some hundred steps; no gc.collect() and "
        "no torch.cuda.empty_cache() in the step.",
        by_step=by_step,
        once=_COLLECTED,
    )


def recorded_collections(evidence: RunEvidence) -> Observation | None:
    """Python's garbage collections, for which all its threads stand still."""
    ns = sum(step.collection_ns for step in evidence.steps)
    return Observation(
        ns,
        f"Python collected garbage for {evidence.share(ns)} of the time.",
        "gc.collect() is called in the loop, or a large heap of Python's objects is gone through again and again.",
        "gc.freeze() after the set-up, gc.disable() with a collection every some hundred steps, or fewer and larger "
        "objects (tensors, arrays) in place of many small ones.",
        by_step={step.step: step.collection_ns for step in evidence.steps},
        once=_COLLECTED,
    )


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


def _extent(evidence: StepEvidence, members: Sequence[tuple[StepPauses, Pause]]) -> str:
    number = len(members) / evidence.num_steps
    longest = max(gap.ns for _, gap in members)
    return f"{number:,.1f} pause{'' if number == 1 else 's'} a step, the longest of {format_ms(longest)} ms"


def host_pause(evidence: StepEvidence) -> Observation | None:
    """A few long gaps, and the host's surroundings in them."""
    ns, places, members = _classed(evidence, "pause")
    if not members:
        return None
    stacks: Counter[tuple[str, ...]] = Counter()
    for step, gap in members:
        stacks.update(stacks_of(evidence, step, gap))
    idle = "called no operator" if evidence.is_cpu else "launched nothing"
    message = f"the host {idle} in {_extent(evidence, members)}: {evidence.share(ns)} of the time."
    by_step = _by_step(members)
    # The stack that the pauses were in longest names the code; the host's annotation the part of the loop.
    if stacks:
        stack, _ = stacks.most_common(1)[0]
        words = purpose_of(stack).in_trace
        share = stacks[stack] / stacks.total()
        where = f" Python was in {_frames(stack)} for {format_share(share)} of it."
        cause = words["cause"] or "code of the loop that calls no operator of PyTorch runs between the operators."
        once = f"the host {idle} for {{}}, mostly in {_frames(stack)}"
        return Observation(ns, message + where, cause, words["advice"], by_step=by_step, once=once)
    place = next((name for name, _ in places.most_common() if name), "")
    if place:
        return Observation(
            ns,
            f"{message} It was in {place}.",
            _NOT_KNOWN_MESSAGE
            if place.startswith(ANNOTATION)
            else f"{place} runs on the host while the device has nothing to do.",
            "do that work ahead of time or in a thread of its own, less often, or not in the step.",
            by_step=by_step,
            once=f"the host {idle} for {{}}, in {place}",
        )
    return Observation(
        ns,
        f"{message} The trace shows nothing that it did meanwhile.",
        _NOT_KNOWN_MESSAGE,
        "a profile with stacks (with_stack=True, or headway.profile, which samples them), which names the code.",
        by_step=by_step,
        once=f"the host {idle} for {{}}",
    )


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
    paused_ns, place, by_step = paused_for(evidence, phase)
    ns = sum(parts[name] for name in names) + paused_ns
    for step in evidence.steps:
        by_step[step.step] += sum(
            line.parts.get(name, 0) for line in step.lines if line.key == "aside" for name in names
        )
    words = PURPOSES[phase.value].in_trace
    where = f" Python was in {place}." if place else ""
    message = f"{words['message']} {evidence.share(ns)} of the time.{where}"
    once = f"{words['message']} {{}}"
    return Observation(ns, message, words["cause"], words["advice"], words["setting"], by_step=by_step, once=once)


def beside(evidence: RunEvidence, what: str) -> Observation | None:
    """Evaluations, or checkpoints, between the steps."""
    ns = evidence.beside_ns.get(what, 0)
    advice = {
        "evaluation": "a larger eval.every, or fewer samples (eval.max_samples).",
        "checkpoint": "a larger checkpoint.every, and checkpoint.asynchronous: true, which writes while training goes "
        "on.",
    }[what]
    return Observation(
        ns,
        f"{what}s took {format_duration(ns / 1e9)}, the steps {format_duration(evidence.duration_ns / 1e9)}.",
        f"the run stops for its {what}s too often, each takes too long, or the run is short.",
        advice,
        by_step=evidence.beside_by_step.get(what, {}),
        once=f"the run's {what} took {{}}",
    )


def paused_for(evidence: StepEvidence, phase: Phase) -> tuple[int, str, Counter[int]]:
    """Add up the long gaps in which stacks show a chore that nobody announced to the meter.

    Returns:
        Their time in all steps [ns], the frames that they were in longest, "" without any, and their time by step.
    """
    ns, _, members = _classed(evidence, phase.value)
    stacks: Counter[tuple[str, ...]] = Counter()
    for step, gap in members:
        stacks.update(stacks_of(evidence, step, gap))
    return ns, _frames(stacks.most_common(1)[0][0]) if stacks else "", _by_step(members)


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
    ((place, _),) = places.most_common(1)
    return Observation(
        ns,
        f"nothing ran for {evidence.share(ns)} of the time while memory of the device was allocated or freed, mostly "
        f"in {place}.",
        "the caching allocator has no free block that fits: the first steps, sizes that change from step to step, "
        "memory near its limit, or torch.cuda.empty_cache() in the loop.",
        "profile later steps; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; sizes rounded up to a few; no "
        "empty_cache().",
    )


def first_use(evidence: StepEvidence) -> Observation | None:
    """Libraries and kernels that are loaded or tried out when they are first needed."""
    ns, places, members = _classed(evidence, "first-use")
    if not members:
        return None
    ((place, _),) = places.most_common(1)
    return Observation(
        ns,
        f"nothing ran for {evidence.share(ns)} of the time in the first call of {place}, which took far longer than "
        "later ones.",
        "a library is loaded or its kernels are tried out (cudnn.benchmark, lazy loading of modules).",
        "nothing in a long run: profile later steps; where shapes change all the time, cudnn.benchmark = False.",
    )


def graph_late(evidence: StepEvidence) -> Observation | None:
    """A graph of kernels that the host replays late."""
    ns, places, members = _classed(evidence, "graph")
    if not members:
        return None
    place = next((name for name, _ in places.most_common() if name), "")
    where = f" while the host was in {place}" if place else "; the trace does not show what the host did before"
    return Observation(
        ns,
        f"nothing ran in {_extent(evidence, members)}, before a graph was replayed{where}: {evidence.share(ns)} of the "
        "time.",
        "what the host does between two replays (inputs, sampling, scheduling) takes longer than the graph.",
        "prepare the next inputs while the graph runs, and read nothing back in between; larger graphs or batches.",
    )


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
    Rule("allocation", RuleObserver(allocation, 0.03, lines=_LATE)),
    Rule("first-use", RuleObserver(first_use, 0.05, lines=_LATE)),
    Rule("graph-late", RuleObserver(graph_late, 0.05, lines=_LATE)),
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
