"""Making a pack in a worker process: read its rows, encode and cut them, collate."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from headway.data.bad_rows import sample_error
from headway.data.collate import Batch, Collator
from headway.data.encode import Encoder
from headway.data.encoded import EncodedSample
from headway.data.pack_times import charged_to, take_charges
from headway.data.sample_cache import CacheCounts, SampleCache
from headway.data.samples import Origin, Sample, SampleError, supervised
from headway.data.sources import Source
from headway.errors import DataError
from headway.packing.parts import Dropout


class Piece(NamedTuple):
    """A sample of a pack, or a part of one.

    Attributes:
        source: number of its source.
        row: place in the source.
        start: its first token in the sample [tokens].
        stop: one past its last token in the sample [tokens].
        epoch: how often the sample has played before.
        is_first: whether it is the first of its sample that is trained on, with which the sample is counted.
    """

    source: int
    row: int
    start: int
    stop: int
    epoch: int = 0
    is_first: bool = True


class SkippedSample(NamedTuple):
    """A sample that could not be used.

    Attributes:
        error: which, and why.
        tokens: its planned length [tokens]; 0 where that was not known.
    """

    error: SampleError
    tokens: int


class DroppedSample(NamedTuple):
    """A sample that was left out because it exceeds a pack, or pieces of a split one that learn nothing.

    Attributes:
        source: its source's name.
        tokens: what was left out [tokens].
        samples: 1, or 0 where other pieces of the sample are used.
    """

    source: str
    tokens: int
    samples: int = 1


class FinishedPack(NamedTuple):
    """A finished pack, and the samples that could not be used for it.

    Attributes:
        batch: its tensors.
        pieces: its samples, and what each was cut to.
        whole_tokens: length of each of its samples before cutting [tokens].
        skipped: samples planned for it that could not be used.
        dropped: samples read for it that exceed a pack.
        making_s: time of making it, by part of `headway.data.pack_times` [s]; None where nobody took it.
        cached: what the cache of encoded samples did for it.
    """

    batch: Batch
    pieces: tuple[Piece, ...]
    whole_tokens: tuple[int, ...]
    skipped: tuple[SkippedSample, ...]
    dropped: tuple[DroppedSample, ...] = ()
    making_s: dict[str, float] | None = None
    cached: CacheCounts = CacheCounts()


class RowRule:
    """Rows that an objective learns from, and what it needs beside their tokens; here those that are all right.

    An objective with another rule gives a subclass, which is pickled for the workers.
    """

    @property
    def needs_rows(self) -> bool:
        """True if more than the check reads a row, so that its tokens alone do not do."""
        own = type(self)
        return own.marked is not RowRule.marked or own.others is not RowRule.others

    def check(self, sample: Sample) -> None:
        """Refuse a row that cannot be learnt from.

        Raises:
            DataError: with the reason.
        """
        supervised(sample)

    def marked(self, encoded: EncodedSample, sample: Sample) -> EncodedSample:  # noqa: ARG002 - for subclasses
        """An encoded row, or a part of it, with marks that the objective reads."""
        return encoded

    def others(
        self,
        encoded: EncodedSample,  # noqa: ARG002 - for subclasses
        sample: Sample,  # noqa: ARG002 - for subclasses
        encoder: Encoder,  # noqa: ARG002 - for subclasses
    ) -> list[EncodedSample]:
        """Parts that a row gives to a second pack, if there is one."""
        return []

    def companions(
        self,
        others: Sequence[Sequence[EncodedSample]],  # noqa: ARG002 - for subclasses
    ) -> list[EncodedSample] | None:
        """The samples of a second pack, `Batch.companion`, from what `others` gave of each row; None for no pack."""
        return None

    def without_companions(self) -> "RowRule":
        """The same rule without a second pack."""
        return self


@dataclass(frozen=True)
class PackMaker:
    """Loads, encodes, cuts and collates the samples of a pack.

    Attributes:
        sources: datasets, by the pieces' source numbers.
        encoder: turns samples into tensors.
        collator: lays them end to end.
        skips: whether a sample that cannot be used is left out and named, instead of ending the run.
        dropout: of conditions; None where all samples are whole.
        rule: which samples the run's objective learns from, and what it needs beside their tokens.
        cache: of encoded samples, of rules that need no rows; None without one.
    """

    sources: tuple[Source, ...]
    encoder: Encoder
    collator: Collator
    skips: bool
    dropout: Dropout | None = None
    rule: RowRule = field(default_factory=RowRule)
    cache: SampleCache | None = None

    def __call__(self, pieces: Sequence[Piece]) -> FinishedPack:
        """Make a pack; one of which nothing is left is a pack of padding.

        Raises:
            DataError: a sample cannot be used and `skips` is off; one that is not what was planned with cannot either.
        """
        return self.make((piece, partial(self._load, piece)) for piece in pieces)

    def make(self, pieces: Iterable[tuple[Piece, Callable[[], Sample]]]) -> FinishedPack:
        """Make a pack of samples that are read in another way than by their row.

        Raises:
            DataError: as when called.
        """
        encoded, whole_tokens, used, skipped = [], [], [], []
        others: list[list[EncodedSample]] = []
        if self.cache is not None:
            self.cache.tend()
        for piece, read_sample in pieces:
            try:
                full_sample, sample = self._encoded(piece, read_sample)
                try:
                    full_sample = self.encoder.without_conditions(full_sample, self.dropout, piece.epoch)
                    part = cut_sample(full_sample, piece.start, piece.stop)
                    if sample is not None:
                        part = self.rule.marked(part, sample)
                        others.append(self.rule.others(part, sample, self.encoder))
                except DataError as error:
                    raise sample_error(error, full_sample.origin) from error
            except SampleError as error:
                if not self.skips:
                    raise
                skipped.append(SkippedSample(error, piece.stop - piece.start))
                continue
            encoded.append(part)
            whole_tokens.append(full_sample.tokens)
            used.append(piece)
        batch = self.collator(encoded)
        if (samples := self.rule.companions(others)) is not None:
            batch = replace(batch, companion=self.collator(samples))
        cached = CacheCounts() if self.cache is None else self.cache.take_counts()
        return FinishedPack(
            batch, tuple(used), tuple(whole_tokens), tuple(skipped), making_s=take_charges(), cached=cached
        )

    def _encoded(self, piece: Piece, read_sample: Callable[[], Sample]) -> tuple[EncodedSample, Sample | None]:
        """A sample and its row; None for the row where the sample is in the cache."""
        with charged_to("read"):
            cached = None if self.cache is None else self.cache.read(piece.source, piece.row)
            if cached is not None:
                return cached, None
            sample = read_sample()
        try:
            self.rule.check(sample)
            if self.cache is None:
                return self.encoder.encode(sample), sample
            return self.cache.encoded(piece.source, piece.row, sample, self.encoder.encode), sample
        except DataError as error:
            raise sample_error(error, sample.origin) from error

    def _load(self, piece: Piece) -> Sample:
        source = self.sources[piece.source]
        try:
            return source[piece.row]
        except DataError as error:
            raise sample_error(error, Origin(source.name, source.name, piece.row, f"row {piece.row}")) from error


def cut_sample(sample: EncodedSample, start: int, stop: int) -> EncodedSample:
    """Cut tokens start .. stop - 1 out of a sample; positions of a later piece begin at 0 again.

    Raises:
        DataError: the sample has no such tokens: it is another one than was planned with.
    """
    if (start, stop) == (0, sample.tokens):
        return sample
    cut = None
    if start == 0 and stop < sample.tokens:
        cut = sample.truncated(stop)
    elif sample.media_end == 0 and stop <= sample.tokens:
        cut = sample.slice(start, stop)
    if cut is None:
        raise DataError(
            f"the sample has {sample.tokens} tokens, and tokens {start} to {stop} of it were planned, "
            "which cannot be cut out of it. It changed since it was indexed, as where an image was replaced under "
            "the same name; measure it anew with `headway index DATA --model MODEL --refresh`.",
            where=sample.where,
        )
    return cut
