"""Rules about several ranks: who is waited for and why, and communication that nothing hides."""

import re
from collections import Counter
from collections.abc import Collection

from headway.explain.findings.evidence import Evidence, Observation

# Why a rank comes late other than by more work; waiting for data has a rule of its own.
_SLOW_CAUSES = frozenset({"speed", "idle.launch", "idle.sync", "idle.other", "copies", "aside"})
_GATHERS = re.compile(r"all_?gather", flags=re.IGNORECASE)


def heavy_pack(evidence: Evidence) -> Observation | None:
    """Ranks wait for one that has more to compute."""
    return _waited_for(
        evidence,
        {"work"},
        "packs are dealt out by number, or by tokens, and not by what they cost.",
        "data.strategy: balanced, which deals packs of equal cost to the ranks, and a larger data.window.",
    )


def slow_rank(evidence: Evidence) -> Observation | None:
    """Ranks wait for one that takes longer for the same work."""
    return _waited_for(
        evidence,
        _SLOW_CAUSES,
        "that rank's device or host is slower: throttled, shared with others, or held up by something in its process.",
        "look at that machine (clocks, other processes, its loader), and take it out if it stays slow; --rank shows "
        "where its time went.",
    )


def _waited_for(evidence: Evidence, causes: Collection[str], cause: str, advice: str) -> Observation | None:
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


def exposed_gathers(evidence: Evidence) -> Observation | None:
    """Nothing computes while weights are gathered."""
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


def exposed_communication(evidence: Evidence) -> Observation | None:
    """Nothing computes while gradients are exchanged."""
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


def _communicated(evidence: Evidence) -> tuple[int, int]:
    """Time of gathers, and of all collectives [ns]."""
    gathered = total = 0
    for event in evidence.spent:
        if event.line == "communication":
            total += event.ns
            gathered += event.ns if _GATHERS.search(f"{event.name} {event.group}") else 0
    return gathered, total
