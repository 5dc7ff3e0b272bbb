"""One pack, from the rows it holds to its batch: what a worker process does."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from headway.data.collate import Batch, Collator
from headway.data.encode import Encoder
from headway.data.encoded import EncodedSample
from headway.data.samples import Sample
from headway.data.sources import Source
from headway.errors import DataError


class Piece(NamedTuple):
    """A sample of a pack, or a part of one.

    Attributes:
        source: number of its source.
        row: place in the source.
        start: its first token in the sample [tokens].
        stop: one past its last token in the sample [tokens].
    """

    source: int
    row: int
    start: int
    stop: int


class Skipped(NamedTuple):
    """A sample that could not be used.

    Attributes:
        source: its source's name.
        row: place in the source.
        reason: what was wrong, file and place included.
        tokens: what it was to bring [tokens]; 0 where that was not known.
    """

    source: str
    row: int
    reason: str
    tokens: int


class Dropped(NamedTuple):
    """A sample that was left out because it exceeds a pack.

    Attributes:
        source: its source's name.
        tokens: its length [tokens].
    """

    source: str
    tokens: int


class Made(NamedTuple):
    """A finished pack.

    Attributes:
        batch: its tensors.
        whole_tokens: length of each of its samples before it was cut [tokens].
        skipped: samples that were to be in it.
        dropped: samples that were read for it.
    """

    batch: Batch
    whole_tokens: tuple[int, ...]
    skipped: tuple[Skipped, ...]
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True)
class PackMaker:
    """Loads, encodes, cuts and collates the samples of a pack.

    Attributes:
        sources: what the pieces' source numbers mean.
        encoder: turns samples into tensors.
        collator: lays them end to end.
        skips: whether a sample that cannot be used is left out and named, instead of ending the run.
    """

    sources: tuple[Source, ...]
    encoder: Encoder
    collator: Collator
    skips: bool

    def __call__(self, pieces: Sequence[Piece]) -> Made:
        """Make a pack; one of which nothing is left is a pack of padding.

        Raises:
            DataError: a sample cannot be used and `skips` is off, or it is not the one that was planned with.
        """
        return self.make((piece, partial(self.sources[piece.source].__getitem__, piece.row)) for piece in pieces)

    def make(self, pieces: Iterable[tuple[Piece, Callable[[], Sample]]]) -> Made:
        """Make a pack of samples that are read in another way than by their row.

        Raises:
            DataError: as when called.
        """
        encoded, whole_tokens, skipped = [], [], []
        for piece, read in pieces:
            try:
                whole = self.encoder.encode(read())
            except DataError as error:
                if not self.skips:
                    raise
                name = self.sources[piece.source].name
                skipped.append(Skipped(name, piece.row, str(error), piece.stop - piece.start))
                continue
            encoded.append(part_of(whole, piece.start, piece.stop))
            whole_tokens.append(whole.tokens)
        return Made(self.collator(encoded), tuple(whole_tokens), tuple(skipped))


def part_of(whole: EncodedSample, start: int, stop: int) -> EncodedSample:
    """Cut tokens start .. stop - 1 out of a sample; positions of a later piece begin at 0 again.

    Raises:
        DataError: the sample has no such tokens: it is another one than was planned with.
    """
    if (start, stop) == (0, whole.tokens):
        return whole
    cut = None
    if start == 0 and stop < whole.tokens:
        cut = whole.truncated(stop)
    elif whole.media_end == 0 and stop <= whole.tokens:
        rows = whole.position_ids_RS.shape[0]
        cut = replace(
            whole,
            input_ids_S=whole.input_ids_S[start:stop].clone(),
            labels_S=whole.labels_S[start:stop].clone(),
            position_ids_RS=torch.arange(stop - start).expand(rows, -1),
            token_types_S=None if whole.token_types_S is None else whole.token_types_S[start:stop].clone(),
        )
    if cut is None:
        raise DataError(
            f"{whole.where}: the sample has {whole.tokens} tokens, and tokens {start} to {stop} of it were planned, "
            "which cannot be cut out of it. It changed since it was indexed; index the dataset again."
        )
    return cut
