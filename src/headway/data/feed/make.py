"""Making a pack in a worker process: read its rows, encode and cut them, collate."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from headway.data.bad_rows import sample_error
from headway.data.collate import Batch, Collator
from headway.data.conditions import sample_without
from headway.data.encode import Encoder
from headway.data.encoded import EncodedSample
from headway.data.pack_times import charged_to, take_charges
from headway.data.samples import Origin, Preference, Sample, SampleError, supervised, unusable
from headway.data.sources import Source
from headway.data.unpaired import graded, grades_of, mismatched
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
    """

    batch: Batch
    pieces: tuple[Piece, ...]
    whole_tokens: tuple[int, ...]
    skipped: tuple[SkippedSample, ...]
    dropped: tuple[DroppedSample, ...] = ()
    making_s: dict[str, float] | None = None


@dataclass(frozen=True)
class PackMaker:
    """Loads, encodes, cuts and collates the samples of a pack.

    Attributes:
        sources: datasets, by the pieces' source numbers.
        encoder: turns samples into tensors.
        collator: lays them end to end.
        skips: whether a sample that cannot be used is left out and named, instead of ending the run.
        dropout: of conditions of what is drawn; None where all samples are whole.
        compares: whether samples must be preferences; otherwise these, and answers that were graded as bad ones, are
            refused.
        grades: whether each answer is learnt by whether it is wished for: of samples that say so, or preferences.
        mismatches: whether a pack's answers are also made behind other prompts of it.
    """

    sources: tuple[Source, ...]
    encoder: Encoder
    collator: Collator
    skips: bool
    dropout: Dropout | None = None
    compares: bool = False
    grades: bool = False
    mismatches: bool = False

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
        rows: list[list[EncodedSample]] = []
        for piece, read_sample in pieces:
            try:
                with charged_to("read"):
                    sample = read_sample()
                try:
                    self._check_kind(sample)
                    full_sample = sample_without(self.encoder.encode(sample), self.dropout, piece.epoch)
                    part = part_of(full_sample, piece.start, piece.stop)
                    if self.grades:
                        part = graded(part, grades_of(sample))
                    if self.mismatches:
                        chats = sample.chats if isinstance(sample, Preference) else ()
                        rows.append([self.encoder.encode(chat) for chat in chats] or [part])
                except DataError as error:
                    raise sample_error(error, sample.origin) from error
            except SampleError as error:
                if not self.skips:
                    raise
                skipped.append(SkippedSample(error, piece.stop - piece.start))
                continue
            encoded.append(part)
            whole_tokens.append(full_sample.tokens)
            used.append(piece)
        batch = self.collator(encoded)
        if self.mismatches:
            batch = replace(batch, mismatched=self.collator(mismatched(rows)))
        return FinishedPack(batch, tuple(used), tuple(whole_tokens), tuple(skipped), making_s=take_charges())

    def _check_kind(self, sample: Sample) -> None:
        if self.grades:
            grades_of(sample)
        elif not self.compares:
            supervised(sample)
        elif not isinstance(sample, Preference):
            raise unusable(
                sample, "the row is no preference, and the run trains on preferences. Delete it, or train on it apart."
            )

    def _load(self, piece: Piece) -> Sample:
        source = self.sources[piece.source]
        try:
            return source[piece.row]
        except DataError as error:
            raise sample_error(error, Origin(source.name, source.name, piece.row, f"row {piece.row}")) from error


def part_of(sample: EncodedSample, start: int, stop: int) -> EncodedSample:
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
