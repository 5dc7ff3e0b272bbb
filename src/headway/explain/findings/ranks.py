"""Rules about several ranks: which one is waited for and why, and communication that nothing hides."""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

from headway.explain.attribution import Chore
from headway.explain.findings.evidence import EventTime, RunEvidence, StepEvidence
from headway.explain.findings.gaps import recorded_pause
from headway.explain.findings.patterns import num_passes
from headway.explain.findings.rule import Observation, Rule, RuleObserver, TimeOf, observe
from headway.explain.ranks import WaitedFor
from headway.report import format_share
from headway.words import Argument

# Causes for which a rank comes late, by rule.
_CAUSES = {
    "heavy-pack": ("work",),
    "slow-rank": ("speed", "idle.data", "idle.launch", "idle.sync", "idle.other", "copies", "aside"),
}
# Part of the ranks' waiting from which one rank is slow: below it the late rank changes from step to step.
_MOSTLY = 0.8
_BY_CHANCE = 0.5  # part of the ranks' waiting for cores; ranks with equal work came a fifth of that apart
_MANY = 32  # small exchanges of one kind a step
_SHARDS = ("FSDP::", "FullyShardedDataParallel")
# Names of collectives, as NCCL, RCCL, Gloo and c10d write them; one that holds another stands first.
_COLLECTIVE = re.compile(
    r"(?P<reduce_scatter>reduce_?scatter)|(?P<all_gather>all_?gather)|(?P<all_reduce>all_?reduce)|"
    r"(?P<all_to_all>all_?to_?all)|(?P<broadcast>broadcast)|(?P<barrier>barrier)|(?P<send>send|recv)",
    flags=re.IGNORECASE,
)
_ROWS = {"all_reduce": "reduce", "reduce_scatter": "reduce"}  # collectives that share their sentences
_LARGE = 2**18  # an exchange of so many elements takes longer than its latency
_REDUCES = re.compile(r"all_?reduce|reduce_?scatter", flags=re.IGNORECASE)


def uneven_work(evidence: RunEvidence) -> Observation | None:
    """Ranks that wait for the one with the most work, by the FLOPs of each."""
    lost_ns = sum(step.imbalance * step.duration_ns for step in evidence.steps)
    ranks = {step.heaviest_rank for step in evidence.steps}
    which = f"rank {ranks.pop()}, always" if len(ranks) == 1 else "now one rank, now another"
    return observe(evidence, "heavy-pack", lost_ns, rank=which)


def slow_device(evidence: RunEvidence) -> Observation | None:
    """A rank that computes slower than the other ranks in most steps."""
    slow = [step for step in evidence.steps if step.slowest_speed is not None and step.slowest_speed < 0.9]
    ranks = {step.slowest_rank for step in slow}
    # Devices of one kind agree within 3 %, and chance varies: now one is the slowest, now another.
    if len(ranks) != 1 or 2 * len(slow) <= evidence.num_steps:
        return None
    speed = median(step.slowest_speed or 0.0 for step in slow)
    ns = sum((1 - (step.slowest_speed or 1.0)) * step.duration_ns for step in slow)
    return observe(evidence, "slow-rank", ns, rank=ranks.pop(), speed=speed, option=Argument("rank"))


def waited_for(evidence: StepEvidence, name: str) -> Observation | None:
    """Sum up the time that steps would save without the rank that they waited for, over the waits of a rule's causes.

    Of a cause that covers a part of the wait, that part counts. The rank with the most work may change from step to
    step; a slow one is always the same, and comes late in most steps by more than it waits for a core.
    """
    waits = {wait.step: _by_itself(evidence, wait) for wait in evidence.waits if wait.cause in _CAUSES[name]}
    costs = {step: round(wait.cost_ns * wait.explained) for step, wait in waits.items()}
    of_rank: Counter[int] = Counter()  # time that each rank cost the others [ns]
    for step in evidence.steps:  # once for each rank, all of which would take their step in less time
        if step.step in waits:
            of_rank[waits[step.step].rank] += costs[step.step]
    ns = of_rank.total()
    if not ns:
        return None
    rank = max(of_rank, key=of_rank.__getitem__)
    if name == "slow-rank":
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
    return observe(
        evidence,
        name,
        ns,
        rank=rank,
        saved=evidence.share(ns, evidence.full_ns),
        step=dearest.step,
        wait=dearest.wait_ns,
        reason=dearest.why(),
        option=Argument("rank"),
    )


def _by_itself(evidence: StepEvidence, wait: WaitedFor) -> WaitedFor:
    """Take from the cause of a wait the time for which the slow rank waited for a core longer than the other ranks."""
    waits = {step.rank: evidence.core_wait_of(step) or 0 for step in evidence.steps if step.step == wait.step}
    own_ns = waits.pop(wait.rank, 0)
    if not waits or not evidence.is_cpu or wait.cause in ("work", "idle.data"):
        return wait
    longer_ns = max(0, round(own_ns - median(waits.values())))
    return replace(wait, cause_ns=max(0, wait.cause_ns - longer_ns))


def exposed(evidence: StepEvidence, name: str) -> Observation | None:
    """Exchanges while nothing computes: gathers of sharded weights, or those of the collective that takes longest."""
    kinds = _communicated(evidence)
    all_ns, gathered_ns = sum(kind.ns for kind in kinds.values()), kinds.get("all_gather", _Exchanges()).ns
    ns = evidence.ns("communication") - evidence.ns("communication.waiting")
    is_sharded = _is_sharded(evidence, kinds)
    gathers_weights = is_sharded and 2 * gathered_ns > all_ns
    if gathers_weights != (name == "exposed-gathers"):
        return None
    if gathers_weights:
        return observe(evidence, name, round(ns * gathered_ns / all_ns))
    # Many small exchanges cost their number, whichever the others are.
    most = _MANY * evidence.num_steps
    collective = max(kinds, key=lambda name: (kinds[name].num_small > most, kinds[name].ns), default="")
    kind, which = kinds.get(collective, _Exchanges()), ""
    if collective and all_ns:  # on a crowded machine the whole exchange may have waited for a core
        many = kind.number / evidence.num_steps
        which = f", {format_share(kind.ns / all_ns)} of it in {many:,.0f} {collective.replace('_', '-')}s a step"
    row = "many" if kind.num_small > most else _ROWS.get(collective, collective)
    # Ranks meet anew in each of many exchanges, so that waiting is theirs; exchanges of shards hide behind work.
    ns = max(ns, kind.ns) if row == "many" and not is_sharded else ns
    return observe(evidence, "/".join(filter(None, [name, row])), ns, which=which)


def recorded_exchanges(evidence: RunEvidence) -> Observation | None:
    """Exchanges of the loop's own between the phases, or of data parallelism before the forward."""
    own, ns = recorded_pause(evidence, "exchange"), sum(step.phases_ns.get("exchange", 0) for step in evidence.steps)
    # A rank that is late is waited for there too, and has a finding of its own.
    ns = max(0, ns - sum(step.late_ns for step in evidence.steps))
    if own is not None and own.ns > ns:
        return own
    return observe(evidence, "exposed-communication/broadcast", ns)


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
    return observe(evidence, "reduces-each-pass", repeated_ns, passes=most)


def _text(event: EventTime) -> str:
    return f"{event.operator or event.name} {event.group}"


class _Exchanges(NamedTuple):
    """Exchanges of one kind in all steps."""

    ns: int = 0  # time in which nothing else ran [ns]
    number: int = 0
    num_small: int = 0  # exchanges that do not say that they are large


def _communicated(evidence: StepEvidence) -> dict[str, _Exchanges]:
    """Add up the exchanges that nothing hides, by the name of their collective; "" of an unknown name."""
    kinds: dict[str, _Exchanges] = {}
    for event in (event for event in evidence.spent if event.line == "communication"):
        # NCCL sends all-to-alls by kernels that are named after sends, so the fields of an event go before its name.
        match = _COLLECTIVE.search(f"{event.group} {event.name}")
        name = "" if match is None else (match.lastgroup or "")
        ns, number, num_small = kinds.get(name, _Exchanges())
        elements = event.group.rpartition(" ")[2]
        is_small = not elements.isdecimal() or int(elements) < _LARGE
        kinds[name] = _Exchanges(ns + event.ns, number + 1, num_small + is_small)
    return kinds


def _is_sharded(evidence: StepEvidence, kinds: Collection[str]) -> bool:
    """Tell whether weights are sharded: FSDP says so, or gradients are scattered where weights are gathered."""
    names = evidence.names
    has_ddp = any("ddp.reducer" in name or name.startswith("DistributedDataParallel") for name in names)
    return any(name.startswith(_SHARDS) for name in names) or ("reduce_scatter" in kinds and not has_ddp)


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
    kind = dearest if dearest in ("data", "forward") else "late"
    values = {"late": ns / len(slow) / 1e6, "times": times, "number": len(compared), "phase": dearest}
    return observe(evidence, f"slow-rank/{kind}", ns, rank=rank, **values)


RULES = (
    # Packs that are dealt out well lose 1 to 2 %, and equal ranks still come a few per cent apart.
    Rule(
        "heavy-pack",
        RuleObserver(partial(waited_for, name="heavy-pack"), 0.05, TimeOf.MACHINE, lines=("communication",)),
        RuleObserver(uneven_work, 0.05),
    ),
    Rule(
        "slow-rank",
        RuleObserver(partial(waited_for, name="slow-rank"), 0.05, TimeOf.MACHINE, lines=("communication", "idle.data")),
        RuleObserver(recorded_slow_rank, 0.0),
    ),
    # An exchange per pass is a habit that costs more with every pass.
    Rule("reduces-each-pass", RuleObserver(reduces_each_pass, 0.03, lines=("communication",))),
    # The last and the first exchange of a step cannot hide.
    Rule("exposed-gathers", RuleObserver(partial(exposed, name="exposed-gathers"), 0.05, lines=("communication",))),
    Rule(
        "exposed-communication",
        RuleObserver(partial(exposed, name="exposed-communication"), 0.10, lines=("communication",)),
        RuleObserver(recorded_exchanges, 0.10),
    ),
)
