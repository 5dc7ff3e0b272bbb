"""Rules about gaps in which the host was late: each names a cause only where the trace shows it.

A few long gaps are pauses: an allocation, the first use of a kernel, a graph that is replayed late, garbage that is
collected, or whatever the host's stack tells. Many short ones are launches that take longer than their kernels.
"""

import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from headway.explain.attribution import Phase
from headway.explain.events import NONE, Column, Kind
from headway.explain.findings import loops, patterns
from headway.explain.findings.evidence import Observation, StepEvidence, as_number
from headway.explain.measurement import MeasuredStep, MeasuredTrace
from headway.meter.host_evidence import COLLECTION
from headway.report import format_ms

_LONG_NS = 1_000_000  # launches and Python between two operators take some 5 to 100 us
_LONG_SHARE = 0.02  # of the step; a core that is shared takes a thread away for some milliseconds now and then
_MANY = 16  # short gaps a step, from which they are the launches' and not the step's begin and end
_TINY_NS = 30_000  # an operator on a CPU that takes less is mostly its call: PyTorch's dispatch and autograd's node
_LOOP_SHARE = 0.05  # of the steps, from which a loop over tensors is what is to be told
_FIRST_USE = 10  # times what other calls of the operator take
_ALLOCATES = re.compile(r"(cuda|hip|cu)(Host)?(Malloc|Free|MemAlloc|MemFree|HostAlloc|MemCreate|MemMap)\w*")
_LOADS = re.compile(r"(cu|hip)(ModuleLoad|LibraryLoad|ModuleGetFunction)\w*|cudaFuncGetAttributes")
_REPLAYS = re.compile(r"(cuda|hip|cu)GraphLaunch\w*")
_ANNOTATION = "the annotation"
_NOT_KNOWN_MESSAGE = (
    "not known: code outside of PyTorch, such as logging, a checkpoint, an evaluation, collecting garbage, a callback, "
    "or another process that had its core."
)
_SURROUNDINGS = ("ProfilerStep#", "phase:", COLLECTION)
_LOOKED_AT = 40  # longest pauses of a job that are looked at one by one
_ENGINE = re.compile(r"^~?_engine_run_backward")
# What names of files and functions in a stack tell of a pause: words, the chore that has a finding of its own, else
# what the host did and what to do about it.
_ACTIVITIES = (
    (r"\((torch/)?serialization\.py|safetensors|save_checkpoint|\w*save\w* \(", Phase.CHECKPOINT, "", ""),
    (r"\(logging/|wandb|tensorboard|mlflow|comet|\(tqdm/", Phase.LOGGING, "", ""),
    (r"evaluat|validat", Phase.EVALUATION, "", ""),
    (r"subprocess\.py|\(multiprocessing/", None, "another program or process is waited for",
     "ask it less often, or in a thread of its own"),
    (r"\(socket\.py|\(ssl\.py|\(http/|urllib|requests/|\(asyncio/", None, "a server is waited for",
     "ask it less often, or in a thread of its own"),
    (_ENGINE.pattern, None, "backward's engine was between two operators: a hook in C++, or another "
     "thread that held Python's lock", "look at the trace around the gap, and at other threads"),
    (r"\(copy\.py|\w+/copy\.py", None, "objects are copied in Python", "copy less often, and tensors alone"),
)  # fmt: skip


@dataclass(frozen=True)
class Pause:
    """A gap in which nothing ran, since the host had not launched or called anything.

    Attributes:
        ns: of it, without what a phase or a wait explains [ns].
        start_ns: beginning [ns].
        end_ns: end [ns].
        event: that ends it; NONE where the step does.
        collected_ns: part in which garbage was collected [ns].
        preempted_ns: part in which the thread had no core [ns].
        is_long: whether it is a pause, and not one of many gaps between launches.
    """

    ns: int
    start_ns: int
    end_ns: int
    event: int
    collected_ns: int
    preempted_ns: int
    is_long: bool

    @property
    def own_ns(self) -> int:
        """Without what has another cause [ns]."""
        return max(0, self.ns - self.collected_ns - self.preempted_ns)


class StepPauses:
    """Gaps of one step in which the host was late.

    Args:
        measured: the trace.
        step: one of its steps.
        preempted: begin, end and how much of it the loop's thread had no core [ns].
    """

    def __init__(
        self, measured: MeasuredTrace, step: MeasuredStep, preempted: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        self.measured, self.step, self._preempted = measured, step, preempted
        self.host = measured.trace.host

    @cached_property
    def own_events(self) -> Column:
        """Host events of the loop's thread that overlap the step."""
        host, window = self.host, self.step.window
        inside = (host.end_ns > window.start_ns) & (host.start_ns < window.end_ns)
        return np.flatnonzero(inside & (host.track == self.measured.trace.step_track))

    @cached_property
    def collections(self) -> list[tuple[int, int]]:
        """Begin and end of each collection of garbage in the loop's thread [ns]."""
        names = self.measured.trace.names
        return [
            (int(self.host.start_ns[i]), int(self.host.end_ns[i]))
            for i in self.own_events.tolist()
            if self.host.kind[i] == Kind.ANNOTATION and names[self.host.name[i]].startswith(COLLECTION)
        ]

    @cached_property
    def gaps(self) -> tuple[Pause, ...]:
        """All gaps in which the host was late, by their order in time."""
        window, events = self.step.window, self.measured.events
        long_ns = max(_LONG_NS, round(_LONG_SHARE * window.ns))
        gaps = []
        for event, ns in self.step.idle.late_before.items():
            end_ns = window.end_ns if event == NONE else min(int(events.start_ns[event]), window.end_ns)
            collected_ns = min(ns, _overlap(self.collections, end_ns - ns, end_ns))
            preempted_ns = self._preempted_ns(end_ns - ns, end_ns)
            # What the counts leave of a gap that was nearly all another process's is not known well enough.
            is_long = ns - collected_ns - preempted_ns >= max(long_ns, preempted_ns // 4)
            gaps.append(Pause(ns, end_ns - ns, end_ns, event, collected_ns, preempted_ns, is_long))
        return tuple(sorted(gaps, key=lambda gap: gap.start_ns))

    def _preempted_ns(self, start_ns: int, end_ns: int) -> int:
        """Time of a span in which the thread had no core: of what was counted between two samples, all that fits."""
        return sum(
            min(ns, min(end, end_ns) - max(begin, start_ns))
            for begin, end, ns in self._preempted
            if begin < end_ns and end > start_ns
        )

    @cached_property
    def waiting_gaps(self) -> list[tuple[int, int]]:
        """Length [ns] and ending event of gaps of the device before events that had been launched already."""
        events, window = self.measured.events, self.step.window
        inside = np.flatnonzero((events.end_ns > window.start_ns) & (events.start_ns < window.end_ns))
        if self.measured.trace.is_cpu_only or not len(inside):
            return []
        busy_until = np.maximum.accumulate(np.concatenate([[window.start_ns], events.end_ns[inside]]))[:-1]
        lengths = events.start_ns[inside] - busy_until
        late_before = self.step.idle.late_before
        return [
            (int(length), int(event))
            for length, event in zip(lengths.tolist(), inside.tolist(), strict=True)
            if length > 0 and not late_before[event]
        ]

    def surrounding(self, pause: Pause) -> int:
        """Innermost host event that lasts for most of a pause; NONE where there is none but the step and its phase."""
        host, own = self.host, self.own_events
        names, contexts = self.measured.trace.names, self.measured.attribution.contexts
        overlap = np.minimum(host.end_ns[own], pause.end_ns) - np.maximum(host.start_ns[own], pause.start_ns)
        candidates = [
            i for i in own[2 * overlap > pause.ns].tolist() if not names[host.name[i]].startswith(_SURROUNDINGS)
        ]
        return max(candidates, key=lambda i: contexts[i].depth, default=NONE)

    def cause(self, pause: Pause) -> tuple[str, str]:
        """Class a long pause by what the trace shows of it.

        Returns:
            "allocation", "first-use", "graph" or "pause", and what the host was in; "" where nothing shows it.
        """
        host, names = self.host, self.measured.trace.names
        around = self.surrounding(pause)
        name = names[host.name[around]] if around != NONE else ""
        if around != NONE and host.kind[around] == Kind.ANNOTATION:
            name = f"{_ANNOTATION} {name}"
        operator = self.measured.attribution.contexts[around].operator if around != NONE else NONE
        operator_name = names[host.name[operator]] if operator != NONE else ""
        if _ALLOCATES.fullmatch(name):
            return "allocation", f"{name} in {operator_name}" if operator_name else name
        if _LOADS.fullmatch(name) or (operator != NONE and self._is_first_use(operator)):
            return "first-use", operator_name or name
        if pause.event != NONE and not self.measured.trace.is_cpu_only:
            launch = int(self.measured.attribution.launch[pause.event])
            if launch != NONE and _REPLAYS.fullmatch(names[host.name[launch]]):
                return "graph", name
        return "pause", name

    def _is_first_use(self, operator: int) -> bool:
        """Whether an operator is the first of its name, and took far longer than those that follow."""
        host = self.host
        same = np.flatnonzero((host.name == host.name[operator]) & (host.kind == Kind.OPERATOR))
        durations = host.end_ns[same] - host.start_ns[same]
        others = durations[same != operator]
        own_ns = int(host.end_ns[operator] - host.start_ns[operator])
        is_first = int(host.start_ns[same].min()) == int(host.start_ns[operator])
        return is_first and (not len(others) or own_ns > _FIRST_USE * float(np.median(others)))


def _overlap(spans: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """Time that spans have in common with one [ns]."""
    return sum(max(0, min(end, end_ns) - max(start, start_ns)) for start, end in spans)


_pauses: "weakref.WeakKeyDictionary[StepEvidence, list[StepPauses]]" = weakref.WeakKeyDictionary()


def pauses_of(evidence: StepEvidence) -> list[StepPauses]:
    """Gaps of each step that was measured."""
    if evidence not in _pauses:
        _pauses[evidence] = [
            StepPauses(*step.measured, evidence.preempted(step.measured[0], step.step))
            for step in evidence.steps
            if step.measured is not None
        ]
    return _pauses[evidence]


def stacks_of(evidence: StepEvidence, step: StepPauses, pause: Pause) -> Counter[tuple[str, ...]]:
    """Time of each stack of the loop's thread within a pause [ns]; none where nobody sampled it."""
    spent: Counter[tuple[str, ...]] = Counter()
    for begin, end, stack in evidence.samples(step.measured, step.step.window.step):
        ns = min(end, pause.end_ns) - max(begin, pause.start_ns)
        if ns > 0:
            spent[stack] += ns
    return spent


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
    """Time of all collections within steps, in operators as well as between them [ns]."""
    return sum(_overlap(step.collections, step.step.window.start_ns, step.step.window.end_ns) for step in steps)


def _classed(evidence: StepEvidence, kind: str) -> tuple[int, Counter[str], list[tuple[StepPauses, Pause]]]:
    """Long pauses of one cause: their time [ns], what the host was in, and themselves."""
    pauses = [(step, gap) for step in pauses_of(evidence) for gap in step.gaps if gap.is_long]
    pauses.sort(key=lambda pair: -pair[1].own_ns)
    ns, places, members = 0, Counter[str](), []
    for step, gap in pauses[:_LOOKED_AT]:
        cause, place = step.cause(gap)
        if cause == "pause":
            # What stacks tell to be a chore is that chore, announced to the meter or not.
            stacks = stacks_of(evidence, step, gap)
            stack = stacks.most_common(1)[0][0] if stacks else ()
            cause = _activity(stack)[0] if stack else cause
            # Between operators of backward no code of the loop runs: there it waits for a thread that lost its core.
            if gap.preempted_ns and _ENGINE.match(" ".join(stack)):
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
        _, what, advice = _activity(stack)
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
            if place.startswith(_ANNOTATION)
            else f"{place} runs on the host while the device has nothing to do.",
            "do that work ahead of time or in a thread of its own, less often, or not in the step.",
        )
    return Observation(
        ns,
        f"{message} The trace shows nothing that it did meanwhile.",
        _NOT_KNOWN_MESSAGE,
        "a profile with stacks (with_stack=True, or headway.profile, which samples them), which names the code.",
    )


def paused_for(evidence: StepEvidence, phase: Phase) -> int:
    """Time of long gaps whose stacks tell that the loop did such a chore in them, unannounced [ns]."""
    return _classed(evidence, phase.value)[0]


def _activity(stack: Sequence[str]) -> tuple[str, str, str]:
    """Class, cause and advice that a stack tells; "pause", "" and general advice where it is nothing that is known."""
    text = " ".join(stack)
    for words, phase, cause, advice in _ACTIVITIES:
        if re.search(words, text, flags=re.IGNORECASE):
            return phase.value if phase is not None else "pause", f"{cause}.", f"{advice}."
    return "pause", "", "do it less often, ahead of time, or in a thread or process of its own."


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
    """Whether a wait, as the waterfall names it, is one for memory: "aten::empty (cudaMalloc)"."""
    return _ALLOCATES.search(call) is not None


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
    short_ns = number = 0
    for step in pauses_of(evidence):
        short = [gap for gap in step.gaps if not gap.is_long and (id(step.measured), gap.event) not in other_findings]
        short_ns += sum(gap.own_ns for gap in short)
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
    """The same on a CPU, whose operators run within their calls: the short ones are calls and little else."""
    operators = [event for event in evidence.spent if event.ns and event.line not in ("aside", "communication")]
    usual_ns = median(event.ns for event in operators) if operators else 0
    # What calls of one kind usually take: a core that was taken away within one of them is not its work.
    of_kind: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in operators:
        of_kind[event.operator, int(event.trace.events.operands[event.event])].append(event.ns)
    large_ns = sum(len(calls) * kind_ns for calls in of_kind.values() if (kind_ns := round(median(calls))) > _TINY_NS)
    # Collections interrupt operators and gaps alike, and are no part of a call.
    lost_ns = _core_wait_ns(evidence) + _collected_ns(pauses_of(evidence))
    own_ns = evidence.duration_ns - lost_ns
    # Half of what the thread computed, at least: every step of a small model has some work to hide calls behind.
    if not operators or usual_ns > _TINY_NS or 2 * large_ns > own_ns:
        return None
    # Loops over tensors are many small operators too, and have findings of their own.
    if any(loop is not None and loop.ns >= _LOOP_SHARE * evidence.duration_ns for loop in _loops(evidence)):
        return None
    pauses_ns = sum(gap.own_ns for step in pauses_of(evidence) for gap in step.gaps if gap.is_long)
    others_ns = sum(evidence.ns(key) for key in ("aside", "communication", "idle.data", "idle.sync"))
    ns = max(0, evidence.duration_ns - lost_ns - large_ns - pauses_ns - others_ns)
    return Observation(
        ns,
        f"{len(operators) / evidence.num_steps:,.0f} operators a step take {usual_ns / 1e3:,.0f} us each (median), and "
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


def _core_wait_ns(evidence: StepEvidence) -> int:
    """Time in which the loop's thread waited for a core, in all steps; 0 where nobody counted [ns]."""
    waited_ns: list[int] = []
    for step in evidence.steps:
        moments = evidence.host_fact("core_wait_ns", step.rank) or {}
        begin, end = moments.get(str(step.step)), moments.get(str(step.step + 1))
        if begin is not None and end is not None:
            waited_ns.append(max(0, int(end) - int(begin)))
    return round(sum(waited_ns) / len(waited_ns) * evidence.num_steps) if waited_ns else 0


def contended(evidence: StepEvidence) -> Observation | None:
    """Time in which the loop's thread waited for a core that other threads had."""
    ns = _core_wait_ns(evidence)
    if not ns:
        return None
    if not evidence.is_cpu:  # whose device works on meanwhile, as long as it has been launched ahead
        ns = min(ns, evidence.ns("idle.launch"))
    return Observation(
        ns,
        f"the loop's thread waited for a core {evidence.share(ns)} of the time, as the system counts it.",
        "more threads and processes compute than there are cores: data workers, other ranks, other jobs.",
        "fewer threads (OMP_NUM_THREADS) and workers, cores of its own for each rank, or a machine of its own.",
    )
