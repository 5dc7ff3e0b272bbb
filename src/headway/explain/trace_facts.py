"""Facts of a trace together: its steps measured, what they needed, and how fast the device could have been."""

from dataclasses import dataclass, replace

from headway.explain.budget import NeededWork
from headway.explain.collectives import Collectives, find_collectives
from headway.explain.measure import MeasuredTrace, measure
from headway.explain.rates import DeviceRates, rates_of
from headway.explain.stated_work import StatedWork, with_stated_work
from headway.explain.trace import Trace
from headway.report import format_duration


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """A trace measured, and what it or the user tells of its work and its device.

    Attributes:
        measured: the trace.
        budget: what its steps needed; None where nobody tells.
        rates: of its device.
        notes: what a reader must know of all this, as sentences.
        collectives: of its steps.
    """

    measured: MeasuredTrace
    budget: NeededWork | None
    rates: DeviceRates
    notes: list[str]
    collectives: Collectives


def gather_facts(trace: Trace, work: StatedWork | None, device: str | None, *, as_one_step: bool) -> TraceFacts:
    """Measure a trace and gather what it, and the user, say of its work and device.

    Args:
        trace: the trace.
        work: model and workload, where the user gives them.
        device: its name or dense peak [FLOP/s], where the user gives it.
        as_one_step: take the trace as one step.

    Raises:
        ConfigError: the trace has no steps, what Headway wrote into it cannot be read, or it is not of the model given.
        UsageError: the user's device is not known.
    """
    measured = measure(trace, as_one_step=as_one_step)
    notes = [*measured.notes]
    rates = rates_of(measured, device)
    if work is not None:
        measured, note = with_stated_work(measured, work, rates)
        notes.append(note)
    elif trace.headway is not None and rates.peak_source:
        stated = {**trace.headway, "peak_flops_per_s": rates.peak_flops_per_s}
        measured = replace(measured, trace=replace(trace, headway=stated))
    written = measured.trace.headway
    budget = None if written is None else NeededWork(written, str(trace.path))
    if rates.peak_source and budget is not None:
        notes.append(f"{rates.peak_source}.")
    notes += _notes_of_budget(budget)
    return TraceFacts(measured, budget, rates, notes, find_collectives(measured))


def _notes_of_budget(budget: NeededWork | None) -> list[str]:
    if budget is None:
        return [
            "the matmul-class line is not split into needed work at peak, ceiling loss, recomputation, padding and "
            "losses by component: that needs the steps' workloads and the device's peak, which Headway writes into its "
            "own traces. Of others, --model and --segments tell them."
        ]
    notes = []
    if budget.profiler_overhead_s > 0:
        notes.append(
            f"{format_duration(budget.profiler_overhead_s)} of each step is the profiler's, as Headway measured."
        )
    if budget.peak_flops_per_s is None:
        notes.append(
            "the matmul-class line is not split: the trace does not tell the device's peak. Name the device, or state "
            "its dense rate [FLOP/s]: --device."
        )
    elif budget.ceiling_flops_per_s is None:
        notes.append(
            "the device's ceiling was not measured, so it is taken as the peak (`headway ceiling` measures it)."
        )
    return notes
