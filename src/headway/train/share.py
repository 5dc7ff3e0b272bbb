"""What the ranks tell each other at the start of a step: what each is about to compute."""

from collections.abc import Sequence
from typing import NamedTuple

from headway.count import Workload
from headway.data import Batch
from headway.data.blank import Modalities
from headway.data.feed import Feed
from headway.train.ranks import Ranks


class StepShare(NamedTuple):
    """One rank's part of a step, or all of them together.

    Attributes:
        workload: what is computed.
        tokens: of each source [tokens], shape (S,).
        supervised: targets of each source [tokens], shape (S,).
        lost: tokens of each source that were cut off or left out [tokens], shape (S,).
        has_ended: whether no data are left; the packs are padding then.
        stops: whether this is to be the last step.
        modalities: which towers each of the packs needs.
    """

    workload: Workload
    tokens: tuple[int, ...]
    supervised: tuple[int, ...]
    lost: tuple[int, ...]
    has_ended: bool
    stops: bool
    modalities: tuple[Modalities, ...]

    @property
    def num_supervised(self) -> int:
        """Targets of all sources [tokens]."""
        return sum(self.supervised)

    @classmethod
    def of(cls, batches: Sequence[Batch], feed: Feed, *, has_ended: bool, stops: bool) -> "StepShare":
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
        modalities = tuple(map(Modalities.of, batches))
        return cls(
            workload, tuple(tokens.values()), tuple(supervised.values()), feed.lost_tokens, has_ended, stops, modalities
        )

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
            any(share.stops for share in shares),
            tuple(Modalities.union(packs) for packs in zip(*(share.modalities for share in shares), strict=True)),
        )


def agree(
    batches: list[Batch], feed: Feed, ranks: Ranks, *, has_ended: bool, stops: bool
) -> tuple[list[Batch], StepShare]:
    """Tell the other ranks what this one is about to compute, and hear what they are.

    Where some rank's pack has an image or a video, the packs that the others compute meanwhile get a blank one.

    Args:
        batches: this rank's packs.
        feed: what handed them out.
        ranks: all of them.
        has_ended: whether this rank has no data left.
        stops: whether this rank wishes this to be the last step.

    Returns:
        The packs to compute, and what all ranks compute together.
    """
    shares = ranks.gather(StepShare.of(batches, feed, has_ended=has_ended, stops=stops))
    whole = StepShare.total(shares)
    if all(share.modalities == whole.modalities for share in shares):
        return batches, whole
    batches = [feed.with_blanks(batch, wanted) for batch, wanted in zip(batches, whole.modalities, strict=True)]
    return batches, StepShare.total(ranks.gather(StepShare.of(batches, feed, has_ended=has_ended, stops=stops)))
