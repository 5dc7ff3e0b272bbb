"""A run's records as waterfalls: the evidence of its counters on every step, without a trace.

Records are those of `headway train`, `Meter` and every integration (docs/record.md): one of each step, or of each
window of steps, of all ranks together.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.explain.budget import SCHEMA_VERSION, Need, NeededWork, head_lines
from headway.explain.explanation import (
    NO_PROFILE_NOTE,
    Finding,
    JobExplanation,
    StepWaterfall,
    unprofiled_waterfall,
)
from headway.explain.findings.evidence import RunEvidence, RunStep, StepEvidence, as_number
from headway.explain.findings.rules import find
from headway.explain.phases import phase_lines
from headway.explain.run_folder import (
    BESIDE,
    RecordedStep,
    checked_record,
    device_of_run,
    notes_of_run,
    read_steps,
    time_beside,
)
from headway.log.losses import StepLoss, learning_sentence
from headway.log.run_files import further_losses
from headway.report.quantity import finite, integer, quantity
from headway.report.step_lines import NAMES
from headway.words import Argument

_MOST_FLOPS = 10**30  # most FLOPs of all devices in one record
_LOST_WORK = ("recomputation", "padding")  # keys of lines of what is computed in vain
_PHASE_LINES = {
    "optimizer": "optimizer",
    **{gap: f"gap.{gap}" for gap in ("input", "gradients", "after")},
}  # keys of the lines of phases
_FACTS = ("optimizer", "anomaly_mode", "weights_dtype")  # about the loop, that rules read
_ALL_COMPONENTS = "all components"  # component of FLOPs that the record does not divide


def explain_records(path: Path, *, step: int | None = None, rank: int | None = None) -> JobExplanation:
    """Explain the steps of a run from its records.

    Args:
        path: metrics.jsonl, or a file of a meter's records by any name; what stands beside it in a run folder is used.
        step: only this one.
        rank: 0 or None: records are of all ranks together.

    Raises:
        ConfigError: the file cannot be read or holds no record of a step, or there is no such step or rank.
    """
    return explain_with_records(path, step=step, rank=rank)[0]


def explain_with_records(
    path: Path, *, step: int | None = None, rank: int | None = None
) -> tuple[JobExplanation, list[Mapping[str, Any]]]:
    """Explain the steps of a run as `explain_records`, and give all its records of steps, each step once, in order."""
    # All ranks add up in a record: none of them can be shown apart.
    if rank:
        raise ConfigError(
            Argument("rank", rank),
            ": records are of all ranks together. Profile that rank with run.profile.ranks, and explain its trace.",
        )
    every, notes = read_steps(path, single=step)
    # Steps that are left out are in no rate; they are shown where there is nothing else, and their compiling counts.
    entries = _counted(every)
    device_name, memory_bytes = device_of_run(path.parent)
    # Each record becomes a waterfall and a place in the series; a value that Headway does not write names its step.
    waterfalls, run_steps, unsaid = [], list[RunStep](), Counter[str]()
    for entry in entries:
        try:
            work = _work(entry, str(path))
            unsaid.update([] if work is not None or entry.is_left_out else [_why_no_work(entry.record)])
            waterfalls.append(_waterfall(entry, work, device_name))
            run_steps.append(_run_step(entry, waterfalls[-1], memory_bytes))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(
                f"{path}: the record of step {entry.step} has a value that Headway does not write "
                f"({type(error).__name__}: {error}). Repair or delete the line."
            ) from error
    # The series sees the whole run even where one step alone is shown: rules compare steps with each other.
    notes += _notes_of_work(unsaid, waterfalls, entries) + notes_of_run(path.parent, entries[-1].step)
    # Time outside of the steps comes from the run's ledger, where there is one.
    # A record stands for its mean step in the series, and so does what came beside it.
    by_step = {name: {entry.step: ns for entry in every if (ns := entry.ns(f"{name}_s"))} for name in BESIDE}
    of_records = {name: sum(by_step[name].values()) for name in BESIDE}
    steps_tell = any("away_s" in entry.record for entry in every)
    beside_ns, about_beside = time_beside(path.parent, of_records, steps_tell=steps_tell)
    chosen = [waterfall for waterfall in waterfalls if step is None or waterfall.step == step]
    if not chosen:
        numbers = f"{waterfalls[0].step} to {waterfalls[-1].step}"
        raise ConfigError(
            Argument("step", step),
            f": {path} has no record of it; it has {len(waterfalls)} records, {numbers}.",
            choices=[str(waterfall.step) for waterfall in waterfalls],
        )
    judged = _unprofiled(entries)
    losses = [_loss(entry) for entry in entries]
    run = RunEvidence([run_steps[place] for place in judged], beside_ns, _left_out(every, entries), by_step, losses)
    findings = _findings(entries, [waterfalls[place] for place in judged], run)
    explanation = JobExplanation(
        tuple(chosen), (NO_PROFILE_NOTE, *notes, *about_beside), findings, learning=learning_sentence(losses)
    )
    return explanation, [entry.record for entry in entries]


def find_in_records(records: Iterable[Mapping[str, Any]], memory_bytes: int | None = None) -> list[Finding]:
    """Find the findings of a run's last records, while the run goes.

    Args:
        records: as Headway writes them, in their order.
        memory_bytes: of the device [bytes]; None where it is not known.

    Returns:
        At most five, the dearest first.
    """
    every = [entry for record in records if (entry := checked_record(record)) is not None]
    entries = _counted(every)
    entries = [entries[place] for place in _unprofiled(entries)]
    waterfalls = [_waterfall(entry, _work(entry, "the run"), "") for entry in entries]
    run_steps = [
        _run_step(entry, waterfall, memory_bytes) for entry, waterfall in zip(entries, waterfalls, strict=True)
    ]
    return list(_findings(entries, waterfalls, RunEvidence(run_steps, left_out=_left_out(every, _counted(every)))))


def _counted(entries: list[RecordedStep]) -> list[RecordedStep]:
    return [entry for entry in entries if not entry.is_left_out] or entries


def _left_out(every: list[RecordedStep], entries: list[RecordedStep]) -> list[RunStep]:
    if len(every) == len(entries):
        return []
    return [
        RunStep(entry.step, entry.wall_ns // entry.num_steps, has_compiled_again=_has_compiled(entry))
        for entry in every
        if entry.is_left_out
    ]


def _has_compiled(entry: RecordedStep) -> bool:
    return bool(entry.record.get("recompiles") or (entry.record.get("num_left_out") and entry.ns("compile_s")))


def _findings(entries: list[RecordedStep], waterfalls: list[StepWaterfall], run: RunEvidence) -> tuple[Finding, ...]:
    return find(StepEvidence(waterfalls[run.num_first :], {0: _facts(entries)}), run)


def _unprofiled(entries: list[RecordedStep]) -> list[int]:
    """Find the records to judge: records that a profile made slower only if there are no other ones."""
    numbers = [as_number(entry.record.get("num_profiled")) or 0.0 for entry in entries]
    usual = [place for place, entry in enumerate(entries) if 2 * numbers[place] <= entry.num_steps]
    return usual or list(range(len(entries)))


def _loss(entry: RecordedStep) -> StepLoss:
    """Read a record's loss; one that is null where there was something to learn was not finite."""
    record = entry.record
    loss, norm = quantity(record.get("loss")), quantity(record.get("grad_norm"))
    is_broken = "loss" in record and loss is None and not record.get("empty") and not further_losses(record)
    return StepLoss(
        entry.step, math.nan if is_broken else loss, norm, num_skipped=round(quantity(record.get("num_skipped")) or 0)
    )


def _facts(entries: list[RecordedStep]) -> dict[str, Any]:
    """Facts that rules about single steps may ask of the loop, under the names that a trace has for it."""
    return {
        "steps": {
            str(entry.step): {key: entry.record.get(key) for key in ("tokens", "slots", "making_s")}
            for entry in entries
        }
    }


def _work(entry: RecordedStep, source: str) -> dict[str, Need] | None:
    """Compute the useful work of each component of a step on a device, as of a trace; None without FLOPs or a peak."""
    record = entry.record
    if entry.is_left_out or not record.get("peak_flops_per_s") or not isinstance(record.get("flops"), Mapping):
        return None
    # FLOPs are of all ranks and of all steps in the record: so are the rates, and needs are of one step of a device
    num_devices, peak = entry.world_size * entry.num_steps, finite(record["peak_flops_per_s"])
    if not peak > 0:
        raise ValueError(f"peak_flops_per_s {peak}")
    # The ceiling is not recorded itself, but MFU of it and the rate are, whose ratio it is.
    of_ceiling, rate = record.get("mfu_of_ceiling"), record.get("flops_per_s_per_device")
    flops, by_component = record["flops"], record.get("flops_by_component") or {}
    # Components where the record divides its FLOPs, else all of them as one.
    useful = {name: {"useful": integer(count, largest=_MOST_FLOPS)} for name, count in by_component.items()}
    useful = useful or {_ALL_COMPONENTS: {"useful": integer(flops["total"], largest=_MOST_FLOPS)}}
    # The object that a trace has under `headway`, of all devices and steps of the record together.
    work = NeededWork(
        {
            "schema_version": SCHEMA_VERSION,
            "peak_flops_per_s": peak * num_devices,
            "ceiling_flops_per_s": rate / of_ceiling * num_devices if of_ceiling and rate else None,
            "profiler_overhead_s": None,
            "components": {},
            "steps": {
                str(entry.step): {
                    "useful_flops": useful,
                    "recomputed_flops": {},  # these two are charged their time, not their FLOPs at the peak
                    "padding_flops": 0,
                }
            },
        },
        source,
    )
    return work.needs(entry.step)


def _lost_work(entry: RecordedStep) -> dict[str, int]:
    """Time that recomputation and padding take of a step, at most, by the keys of their lines [ns].

    What is computed in vain takes as long as what is needed, whatever the device's rate: a part of the FLOPs that ran
    is charged that part of the time which is not known to be something else.
    """
    record = entry.record
    flops, by_component = record.get("flops"), record.get("flops_by_component") or {}
    if not isinstance(flops, Mapping):
        return {}
    total, again, forward = (
        integer(flops.get(name) or 0, largest=_MOST_FLOPS) for name in ("total", "recompute", "forward")
    )
    # Forward and backward where they were timed, else all but waiting for data.
    phases_ns, wall_ns = entry.phases_ns(), entry.wall_ns // entry.num_steps
    computing_ns = wall_ns - min(wall_ns, entry.ns("data_wait_s"))
    if phases_ns:
        computing_ns = min(computing_ns, phases_ns.get("forward", 0) + phases_ns.get("backward", 0))
    # A forward that runs again takes as long as the first time.
    recomputed_ns = computing_ns * again // (total + again) if again else 0
    if again and forward and phases_ns:
        recomputed_ns = min(phases_ns.get("forward", 0) * again // forward, phases_ns.get("backward", 0))
    # Language layers spend as much on a padding slot as on a token; other towers have no such slots.
    tokens, slots = integer(record.get("tokens") or 0), integer(record.get("slots") or 0)
    language = sum(
        integer(count, largest=_MOST_FLOPS) for name, count in by_component.items() if name.startswith("language.")
    )
    language = language if by_component else total
    empty = language * max(0, slots - tokens) // tokens if tokens else 0  # FLOPs that the padding took
    padding_ns = (computing_ns - recomputed_ns) * empty // (total + empty) if empty else 0
    return {"recomputation": recomputed_ns, "padding": padding_ns}


def _waterfall(entry: RecordedStep, work: Mapping[str, Need] | None, device_name: str) -> StepWaterfall:
    amounts: list[tuple[str, str, int, dict[str, int]]] = []
    if work is not None:
        lost_ns = _lost_work(entry)
        amounts += [
            (key, name, lost_ns.get(key, 0) if key in _LOST_WORK else ns, {} if key in _LOST_WORK else parts)
            for key, name, ns, parts in head_lines(work)
        ]
    waited_s = entry.record.get("data_wait_s")
    if waited_s is not None and not entry.is_left_out:
        amounts.append(("idle.data", NAMES["idle.data"], round(waited_s * 1e9 / entry.num_steps), {}))
    # Phases in which the model does not compute, each where it was seen.
    for phase, key in _PHASE_LINES.items():
        if phase_ns := entry.phases_ns().get(phase, 0):
            amounts.append((key, NAMES[key], phase_ns, {}))
    away_ns = entry.away_ns // entry.num_steps
    if "away_s" in entry.record or entry.is_left_out:
        amounts.append(("aside", NAMES["aside"], away_ns, {}))
    waterfall = unprofiled_waterfall(entry.step, entry.wall_ns // entry.num_steps + away_ns, amounts, device_name)
    return replace(waterfall, phases=phase_lines(entry.record, waterfall.duration_ns, away_ns))


def _why_no_work(record: Mapping[str, Any]) -> str:
    return "FLOPs" if not isinstance(record.get("flops"), Mapping) else "a peak"


def _notes_of_work(unsaid: Counter[str], waterfalls: list[StepWaterfall], entries: list[RecordedStep]) -> list[str]:
    # Notes on what the records lack, and on how to have it next time.
    notes = []
    for name, way_out in (
        ("FLOPs", "`Meter` and `headway train` record them."),
        ("a peak", "set HEADWAY_PEAK_FLOPS [FLOP/s] for the next run."),
    ):
        if count := unsaid[name]:
            which = "" if count == len(entries) else f" of {count} of {len(entries)} records"
            notes.append(f"useful work{which} is not known, because the records lack {name}: {way_out}")
    if any(line.key == "useful" for waterfall in waterfalls for line in waterfall.lines) and not any(
        entry.record.get("mfu_of_ceiling") for entry in entries
    ):
        notes.append(
            "the device's ceiling was not recorded, so it is taken as the peak (`headway ceiling` measures it)."
        )
    # Notes on how to read the numbers that are there.
    if any(line.key in _LOST_WORK and line.ns for waterfall in waterfalls for line in waterfall.lines):
        notes.append(
            "padding and recomputation have their part of the time of which nothing else is known. They take at most "
            "that."
        )
    num_ranks = max(entry.world_size for entry in entries)
    if num_ranks > 1:
        notes.append(
            f"records are of {num_ranks} ranks together: times are the first rank's, FLOPs the mean of all ranks'."
        )
    if any(entry.num_steps > 1 for entry in entries):
        notes.append("a record is of several steps. Their mean is shown under the number of the last step.")
    if any(entry.is_left_out for entry in entries):
        notes.append(
            "every step compiled something or was warm-up, so no step is counted. The times are those of the steps "
            "that are left out."
        )
    return notes


def _clock(state: Any) -> tuple[float | None, tuple[str, ...]]:
    """Clock of a device over its highest, and the reasons that held it; of a device at work."""
    state = state if isinstance(state, Mapping) else {}
    now, most = quantity(state.get("sm_mhz")), quantity(state.get("most_sm_mhz"))
    reasons = state.get("limits")
    limits = tuple(map(str, reasons)) if isinstance(reasons, list) else ()
    if not now or not most or "idle" in limits:
        return None, ()
    return min(1.0, now / most), limits


def _run_step(entry: RecordedStep, waterfall: StepWaterfall, memory_bytes: int | None) -> RunStep:
    record = entry.record
    ns = {line.key: line.ns for line in waterfall.lines}
    duration_ns = waterfall.duration_ns - ns.get("aside", 0)  # time beside training comes from the ledger
    waited_ns, useful_ns = ns.get("idle.data", 0), ns.get("useful")
    core_wait_ns = min(duration_ns, entry.ns("core_wait_s"))
    # Waits for a core lie in the wait for data as in the rest.
    busy_ns = round((duration_ns - waited_ns) * (1 - core_wait_ns / max(1, duration_ns)))
    tokens = (quantity(record.get("tokens")) or 0.0) / entry.num_steps
    work = useful_ns or tokens
    peak_memory, slowest = quantity(record.get("peak_memory_bytes")), record.get("slowest_rank")
    memory_bytes = memory_bytes or integer(record.get("device_memory_bytes") or 0)
    clock, limits = _clock(record.get("machine_state"))
    lead_s, late_rank = record.get("host_lead_s"), record.get("late_rank")
    return RunStep(
        step=entry.step,
        duration_ns=duration_ns,
        mfu=None if useful_ns is None else useful_ns / duration_ns,
        rate=work / busy_ns if work and busy_ns > 0 else None,
        waited_ns=waited_ns,
        core_wait_ns=core_wait_ns,
        tokens=tokens,
        memory_share=peak_memory / memory_bytes if peak_memory and memory_bytes else None,
        has_compiled_again=_has_compiled(entry),
        imbalance=quantity(record.get("straggler_share")) or 0.0,
        heaviest_rank=integer(record.get("heaviest_rank") or 0),
        slowest_rank=None if slowest is None else integer(slowest),
        slowest_speed=quantity(record.get("slowest_rank_speed")),
        padding_ns=ns.get("padding", 0),
        empty_share=quantity(record.get("padding_share")) or 0.0,
        recomputed_ns=ns.get("recomputation", 0),
        clock=clock,
        limits=limits,
        stage=_stage(record),
        phases_ns=entry.phases_ns(),
        lead_ns=None if lead_s is None else round((quantity(lead_s) or 0.0) * 1e9),
        collection_ns=entry.ns("collection_s"),
        extra=_extra(entry),
        places=_places(record),
        late_rank=None if late_rank is None else integer(late_rank),
        late_ns=round((quantity(record.get("late_rank_s")) or 0.0) * 1e9),
        late_phase=str(record.get("late_rank_phase") or ""),
        facts={name: record.get(name) for name in _FACTS},
        loop_phases=waterfall.phases,
    )


def _extra(entry: RecordedStep) -> dict[str, tuple[float, int]]:
    """Passes and updates of one step beyond those that it needs, from the sampled ones; see `RunStep.extra`."""
    extra, num_sampled = entry.record.get("extra_passes") or {}, entry.record.get("num_sampled") or 1
    return {
        name: (number / num_sampled, round((quantity(extra[f"{name}_s"]) or 0.0) * 1e9 / num_sampled))
        for name, number in extra.items()
        if not name.endswith("_s")
    }


def _stage(record: Mapping[str, Any]) -> frozenset[str]:
    sources = record.get("sources")
    if not isinstance(sources, Mapping):
        return frozenset()
    return frozenset(name for name, source in sources.items() if isinstance(source, Mapping) and source.get("tokens"))


def _places(record: Mapping[str, Any]) -> tuple[tuple[str, str, str, int], ...]:
    """Code that the loop's thread was in between its phases: gap, code, purpose, and time of a step [ns]."""
    return tuple(
        (str(place["phase"]), str(place["code"]), str(place["purpose"]), round((quantity(place["s"]) or 0.0) * 1e9))
        for place in record.get("places") or ()
    )
