"""Attribute the difference between a tool's bill and useful FLOPs: one rule at a time, so that ratios multiply.

The chain starts at the tool's bill and ends at the useful FLOPs. Each link replaces one thing that the tool does by
what `useful` does; its factor is the sum before over the sum after, so that the product of all is the bill over useful.
"""

from dataclasses import dataclass

from headway.conventions import PARTS, Architecture, Convention, Step, get_convention
from headway.count.masks import full_pairs

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
    """Attribute a bill's ratio to useful FLOPs.

    Args:
        convention: whose bill it is.
        model: the model with every parameter trained, which is what the tools take it for.
        step: the work.
        trained: the model with its frozen parameters.

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
