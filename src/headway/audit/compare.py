"""The same step in every convention: FLOPs, rate, MFU against the peak each tool would use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.conventions import PARTS, Architecture, Bill, Convention, Step, conventions, get_convention, tool_peak
from headway.devices import Peak
from headway.errors import UsageError
from headway.words import Argument

_NOTED = 0.0005  # differences below this share of the useful FLOPs are left out of the explanation


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One convention's view of a step."""

    convention: Convention  # the rule
    bill: Bill  # the FLOPs that the rule charges, all devices together
    flops_per_s: float | None  # FLOP/s of one device; None where it has no number
    peak_flops_per_s: float  # the peak that the tool divides by; infinite for a device that the tool does not know
    mfu: float | None  # fraction; 0.0 against an infinite peak, None without a number
    ratio: float | None  # bill over useful FLOPs; None without a number
    differences: Mapping[str, float]  # part of the model -> (bill - useful) / useful total, for parts that differ
    note: str  # an oddity of the peak, "" for none

    @property
    def why(self) -> str:
        """One line on what it counts, and by how much each part differs from useful."""
        if self.bill.flops is None:
            return self.bill.reason
        parts = [f"{name} {share:+.1%}" for name, share in self.differences.items()]
        text = f"{self.convention.why} ({', '.join(parts)})" if parts else self.convention.why
        notes = (self.bill.note, self.note if self.convention.tool else "")
        return "; ".join([text, *(note for note in notes if note)])


def compare(model: Architecture, step: Step, step_s: float, peak: Peak, num_ranks: int = 1) -> list[ComparisonRow]:
    """Bill one step in every convention.

    Args:
        model: the model's numbers, with its cost model.
        step: what all devices computed together.
        step_s: wall time of the step [s].
        peak: datasheet peak of one device, and its exact name for the tools' own rules.
        num_ranks: devices that shared the step.

    Returns:
        One entry per convention, `useful` first.

    Raises:
        UsageError: a time or a number of ranks that is not positive, or a step without work.
    """
    if not (math.isfinite(step_s) and step_s > 0):
        raise UsageError(
            Argument("step_s", step_s), " is not a time: give the wall time of one step in seconds, above 0."
        )
    if num_ranks < 1:
        raise UsageError(Argument("num_ranks", num_ranks), ": at least 1 device computes the step.")
    useful = get_convention("useful").bill(model, step)
    if not useful.flops:
        raise UsageError("the step computes nothing: its useful FLOPs are 0, so that no ratio exists.")
    return [
        _row(convention, model, step, useful, step_s * num_ranks, peak) for convention in conventions(model.model_type)
    ]


def _row(
    convention: Convention, model: Architecture, step: Step, useful: Bill, device_s: float, peak: Peak
) -> ComparisonRow:
    bill = convention.bill(model, step)
    theirs = tool_peak(convention.tool, peak.name)
    divisor = peak.flops_per_s if theirs.flops_per_s is None else theirs.flops_per_s
    if bill.flops is None or useful.flops is None:
        return ComparisonRow(convention, bill, None, divisor, None, None, {}, theirs.note)
    shares = {name: (bill.parts.get(name, 0) - useful.parts.get(name, 0)) / useful.flops for name in PARTS}
    differences = {name: share for name, share in shares.items() if abs(share) >= _NOTED}
    rate = bill.flops / device_s
    return ComparisonRow(
        convention, bill, rate, divisor, rate / divisor, bill.flops / useful.flops, differences, theirs.note
    )
