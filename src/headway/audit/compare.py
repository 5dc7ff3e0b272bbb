"""The same step in every convention, against the peak each tool would use, and a bill's difference from useful FLOPs.

That difference is attributed one rule at a time, so that ratios multiply. The chain starts at the tool's bill and ends
at the useful FLOPs. Each link replaces one thing that the tool does by what `useful` does; its factor is the sum before
over the sum after, so that the product of all is the bill over useful.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.conventions import PARTS, Architecture, Bill, Convention, Step, conventions, get_convention, tool_peak
from headway.count.masks import full_pairs
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
        raise UsageError("the step computes nothing. Its useful FLOPs are 0, so there is no ratio.")
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


# factor, the part of a bill that it replaces, and its meaning
_PARTS_IN_ORDER = (
    ("causal", "attention", "attention billed for pairs that the mask forbids, or for fewer than it allows"),
    ("vision", "vision", "the vision tower left out, billed per text token, or with other mergers"),
    ("audio", "audio", "the audio tower left out"),
    ("head", "head", "the language-model head: vocabulary padding, extra heads"),
    ("embedding", "embedding", "the embedding look-up billed as a matrix product"),
    ("experts", "experts", "experts that a token does not use, or experts and routers left out"),
    ("recurrence", "recurrence", "the states of linear attention left out, or billed by another form of them"),
    ("other weights", "linear", "norms and biases billed as matrices, or layers that are not trained"),
    ("recompute", "recompute", "forward passes that checkpointing runs again"),
)
_NONE = 2e-5  # a factor this close to 1 is left out


@dataclass(frozen=True, slots=True)
class Factor:
    """One reason why a reported number differs from the useful one."""

    name: str  # name of the reason, such as "document mask"
    ratio: float  # reported over useful that it explains
    meaning: str  # one line


def factors(convention: Convention, model: Architecture, step: Step, trained: Architecture) -> list[Factor]:
    """Attribute a bill's ratio to useful FLOPs, of a model as tools take it, with all trained, and as it was trained.

    Returns:
        Factors whose product is the bill over the useful FLOPs of `trained`; those that are 1 are left out.
    """
    bill = convention.bill(model, step)
    parts = {name: float(bill.parts.get(name, 0)) for name in PARTS}
    useful = {name: float(flops) for name, flops in get_convention("useful").bill(model, step).parts.items()}
    workload = step.workload
    links: list[Factor] = []

    def link(name: str, after: dict[str, float], meaning: str) -> None:
        nonlocal parts
        ratio = sum(parts.values()) / sum(after.values())
        if abs(ratio - 1) > _NONE:
            links.append(Factor(name, ratio, meaning))
        parts = after

    def scaled(share: float) -> dict[str, float]:
        by_token = {"linear", "experts", "recurrence", "head", "embedding"}
        if convention.scope == "rows":
            by_token.add("attention")
        if convention.name in {"6nd", "palm", "torchtitan-2025-12-vlm"}:
            by_token.add("vision")  # these rules bill the tower per text token
        return {name: value * (share if name in by_token else 1.0) for name, value in parts.items()}

    # First the tokens: from positions of whole rows to slots, and from slots to real tokens, as `useful` counts them.
    if convention.tokens == "rows":
        meaning = f"{step.row_slots:,} positions of whole rows billed for {workload.slots:,} slots"
        link("tokens billed", scaled(workload.slots / step.row_slots), meaning)
    if convention.tokens in {"rows", "slots"}:
        meaning = f"{workload.slots:,} slots billed for {workload.tokens:,} real tokens"
        link("padding", scaled(workload.tokens / workload.slots), meaning)
    # Query-key pairs within the segments, over those that the rule bills: each token with its whole row.
    if convention.scope == "rows":
        share = full_pairs(workload.segments) / (workload.tokens * step.seq_len)
        meaning = "attention billed over the configured row instead of within each segment"
        link("document mask", {**parts, "attention": parts["attention"] * share}, meaning)
    # Then part after part takes its useful FLOPs, so that each factor is one difference between the rules.
    for name, part, meaning in _PARTS_IN_ORDER:
        link(name, {**parts, part: useful.get(part, 0.0)}, meaning)
    frozen = get_convention("useful").bill(trained, step).parts
    link("frozen", {name: float(frozen.get(name, 0)) for name in PARTS}, "gradients that frozen weights do not need")
    return links
