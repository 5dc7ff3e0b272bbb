"""Rules about gaps in which the host was late: each names a cause only where the trace shows it.

A few long gaps are pauses: an allocation, the first use of a kernel, a graph that is replayed late, garbage that is
collected, or whatever the host's stack tells. Many short ones are launches that take longer than their kernels.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median

from headway.explain.attribution import Phase
from headway.explain.findings import loops, patterns
from headway.explain.findings.evidence import Observation, StepEvidence, as_number
from headway.explain.findings.gaps import (
    ALLOCATES,
    ANNOTATION,
    ENGINE,
    Pause,
    StepPauses,
    activity,
    pauses_of,
    stacks_of,
)
from headway.report import format_ms, format_share

_MANY = 16  # short gaps a step, from which they are the launches' and not the step's begin and end
_TINY_NS = 30_000  # what an operator on a CPU takes of which larger batches take no more
_CALL_NS = 5_000  # of a call on a CPU that does nothing: PyTorch's dispatch, autograd's node, memory for the result
_LOOP_SHARE = 0.05  # of the steps, from which a loop over tensors is what is to be told
_NOT_KNOWN_MESSAGE = (
    "not known: code outside of PyTorch, such as logging, a checkpoint, an evaluation, collecting garbage, a callback, "
    "or another process that had its core."
)
_LOOKED_AT = 40  # longest pauses of a job that are looked at one by one


def garbage_collection(evidence: StepEvidence) -> Observation | None:
    """Collections of Python's garbage while nothing else ran."""
    steps = pauses_of(evidence)
    ns = _collected_ns(steps) if evidence.is_cpu else sum(gap.collected_ns for step in steps for gap in step.gaps)
    number = sum(len(step.collections) for step in steps)
    if not ns:
        return None
    return Observation(
        ns,
        f"Python collected garbage {number / evidence.num_steps:,.1f} times a step, for {evidence.share(ns)} of the "
        "time, in which the loop stood still.",
        "gc.collect() is called in the step, or the collector runs often over many objects that live long.",
        "gc.freeze() after the start and gc.disable() with a collection every some hundred steps; no gc.collect() and "
        "no torch.cuda.empty_cache() in the step.",
    )


def _collected_ns(steps: Sequence[StepPauses]) -> int:
    """Time of all collections within steps, in operators as well as between them, as far as they had a core [ns]."""
    spans = [
        (step, max(start, step.step.window.start_ns), min(end, step.step.window.end_ns))
        for step in steps
        for start, end in step.collections
    ]
    return sum(max(0, end - start - step.preempted_ns(start, end)) for step, start, end in spans)


def _classed(evidence: StepEvidence, kind: str) -> tuple[int, Counter[str], list[tuple[StepPauses, Pause]]]:
    """Long pauses of one cause: their time [ns], what the host was in, and themselves."""
    of_loops = {id(gap) for gap in loops.pauses_in_loop(evidence)}
    pauses = [
        (step, gap) for step in pauses_of(evidence) for gap in step.gaps if gap.is_long and id(gap) not in of_loops
    ]
    pauses.sort(key=lambda pair: -pair[1].own_ns)
    ns, places, members = 0, Counter[str](), []
    for step, gap in pauses[:_LOOKED_AT]:
        cause, place = step.cause(gap)
        if cause == "pause":
            # What stacks tell to be a chore is that chore, announced to the meter or not.
            stacks = stacks_of(evidence, step, gap)
            stack = stacks.most_common(1)[0][0] if stacks else ()
            cause = activity(stack)[0] if stack else cause
            # Between operators of backward no code of the loop runs: there it waits for a thread that lost its core.
            if gap.preempted_ns and ENGINE.match(" ".join(stack)):
                continue
        if cause == kind:
            ns += gap.own_ns
            places[place] += gap.own_ns
            members.append((step, gap))
    return ns, places, members


def _extent(evidence: StepEvidence, members: Sequence[tuple[StepPauses, Pause]]) -> str:
    """Number and length of pauses: "1.0 pause a step, the longest of 463 ms"."""
    number = len(members) / evidence.num_steps
    longest = max(gap.ns for _, gap in members)
    return f"{number:,.1f} pause{'' if number == 1 else 's'} a step, the longest of {format_ms(longest)} ms"


def host_pause(evidence: StepEvidence) -> Observation | None:
    """A few long gaps, and what the host was in."""
    ns, places, members = _classed(evidence, "pause")
    if not members:
        return None
    stacks: Counter[tuple[str, ...]] = Counter()
    for step, gap in members:
        stacks.update(stacks_of(evidence, step, gap))
    idle = "called no operator" if evidence.is_cpu else "launched nothing"
    message = f"the host {idle} in {_extent(evidence, members)}: {evidence.share(ns)} of the time."
    # The stack that the pauses were in longest names the code; the host's annotation the part of the loop.
    if stacks:
        stack, _ = stacks.most_common(1)[0]
        _, what, advice = activity(stack)
        share = stacks[stack] / stacks.total()
        where = f" Python was in {_frames(stack)} for {share:.0%} of it."
        cause = what or "code of the loop that calls no operator of PyTorch runs between the operators."
        return Observation(ns, message + where, cause, advice)
    place = next((name for name, _ in places.most_common() if name), "")
    if place:
        return Observation(
            ns,
            f"{message} It was in {place}.",
            _NOT_KNOWN_MESSAGE
            if place.startswith(ANNOTATION)
            else f"{place} runs on the host while the device has nothing to do.",
            "do that work ahead of time or in a thread of its own, less often, or not in the step.",
        )
    return Observation(
        ns,
        f"{message} The trace shows nothing that it did meanwhile.",
        _NOT_KNOWN_MESSAGE,
        "a profile with stacks (with_stack=True, or headway.profile, which samples them), which names the code.",
    )


def paused_for(evidence: StepEvidence, phase: Phase) -> tuple[int, str]:
    """Add up the long gaps in which stacks show a chore that the meter was not told of.

    Returns:
        Their time in all steps [ns], and the frames that they were in longest; "" without any.
    """
    ns, _, members = _classed(evidence, phase.value)
    stacks: Counter[tuple[str, ...]] = Counter()
    for step, gap in members:
        stacks.update(stacks_of(evidence, step, gap))
    return ns, _frames(stacks.most_common(1)[0][0]) if stacks else ""


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


def is_allocation(call: str) -> bool:
    """Tell whether a wait, as the waterfall names it, is one for memory: "aten::empty (cudaMalloc)"."""
    return ALLOCATES.search(call) is not None


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


def launch_bound(evidence: StepEvidence) -> Observation | None:
    """Many short gaps between operators, which the host takes longer to call than they take to run."""
    other_findings = {
        (id(event.trace), event.event)
        for event in [*loops.loop_over_parameters(evidence), *loops.small_products(evidence)]
    }
    late_ns = {(id(event.trace), event.event): event.late_ns for event in evidence.spent}
    short_ns = number = 0
    for step in pauses_of(evidence):
        short = [gap for gap in step.gaps if not gap.is_long and (id(step.measured), gap.event) not in other_findings]
        short_ns += sum(min(gap.own_ns, late_ns.get((id(step.measured), gap.event), gap.own_ns)) for gap in short)
        number += len(short)
    if number < _MANY * evidence.num_steps:
        return None
    if evidence.is_cpu:
        return _call_bound(evidence, short_ns)
    # What the profiler adds to a step lies between its operators.
    overheads_s = [as_number(evidence.fact("profiler_overhead_s", step.rank)) for step in evidence.steps]
    profiler_ns = sum(max(0, round(overhead_s * 1e9)) for overhead_s in overheads_s if overhead_s is not None)
    ns = max(0, short_ns - profiler_ns)
    return Observation(
        ns,
        f"nothing ran for {evidence.share(ns)} of the time in {number / evidence.num_steps:,.0f} gaps a step of "
        f"{short_ns / number / 1e3:,.0f} us on average, since the next kernel had not been launched yet.",
        "each step is many small operators, which Python takes longer to launch than they take to run.",
        "larger batches and torch.compile (or CUDA graphs): fewer and larger launches.",
        setting="larger packs (data.tokens_per_pack) and speed.compile: true",
    )


def _call_bound(evidence: StepEvidence, short_ns: int) -> Observation | None:
    """The same on a CPU, whose operators run within their calls: of the short ones most is the call."""
    # Loops over tensors are many small operators too, and have findings of their own.
    if any(loop is not None and loop.ns >= _LOOP_SHARE * evidence.duration_ns for loop in _loops(evidence)):
        return None
    operators = [event for event in evidence.spent if event.ns and event.line not in ("aside", "communication")]
    # A call takes its time whatever it computes; what an operator takes beyond that is work. Collections of garbage
    # interrupt operators and gaps alike, and are no part of a call.
    own_ns = evidence.duration_ns - _collected_ns(pauses_of(evidence))
    calls_ns = short_ns + sum(min(event.ns, _CALL_NS) for event in operators)
    # Every step of a small model has some calls that its work does not hide; half of the time is no such model's.
    if 2 * calls_ns < own_ns:
        return None
    # At most all goes but what larger batches would take too: operators that usually take long, pauses, waits.
    of_kind: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in operators:
        of_kind[event.operator, int(event.trace.events.operands[event.event])].append(event.ns)
    large_ns = sum(len(calls) * kind_ns for calls in of_kind.values() if (kind_ns := round(median(calls))) > _TINY_NS)
    pauses_ns = sum(gap.own_ns for step in pauses_of(evidence) for gap in step.gaps if gap.is_long)
    others_ns = sum(evidence.ns(key) for key in ("aside", "communication", "idle.data", "idle.sync"))
    ns = max(0, own_ns - large_ns - pauses_ns - others_ns)
    usual_ns = median(event.ns for event in operators)
    return Observation(
        ns,
        f"{len(operators) / evidence.num_steps:,.0f} operators a step take {usual_ns / 1e3:,.1f} us each (median), and "
        f"Python between them {evidence.share(short_ns)} of the time: calls, not work, take {evidence.share(ns)}.",
        "a step has little work for its number of operators: few tokens, or a small model.",
        "larger batches, and torch.compile, which makes one operator of many.",
        setting="larger packs (data.tokens_per_pack) and speed.compile: true",
    )


def _loops(evidence: StepEvidence) -> tuple[Observation | None, ...]:
    return (
        loops.optimizer_loop(evidence),
        loops.parameter_loop(evidence),
        loops.read_backs(evidence),
        loops.product_loop(evidence),
        patterns.anomaly_mode(evidence),
    )


def contended(evidence: StepEvidence) -> Observation | None:
    """Time in which the loop's thread waited for a core that other threads had."""
    ns = evidence.core_wait_ns
    if not ns:
        return None
    if not evidence.is_cpu:  # whose device works on meanwhile, as long as it has been launched ahead
        ns = min(ns, evidence.ns("idle.launch"))
    return Observation(
        ns,
        f"the loop's thread waited for a core {format_share(ns / evidence.full_ns)} of the time, as the system counts "
        "it.",
        "more threads and processes compute than there are cores: data workers, other ranks, other jobs.",
        "fewer threads (OMP_NUM_THREADS) and workers, cores of its own for each rank, or a machine of its own.",
    )
