"""The base of both feeds: packs made ahead by workers, samples counted as packs are handed out, state to resume."""

import json
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Self

from headway.data.bad_rows import BadSamples, SampleCounts
from headway.data.blank_media import Kinds, with_blanks
from headway.data.collate import Batch
from headway.data.feed.make import FinishedPack, PackMaker
from headway.data.pool import Pool
from headway.data.sample_cache import CacheCounts
from headway.data.sources.identity import Identities, Verify, changes_since, identify, refusal
from headway.errors import CheckpointError, ConfigError, HeadwayError
from headway.packing.budget import Budget

FILES = "files"
"""Key of a feed's state under which the identity of every file stands."""

_BYTES_PER_TOKEN = 64  # ids, labels, up to three rows of positions, token types
_BYTES_PER_PATCH = 1664  # 16 x 16 x 3 bytes over two frames, and 128 for what the tower derives from grids


def estimated_bytes(tokens: int, patches: int) -> int:
    """Estimate of a pack's memory [bytes]."""
    return tokens * _BYTES_PER_TOKEN + patches * _BYTES_PER_PATCH


@dataclass(frozen=True)
class Share:
    """A rank's share of every step, and how its packs are made.

    Attributes:
        rank: this process among those that train together, from 0.
        ranks: how many there are.
        accumulation: packs of each rank in a step [packs].
        workers: processes that make them; 0 for a thread.
        prefetch_bytes: estimated size of the packs that are made ahead [bytes].
        pin_memory: whether to hand out packs in page-locked memory.

    Raises:
        ConfigError: no such rank, or no pack in a step.
    """

    rank: int = 0
    ranks: int = 1
    accumulation: int = 1
    workers: int = 0
    prefetch_bytes: int = 2**28
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks or self.accumulation < 1:
            raise ConfigError(
                f"The feed got rank {self.rank} of {self.ranks} and accumulation {self.accumulation}; ranks count from "
                "0, and a step needs at least one pack."
            )


@dataclass(slots=True)
class FeedReport:
    """Counts of samples and packs up to the last pack handed out.

    Attributes:
        samples: by source, as they were read for packs.
        packs: packs handed out, those without a sample left out.
        tokens: in those packs [tokens].
        capacity: tokens that those packs could have held [tokens].
        planned: `OverlongCounts` of each source when the plan was made, rows that are never read included; empty for a
            stream.
    """

    samples: SampleCounts = field(default_factory=SampleCounts)
    packs: int = 0
    tokens: int = 0
    capacity: int = 0
    planned: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def fill(self) -> float:
        """Share of the packs' token budget that holds tokens, a fraction; 0 before the first pack."""
        return self.tokens / self.capacity if self.capacity else 0.0

    @classmethod
    def total(cls, reports: Sequence["FeedReport"]) -> "FeedReport":
        """The reports of all ranks as one."""
        samples = SampleCounts()
        for report in reports:
            samples.add(report.samples)
        packs, tokens, capacity = (sum(getattr(r, name) for r in reports) for name in ("packs", "tokens", "capacity"))
        return cls(samples, packs, tokens, capacity, reports[0].planned)

    def to_dict(self) -> dict[str, Any]:
        """The counts by name, as plain JSON values."""
        numbers = {"packs": self.packs, "tokens": self.tokens, "capacity": self.capacity}
        return {**numbers, "samples": self.samples.to_dict(), "planned": self.planned}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "FeedReport":
        """Read the dictionary that `to_dict` gave."""
        return cls(**{**content, "samples": SampleCounts.from_dict(content["samples"])})


class Feed(ABC):
    """Iterates over optimizer steps, each a list of the packs that this rank computes.

    Args:
        maker: makes packs; its sources give the names.
        budget: limits of a pack.
        share: which packs are made here, and how.
        bad: policy for samples that cannot be used.
        work: function that the workers run.
        splits: sources whose over-long samples are split, so that pieces of them are not truncated ones.
        keyed: whether tasks belong to one worker each, as for `Pool`.
        planned: `OverlongCounts` of each source, for the report.
        files: identity of every file, where more is known than can be seen without reading them.

    Attributes:
        sources: the datasets.
        making_s: times of the workers on the packs of the last step, by part of `headway.data.pack_times` [s].
        cached: what the cache of encoded samples did since the feed was opened.
        needed: steps that will still be asked for, beyond which an index's packs are not made; None where nobody knows.
        files: identity of every file of the sources, which states hold and are compared by.
    """

    def __init__(
        self,
        maker: PackMaker,
        budget: Budget,
        share: Share,
        bad: BadSamples,
        work: Any,
        *,
        splits: Set[str],
        keyed: bool,
        planned: dict[str, dict[str, int]] | None = None,
        files: Identities | None = None,
    ) -> None:
        self.share, self._maker, self._budget, self._bad, self._splits = share, maker, budget, bad, splits
        self.sources = maker.sources
        self.names = tuple(source.name for source in maker.sources)
        self._report = FeedReport(planned=planned or {})
        self._lost = dict.fromkeys(self.names, 0)
        self.making_s: dict[str, float] = {}
        self.cached = CacheCounts()
        self.needed: int | None = None
        self.files = identify(maker.sources) if files is None else files
        self._pool: Pool[Any, Any] = Pool(
            work,
            workers=share.workers,
            prefetch_bytes=share.prefetch_bytes,
            keyed=keyed,
            pin_memory=share.pin_memory,
        )
        self._steps: Iterator[list[FinishedPack]] | None = None
        weakref.finalize(self, self._pool.close, wait=False)

    @abstractmethod
    def _finished_steps(self) -> Iterator[list[FinishedPack]]:
        """Yield this rank's packs of each step from the current position on, moving it with each."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Settings that decide the packs' contents and order, as plain JSON values."""

    @abstractmethod
    def _position(self) -> dict[str, Any]:
        """This rank's position after the last step handed out, as plain JSON values."""

    @abstractmethod
    def _merged_positions(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The positions of all ranks as one."""

    @abstractmethod
    def _go_to(self, position: dict[str, Any]) -> None:
        """Go to a position of all ranks."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Batch]:
        """The packs of the next step.

        Raises:
            DataError: a sample cannot be used and is not to be skipped.
        """
        if self._steps is None:
            self._steps = self._finished_steps()
        self._lost = dict.fromkeys(self.names, 0)
        try:
            packs = next(self._steps)
        except HeadwayError:
            self.close()  # asked again, the same place gives the same error instead of a quiet end
            raise
        if self.needed is not None:
            self.needed -= 1
        self.making_s = {}
        for part, spent_s in (charge for pack in packs for charge in (pack.making_s or {}).items()):
            self.making_s[part] = self.making_s.get(part, 0.0) + spent_s
        return [pack.batch for pack in packs]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; the next step, if asked for, is the one after the last handed out."""
        self._steps = None
        self._pool.close()
        self._write_cache()

    def padding(self) -> Batch:
        """A pack without a sample, for a rank whose data have ended before the others'."""
        return self._maker([]).batch

    def with_blanks(self, batch: Batch, wanted: Kinds) -> Batch:
        """A pack of this feed with a blank image or video where other ranks' packs have one and it has none."""
        padded = with_blanks(batch, wanted, self._maker.collator)
        return padded.pin_memory() if self.share.pin_memory else padded

    @property
    def epochs(self) -> float | None:
        """Epochs of the data by the end of the last step handed out; None where that is not known."""
        return None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what its records do not mean."""
        return ()

    def steps_left(self, most: int | None) -> int | None:  # noqa: ARG002 - for those who can count
        """Steps until the data end, counted up to `most`; None if they never do, or it is not known beforehand."""
        return None

    @property
    def lost_tokens(self) -> tuple[int, ...]:
        """Tokens of each source's samples that were cut off or left out in the last step [tokens], by `names`."""
        return tuple(self._lost.values())

    def cache_line(self, counts: Sequence[CacheCounts]) -> str:
        """A line on what the cache of encoded samples did; empty if there was nothing for it to do.

        Args:
            counts: `cached` of all ranks.
        """
        cache, total = self._maker.cache, CacheCounts()
        for count in counts:
            total = total.plus(count)
        return "" if cache is None else cache.describe(total)

    def report(self) -> FeedReport:
        """Counts up to the last step handed out, of this rank alone."""
        return self._report

    def state_dict(self) -> dict[str, Any]:
        """This rank's state after the last step handed out, as plain JSON values; save the ranks' states `merged`."""
        return {"settings": _plain(self._settings()), "position": self._position(), "report": self._report.to_dict()}

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks into the one that any number of ranks can resume from.

        Args:
            states: `state_dict()` of each rank, in order.
        """
        return {
            "settings": states[0]["settings"],
            "position": self._merged_positions([state["position"] for state in states]),
            "report": FeedReport.total([FeedReport.from_dict(state["report"]) for state in states]).to_dict(),
            FILES: self.files,
        }

    def load_state_dict(self, state: dict[str, Any], verify: Verify = "size-and-time") -> None:
        """Go to a saved, merged state; the first rank takes the counts over.

        Args:
            state: of `merged`.
            verify: how files are compared with those that the state was saved with.

        Raises:
            CheckpointError: the state was saved with other data or settings, or is damaged.
        """
        if not {"settings", "position", "report", FILES} <= state.keys():
            raise CheckpointError("The saved data position is damaged. Resume from another checkpoint.")
        # Another machine may read a copy of the files, with other times.
        if clauses := changes_since(state[FILES], self.files, verify, times=self.share.rank == 0):
            raise CheckpointError(refusal(clauses))
        # Settings that decide the order of samples must be the same; each that differs is named.
        ours, saved = _plain(self._settings()), state["settings"]
        if saved != ours:
            saved = saved if isinstance(saved, dict) else {}
            differing = [
                f"{name} was {saved.get(name)} and is {ours[name]}" for name in ours if saved.get(name) != ours[name]
            ]
            raise CheckpointError(
                f"The data position was saved with other data or settings: {'; '.join(differing)}. Resume with the "
                "same ones, or start a new run from the checkpoint's weights."
            )
        # Workers are ahead of the old place; they start again from the new one.
        self.close()
        try:
            self._go_to(state["position"])
            report = FeedReport.from_dict(state["report"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"The saved data position is damaged ({error!r}). Resume from another checkpoint."
            ) from error
        # Counts are summed over ranks when saved, so the first rank alone goes on with them.
        self._report = report if self.share.rank == 0 else FeedReport(planned=report.planned)

    def _write_cache(self) -> None:
        """Write the samples that a thread of this process encoded."""
        if self._maker.cache is not None:
            self._maker.cache.flush()
            self._count_cached(self._maker.cache.take_counts())

    def _count_cached(self, counts: CacheCounts) -> None:
        if counts.trouble and not self.cached.trouble and self.share.rank == 0:
            warnings.warn(f"{counts.trouble[:1].upper()}{counts.trouble[1:]}.", RuntimeWarning, stacklevel=2)
        self.cached = self.cached.plus(counts)

    def _hand_out(self, pack: FinishedPack) -> None:
        self._count_cached(pack.cached)
        counts, batch = self._report.samples, pack.batch
        pieces = zip(batch.origins, batch.sample_tokens, pack.pieces, pack.whole_tokens, strict=True)
        for origin, tokens, piece, whole_tokens in pieces:
            first = int(piece.is_first)  # a sample is counted with its first piece
            cut = origin.source in self._splits and tokens < whole_tokens
            counts.count(origin.source, "read", first, tokens if cut else whole_tokens * first)
            counts.count(origin.source, "used", first, tokens)
            if cut:
                counts.count(origin.source, "split", first, tokens)
            elif tokens < whole_tokens:
                counts.count(origin.source, "truncated", 1, whole_tokens - tokens)
                self._lost[origin.source] += whole_tokens - tokens
        for source, tokens, samples in pack.dropped:
            counts.count(source, "read", samples, tokens)
            counts.count(source, "dropped", samples, tokens)
            self._lost[source] += tokens
        for error, tokens in pack.skipped:
            counts.count(error.origin.source, "read", 1, tokens)
            self._bad.handle(error, counts, tokens)
            self._lost[error.origin.source] += tokens
        if batch.num_samples:
            self._report.packs += 1
            self._report.tokens += batch.tokens
            self._report.capacity += self._budget.tokens


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values as they come back from a JSON file: tuples as lists."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
