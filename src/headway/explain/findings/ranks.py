"""Rules about several ranks: which one is waited for and why, and communication that nothing hides."""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from statistics import median
from typing import NamedTuple

from headway.explain.attribution import Chore
from headway.explain.findings.evidence import EventTime, RunEvidence, StepEvidence
from headway.explain.findings.gaps import recorded_pause
from headway.explain.findings.patterns import num_passes
from headway.explain.findings.rule import Observation, Rule, RuleObserver, TimeOf
from headway.report import format_ms, format_share
from headway.words import Argument

# Causes other than more work for which a rank comes late.
_SLOW_CAUSES = frozenset({"speed", "idle.data", "idle.launch", "idle.sync", "idle.other", "copies", "aside"})
# Part of the ranks' waiting from which one rank is slow: below it the late rank changes from step to step.
_MOSTLY = 0.8
_BY_CHANCE = 0.5  # part of the ranks' waiting for cores; ranks with equal work came a fifth of that apart
_MANY = 32  # exchanges of one kind a step; buckets of gradients are fewer
_GATHERS = ("all_gather",)
# Names of collectives, as NCCL, RCCL, Gloo and c10d write them; one that holds another stands first.
_COLLECTIVE = re.compile(
    r"(?P<reduce_scatter>reduce_?scatter)|(?P<all_gather>all_?gather)|(?P<all_reduce>all_?reduce)|"
    r"(?P<all_to_all>all_?to_?all)|(?P<broadcast>broadcast)|(?P<barrier>barrier)|(?P<send>send|recv)",
    flags=re.IGNORECASE,
)
_EXCHANGES = {  # collective: likely cause, advice
    "broadcast": (
        "one rank sends its buffers or weights to the others in each forward (DDP's broadcast_buffers).",
        "broadcast_buffers=False, or buffers that need no agreement registered with persistent=False outside of the "
        "wrapped model; large tables made on each rank.",
    ),
    "barrier": (
        "ranks wait for each other at a barrier within the step.",
        "no barrier in the step: collectives wait by themselves.",
    ),
    "all_gather": (
        "results of all ranks, such as logits or embeddings, are gathered in the step, or sharded weights.",
        "numbers that are reduced before they are sent, less often; traces of all ranks tell transfer from waiting.",
    ),
    "all_to_all": (
        "tokens go to their experts, or heads to their ranks, and nothing computes meanwhile.",
        "a smaller group within a node; larger batches; traces of all ranks tell transfer from waiting.",
    ),
    "many": (
        "many small tensors, such as metrics or parameters, are exchanged one by one: each costs its latency.",
        "one exchange of all of them stacked, every some steps.",
    ),
    "": (
        "gradients are exchanged more often or in more bytes than computing hides, or ranks wait for each other.",
        "larger batches, gradients in bfloat16, fewer exchanges; traces of all ranks tell transfer from waiting.",
    ),
}
_REDUCES = re.compile(r"all_?reduce|reduce_?scatter", flags=re.IGNORECASE)


def uneven_work(evidence: RunEvidence) -> Observation | None:
    """Ranks that wait for the one with the most work, by the FLOPs of each."""
    lost_ns = sum(step.imbalance * step.duration_ns for step in evidence.steps)
    share = evidence.share(lost_ns)
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


def slow_device(evidence: RunEvidence) -> Observation | None:
    """A rank that computes slower than the other ranks in most steps."""
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
        "batches of equal cost on all ranks, dealt out by FLOPs and not by number.",
        setting="data.strategy: balanced, which deals packs of equal cost to the ranks, and a larger data.window",
    )


def slow_rank(evidence: StepEvidence) -> Observation | None:
    """Ranks that wait for one, always the same and in most steps, that takes longer for the same work."""
    return _waited_for(
        evidence,
        _SLOW_CAUSES,
        "that rank's device or host is slower: throttled, shared with others, or held up by something in its process.",
        "look at that machine (clocks, other processes, its loader), and take it out if it stays slow; "
        f"{Argument('rank')} shows where its time went.",
        is_one_rank=True,
    )


def _waited_for(
    evidence: StepEvidence,
    causes: Collection[str],
    cause: str,
    advice: str,
    setting: str = "",
    *,
    is_one_rank: bool = False,
) -> Observation | None:
    """Sum up the time that steps would save without the rank they waited for, over the waits with one of some causes.

    Of a cause that covers a part of the wait, that part counts.
    """
    waits = {wait.step: wait for wait in evidence.waits if wait.cause in causes}
    costs = {step: round(wait.cost_ns * wait.explained) for step, wait in waits.items()}
    of_rank: Counter[int] = Counter()  # time that each rank cost the others [ns]
    for step in evidence.steps:  # once for each rank, all of which would take their step in less time
        if step.step in waits:
            of_rank[waits[step.step].rank] += costs[step.step]
    ns = of_rank.total()
    if not ns:
        return None
    rank = max(of_rank, key=of_rank.__getitem__)
    if is_one_rank:
        if of_rank[rank] < _MOSTLY * ns:
            return None
        # A rank that is slow is so in most steps: what it cost in a single one counts as the median step has it.
        steps_late = {step for step, wait in waits.items() if wait.rank == rank}
        usual_ns = median(costs[step.step] if step.step in steps_late else 0 for step in evidence.steps)
        ns = min(ns, round(usual_ns * len(evidence.steps)))
        if not ns:
            return None
        # Ranks that take cores from each other are late by chance, for a part of what each of them waits for cores.
        if evidence.is_cpu and ns < _BY_CHANCE * evidence.core_wait_ns:
            return None
    dearest = max(
        (wait for wait in waits.values() if wait.rank == rank), key=lambda wait: wait.cost_ns * wait.explained
    )
    return Observation(
        ns,
        f"the others waited for rank {rank}, mostly: without its delay steps would take "
        f"{evidence.share(ns, evidence.full_ns)} less; in "
        f"step {dearest.step} they waited {format_ms(dearest.wait_ns)} ms, and {dearest.why()}.",
        cause,
        advice,
        setting,
    )


def exposed_gathers(evidence: StepEvidence) -> Observation | None:
    """Gathers of sharded weights while nothing computes."""
    kinds = _communicated(evidence)
    gathered_ns, all_ns = sum(kind.ns for name, kind in kinds.items() if name in _GATHERS), _total_ns(kinds)
    transferred_ns = evidence.ns("communication") - evidence.ns("communication.waiting")
    ns = round(transferred_ns * gathered_ns / all_ns) if all_ns else 0
    if 2 * gathered_ns <= all_ns or not _is_sharded(evidence):
        return None
    return Observation(
        ns,
        f"only gathers of sharded weights ran for {evidence.share(ns)} of the time.",
        "a block computes for a shorter time than the next block's weights take to arrive.",
        "larger batches, weights that are kept until backward where memory allows it (reshard_after_forward=False), or "
        "sharding within a node (hybrid sharding).",
        setting="larger packs (data.tokens_per_pack), parallel.reshard: false, or a smaller parallel.shard with "
        "parallel.replicate",
    )


def exposed_communication(evidence: StepEvidence) -> Observation | None:
    """Exchanges while nothing computes, by the name of the collective that takes most of it."""
    kinds = _communicated(evidence)
    gathered_ns, all_ns = sum(kind.ns for name, kind in kinds.items() if name in _GATHERS), _total_ns(kinds)
    if 2 * gathered_ns > all_ns > 0 and _is_sharded(evidence):
        return None
    ns = evidence.ns("communication") - evidence.ns("communication.waiting")
    # Many small exchanges cost their number, whichever the others are.
    name = max(kinds, key=lambda name: (kinds[name].number > _MANY * evidence.num_steps, kinds[name].ns), default="")
    kind, which = kinds.get(name, _Exchanges()), ""
    if name and all_ns:  # on a crowded machine all of it may have been waiting for a core
        many = kind.number / evidence.num_steps
        which = f", {format_share(kind.ns / all_ns)} of it in {many:,.0f} {name.replace('_', '-')}s a step"
    row = "many" if kind.number > _MANY * evidence.num_steps else name
    # Ranks meet anew in each of many exchanges, so that waiting is theirs; exchanges of shards hide behind work.
    ns = max(ns, kind.ns) if row == "many" and not _is_sharded(evidence) else ns
    cause, advice = _EXCHANGES.get(row, _EXCHANGES[""])
    return Observation(
        ns,
        f"only communication ran for {evidence.share(ns)} of the time{which}.",
        cause,
        advice,
        setting="parallel.reduce: step with optim.accumulation, parallel.reduce_dtype: bfloat16, larger packs "
        "(data.tokens_per_pack)",
    )


def recorded_exchanges(evidence: RunEvidence) -> Observation | None:
    """Exchanges of the loop's own between the phases, or of data parallelism before the forward."""
    own, ns = recorded_pause(evidence, "exchange"), sum(step.phases_ns.get("exchange", 0) for step in evidence.steps)
    # A rank that is late is waited for there too, and has a finding of its own.
    ns = max(0, ns - sum(step.late_ns for step in evidence.steps))
    if own is not None and own.ns > ns:
        return own
    return Observation(
        ns,
        f"ranks waited for each other between the phases {evidence.share(ns)} of the time, such as before the forward.",
        "data parallelism sends the model's buffers before each forward (broadcast_buffers), or ranks wait for each "
        "other's numbers there.",
        "DistributedDataParallel(broadcast_buffers=False) if buffers do not change, smaller buffers, or numbers that "
        "are exchanged every N steps.",
    )


def reduces_each_pass(evidence: StepEvidence) -> Observation | None:
    """Gradients that are exchanged after each pass of a step, though the optimizer needs them once."""
    repeated_ns = 0.0
    most = 0
    for events, passes in zip(evidence.spent_by_step, num_passes(evidence), strict=True):
        exchanges = [event for event in events if event.line == "communication"]
        if passes < 2 or not exchanges:
            continue
        # A bucket is one kind of exchange, of so many elements. Those that every pass has were sent again and again,
        # and with gradients go buffers (broadcasts), and copies into the buckets and out of them.
        times = Counter(_text(event) for event in exchanges)
        repeated = {text for text, number in times.items() if number >= passes}
        ns = sum(event.ns for event in exchanges if _text(event) in repeated)
        if any(_REDUCES.search(text) for text in repeated) and ns:
            attribution = events[0].trace.attribution
            ns += sum(event.ns for event in events if attribution.chore[event.event] is Chore.DATA_PARALLEL)
            repeated_ns += ns * (1 - 1 / passes)
            most = max(most, passes)
    if not most:
        return None
    return Observation(
        repeated_ns,
        f"gradients are exchanged after each of {most} passes of a step; once would save "
        f"{evidence.share(round(repeated_ns))} of the time.",
        "gradients are accumulated over several passes, and data parallelism sends them after every one.",
        "no_sync() around all passes but the last (DDP), set_requires_gradient_sync(False) (FSDP2).",
        setting="parallel.reduce: step",
    )


def _text(event: EventTime) -> str:
    return f"{event.operator or event.name} {event.group}"


class _Exchanges(NamedTuple):
    """Exchanges of one kind in all steps."""

    ns: int = 0  # time in which nothing else ran [ns]
    number: int = 0


def _communicated(evidence: StepEvidence) -> dict[str, _Exchanges]:
    """Add up the exchanges that nothing hides, by the name of their collective; "" of an unknown name."""
    kinds: dict[str, _Exchanges] = {}
    for event in (event for event in evidence.spent if event.line == "communication"):
        match = _COLLECTIVE.search(f"{event.name} {event.group}")
        name = "" if match is None else (match.lastgroup or "")
        ns, number = kinds.get(name, _Exchanges())
        kinds[name] = _Exchanges(ns + event.ns, number + 1)
    return kinds


def _total_ns(kinds: Mapping[str, _Exchanges]) -> int:
    return sum(kind.ns for kind in kinds.values())


def _is_sharded(evidence: StepEvidence) -> bool:
    """Tell whether weights may be sharded: not where data parallelism keeps all of them on each rank (DDP)."""
    names = evidence.names
    has_ddp = any("ddp.reducer" in name or name.startswith("DistributedDataParallel") for name in names)
    return not has_ddp or any(name.startswith("FSDP::") for name in names)


def recorded_slow_rank(evidence: RunEvidence) -> Observation | None:
    """One rank that the other ranks wait for: by when it comes to its backward, else by the rate of its forwards."""
    lateness = _late_rank(evidence)
    if lateness is not None and lateness.ns >= 0.05 * evidence.duration_ns:  # equal ranks come a few per cent apart
        return lateness
    return slow_device(evidence)


def _late_rank(evidence: RunEvidence) -> Observation | None:
    """One rank that comes to its backward later than all other ranks, which wait for its gradients."""
    compared = [step for step in evidence.steps if step.late_rank is not None]
    if not compared:
        return None
    rank, times = Counter(step.late_rank for step in compared).most_common(1)[0]
    if times < 0.8 * len(compared):  # otherwise it is now this one and now that one
        return None
    slow = [step for step in compared if step.late_rank == rank]
    ns = sum(step.late_ns for step in slow)
    phase = Counter({step.late_phase: 0 for step in slow})
    for step in slow:
        phase[step.late_phase] += step.late_ns
    dearest = phase.most_common(1)[0][0]
    reasons = {
        "data": ("it waits longer for its data.", "its loader's workers and its storage."),
        "forward": ("its device or its cores are slower, or its batches larger.", "clocks and other processes there, "
                    "and the tokens of each rank (rank_flops)."),
    }  # fmt: skip
    other = ("its host does something before the forward that the others do not.", "what the loop does on that rank.")
    cause, advice = reasons.get(dearest, other)
    return Observation(
        ns,
        f"rank {rank} came to its backward {ns / len(slow) / 1e6:,.1f} ms later than any other in {times} of "
        f"{len(compared)} steps, most of it in the phase '{dearest}'; the others wait for it.",
        cause,
        advice,
    )


RULES = (
    # Packs that are dealt out well lose 1 to 2 %, and equal ranks still come a few per cent apart.
    Rule(
        "heavy-pack",
        RuleObserver(heavy_pack, 0.05, TimeOf.MACHINE, lines=("communication",)),
        RuleObserver(uneven_work, 0.05),
    ),
    Rule(
        "slow-rank",
        RuleObserver(slow_rank, 0.05, TimeOf.MACHINE, lines=("communication", "idle.data")),
        RuleObserver(recorded_slow_rank, 0.0),
    ),
    # An exchange per pass is a habit that costs more with every pass.
    Rule("reduces-each-pass", RuleObserver(reduces_each_pass, 0.03, lines=("communication",))),
    # The last and the first exchange of a step cannot hide.
    Rule("exposed-gathers", RuleObserver(exposed_gathers, 0.05, lines=("communication",))),
    Rule(
        "exposed-communication",
        RuleObserver(exposed_communication, 0.10, lines=("communication",)),
        RuleObserver(recorded_exchanges, 0.10),
    ),
)
