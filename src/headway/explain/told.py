"""All that is told of a trace: its steps measured, what they needed, and how fast the device could have been."""

from dataclasses import dataclass, replace

from headway.explain.budget import NeededWork
from headway.explain.collectives import Collectives, find_collectives
from headway.explain.given import GivenWork, with_given
from headway.explain.measure import MeasuredTrace, measure
from headway.explain.rates import DeviceRates, rates_of
from headway.explain.trace import Trace
from headway.report import format_duration


@dataclass(frozen=True, slots=True)
class ToldTrace:
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


def tell(trace: Trace, given: GivenWork | None, device: str | None, *, whole: bool) -> ToldTrace:
    """Measure a trace and find out what is told of it.

    Args:
        trace: the trace.
        given: model and workload, where the user gives them.
        device: its name or dense peak [FLOP/s], where the user gives it.
        whole: take the trace as one step.

    Raises:
        ConfigError: the trace has no steps, what Headway wrote into it cannot be read, or it is not of the model given.
        UsageError: the user's device is not known.
    """
    measured = measure(trace, whole=whole)
    notes = [*measured.notes]
    rates = rates_of(measured, device)
    if given is not None:
        measured, note = with_given(measured, given, rates)
        notes.append(note)
    elif trace.headway is not None and rates.peak_source:
        stated = {**trace.headway, "peak_flops_per_s": rates.peak_flops_per_s}
        measured = replace(measured, trace=replace(trace, headway=stated))
    written = measured.trace.headway
    budget = None if written is None else NeededWork(written, str(trace.path))
    if rates.peak_source and budget is not None:
        notes.append(f"{rates.peak_source}.")
    notes += _notes_of_budget(budget)
    return ToldTrace(measured, budget, rates, notes, find_collectives(measured))


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
