"""Rules about several ranks: which one is waited for and why, and communication that nothing hides."""

import re
from collections import Counter
from collections.abc import Collection
from statistics import median

from headway.explain.findings.evidence import Observation, SteadyEvidence, StepEvidence
from headway.report import format_share
from headway.words import Argument

# Why a rank comes late other than by more work; waiting for data has a rule of its own.
_SLOW_CAUSES = frozenset({"speed", "idle.launch", "idle.sync", "idle.other", "copies", "aside"})
_GATHERS = re.compile(r"all_?gather", flags=re.IGNORECASE)


def uneven_work(evidence: SteadyEvidence) -> Observation | None:
    """Ranks that wait for the one with the most work, by the FLOPs of each."""
    lost_ns = sum(step.imbalance * step.duration_ns for step in evidence.steps)
    share = format_share(lost_ns / evidence.duration_ns)
    ranks = {step.heaviest_rank for step in evidence.steps}
    which = f"rank {ranks.pop()}, always" if len(ranks) == 1 else "now one rank, now another"
    return Observation(
        lost_ns,
        f"ranks wait at least {share} of the time for the one with the most work ({which}).",
        "the packs of a step differ in FLOPs: long samples cost more than short ones of as many tokens, images more "
        "than text.",
        "packs that are planned over a length index, which carry equal FLOPs (no data.stream; `headway pack` shows the "
        "plan); or more packs a step (optim.accumulation).",
    )


def slow_device(evidence: SteadyEvidence) -> Observation | None:
    """A rank that computes slower than the others in most steps."""
    slow = [step for step in evidence.steps if step.slowest_speed is not None and step.slowest_speed < 0.9]
    ranks = {step.slowest_rank for step in slow}
    # Devices of one kind agree within 3 %, and chance varies: now one is the slowest, now another.
    if len(ranks) != 1 or 2 * len(slow) <= evidence.num_steps:
        return None
    speed = median(step.slowest_speed or 0.0 for step in slow)
    return Observation(
        sum((1 - (step.slowest_speed or 1.0)) * step.duration_ns for step in slow),
        f"rank {ranks.pop()} computes at {format_share(speed)} of the ranks' median speed, whatever work it is given.",
        "its device is throttled or shared, or its host is.",
        "the run without that machine, once its clocks, temperature and other processes have been looked at.",
    )


def heavy_pack(evidence: StepEvidence) -> Observation | None:
    """Ranks that wait for one that has more to compute."""
    return _waited_for(
        evidence,
        {"work"},
        "packs are dealt out by number, or by tokens, and not by what they cost.",
        "data.strategy: balanced, which deals packs of equal cost to the ranks, and a larger data.window.",
    )


def slow_rank(evidence: StepEvidence) -> Observation | None:
    """Ranks that wait for one that takes longer for the same work."""
    return _waited_for(
        evidence,
        _SLOW_CAUSES,
        "that rank's device or host is slower: throttled, shared with others, or held up by something in its process.",
        "look at that machine (clocks, other processes, its loader), and take it out if it stays slow; "
        f"{Argument('rank')} shows where its time went.",
    )


def _waited_for(evidence: StepEvidence, causes: Collection[str], cause: str, advice: str) -> Observation | None:
    """Sum up how long ranks waited for others in the steps in which one of some causes was why."""
    wait_in_step = {wait.step: wait for wait in evidence.waits if wait.cause in causes}
    waited: Counter[int] = Counter()  # time that the others waited for each rank [ns]
    in_step: Counter[tuple[int, int]] = Counter()  # the same by rank and step
    for step in evidence.steps:
        if step.step in wait_in_step:
            ns = sum(line.ns for line in step.lines if line.key == "communication.waiting")
            rank = wait_in_step[step.step].rank
            waited[rank] += ns
            in_step[rank, step.step] += ns
    ns = waited.total()
    if not ns:
        return None
    rank = max(waited, key=waited.__getitem__)
    dearest = max((step for late_rank, step in in_step if late_rank == rank), key=lambda step: in_step[rank, step])
    return Observation(
        ns,
        f"ranks waited {evidence.share(ns)} of their time in collectives, mostly for rank {rank}; in step {dearest} "
        f"{wait_in_step[dearest].why()}.",
        cause,
        advice,
    )


def exposed_gathers(evidence: StepEvidence) -> Observation | None:
    """Gathers of sharded weights while nothing computes."""
    gathered_ns, all_ns = _communicated(evidence)
    transferred_ns = evidence.ns("communication") - evidence.ns("communication.waiting")
    ns = round(transferred_ns * gathered_ns / all_ns) if all_ns else 0
    if 2 * gathered_ns <= all_ns:
        return None
    return Observation(
        ns,
        f"only gathers of sharded weights ran for {evidence.share(ns)} of the time.",
        "a block computes for a shorter time than the next block's weights take to arrive.",
        "larger packs (data.tokens_per_pack), parallel.reshard: false where memory allows it, or a smaller "
        "parallel.shard with parallel.replicate.",
    )


def exposed_communication(evidence: StepEvidence) -> Observation | None:
    """Exchanges of gradients while nothing computes."""
    gathered_ns, all_ns = _communicated(evidence)
    if 2 * gathered_ns > all_ns > 0:
        return None
    ns = evidence.ns("communication") - evidence.ns("communication.waiting")
    return Observation(
        ns,
        f"only communication ran for {evidence.share(ns)} of the time.",
        "gradients are exchanged more often or in more bytes than computing hides, or ranks wait for each other.",
        "parallel.reduce: step with optim.accumulation, parallel.reduce_dtype: bfloat16, larger packs "
        "(data.tokens_per_pack); traces of all ranks tell transfer from waiting.",
    )


def _communicated(evidence: StepEvidence) -> tuple[int, int]:
    """Time of gathers, and of all collectives [ns]."""
    gathered = total = 0
    for event in evidence.spent:
        if event.line == "communication":
            total += event.ns
            gathered += event.ns if _GATHERS.search(f"{event.name} {event.group}") else 0
    return gathered, total
