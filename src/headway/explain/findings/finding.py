"""A finding: what was seen in a step, its likely cause, and what to try next."""

from dataclasses import asdict, dataclass
from typing import Any

MOST = 5  # findings that are told: more are no order of work


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to do about a step's time.

    Attributes:
        id: the rule that found it, such as "data-bound".
        seen: what was seen, with its number, as a sentence.
        cause: the likely cause, as a sentence.
        next: what to try next, by the name of a setting of `headway train` where there is one, as a sentence.
        ns: what it costs a step, at most [ns].
        share: the same / the step's duration.
        mfu_from: MFU of the step; None where it is not known.
        mfu_to: MFU that the step would have without it; None where it is not known.
    """

    id: str
    seen: str
    cause: str
    next: str
    ns: int
    share: float
    mfu_from: float | None = None
    mfu_to: float | None = None

    def as_record(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return asdict(self)
