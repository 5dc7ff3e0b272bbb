"""All rules in one table, and the engine that evaluates them.

A rule names the kind of evidence that it reads: waterfalls of steps (`StepEvidence`), all steps of a run in a row
(`RunEvidence`), or those without the slow first ones (`SteadyEvidence`). To add a finding is to write a function from
one of these to an `Observation`, in the file of its subject, and to add a line to the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial
from typing import Any, Generic, TypeVar

from headway.explain.attribution import Phase
from headway.explain.explanation import MOST, Finding
from headway.explain.findings import device, host, loops, optimizer, patterns, pauses, ranks, recorded, rollout, series
from headway.explain.findings.evidence import Evidence, Observation, RunEvidence, SteadyEvidence, StepEvidence
from headway.explain.findings.largest import LEAST, largest_loss

EvidenceKind = TypeVar("EvidenceKind", bound=Evidence[Any])


class TimeOf(Enum):
    """Part of the time in which a loss lies."""

    STEPS = "in the steps"
    MACHINE = "in the steps, and no part of their own time"
    DATA = "in the steps, waiting for data"
    BESIDE = "between the steps"


class FindingPlace(IntEnum):
    """Place of a finding in the list: those that name a cause come first, the dearest before the others."""

    CAUSE = 0
    CHOICE = 1  # costs what it does for its result: without it something else would be trained
    LIMIT = 2  # costs nothing yet
    UNEXPLAINED = 3  # the largest loss, of which no cause is known
    VAGUE = 4  # names no cause, so that it is charged with what no other finding names
    PASSING = 5  # passes by itself


@dataclass(frozen=True, slots=True)
class Rule(Generic[EvidenceKind]):
    """One cause of lost time, and how it is seen.

    Attributes:
        name: the finding's.
        evidence: the kind of evidence that it reads.
        least: share of the time below which it stays silent; 0 where its condition says all.
        look: the condition, the loss and the sentences: what is seen in the evidence; None where the evidence does not
            tell, or tells otherwise.
        time: in which its loss lies.
        place: of its finding.
        lines: beginnings of the keys of the waterfall's lines in which its loss lies.
    """

    name: str
    evidence: type[EvidenceKind]
    least: float
    look: Callable[[EvidenceKind], Observation | None]
    time: TimeOf = TimeOf.STEPS
    place: FindingPlace = FindingPlace.CAUSE
    lines: tuple[str, ...] = ()


_DATA = ("idle.data",)
_LATE = ("idle.launch",)
_ASIDE = ("aside",)
_CHORES = ("aside", "idle.launch")  # announced to the meter, or seen in stacks
_KERNELS = ("memory", "slow", "matmul", "optimizer")

# Below its share a finding is not worth a change, or is what every run has. Of two rules of one name the first that
# sees something tells it. What is charged with the rest stands last.
RULES: tuple[Rule[Any], ...] = (
    # A loader that keeps up is not waited for at all; 5 % is more than a batch that is late now and then.
    Rule("data-storage", StepEvidence, 0.05, partial(host.data_wait, part="read"), TimeOf.DATA, lines=_DATA),
    Rule("data-decoding", StepEvidence, 0.05, partial(host.data_wait, part="decode"), TimeOf.DATA, lines=_DATA),
    Rule("data-tokenising", StepEvidence, 0.05, partial(host.data_wait, part="tokenise"), TimeOf.DATA, lines=_DATA),
    Rule("data-bound", StepEvidence, 0.05, partial(host.data_wait, part=""), TimeOf.DATA, lines=_DATA),
    # A pause is one gap that is a fiftieth of the step; 5 % is more than one that comes now and then.
    Rule("host-pause", StepEvidence, 0.05, pauses.host_pause, lines=_LATE),
    # Collections of young objects take some thousandths of the time in every program.
    Rule("garbage-collection", StepEvidence, 0.05, pauses.garbage_collection, lines=_LATE),
    # They belong to the first steps; what a profile of later ones has of them is worth a word.
    Rule("allocation", StepEvidence, 0.03, pauses.allocation, lines=_LATE),
    Rule("first-use", StepEvidence, 0.05, pauses.first_use, lines=_LATE),
    Rule("graph-late", StepEvidence, 0.05, pauses.graph_late, lines=_LATE),
    # A device that is launched ahead never waits; 10 % leaves the step's begin and end, and what a profiler adds.
    Rule("launch-bound", StepEvidence, 0.10, pauses.launch_bound, lines=_LATE),
    # A core is taken away for some per cent of the time wherever the system itself has work.
    Rule("shared-cores", StepEvidence, 0.15, pauses.contended, TimeOf.MACHINE),
    # Answers differ in length, rewards take their time and servers are waited for in every loop; a tenth is more.
    Rule("longest-answer", SteadyEvidence, 0.10, rollout.longest_answer),
    Rule("small-decode-batches", SteadyEvidence, 0.10, rollout.small_batches),
    Rule("repeated-prefill", SteadyEvidence, 0.05, rollout.repeated_prefill),
    Rule("repeated-scoring", SteadyEvidence, 0.03, rollout.repeated_scoring),
    Rule("host-phase", SteadyEvidence, 0.10, rollout.host_phase),
    Rule("no-overlap", SteadyEvidence, 0.10, rollout.no_overlap),
    # A loop zeroes gradients, counts and logs a line between the phases; a tenth of the time is more than that.
    Rule("garbage-collection", SteadyEvidence, 0.05, recorded.collections),
    Rule("logging", SteadyEvidence, 0.05, partial(recorded.pause, purpose="logging")),
    Rule("checkpoint", SteadyEvidence, 0.10, partial(recorded.pause, purpose="checkpoint")),
    Rule("read-back", SteadyEvidence, 0.10, partial(recorded.pause, purpose="read-back")),
    Rule("parameter-loop", SteadyEvidence, 0.10, partial(recorded.pause, purpose="parameter-loop")),
    Rule("host-pause", SteadyEvidence, 0.10, partial(recorded.pause, purpose="")),
    # One read-back of a number per step costs a device some 1 %; a loop of them more.
    Rule("synchronisation", StepEvidence, 0.03, host.synchronisation, lines=("idle.sync",)),
    # A CPU waits for nothing, so what counts is their number; a thousandth leaves out what cannot be measured.
    Rule("read-back", StepEvidence, 0.001, loops.read_backs, lines=("memory", "idle.launch")),
    Rule("blocking-copy", StepEvidence, 0.03, host.blocking_copies, lines=("copies", "idle.sync")),
    # A fused AdamW moves 28 bytes a parameter: some 1 to 5 % of a step; a loop adds its launches to that.
    Rule("optimizer-loop", StepEvidence, 0.05, loops.optimizer_loop, lines=("optimizer", "idle.launch")),
    # As much as an optimizer that goes over tensors one by one.
    Rule("parameter-loop", StepEvidence, 0.05, loops.parameter_loop, lines=("memory", "idle.launch")),
    # An update of one pass takes 1 to 5 % itself; what one saves below that is no reason for another optimizer.
    Rule("unfused-optimizer", StepEvidence, 0.03, optimizer.unfused_optimizer, lines=("optimizer",)),
    Rule("optimizer-loop", SteadyEvidence, 0.10, recorded.optimizer_loop),
    # A few small products, of norms' gains and routers, are in every model.
    Rule("small-gemms", StepEvidence, 0.10, loops.small_gemms, lines=("slow", "memory", "idle.launch")),
    # After the first steps nothing should be compiled at all; of a run their number counts.
    Rule("recompilation", RunEvidence, 0.0, series.compiled_again, TimeOf.BESIDE),
    Rule("recompilation", StepEvidence, 0.02, partial(host.beside_training, phase=Phase.COMPILE), lines=_ASIDE),
    # Below, a longer run makes up for it.
    Rule("compiling", RunEvidence, 0.05, series.compiling, TimeOf.BESIDE),
    # Young's formula puts a checkpoint's cost at a few per cent where devices fail daily; more is too often.
    Rule("checkpoint", StepEvidence, 0.10, partial(host.beside_training, phase=Phase.CHECKPOINT), lines=_CHORES),
    # A line of numbers costs the host a millisecond or two, and several ranks wait for each other to write it.
    Rule("logging", StepEvidence, 0.10, partial(host.beside_training, phase=Phase.LOGGING), lines=_CHORES),
    # Judging is useful work, but a fifth of the time is much of it.
    Rule("evaluation", StepEvidence, 0.20, partial(host.beside_training, phase=Phase.EVALUATION), lines=_CHORES),
    Rule("checkpoint", RunEvidence, 0.10, partial(series.beside, what="checkpoint"), TimeOf.BESIDE),
    Rule("evaluation", RunEvidence, 0.20, partial(series.beside, what="evaluation"), TimeOf.BESIDE),
    # Nobody leaves it on for its use, so what can be measured is worth a word.
    Rule("anomaly-mode", StepEvidence, 0.01, patterns.anomaly_mode, lines=_KERNELS),
    # Sums in 64 bits, as of a norm, take some thousandths.
    Rule("double-precision", StepEvidence, 0.05, patterns.double_precision, lines=_KERNELS),
    # Of short sequences the matrix of all pairs is small, and a fused kernel saves little.
    Rule("eager-attention", StepEvidence, 0.10, patterns.eager_attention, lines=_KERNELS),
    # A head is a fifth to a quarter of a model of half a billion parameters.
    Rule("large-head", StepEvidence, 0.40, patterns.large_head, lines=_KERNELS),
    Rule("misaligned-gemms", StepEvidence, 0.05, device.misaligned_gemms, lines=("slow", "matmul")),
    # Norms and activations of an ordinary step take 5 to 10 % on a device, written out 10 to 16 % on a CPU.
    Rule("unfused-chains", StepEvidence, 0.20, device.unfused_chains, lines=("memory",)),
    # Of an eager step of a large model memory-bound kernels take a fifth, a part of it at full bandwidth.
    Rule("memory-bound", StepEvidence, 0.20, patterns.memory_bound, lines=("memory",)),
    Rule("slow-attention", StepEvidence, 0.03, device.slow_attention, lines=("slow", "matmul")),
    Rule("recomputation", SteadyEvidence, 0.05, recorded.recomputation),
    # Recomputing attention alone costs some 3 %; a whole forward again is a fifth to a quarter.
    Rule("recomputation", StepEvidence, 0.05, device.recomputation, lines=("recomputation", *_KERNELS)),
    # Packs of a balanced plan are 95 to 99 % full.
    Rule("padding", SteadyEvidence, 0.10, recorded.padding),
    Rule("padding", StepEvidence, 0.10, device.padding, lines=("padding", *_KERNELS)),
    # A frozen tower of ordinary images takes 10 to 20 %; its backward alone more than this is worth the question.
    Rule("vision-tower", StepEvidence, 0.30, device.vision_tower, place=FindingPlace.CHOICE, lines=("slow", "matmul")),
    Rule("uneven-experts", StepEvidence, 0.05, device.uneven_experts, lines=("slow", "communication")),
    Rule("double-precision", SteadyEvidence, 0.0, recorded.double_precision),
    Rule("anomaly-mode", SteadyEvidence, 0.0, recorded.anomaly_mode, place=FindingPlace.LIMIT),
    # Boards vary by some per cent, and a product at its power limit runs 5 to 10 % below the highest clock.
    Rule("throttled-clocks", StepEvidence, 0.10, device.throttled_clocks, lines=("slow", "matmul")),
    # Packs that are dealt out well lose 1 to 2 %, and equal ranks still come a few per cent apart.
    Rule("heavy-pack", SteadyEvidence, 0.05, ranks.uneven_work),
    Rule("heavy-pack", StepEvidence, 0.05, ranks.heavy_pack, lines=("communication",)),
    Rule("slow-rank", SteadyEvidence, 0.0, recorded.slow_rank),
    Rule("slow-rank", StepEvidence, 0.05, ranks.slow_rank, lines=("communication", "idle.data")),
    # An exchange per pass is a habit that costs more with every pass.
    Rule("reduces-each-pass", StepEvidence, 0.03, ranks.reduces_each_pass, lines=("communication",)),
    # What is exchanged last and first in a step cannot hide.
    Rule("exposed-gathers", StepEvidence, 0.05, ranks.exposed_gathers, lines=("communication",)),
    Rule("exposed-communication", StepEvidence, 0.10, ranks.exposed_communication, lines=("communication",)),
    # Other work on a machine makes steps some per cent slower now and then; below, nobody looks for a reason.
    Rule(series.CHANGED, SteadyEvidence, 0.05, series.changed),
    Rule("unstable-steps", SteadyEvidence, 0.05, series.unstable),
    # Less is not worth a search.
    Rule("slow-steps", SteadyEvidence, 0.02, series.slow_now_and_then),
    Rule(series.FALLING, SteadyEvidence, 0.0, series.drift),
    Rule("memory-limit", RunEvidence, 0.0, series.memory_limit, place=FindingPlace.LIMIT),
    # A host that is never a twentieth of a step ahead launches each kernel when the device is already waiting.
    Rule("host-bound", SteadyEvidence, 0.10, recorded.host_bound, place=FindingPlace.VAGUE),
    Rule("not-compute-bound", SteadyEvidence, 0.05, series.far_from_compute, place=FindingPlace.VAGUE),
    # A long run makes up for them.
    Rule("first-steps", RunEvidence, 0.05, series.first_steps, place=FindingPlace.PASSING),
)


def find(steps: StepEvidence | None = None, run: RunEvidence | None = None) -> tuple[Finding, ...]:
    """Find what costs the steps of a job most, and say what to try first.

    Args:
        steps: waterfalls of a trace, or of a run's records without the slow first ones.
        run: all steps of a run, as its records or its log tell them; None of a trace.

    Returns:
        At most five. Those that name a cause come first, the largest before the others; then what a run chose, what
        costs nothing yet, what names no cause, and what passes by itself.
    """
    kinds: dict[type, Evidence[Any]] = {
        type(evidence): evidence
        for evidence in (steps, run, run and run.steady)
        if evidence is not None and evidence.num_steps
    }
    findings: dict[str, tuple[FindingPlace, Finding]] = {}
    covered: list[tuple[str, int]] = []  # of each finding so far, the lines that its loss lies in, and the loss
    named_ns = 0  # time in the steps that findings so far name a cause of, without the wait for data
    for rule in RULES:
        evidence = kinds.get(rule.evidence)
        observation = None if evidence is None or rule.name in findings else rule.look(evidence)
        if evidence is None or observation is None:
            continue
        # A vague rule is charged with what is left; of time between the steps a loss is a share of both together.
        lost_ns = max(0, observation.ns - (named_ns if rule.place is FindingPlace.VAGUE else 0))
        beside_ns = sum(evidence.beside_ns.values()) if rule.time is TimeOf.BESIDE else 0
        total_ns = beside_ns + (evidence.full_ns if rule.time is TimeOf.MACHINE else evidence.duration_ns)
        if lost_ns < rule.least * total_ns:
            continue
        finding = _finding(rule, observation, evidence, lost_ns, total_ns, beside_ns)
        findings[rule.name] = rule.place, finding
        named_ns += finding.ns * evidence.num_steps if rule.time is TimeOf.STEPS else 0
        covered += [(line, round(lost_ns)) for line in rule.lines]
    if steps is not None and steps.num_steps and (observation := largest_loss(steps, covered)) is not None:
        rule = Rule("largest-loss", StepEvidence, LEAST, lambda _: observation, place=FindingPlace.UNEXPLAINED)
        findings[rule.name] = rule.place, _finding(rule, observation, steps, observation.ns, steps.duration_ns, 0)
    in_order = sorted(findings.values(), key=lambda placed: (placed[0], -placed[1].ns, placed[1].id))
    return tuple(finding for _, finding in in_order[:MOST])


def _finding(
    rule: Rule[Any], observation: Observation, evidence: Evidence[Any], lost_ns: float, total_ns: int, beside_ns: int
) -> Finding:
    """Make the finding of an observation: its loss as a share of a time, and MFU with and without it.

    Args:
        rule: that made the observation.
        observation: of the rule.
        evidence: that the rule read.
        lost_ns: what it costs all steps [ns].
        total_ns: the time that it is a share of [ns].
        beside_ns: the part of that time between the steps [ns].
    """
    mfu_ns = evidence.full_ns + beside_ns  # MFU is that of the steps as they were measured
    lost_ns, useful_ns, mfu_to = min(round(lost_ns), total_ns), evidence.useful_ns, None
    is_promise = rule.place not in (FindingPlace.VAGUE, FindingPlace.UNEXPLAINED)  # whose losses are bounds
    if is_promise and useful_ns is not None and 0 < lost_ns < total_ns:
        mfu_to = min(evidence.most_mfu, useful_ns / (mfu_ns - lost_ns))
    advice = observation.next
    if observation.setting and isinstance(evidence, StepEvidence) and evidence.is_headway_train:
        advice = f"{advice.removesuffix('.')}; here: {observation.setting}."
    return Finding(
        id=rule.name,
        seen=observation.message,
        cause=observation.cause,
        next=advice,
        ns=evidence.of_a_step(lost_ns),
        share=lost_ns / total_ns,
        mfu_from=None if useful_ns is None else useful_ns / mfu_ns,
        mfu_to=mfu_to,
    )
