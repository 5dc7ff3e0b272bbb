"""Waterfalls of the steps of one job's traces.

Lines 1 to 5 need the step's workload and the device's peak, which Headway writes into its traces. The time of
matmul-class kernels of each component, less what its FLOPs take at peak, at the ceiling, again and for padding, is what
these kernels lose. Nothing is clipped: a component that beats the ceiling has a line below zero.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.explain.breakdown import Owners
from headway.explain.budget import head_lines
from headway.explain.events import Trace
from headway.explain.explanation import JobExplanation, StepWaterfall, operand_traffic, waterfall_lines
from headway.explain.findings.evidence import StepEvidence
from headway.explain.findings.rules import find
from headway.explain.measurement import ASIDE, MATMUL, MeasuredStep, MeasuredTrace
from headway.explain.phases import profiled_phases
from headway.explain.ranks import RankStep, WaitedFor, waited_for
from headway.explain.trace_facts import TraceFacts, gather_facts, waiting_in
from headway.explain.windows import StepWindow
from headway.report import format_ms
from headway.report.step_lines import NAMES, SLOW
from headway.words import Argument

if TYPE_CHECKING:
    from headway.explain.stated_work import StatedWork

_LONGER = 1.02  # ratio of the times of host and device; less is how a step, or a profiler, starts and stops
_NAMES_ON_CPU = {
    MATMUL: "matmul-class operators",
    "memory": "memory-bound operators",
    "communication": "communication",
    "communication.transfer": "communication: transfer",
    "communication.waiting": "communication: waiting",
    "copies": "copies",
    "idle.data": "waiting for data",
    "idle.launch": "Python between operators",
    "idle.sync": "host waits (sync)",
    "idle.other": "other",
    "unexplained": "unexplained: unknown operators",
}


def explain(
    traces: Sequence[Trace],
    *,
    step: int | None = None,
    rank: int | None = None,
    as_one_step: bool = False,
    work: "StatedWork | None" = None,
    device: str | None = None,
) -> JobExplanation:
    """Explain the steps of one job.

    Args:
        traces: one of each rank, at least one.
        step: only this one; it may be the first or the last of a trace.
        rank: only this one; the others still tell how long collectives take.
        as_one_step: take each trace as one step, as one without steps is anyway.
        work: model and workload of each step of each rank, in place of what the traces say.
        device: name or dense peak [FLOP/s] of the device, in place of what the traces say.

    Raises:
        ConfigError: two traces are of one rank, nothing runs in a trace's steps, there is no such step or rank, or a
            trace is not of the model given.
        UsageError: the device is not known.

    The first and the last step of a device's trace are left out where there are others.
    """
    # One trace of each rank: two of one rank are of different runs.
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        other = by_rank.setdefault(trace.rank, trace)
        if other is not trace:
            raise ConfigError(
                f"{other.path} and {trace.path} both are of rank {trace.rank}. Give one trace of each rank of one job."
            )
    if rank is not None and rank not in by_rank:
        ranks = [str(number) for number in sorted(by_rank)]
        raise ConfigError(Argument("rank", rank), f": the traces are of ranks {', '.join(ranks)}.", choices=ranks)
    # All ranks are measured, also where one alone is shown: the others tell how long collectives take.
    shown = [number for number in sorted(by_rank) if rank is None or rank == number]
    facts_of = {
        number: gather_facts(by_rank[number], work, device, as_one_step=as_one_step) for number in sorted(by_rank)
    }
    waterfalls = []
    ranks_of_note: dict[str, list[int]] = {}
    for number in shown:
        facts = facts_of[number]
        chosen, about_edges = _chosen(facts.measured, step)
        about_products = None
        # A model that the user states must fit what ran.
        if work is not None:
            from headway.explain.stated_work import check_rates, note_on_products

            check_rates(facts.measured, chosen, work, facts.rates)
            about_products = note_on_products(facts.measured, chosen, work)
        # A note that holds for all ranks is printed once, without their numbers.
        for note in dict.fromkeys(filter(None, (*facts.notes, about_products, *about_edges))):
            ranks_of_note.setdefault(note, []).append(number)
        others = [other for other_rank, other in facts_of.items() if other_rank != number]
        waterfalls += [_waterfall(facts, which, others) for which in chosen]
    # Steps in their order, the ranks of a step beside each other.
    waterfalls.sort(key=lambda waterfall: (waterfall.step, waterfall.rank))
    notes = [
        note if said_by == shown else f"rank {', '.join(map(str, said_by))}: {note}"
        for note, said_by in ranks_of_note.items()
    ]
    # Nothing makes up for what the missing traces would have told.
    num_ranks = max(trace.world_size or 1 for trace in traces)
    if num_ranks > len(by_rank):
        notes.append(
            f"traces of {len(by_rank)} of the job's {num_ranks} processes are here, so how long collectives waited for "
            "the other processes is not known. One of those may be the slowest."
        )
    slowest = [_waited_for(number, facts_of) for number in dict.fromkeys(waterfall.step for waterfall in waterfalls)]
    waits = tuple(filter(None, slowest))
    return JobExplanation(tuple(waterfalls), tuple(notes), find(StepEvidence(waterfalls, waits=waits)), waits)


def _waited_for(step: int, facts_of: Mapping[int, TraceFacts]) -> WaitedFor | None:
    steps_of = {
        rank: (facts, which)
        for rank, facts in facts_of.items()
        for which in facts.measured.steps
        if which.window.step == step
    }
    if len(steps_of) < 2:
        return None
    ranks = []
    for rank, (facts, which) in steps_of.items():
        others = {other: there for other, (there, _) in steps_of.items() if other != rank}
        waits = waiting_in(facts, which, list(others.values())) or [0] * len(others)
        flops = facts.budget.useful_flops(step) if facts.budget is not None else None
        ranks.append(RankStep(rank, _spent(facts.measured, which)[0], flops, dict(zip(others, waits, strict=True))))
    return waited_for(step, ranks)


def _chosen(measured: MeasuredTrace, step: int | None) -> tuple[list[MeasuredStep], list[str]]:
    """Choose the steps to show, and make notes on the first and the last of the trace."""
    if step is not None:
        chosen = [shown for shown in measured.steps if shown.window.step == step]
        if not chosen:
            steps = [str(shown.window.step) for shown in measured.steps]
            raise ConfigError(
                Argument("step", step), f": {measured.trace.path} has the steps {', '.join(steps)}.", choices=steps
            )
    else:
        chosen = [shown for shown in measured.steps if not shown.window.is_edge] or list(measured.steps)
    left_out = [str(shown.window.step) for shown in measured.steps if shown.window.is_edge]
    if step is None and left_out and len(chosen) < len(measured.steps):
        note = f"steps {' and '.join(left_out)}, the first and the last of the trace, are left out; "
        return chosen, [f"{note}{Argument('step', example='N')} shows them."]
    notes = [_note_on_window(shown.window) for shown in chosen]
    return chosen, [note for note in notes if note]


def _note_on_window(window: StepWindow) -> str:
    """Both durations of a step with a less certain window: at an edge, or of a whole trace; "" for other steps."""
    if window.host_ns is None or window.device_ns is None:
        return ""
    durations = (window.ns, window.host_ns, window.device_ns)
    if max(durations) <= _LONGER * min(durations):
        return ""
    on_host, on_device = format_ms(window.host_ns), format_ms(window.device_ns)
    if window.is_edge:
        return (
            f"step {window.step} is the first or the last of the trace, so its bounds are less sure: it lasted "
            f"{on_host} ms on the host and {on_device} ms on the device."
        )
    if window.host_ns > _LONGER * window.ns and window.ns == window.device_ns:
        return (
            f"the whole trace is taken from the device's first event to its last, {on_device} ms. The host's events "
            f"span {on_host} ms."
        )
    return ""


def _waterfall(facts: TraceFacts, step: MeasuredStep, others: Sequence[TraceFacts]) -> StepWaterfall:
    measured, budget = facts.measured, facts.budget
    duration_ns, number = step.window.ns, step.window.step
    needs, useful_flops = (budget.needs(number), budget.useful_flops(number)) if budget else (None, None)
    amounts = [] if needs is None else head_lines(needs)  # key, name, ns, parts
    # Matmul-class time first: one line without needs; else what was needed, then what each component took beyond it.
    spent, parts = _spent(measured, step)
    names = {**NAMES, **_NAMES_ON_CPU} if measured.trace.is_cpu_only else NAMES
    if needs is None or budget is None:
        amounts.append((MATMUL, names[MATMUL], spent[MATMUL], parts[MATMUL]))
    else:
        owners = Owners(measured.attribution, budget)
        took = owners.matmul_ns(step)
        needed: Counter[str] = Counter()
        for component, need in needs.items():
            needed[owners.of_component(component)] += need.total
        for owner in [*needed, *(other for other in took if other not in needed)]:
            amounts.append((f"{SLOW}.{owner}", f"{SLOW}: {owner}", took[owner] - needed[owner], {}))
    # The shortest time of a collective on any rank is transfer, the rest of exposed communication is waiting.
    waits = waiting_in(facts, step, others)
    for key in ("memory", "optimizer"):
        amounts.append((key, names[key], spent[key], parts[key]))
    if waits is None:
        amounts.append(("communication", names["communication"], spent["communication"], parts["communication"]))
    else:
        for key, ns in (("transfer", spent["communication"] - sum(waits)), ("waiting", sum(waits))):
            amounts.append((f"communication.{key}", names[f"communication.{key}"], ns, {}))
    # Losses that the trace tells by itself; all lines together are the step's window, exactly.
    for key in ("copies", "idle.data", "idle.launch", "idle.sync", "idle.other", "aside", "unexplained"):
        amounts.append((key, names[key], spent[key], parts[key]))
    # MFU is the useful work's time at the peak, of the duration; each line says how far it would rise without it.
    peak = budget.peak_flops_per_s if budget and needs is not None else None
    at_peak_ns = useful_flops / peak * 1e9 if useful_flops is not None and peak else None
    mfu, lines = waterfall_lines(amounts, duration_ns, at_peak_ns)
    return StepWaterfall(
        step=number,
        rank=measured.trace.rank,
        duration_ns=duration_ns,
        mfu=mfu,
        lines=lines,
        is_edge=step.window.is_edge,
        device_name=measured.trace.device_name,
        measured=(measured, step),
        rates=facts.rates,
        traffic=operand_traffic(measured, step, facts.rates.bytes_per_s),
        phases=profiled_phases(step.loop_phases, duration_ns),
    )


def _spent(measured: MeasuredTrace, step: MeasuredStep) -> tuple[Counter[str], dict[str, dict[str, int]]]:
    spent: Counter[str] = Counter()
    of_line: dict[str, Counter[str]] = {key: Counter() for key in NAMES}
    attribution, idle = measured.attribution, step.idle
    for owned in step.owned:
        spent[owned.line] += owned.ns
        of_line[owned.line][attribution.phase[owned.event].value] += owned.ns
    for phase, ns in idle.by_phase.items():
        key = "aside" if phase in ASIDE else "idle.data"
        spent[key] += ns
        of_line[key][f"{phase.value}, idle" if phase in ASIDE else "idle"] += ns
    spent["idle.launch"] += idle.host_late_ns
    spent["idle.other"] += idle.other_ns
    of_line["idle.other"].update(idle.launched_before)
    for waited, ns in idle.by_wait.items():
        spent["idle.sync"] += ns
        of_line["idle.sync"][waited] += ns
    return spent, {key: dict(counted.most_common()) for key, counted in of_line.items()}
