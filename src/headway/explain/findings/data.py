"""Rules about data: what the loop waits for when it waits for a batch."""

from collections import defaultdict
from collections.abc import Mapping

from headway.explain.findings.evidence import Evidence, Observation, as_number

_UNKNOWN = ""
_ADVICE = {
    "read": ("reading rows and media from storage", "storage is slow or far away, and every sample is read when it is "
             "needed.", "more data.workers, which read side by side, a larger data.prefetch_bytes, or a copy of the "
             "data on a local disk."),
    "decode": ("decoding images, videos and sounds", "media are large, or stored in a way that is slow to decode.",
               "more data.workers; media that are stored at the size at which the model reads them."),
    "tokenise": ("tokenising", "long texts or templates are tokenised anew in every epoch.",
                 "more data.workers; documents that are tokenised once (data.train.N.format: tokens)."),
    _UNKNOWN: ("the loader", "batches take longer to make than to train on.",
               "more data.workers and a larger data.prefetch_bytes; in a DataLoader num_workers and prefetch_factor."),
}  # fmt: skip


def waiting(evidence: Evidence, part: str) -> Observation | None:
    """The loop waits for data, and one part of making a batch takes longest.

    Args:
        evidence: of the steps.
        part: read, decode, tokenise; "" where nobody took down what the workers did.
    """
    spent_s = _making_s(evidence)
    whole_s = sum(spent_s.values())
    dearest = max(sorted(spent_s), key=spent_s.__getitem__) if whole_s else _UNKNOWN
    if dearest != part:
        return None
    ns = evidence.ns("idle.data")
    what, cause, advice = _ADVICE[part]
    message = f"the step waited for data {evidence.share(ns)} of the time"
    if whole_s:
        message += f"; of {whole_s / evidence.num_steps:.2f} s that workers spent on a step's packs, "
        message += f"{spent_s[part] / whole_s:.0%} was {what}"
    return Observation(ns, f"{message}.", cause, advice)


def _making_s(evidence: Evidence) -> dict[str, float]:
    """Time that workers spent on the packs of all steps by part [s]."""
    spent_s: defaultdict[str, float] = defaultdict(float)
    for step in evidence.steps:
        seconds_by_part = evidence.step_fact(step, "making_s")
        if isinstance(seconds_by_part, Mapping):
            for part, seconds in seconds_by_part.items():
                spent_s[part] += as_number(seconds) or 0.0
    return spent_s
