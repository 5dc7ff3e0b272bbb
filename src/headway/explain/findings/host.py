"""Rules about the host: it comes late with data or launches, waits for the device, or has too few cores."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

from headway.explain.findings import loops, patterns
from headway.explain.findings.evidence import SHARED, RunEvidence, StepEvidence, as_number
from headway.explain.findings.gaps import collected_ns, is_allocation, pauses_of
from headway.explain.findings.rule import FindingPlace, Observation, Rule, RuleObserver, TimeOf, observe
from headway.explain.trace_facts import rate_of_hardware
from headway.meter.slow_code import slow_code_table
from headway.report import format_traffic

_READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "tolist")
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to ", "cudaMemcpy", "hipMemcpy", "cuMemcpy")
_SMALL_COPY = 2**16  # bytes below which a copy takes the microseconds of its start, whatever the link
_LINK_SHARE = 0.4  # share of a link's printed rate that copies of pinned memory exceed: they reach 0.75 to 0.9 of it
_MANY = 16  # short gaps a step, from which they are the launches' and not the step's begin and end
_TINY_NS = 30_000  # duration of an operator on a CPU up to which larger batches take no longer
_CALL_NS = 5_000  # duration of an empty call on a CPU: PyTorch's dispatch, autograd's node, memory for the result
_LOOP_SHARE = 0.05  # part of the steps from which a loop over tensors is the finding instead


def data_wait(evidence: StepEvidence, name: str, part: str) -> Observation | None:
    """Waiting for data, and the part of making data that takes longest; "" where nobody took down what workers did."""
    spent_s = _making_s(evidence)
    all_s = sum(spent_s.values())
    if (max(sorted(spent_s), key=spent_s.__getitem__) if all_s else "") != part:
        return None
    share = spent_s[part] / all_s if all_s else 0.0
    ns, seconds = evidence.ns("idle.data"), all_s / evidence.num_steps
    observation = observe(evidence, name, ns, part=share, seconds=seconds)
    for row in slow_code_table():  # samples that the loop's own process makes
        if not part and row.num_workers is not None and row.is_among(evidence.names):
            observation = observation._replace(cause=row.cause, next=row.remedy)
    return observation


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
    call = max(sorted(waits), key=waits.__getitem__)
    is_read = any(name in call for name in _READS)
    return observe(evidence, f"synchronisation{'/read' * is_read}", sum(waits.values()), call=call)


def blocking_copies(evidence: StepEvidence) -> Observation | None:
    """Copies while nothing computes, and time after the host has waited for one; their own fields tell why."""
    waits = Counter({call: ns for call, ns in evidence.parts("idle.sync").items() if call.startswith(_COPIES)})
    ns = evidence.ns("copies") + waits.total()
    has_waited = 2 * waits.total() > ns
    call = waits.most_common(1)[0][0] if has_waited else ""
    # The host waits for copies of pageable memory, whatever else is copied.
    kinds = _copied(evidence)
    copied = max(kinds, key=lambda kind: (has_waited and kind.memory == "Pageable", kind.ns), default=None)
    if copied is None or (has_waited and copied.memory != "Pageable"):
        return observe(evidence, "blocking-copy", ns, copies=call or "no copy of a known kind")
    copies = f"{call}: {copied.text(evidence.num_steps)}" if call else copied.text(evidence.num_steps)
    return observe(evidence, f"blocking-copy{'/' * bool(copied.kind)}{copied.kind}", ns, copies=copies)


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
    def bytes_per_s(self) -> float:
        return self.num_bytes * 1e9 / max(1, self.lasting_ns)

    @property
    def kind(self) -> str:
        """Kind of the copies, by their own fields, as `sentences.toml` has it."""
        if "DtoD" in self.name or "PtoP" in self.name:
            return "within"
        if self.memory != "Pinned" or not self.num_bytes:
            return self.memory
        if self.num_bytes < _SMALL_COPY * self.count:
            return "small"
        link = self.link_bytes_per_s
        return "Pinned" if link is None or self.bytes_per_s >= _LINK_SHARE * link else "slow"

    def text(self, num_steps: int) -> str:
        """Name, number, size and rate of the copies of a step."""
        size = f" of {format_traffic(self.num_bytes / self.count)}" if self.num_bytes else ""
        # Small ones take the time of their start, which is no rate.
        rate = f" at {self.bytes_per_s / 1e9:,.3g} GB/s" if self.num_bytes >= _SMALL_COPY * self.count else ""
        link_bytes_per_s = self.link_bytes_per_s if rate and self.kind != "within" else None
        link = f" of the link's {link_bytes_per_s / 1e9:,.0f}" if link_bytes_per_s else ""
        return f"{self.name}, {self.count / num_steps:,.0f} a step{size}{rate}{link}"


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
    return observe(evidence, "launch-bound", ns, number=number, gap=short_ns / number / 1e3)


def _call_bound(evidence: StepEvidence, short_ns: int) -> Observation | None:
    """Launches on a CPU, whose operators run within their calls: most time of a short operator is the call."""
    # Loops over tensors are many small operators too, and have findings of their own.
    rules = loops.optimizer_loop, loops.parameter_loop, loops.read_backs, loops.product_loop, patterns.anomaly_mode
    if any((loop := look(evidence)) and loop.ns >= _LOOP_SHARE * evidence.duration_ns for look in rules):
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
    return observe(evidence, "launch-bound/calls", ns, number=len(operators), usual=usual_ns / 1e3)


def contended(evidence: StepEvidence) -> Observation | None:
    """Time in which the loop's thread waited for a core that other threads had."""
    ns = evidence.core_wait_ns
    if not ns:
        return None
    if not evidence.is_cpu:  # a device works on meanwhile, as long as work was launched ahead
        ns = min(ns, evidence.ns("idle.launch"))
    return observe(evidence, "shared-cores", ns, waited=evidence.share(ns, evidence.full_ns))


def recorded_contention(evidence: RunEvidence) -> Observation:
    """Time in which the loop's thread waited for a core that other threads had."""
    return observe(evidence, "shared-cores", ns := evidence.core_wait_ns, waited=evidence.share(ns))


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
    return observe(evidence, "host-bound", ns, lead=lead, launching=share)


RULES = (
    # A loader that keeps up is not waited for at all; 5 % is more than a batch that is late now and then.
    *(
        Rule(name, RuleObserver(partial(data_wait, name=name, part=part), 0.05, TimeOf.DATA, lines=("idle.data",)))
        for name, part in (
            ("data-storage", "read"),
            ("data-decoding", "decode"),
            ("data-tokenising", "tokenise"),
            ("data-bound", ""),
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
