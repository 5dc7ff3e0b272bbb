"""What the ranks tell each other at the start of a step: what each is about to compute."""

from collections.abc import Sequence
from typing import NamedTuple

from headway.count import Workload
from headway.data import Batch


class StepShare(NamedTuple):
    """One rank's part of a step, or all of them together.

    Attributes:
        workload: what is computed.
        tokens: of each source [tokens], shape (S,).
        supervised: targets of each source [tokens], shape (S,).
        has_ended: whether no data are left; the packs are padding then.
        stops: whether this is to be the last step.
    """

    workload: Workload
    tokens: tuple[int, ...]
    supervised: tuple[int, ...]
    has_ended: bool
    stops: bool

    @property
    def num_supervised(self) -> int:
        """Targets of all sources [tokens]."""
        return sum(self.supervised)

    @classmethod
    def of(cls, batches: Sequence[Batch], names: Sequence[str], *, has_ended: bool, stops: bool) -> "StepShare":
        """One rank's part: its packs, by the sources' names."""
        tokens, supervised = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        for batch in batches:
            for origin, length, targets in zip(
                batch.origins, batch.workload.segments.tolist(), batch.supervised, strict=True
            ):
                tokens[origin.source] += length
                supervised[origin.source] += targets
        workload = Workload.total(batch.workload for batch in batches)
        return cls(workload, tuple(tokens.values()), tuple(supervised.values()), has_ended, stops)

    @classmethod
    def total(cls, shares: Sequence["StepShare"]) -> "StepShare":
        """All ranks' parts together: the data have ended once they have for all, and one wish to stop is enough."""
        return cls(
            Workload.total(share.workload for share in shares),
            tuple(map(sum, zip(*(share.tokens for share in shares), strict=True))),
            tuple(map(sum, zip(*(share.supervised for share in shares), strict=True))),
            all(share.has_ended for share in shares),
            any(share.stops for share in shares),
        )
