"""Rules about the phases that a loop names: time that a step loses in rollouts, rewards and references."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.explain.findings.evidence import RunEvidence, RunStep
from headway.explain.findings.rule import FindingPlace, Observation, Rule, RuleObserver, observe
from headway.explain.phases import ASIDE, PhaseLine
from headway.meter.step_phases import REST

_REPEATED = 1.5  # times the tokens of the sequences, from which a frozen model has scored them more than once
_FULL = 0.75  # part of the device's memory from which a larger batch has no room
_LEARNT = 0.02  # sampled / trained tokens up to which a run cannot learn from its samples
_BUSY = 0.9  # part of the step from which devices work all the time


@dataclass(slots=True)
class _PhaseTotal:
    """One named phase, added up over all steps."""

    name: str  # name of the phase
    ns: int = 0  # time that the loop was in it [ns]
    busy_ns: int = 0  # time that its devices worked [ns]
    flops: float = 0.0  # useful FLOPs
    is_counted: bool = True  # whether they are known in all steps
    at_peak_ns: float = 0.0  # time that these FLOPs take at peak [ns]; 0 where it is not known
    at_rate_ns: float = 0.0  # time that these FLOPs take at the best rate that a phase on the same devices reaches [ns]
    moved_ns: float = 0.0  # time that its bytes take at full bandwidth [ns]; 0 where it is not known
    num_devices: int = 0  # devices of its own; 0 where it has none
    # tokens, bytes and what was generated, by their names in a record
    quantities: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, line: PhaseLine) -> None:
        """Add the phase of a step."""
        self.ns += line.ns
        self.busy_ns += line.busy_ns
        self.flops += line.flops or 0.0
        self.is_counted = self.is_counted and line.flops is not None
        self.at_peak_ns += (line.mfu or 0.0) * line.busy_ns
        self.moved_ns += (line.mbu or 0.0) * line.busy_ns
        self.num_devices = max(self.num_devices, line.num_devices)
        for name, number in line.quantities.items():
            self.quantities[name] += number

    def __getitem__(self, name: str) -> float:
        return self.quantities[name]

    @property
    def prefill_ns(self) -> float:
        """Time of reading prompts, as long as their FLOPs take at the best rate [ns].

        A token of a prompt and one of an answer need about the same; the head, which runs on answers alone, is shared.
        """
        tokens = self["prefill_tokens"] + self["decode_tokens"]
        return min(self.busy_ns, self.at_rate_ns * self["prefill_tokens"] / tokens) if tokens else 0.0

    @property
    def decode_ns(self) -> float:
        """Time of decode steps: the phase without its prefill [ns]."""
        return self.busy_ns - self.prefill_ns

    @property
    def rows_ns(self) -> float:
        """Time of decode that grows with its rows: FLOPs at the best rate, or reads of the cache [ns]."""
        computing_ns = self.at_rate_ns - self.prefill_ns
        cache = 1 - self["weight_bytes"] / self["bytes_moved"] if self["bytes_moved"] else 0.0
        return min(self.decode_ns, max(computing_ns, self.moved_ns * cache))


def phase_totals(evidence: RunEvidence) -> dict[str, _PhaseTotal]:
    """Add up the named phases of all steps, by name; none of a loop that names none."""
    totals: dict[str, _PhaseTotal] = {}
    for line in (line for step in evidence.steps for line in step.loop_phases if line.name != ASIDE):
        totals.setdefault(line.name, _PhaseTotal(line.name)).add(line)
    # The loop's devices have shown what they can do in the phase that used them best; others only in their own.
    here = [total for total in totals.values() if not total.num_devices and total.flops and total.busy_ns > 0]
    best = max((total.flops / total.busy_ns for total in here), default=0.0)
    for total in totals.values():
        total.at_rate_ns = total.at_peak_ns if total.num_devices else total.flops / best if best else 0.0
    return totals


def _summed(
    evidence: RunEvidence, lost_ns: Callable[[_PhaseTotal], float]
) -> tuple[float, list[tuple[float, _PhaseTotal]]]:
    """Add up a loss over the phases that generate, with these phases, the dearest first."""
    losses = [(lost_ns(total), total) for total in phase_totals(evidence).values() if total["prefills"]]
    lossy = sorted((loss for loss in losses if loss[0] > 0), key=lambda loss: -loss[0])
    return sum(ns for ns, _ in lossy), lossy


def longest_answer(evidence: RunEvidence) -> Observation | None:
    """Rows of decode whose answer has ended, and which go on until the longest of their batch has."""
    ns, phases = _summed(evidence, lambda total: total.decode_ns * _idle_share(total) * _waited(total))
    if not phases:
        return None
    # Means over all batches: a decode step for each token behind the first of the longest answer.
    dearest = phases[0][1]
    longest, mean = dearest["decode_steps"] / dearest["prefills"] + 1, dearest["generated_tokens"] / dearest["answers"]
    idle = _idle_share(dearest)
    return observe(evidence, "longest-answer", ns, idle=idle, phase=dearest.name, longest=longest, mean=mean)


def generation(evidence: RunEvidence) -> Observation | None:
    """Answers that take most of the step, in a log that tells their lengths and not how the engine made them."""
    makers = [total for total in phase_totals(evidence).values() if total["mean_answer"] and not total.num_devices]
    if not makers:
        return None
    dearest = max(makers, key=lambda total: total.ns)
    mean, longest = (dearest[name] / evidence.num_steps for name in ("mean_answer", "longest_answer"))
    of_step = f" ({longest:,.0f} tokens)" if longest else ""
    values = {"its": dearest.ns, "phase": dearest.name, "mean": mean, "longest": of_step}
    return observe(evidence, "generation", dearest.ns, **values)


def _idle_share(total: _PhaseTotal) -> float:
    return 1 - total["decode_tokens"] / total["decode_slots"] if total["decode_slots"] else 0.0


def _waited(total: _PhaseTotal) -> float:
    """Part of the time of a phase's devices in which the loop was in it: their work beside the loop costs no step."""
    return min(1.0, total.ns / total.busy_ns) if total.busy_ns > 0 else 0.0


def small_batches(evidence: RunEvidence) -> Observation | None:
    """Answers of one step that are decoded in several batches, each of which reads all weights for few rows."""
    memory = max((step.memory_share or 0.0 for step in evidence.steps), default=0.0)
    if memory > _FULL:
        return None
    ns, phases = _summed(evidence, lambda total: _saved_by_one_batch(total, len(evidence.steps)) * _waited(total))
    if not phases:
        return None
    # Batches of one step, and their rows: what one batch would join.
    dearest = phases[0][1]
    batches, rows = dearest["prefills"] / evidence.num_steps, dearest["decode_slots"] / dearest["decode_steps"]
    return observe(
        evidence,
        "small-decode-batches",
        ns,
        phase=dearest.name,
        batches=batches,
        rows=rows,
        fixed=1 - dearest.rows_ns / dearest.decode_ns,
        all_rows=batches * rows,
    )


def _saved_by_one_batch(total: _PhaseTotal, num_steps: int) -> float:
    batches = total["prefills"] / num_steps
    if batches <= 1 or not total["decode_steps"]:
        return 0.0
    return (total.decode_ns - total.rows_ns) * (1 - 1 / batches)


def repeated_prefill(evidence: RunEvidence) -> Observation | None:
    """Prompts that are read once for each of their answers."""

    def lost_ns(total: _PhaseTotal) -> float:
        again = 1 - total["prompt_tokens"] / total["prefill_tokens"] if total["prefill_tokens"] else 0.0
        return total.prefill_ns * again * _waited(total)

    ns, phases = _summed(evidence, lost_ns)
    if not phases:
        return None
    dearest = phases[0][1]
    times = dearest["prefill_tokens"] / dearest["prompt_tokens"]
    values = {"phase": dearest.name, "tokens": dearest["prefill_tokens"], "times": times}
    return observe(evidence, "repeated-prefill", ns, **values)


def repeated_scoring(evidence: RunEvidence) -> Observation | None:
    """A frozen model that scores the same sequences again, as in each of several updates on one rollout."""
    totals = phase_totals(evidence)
    sequences = sum(total["sequence_tokens"] for total in totals.values())
    repeated = [
        (total.ns * (1 - sequences / total["scored_tokens"]), total)
        for total in totals.values()
        if sequences and total["scored_tokens"] >= _REPEATED * sequences
    ]
    if not repeated:
        return None
    _, dearest = max(repeated, key=lambda loss: loss[0])
    times = dearest["scored_tokens"] / sequences
    ns = sum(ns for ns, _ in repeated)
    return observe(evidence, "repeated-scoring", ns, phase=dearest.name, times=times, its=dearest.ns)


def host_phase(evidence: RunEvidence) -> Observation | None:
    """A phase, or the unclaimed rest, in which the host works and no FLOPs are counted."""
    # A phase on other devices waits for these, and one whose FLOPs nobody knows may compute.
    hosts = [
        (total.ns, total.name)
        for total in phase_totals(evidence).values()
        if total.name != REST and not total.num_devices and total.is_counted and not total.flops
    ]
    rest_ns = rest_without_work(evidence)
    hosts = [*hosts, *([(rest_ns, REST)] if rest_ns else [])]
    if not hosts:
        return None
    _, dearest = max(hosts)
    # Code that the loop's thread was seen in, where it was sampled.
    which = "what no phase claims" if dearest == REST else f"the phase '{dearest}'"
    codes: Counter[str] = Counter()
    for step in evidence.steps:
        for _, code, _, spent_ns in step.places:
            codes[code] += spent_ns
    where = f", mostly in {codes.most_common(1)[0][0]}" if codes else ""
    ns = sum(ns for ns, _ in hosts)
    return observe(evidence, "host-phase", ns, phase=which, its=max(hosts)[0], where=where)


def rest_without_work(evidence: RunEvidence) -> int:
    """Unclaimed time without counted work, waiting for data left out [ns]; 0 if work is counted there."""
    lines = [(line, step) for step in evidence.steps for line in step.loop_phases if line.name == REST]
    if any(line.flops != 0 for line, _ in lines):
        return 0
    return sum(max(0, line.ns - step.waited_ns) for line, step in lines)


def workless_ns(step: RunStep) -> int:
    """Time of a step in named phases without FLOPs on the loop's devices [ns]."""
    return sum(line.ns for line in step.loop_phases if line.name not in (REST, ASIDE) and line.flops == 0)


def no_overlap(evidence: RunEvidence) -> Observation | None:
    """Devices of a rollout and devices of the loop that wait for each other."""
    apart = [total for total in phase_totals(evidence).values() if total.num_devices]
    if not apart:
        return None
    dearest = max(apart, key=lambda total: total.ns)
    # At once, a step lasts as long as the busier of the two.
    busy_ns = min(dearest.busy_ns, evidence.duration_ns)
    idle_ns = evidence.duration_ns - busy_ns
    values = {"its": dearest.ns, "phase": dearest.name, "busy": busy_ns, "idle": idle_ns}
    # Overlap gains nothing if the phase's devices never stand still; more devices do.
    if busy_ns >= _BUSY * evidence.duration_ns:
        return observe(evidence, "no-overlap/busy", dearest.ns, **values)
    return observe(evidence, "no-overlap", min(dearest.ns, idle_ns), **values)


def samples(evidence: RunEvidence) -> Observation | None:
    """Sampling in every step of a run that does not learn from what it samples."""
    totals = phase_totals(evidence).values()
    sampled = sum(total["prefill_tokens"] + total["decode_tokens"] for total in totals)
    trained = sum(total["tokens"] for total in totals if not total["prefills"])
    if not 0 < sampled < _LEARNT * trained:
        return None
    ns = sum(total.ns for total in totals if total["prefills"])
    return observe(evidence, "samples-in-step", ns, sampled=sampled)


# Answers differ in length, rewards take their time and servers are waited for in every loop; a tenth is more.
RULES = (
    # Half of the step is more than any other phase has.
    Rule("generation", in_records=RuleObserver(generation, 0.40, place=FindingPlace.VAGUE)),
    Rule("longest-answer", in_records=RuleObserver(longest_answer, 0.10)),
    Rule("small-decode-batches", in_records=RuleObserver(small_batches, 0.10)),
    Rule("repeated-prefill", in_records=RuleObserver(repeated_prefill, 0.05)),
    Rule("repeated-scoring", in_records=RuleObserver(repeated_scoring, 0.03)),
    Rule("samples-in-step", in_records=RuleObserver(samples, 0.10)),
    Rule("host-phase", in_records=RuleObserver(host_phase, 0.10)),
    Rule("no-overlap", in_records=RuleObserver(no_overlap, 0.10)),
)
