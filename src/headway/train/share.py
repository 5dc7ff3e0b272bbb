"""What the ranks tell each other at the start of a step: what each is about to compute."""

from collections.abc import Sequence
from typing import NamedTuple

from headway.count import Workload
from headway.data import Batch
from headway.data.feed import Feed


class StepShare(NamedTuple):
    """One rank's part of a step, or all of them together.

    Attributes:
        workload: what is computed.
        tokens: of each source [tokens], shape (S,).
        supervised: targets of each source [tokens], shape (S,).
        lost: tokens of each source that were cut off or left out [tokens], shape (S,).
        has_ended: whether no data are left; the packs are padding then.
        stop_signal: number of the signal that makes this the last step; 0 for none.
        save_failed: whether a checkpoint could not be written.
    """

    workload: Workload
    tokens: tuple[int, ...]
    supervised: tuple[int, ...]
    lost: tuple[int, ...]
    has_ended: bool
    stop_signal: int
    save_failed: bool

    @property
    def num_supervised(self) -> int:
        """Targets of all sources [tokens]."""
        return sum(self.supervised)

    @classmethod
    def of(
        cls, batches: Sequence[Batch], feed: Feed, *, has_ended: bool, stop_signal: int, save_failed: bool
    ) -> "StepShare":
        """One rank's part: the packs that its feed handed out last."""
        names = feed.names
        tokens, supervised = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        for batch in batches:
            for origin, length, targets in zip(
                batch.origins, batch.workload.segments.tolist(), batch.supervised, strict=True
            ):
                tokens[origin.source] += length
                supervised[origin.source] += targets
        workload = Workload.total(batch.workload for batch in batches)
        counts = tuple(tokens.values()), tuple(supervised.values()), feed.lost_tokens
        return cls(workload, *counts, has_ended, stop_signal, save_failed)

    @classmethod
    def total(cls, shares: Sequence["StepShare"]) -> "StepShare":
        """All ranks' parts together: the data have ended once they have for all, and one wish to stop is enough."""
        columns = ([share.tokens for share in shares], [share.supervised for share in shares], [s.lost for s in shares])
        tokens, supervised, lost = (tuple(map(sum, zip(*column, strict=True))) for column in columns)
        return cls(
            Workload.total(share.workload for share in shares),
            tokens,
            supervised,
            lost,
            all(share.has_ended for share in shares),
            max(share.stop_signal for share in shares),
            any(share.save_failed for share in shares),
        )
