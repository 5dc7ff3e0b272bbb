"""Exchange between ranks at the start of a step: the workload, samples and flags of each."""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from headway.count import Workload
from headway.data import Batch
from headway.data.blank_media import Kinds, vision_kinds
from headway.data.feed import Feed
from headway.models.parallel.ranks import Ranks

DIGESTS = 2**64


class Flags(NamedTuple):
    """Reasons to end the run, of one process or of all.

    Attributes:
        has_ended: whether no data are left; the packs are padding then.
        stop_signal: number of the signal that makes this the last step; 0 for none.
        save_failed: whether a checkpoint could not be written.
        failure: why a process cannot take the step; empty where it can.
    """

    has_ended: bool
    stop_signal: int
    save_failed: bool
    failure: str = ""

    @classmethod
    def total(cls, flags: Sequence["Flags"]) -> "Flags":
        """All of them together: the data have ended once they have for all; of the rest, one process is enough."""
        return cls(
            all(own.has_ended for own in flags),
            max(own.stop_signal for own in flags),
            any(own.save_failed for own in flags),
            next((f"rank {rank}: {own.failure}" for rank, own in enumerate(flags) if own.failure), ""),
        )


class Counts(NamedTuple):
    """Whole numbers by which losses are divided, of one pack or of many.

    Attributes:
        units: numbers by which the loss of each source is divided, such as targets or pairs, shape (S,).
        others: what further parts of the loss are means over; as many as the objective has.
    """

    units: tuple[int, ...]
    others: tuple[int, ...] = ()

    @classmethod
    def total(cls, parts: Iterable["Counts"]) -> "Counts":
        """The sum of several; at least one."""
        units, others = zip(*parts, strict=True)
        return cls(*(tuple(map(sum, zip(*numbers, strict=True))) for numbers in (units, others)))


class StepShare(NamedTuple):
    """One rank's part of a step, or all of them together.

    Attributes:
        workload: what is computed.
        tokens: of each source [tokens], shape (S,).
        supervised: targets of each source [tokens], shape (S,).
        lost: tokens of each source that were cut off or left out [tokens], shape (S,).
        counts: by which losses are divided.
        digest: of the samples' origins, `samples_digest`.
        kinds: of each pack the kinds of media for which a vision tower runs.
        flags: what may end the run.
    """

    workload: Workload
    tokens: tuple[int, ...]
    supervised: tuple[int, ...]
    lost: tuple[int, ...]
    counts: Counts
    digest: int
    kinds: tuple[Kinds, ...]
    flags: Flags

    @property
    def units(self) -> tuple[int, ...]:
        """Divisor of each source's mean loss, shape (S,)."""
        return self.counts.units

    @property
    def divisor(self) -> int:
        """Divisor of the step's summed losses, in the gradient and in the log; at least 1."""
        return max(1, sum(self.units))

    @property
    def learns(self) -> bool:
        """True if the step has anything to learn from: a step whose samples were all left out has padding alone."""
        return any(self.units) or any(self.counts.others)

    @classmethod
    def of(cls, batches: Sequence[Batch], feed: Feed, flags: Flags, counts: Callable[[Batch], Counts]) -> "StepShare":
        """One rank's part: the packs that its feed handed out last."""
        tokens, supervised = (dict.fromkeys(feed.names, 0) for _ in range(2))
        for batch in batches:
            for origin, length, targets in zip(batch.origins, batch.sample_tokens, batch.supervised, strict=True):
                tokens[origin.source] += length
                supervised[origin.source] += targets
        workload = Workload.total(batch.workload for batch in batches)
        return cls(
            workload,
            tuple(tokens.values()),
            tuple(supervised.values()),
            feed.lost_tokens,
            Counts.total(map(counts, batches)),
            samples_digest(batches),
            tuple(map(vision_kinds, batches)),
            flags,
        )

    @classmethod
    def total(cls, shares: Sequence["StepShare"]) -> "StepShare":
        """All ranks' parts together."""
        columns = zip(*((share.tokens, share.supervised, share.lost) for share in shares), strict=True)
        tokens, supervised, lost = (tuple(map(sum, zip(*column, strict=True))) for column in columns)
        return cls(
            Workload.total(share.workload for share in shares),
            tokens,
            supervised,
            lost,
            Counts.total(share.counts for share in shares),
            sum(share.digest for share in shares) % DIGESTS,
            tuple(frozenset[str]().union(*packs) for packs in zip(*(share.kinds for share in shares), strict=True)),
            Flags.total([share.flags for share in shares]),
        )


def samples_digest(batches: Sequence[Batch]) -> int:
    """A number that tells which samples some packs hold: another one, if any is lost, repeated, cut or exchanged.

    It is the sum of a hash of each sample's source, file, row and length, modulo 2**64. So the digests of parts add up
    to that of the total, and neither the order of the samples nor who computes them changes it.
    """
    total = 0
    for batch in batches:
        for origin, length in zip(batch.origins, batch.sample_tokens, strict=True):
            name = f"{origin.source}\0{origin.file}\0{origin.row}\0{length}".encode(errors="surrogatepass")
            total += int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
    return total % DIGESTS


def exchange_step(
    batches: list[Batch],
    feed: Feed,
    ranks: Ranks,
    flags: Flags,
    counts: Callable[[Batch], Counts],
    finished: list[Any],
) -> tuple[list[Batch], StepShare, list[list[Any]]]:
    """Exchange the workloads of a step, and the steps that each rank's device has finished.

    Where some rank's pack has an image or a video, the packs that the others compute meanwhile get a blank one.

    Args:
        batches: this rank's packs.
        feed: what handed them out.
        ranks: all of them.
        flags: what may end the run, as this process sees it.
        counts: of the objective, by which the losses of a pack are divided.
        finished: sums of the steps that this rank's device has passed, as `Meter.finished` gives them.

    Returns:
        The packs to compute, what all ranks compute together, and the finished steps of each rank.
    """
    heard = ranks.gather_all((StepShare.of(batches, feed, flags, counts), finished))
    everyone, done = [share for share, _ in heard], [steps for _, steps in heard]
    flags = Flags.total([share.flags for share in everyone])  # a signal may reach any process
    shares = everyone[:: ranks.sequence]
    total = StepShare.total(shares)._replace(flags=flags)
    if all(share.kinds == total.kinds for share in shares):
        return batches, total, done
    batches = [feed.with_blanks(batch, wanted) for batch, wanted in zip(batches, total.kinds, strict=True)]
    return batches, StepShare.total(ranks.gather(StepShare.of(batches, feed, flags, counts))), done
