"""Rules about what the records of a run tell of its steps beside their rates: where a step's time went."""

from headway.explain.findings.evidence import Observation, SteadyEvidence
from headway.report import format_share


def padding(evidence: SteadyEvidence) -> Observation | None:
    """Slots without a token, on which layers spend as much as on others."""
    ns = sum(step.padding_ns for step in evidence.steps)
    if not ns:
        return None
    empty = sum(step.empty_share * step.duration_ns for step in evidence.steps) / evidence.duration_ns
    return Observation(
        ns,
        f"{format_share(empty)} of the slots were padding, on which layers spend as much as on tokens: up to "
        f"{format_share(ns / evidence.duration_ns)} of the time.",
        "samples are padded to the longest of a batch or to a fixed length, or packs to a large bucket.",
        "samples laid end to end (in headway train data.strategy: balanced with data.tokens_per_pack, and a smaller "
        "data.bucket_tokens or null); elsewhere batches of like lengths, padded to their own longest.",
    )


def recomputation(evidence: SteadyEvidence) -> Observation | None:
    """Activations that are computed again, where memory would keep them, as far as is known."""
    ns = sum(step.recomputed_ns for step in evidence.steps)
    memory = max((step.memory_share or 0.0 for step in evidence.steps), default=0.0)
    if not ns or memory > 0.75:  # less may be what a larger batch or the heap needs
        return None
    free = f", and {format_share(1 - memory)} of the device's memory were free at the peak" if memory else ""
    return Observation(
        ns,
        f"activations are computed again in backward: up to {format_share(ns / evidence.duration_ns)} of the time"
        f"{free}.",
        "more blocks are recomputed than memory asks for.",
        "no activation checkpointing, or of fewer blocks (in headway train speed.recompute: none, or memory:NGiB, "
        "which recomputes only as much as it must).",
    )
