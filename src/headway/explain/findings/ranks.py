"""Rules about several ranks: who is waited for and why, and communication that nothing hides."""

import re
from collections import Counter
from collections.abc import Collection

from headway.explain.findings.evidence import Evidence, Seen

# Why a rank comes late other than by more work; waiting for data has a rule of its own.
_LATE = frozenset({"speed", "idle.launch", "idle.sync", "idle.other", "copies", "aside"})
_GATHERS = re.compile(r"all_?gather", flags=re.IGNORECASE)


def heavy_pack(evidence: Evidence) -> Seen | None:
    """Ranks wait for one that has more to compute."""
    return _waited_for(
        evidence,
        {"work"},
        "packs are dealt out by number, or by tokens, and not by what they cost.",
        "data.strategy: balanced, which deals packs of equal cost to the ranks, and a larger data.window.",
    )


def slow_rank(evidence: Evidence) -> Seen | None:
    """Ranks wait for one that takes longer for the same work."""
    return _waited_for(
        evidence,
        _LATE,
        "that rank's device or host is slower: throttled, shared with others, or held up by something in its process.",
        "look at that machine (clocks, other processes, its loader), and take it out if it stays slow; --rank shows "
        "where its time went.",
    )


def _waited_for(evidence: Evidence, causes: Collection[str], cause: str, advice: str) -> Seen | None:
    """What ranks waited for others in the steps in which one of some causes was why."""
    found = {one.step: one for one in evidence.waits if one.cause in causes}
    waited: Counter[int] = Counter()  # time that the others waited for each rank [ns]
    in_step: Counter[tuple[int, int]] = Counter()  # the same by rank and step
    for step in evidence.steps:
        if step.step in found:
            ns = sum(line.ns for line in step.lines if line.key == "communication.waiting")
            rank = found[step.step].rank
            waited[rank] += ns
            in_step[rank, step.step] += ns
    ns = waited.total()
    if not ns:
        return None
    rank = max(waited, key=waited.__getitem__)
    dearest = max((step for one, step in in_step if one == rank), key=lambda step: in_step[rank, step])
    return Seen(
        ns,
        f"ranks waited {evidence.share(ns)} of their time in collectives, mostly for rank {rank}; in step {dearest} "
        f"{found[dearest].why()}.",
        cause,
        advice,
    )


def exposed_gathers(evidence: Evidence) -> Seen | None:
    """Nothing computes while weights are gathered."""
    gathered_ns, all_ns = _communicated(evidence)
    transferred_ns = evidence.ns("communication") - evidence.ns("communication.waiting")
    ns = round(transferred_ns * gathered_ns / all_ns) if all_ns else 0
    if 2 * gathered_ns <= all_ns:
        return None
    return Seen(
        ns,
        f"only gathers of sharded weights ran for {evidence.share(ns)} of the time.",
        "a block computes for a shorter time than the next block's weights take to arrive.",
        "larger packs (data.tokens_per_pack), parallel.reshard: false where memory allows it, or a smaller "
        "parallel.shard with parallel.replicate.",
    )


def exposed_communication(evidence: Evidence) -> Seen | None:
    """Nothing computes while gradients are exchanged."""
    gathered_ns, all_ns = _communicated(evidence)
    if 2 * gathered_ns > all_ns > 0:
        return None
    ns = evidence.ns("communication") - evidence.ns("communication.waiting")
    return Seen(
        ns,
        f"only communication ran for {evidence.share(ns)} of the time.",
        "gradients are exchanged more often or in more bytes than computing hides, or ranks wait for each other.",
        "parallel.reduce: step with optim.accumulation, parallel.reduce_dtype: bfloat16, larger packs "
        "(data.tokens_per_pack); traces of all ranks tell transfer from waiting.",
    )


def _communicated(evidence: Evidence) -> tuple[int, int]:
    """Time of gathers, and of all collectives [ns]."""
    gathered = whole = 0
    for one in evidence.spent:
        if one.line == "communication":
            whole += one.ns
            gathered += one.ns if _GATHERS.search(f"{one.name} {one.group}") else 0
    return gathered, whole
