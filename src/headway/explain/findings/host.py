"""Rules about the host: it comes late with data or launches, waits for the device, or has too few cores."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

from headway.explain.findings import loops, patterns
from headway.explain.findings.evidence import SHARED, RunEvidence, StepEvidence, as_number
from headway.explain.findings.gaps import collected_ns, is_allocation, pauses_of
from headway.explain.findings.rule import FindingPlace, Observation, Rule, RuleObserver, TimeOf
from headway.explain.trace_facts import rate_of_hardware
from headway.meter.slow_code import slow_code_table
from headway.report import format_share, format_traffic

_UNKNOWN = ""
_DATA_ADVICE = {  # slow part: its name, the reason, advice for any loop, advice for `headway train`
    "read": ("reading rows and media from storage", "storage is slow or far away, and every sample is read when it is "
             "needed.", "a copy of the data on a local disk; more workers, which read side by side.",
             "more data.workers, a larger data.prefetch_bytes"),
    "decode": ("decoding images, videos and sounds", "media are large, or stored in a way that is slow to decode.",
               "media that are stored at the size at which the model reads them; more workers.", "more data.workers"),
    "tokenise": ("tokenising", "long texts or templates are tokenised anew in every epoch.",
                 "documents that are tokenised once; more workers.",
                 "data.train.N.format: tokens; more data.workers"),
    _UNKNOWN: ("the loader", "batches take longer to make than to train on.",
               "more workers and batches ahead: in a DataLoader num_workers and prefetch_factor.",
               "more data.workers and a larger data.prefetch_bytes"),
}  # fmt: skip
_READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "tolist")
_WHY_WAITED = {
    True: "a number is read back from the device within the step: .item(), .tolist(), print or an if.",
    False: "the host waits for the device within the step; what for, the call does not tell: a barrier, a "
    "synchronisation for timing, or a library's own.",
}
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to ", "cudaMemcpy", "hipMemcpy", "cuMemcpy")
_SMALL_COPY = 2**16  # bytes below which a copy takes the microseconds of its start, whatever the link
_LINK_SHARE = 0.4  # share of a link's printed rate that copies of pinned memory exceed: they reach 0.75 to 0.9 of it
_COPY_ADVICE = {  # kind of copies: likely cause, advice for any loop, setting of `headway train`
    "Pageable": (
        "the host's memory is pageable, so the driver reads it through a buffer of its own and the host waits.",
        "pin_memory=True in the DataLoader, and .to(device, non_blocking=True) ahead of the step.",
        "",
    ),
    "Pinned": (
        "the memory is pinned already and the link is busy: more bytes are moved than it carries beside the work, as "
        "of weights or optimizer states that are kept on the host.",
        "less offloading: keep on the device what fits (8-bit states, a smaller batch), or copy ahead, on a stream of "
        "its own.",
        "parallel.offload: false, which keeps the weights on the device",
    ),
    "slow": (
        "the memory is pinned already, and the link runs far below its rate: other devices share it, it has fewer "
        "lanes, or the memory is of another socket.",
        "nvidia-smi topo -m and nvidia-smi -q (link width); a process bound to its device's socket (numactl).",
        "",
    ),
    "small": (
        "many small copies: each takes the microseconds of its start, and none fills the link.",
        "one copy of a joined tensor in place of many, and numbers that are made on the device.",
        "",
    ),
    "within": (
        "tensors are copied on the device itself: clones, .contiguous(), concatenations, buffers of gathers.",
        "write into the place where the tensor is needed (out=, views), and no clone of what is not changed.",
        "",
    ),
    "": (
        "copies are not hidden behind work: .to(device) or .cpu() without non_blocking=True, or right before the "
        "batch is used, or from memory that is not pinned.",
        "pinned memory and copies ahead of the step: pin_memory=True and .to(device, non_blocking=True).",
        "parallel.offload: false, which keeps the weights on the device; batches are copied ahead by itself",
    ),
}
_MANY = 16  # short gaps a step, from which they are the launches' and not the step's begin and end
_TINY_NS = 30_000  # duration of an operator on a CPU up to which larger batches take no longer
_CALL_NS = 5_000  # duration of an empty call on a CPU: PyTorch's dispatch, autograd's node, memory for the result
_LOOP_SHARE = 0.05  # part of the steps from which a loop over tensors is the finding instead


def data_wait(evidence: StepEvidence, part: str) -> Observation | None:
    """Waiting for data, and the part of making data that takes longest; "" where nobody took down what workers did."""
    spent_s = _making_s(evidence)
    all_s = sum(spent_s.values())
    dearest = max(sorted(spent_s), key=spent_s.__getitem__) if all_s else _UNKNOWN
    if dearest != part:
        return None
    ns = evidence.ns("idle.data")
    what, cause, advice, setting = _DATA_ADVICE[part]
    for row in slow_code_table():  # samples that the loop's own process makes
        if part == _UNKNOWN and row.num_workers is not None and row.is_among(evidence.names):
            cause, advice = row.cause, row.remedy
    message = f"the step waited for data {evidence.share(ns)} of the time"
    if all_s:
        message += f"; of {all_s / evidence.num_steps:.2f} s that workers spent on a step's packs, "
        message += f"{format_share(spent_s[part] / all_s)} was {what}"
    return Observation(ns, f"{message}.", cause, advice, setting)


def _making_s(evidence: StepEvidence) -> dict[str, float]:
    spent_s: defaultdict[str, float] = defaultdict(float)
    for step in evidence.steps:
        seconds_by_part = evidence.step_fact(step, "making_s")
        if isinstance(seconds_by_part, Mapping):
            for part, seconds in seconds_by_part.items():
                spent_s[part] += as_number(seconds) or 0.0
    return spent_s


def synchronisation(evidence: StepEvidence) -> Observation | None:
    """Numbers that the host reads back from the device, which then waits for the host."""
    waits = {
        call: ns
        for call, ns in evidence.parts("idle.sync").items()
        if not call.startswith(_COPIES) and not is_allocation(call)
    }
    if not waits:
        return None
    ns, dearest = sum(waits.values()), max(sorted(waits), key=waits.__getitem__)
    return Observation(
        ns,
        f"the device idled for {evidence.share(ns)} of the time after the host had waited for it, mostly in {dearest}.",
        _WHY_WAITED[_is_read(dearest)],
        loops.READ_LATE_HINT,
        setting=loops.READ_LATE_SETTING,
    )


def _is_read(call: str) -> bool:
    return any(name in call for name in _READS)


def blocking_copies(evidence: StepEvidence) -> Observation | None:
    """Copies while nothing computes, and time after the host has waited for one; their own fields tell why."""
    waits = Counter({call: ns for call, ns in evidence.parts("idle.sync").items() if call.startswith(_COPIES)})
    ns = evidence.ns("copies") + waits.total()
    message = f"only copies ran, or the host waited for one, for {evidence.share(ns)} of the time"
    has_waited = 2 * waits.total() > ns
    if has_waited:
        message += f", mostly in {waits.most_common(1)[0][0]}"
    # The host waits for copies of pageable memory, whatever else is copied.
    kinds = _copied(evidence)
    copied = max(kinds, key=lambda kind: (has_waited and kind.memory == "Pageable", kind.ns), default=None)
    if copied is None or (has_waited and copied.memory != "Pageable"):
        return Observation(ns, f"{message}.", *_COPY_ADVICE[""])
    message += f": {copied.name}, {copied.count / evidence.num_steps:,.0f} a step"
    kind = "within" if copied.is_within_devices else copied.memory
    if copied.num_bytes:
        message += f" of {format_traffic(copied.size)}"
        if copied.size >= _SMALL_COPY:
            message += f" at {copied.bytes_per_s / 1e9:,.3g} GB/s"
    if kind == "Pinned" and copied.num_bytes:
        link = copied.link_bytes_per_s
        if copied.size < _SMALL_COPY:
            kind = "small"
        elif link is not None:
            message += f", of the {link / 1e9:,.0f} GB/s of the link to the host"
            kind = "slow" if copied.bytes_per_s < _LINK_SHARE * link else kind
    return Observation(ns, f"{message}.", *_COPY_ADVICE[kind])


@dataclass(slots=True)
class _Copies:
    """Copies of one direction between two kinds of memory, in all steps."""

    name: str  # direction and kinds of memory, "Memcpy HtoD (Pinned -> Device)"
    link_bytes_per_s: float | None  # printed rate of the device to its host, one way; None where it is not known
    ns: int = 0  # time of the steps in which nothing more important ran [ns]
    count: int = 0
    num_bytes: int = 0  # 0 where they do not say
    lasting_ns: int = 0  # sum of their durations [ns]

    @property
    def memory(self) -> str:
        """Kind of the host's memory: Pageable, Pinned; "" where the name does not tell."""
        return next((kind for kind in ("Pageable", "Pinned") if kind in self.name), "")

    @property
    def is_within_devices(self) -> bool:
        return "DtoD" in self.name or "PtoP" in self.name

    @property
    def size(self) -> float:
        """Bytes of one copy."""
        return self.num_bytes / self.count

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes * 1e9 / max(1, self.lasting_ns)


def _copied(evidence: StepEvidence) -> list[_Copies]:
    kinds: dict[str, _Copies] = {}
    for event in evidence.spent:
        if event.line == "copies":
            trace = event.trace
            if event.name not in kinds:
                link = rate_of_hardware(trace.trace.device_name, lambda device: device.host_bytes_per_s)
                kinds[event.name] = _Copies(event.name, link)
            copies = kinds[event.name]
            copies.ns += event.ns
            copies.count += 1
            copies.num_bytes += max(0, int(trace.events.num_bytes[event.event]))
            copies.lasting_ns += event.duration_ns
    return [*kinds.values()]


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
    # The profiler's own time lies between the operators of a step.
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
    """Launches on a CPU, whose operators run within their calls: most time of a short operator is the call."""
    # Loops over tensors are many small operators too, and have findings of their own.
    if any(loop is not None and loop.ns >= _LOOP_SHARE * evidence.duration_ns for loop in _loops(evidence)):
        return None
    operators = [event for event in evidence.spent if event.ns and event.line not in ("aside", "communication")]
    # A call takes its time whatever it computes; what an operator takes beyond that is work. Collections of garbage
    # interrupt operators and gaps alike, and are no part of a call.
    own_ns = evidence.duration_ns - collected_ns(pauses_of(evidence))
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
    if not evidence.is_cpu:  # a device works on meanwhile, as long as work was launched ahead
        ns = min(ns, evidence.ns("idle.launch"))
    return _contended(ns, evidence.share(ns, evidence.full_ns))


def recorded_contention(evidence: RunEvidence) -> Observation:
    """Time in which the loop's thread waited for a core that other threads had."""
    return _contended(evidence.core_wait_ns, evidence.share(evidence.core_wait_ns))


def _contended(ns: int, share: str) -> Observation:
    return Observation(
        ns,
        f"the loop's thread waited for a core {share} of the time, as the system counts it.",
        "more threads and processes compute than there are cores: data workers, other ranks, other jobs.",
        "fewer threads (OMP_NUM_THREADS) and workers, cores of its own for each rank, or a machine of its own.",
    )


def host_bound(evidence: RunEvidence) -> Observation | None:
    """A host that is never ahead of its device, which then waits for each launch."""
    led = [step for step in evidence.steps if step.lead_ns is not None and step.phases_ns]
    if not led or len(led) < len(evidence.steps) / 10:
        return None
    led_ns = sum(step.duration_ns for step in led)
    lead = sum(step.lead_ns or 0 for step in led) / led_ns
    if lead > 0.05:
        return None
    launching_ns = sum(step.phases_ns.get(phase, 0) for step in led for phase in ("forward", "backward", "optimizer"))
    share = launching_ns / led_ns
    ns = share * evidence.duration_ns - (evidence.useful_ns or 0.0)
    return Observation(
        ns,
        f"the host was at most {format_share(lead)} of a step ahead of the device, and took {format_share(share)} of "
        "the time for forward, backward and update: the device waits for its launches.",
        "the steps are many small operators, which Python takes longer to launch than they take to run, or the host "
        "waits for the device again and again.",
        "larger batches or packs, torch.compile or CUDA graphs: fewer and larger launches; a profile tells which.",
    )


RULES = (
    # A loader that keeps up is not waited for at all; 5 % is more than a batch that is late now and then.
    *(
        Rule(name, RuleObserver(partial(data_wait, part=part), 0.05, TimeOf.DATA, lines=("idle.data",)))
        for name, part in (
            ("data-storage", "read"),
            ("data-decoding", "decode"),
            ("data-tokenising", "tokenise"),
            ("data-bound", _UNKNOWN),
        )
    ),
    # One read-back of a number per step costs a device some 1 %; a loop of them more.
    Rule("synchronisation", RuleObserver(synchronisation, 0.03, lines=("idle.sync",))),
    Rule("blocking-copy", RuleObserver(blocking_copies, 0.03, lines=("copies", "idle.sync"))),
    # A device that is launched ahead never waits; 10 % leaves the step's begin and end, and what a profiler adds.
    Rule("launch-bound", RuleObserver(launch_bound, 0.10, lines=("idle.launch",))),
    # A host that is never a twentieth of a step ahead launches each kernel when the device is already waiting.
    Rule("host-bound", in_records=RuleObserver(host_bound, 0.10, place=FindingPlace.VAGUE)),
    # A core is taken away for some per cent of the time wherever the system itself has work.
    Rule("shared-cores", RuleObserver(contended, SHARED, TimeOf.MACHINE), RuleObserver(recorded_contention, SHARED)),
)
