"""A dataset as typed samples: any row by its number, or the rows of each shard in order."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from headway.data.media.images import Picture
from headway.data.media.sizes import MediaSizes
from headway.data.samples import Chat, Origin, Sample, SampleError, best_answered
from headway.data.sources.layouts import TEXT
from headway.data.sources.marks import rendered_opening, unread_keys
from headway.data.sources.preferences import num_left_out
from headway.data.sources.reader import Raw, Reader
from headway.data.sources.schemas import Normaliser
from headway.data.sources.text_rows import listed
from headway.errors import DataError, foreign

_DIM = 65536 // 8  # brightest pixel of 16 bits below which a picture is dim
_PICTURED_ROWS = 3  # rows of each file whose pictures are looked at


@dataclass(frozen=True)
class Shard:
    """One file of a dataset.

    `rows` reads it in order and keeps nothing, so it suits files too large or too far away for random access.

    Attributes:
        source: the dataset's name.
        reader: reads the file's format.
        normaliser: makes samples of its rows.
    """

    source: str
    reader: Reader
    normaliser: Normaliser

    @property
    def name(self) -> str:
        """Path or URL of the file."""
        return self.reader.name

    @property
    def description(self) -> str:
        """All that the file's samples depend on: its name, size and time of change, and how its rows are read."""
        columns, sizes = sorted(self.normaliser.columns.items()), self.normaliser.sizes
        return repr((self.reader, self.normaliser)) + repr(columns) * bool(columns) + repr(sizes) * bool(sizes)

    def rows(self, start: int = 0) -> Iterator[tuple[int, Sample | SampleError]]:
        """Rows from `start` on with their places in the file; one that cannot be used is its error.

        A file that cannot be read further, or is empty, ends with an error in the place of the next row.

        Raises:
            DataError: the file was changed since it was found.
        """
        for raw in self.reader.stream(start):
            try:
                sample: Sample | SampleError = self._sample(raw)
            except SampleError as error:
                sample = error
            yield raw.row, sample

    def notes(self, most: int) -> list[str]:
        """Notes on parts of the file's first rows that are left out, or changed, without being plain.

        Args:
            most: how many rows are looked at.
        """
        unread, opening = set[str](), ""
        ties = empty = 0
        for raw in islice(self.reader.stream(), most):
            try:
                fields, reading = self.normaliser.reading(self.reader.row(raw))
            except DataError:
                continue  # told when the row is used
            unread |= unread_keys(fields, reading.roles)
            roles = reading(fields)
            ties += num_left_out(roles) if reading.layout.schema == "ranked" else 0
            empty += any(role in roles and roles[role] is None for role in (TEXT, "question"))
            if reading.layout.makes != "document":
                opening = opening or rendered_opening(roles)
        notes = {
            f"{ties} answers of its first rows are left out, as good as the best, unrated or the same as another "
            "(docs/data.md)": ties,
            f"{empty} of its first rows have no text, which is null, and are left out": empty,
            f"its words begin with {opening!r}, as a chat template writes them, and the model's template is put around "
            "them once more. Give rendered texts in the text column, or chats as they are (docs/data.md)": opening,
            f"{listed(sorted(unread))} {'are' if len(unread) > 1 else 'is'} not looked at "
            "(docs/data-formats.md has the keys that are)": unread,
        }
        return [note for note, is_so in notes.items() if is_so]

    def dim_picture(self, most: int) -> str | None:
        """Note on 16-bit grey that uses only the lowest values, such as X-rays of 12 bits.

        Args:
            most: how many rows are looked at.
        """
        for _, sample in islice(self.rows(), most):
            text = None if isinstance(sample, SampleError) else best_answered(sample)
            for media in text.images if isinstance(text, Chat) else ():
                if media.path is not None and "://" in media.path:
                    continue  # nothing is fetched for a note
                try:
                    with Picture(media, str(sample.origin)) as picture:
                        brightest = picture.brightest_of_16_bits()
                except DataError:
                    continue  # told when the row is used
                if brightest is not None and brightest < _DIM:
                    return (
                        f"{sample.origin}: no pixel of the 16-bit grey image {media} is above {brightest:,} of 65,535, "
                        "so the model sees it nearly black (docs/data.md). Scale such images to their own range"
                    )
        return None

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, row: int) -> Sample:
        """A row by its place in the file.

        Raises:
            DataError: the row cannot be used; the message names file and place.
            IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} rows in {self.name}")
        with foreign(lambda reason: DataError(f"{self.name}: row {row} cannot be read: {reason} Copy the file again.")):
            raw = self.reader.get(int(row))
        return self._sample(raw)

    def _sample(self, raw: Raw) -> Sample:
        origin = Origin(self.source, self.name, raw.row, raw.place)
        try:
            return self.normaliser.sample(self.reader.row(raw), origin)
        except DataError as error:
            raise SampleError(origin, *error.pieces) from error


class Source:
    """A dataset of one or many files.

    It is small to pickle and opens its files where it is used, so worker processes can be handed one.

    Args:
        name: how the run calls it.
        shards: its files, in order.

    Attributes:
        name: how the run calls it.
        shards: its files, in order.
    """

    def __init__(self, name: str, shards: tuple[Shard, ...]) -> None:
        self.name, self.shards = name, shards
        self._starts: list[int] | None = None

    @property
    def sizes(self) -> MediaSizes:
        """Bounds that the source sets itself on the sizes of its media."""
        return self.shards[0].normaliser.sizes if self.shards else MediaSizes()

    @property
    def starts(self) -> list[int]:
        """Rows before each shard, and of all in the end.

        Raises:
            DataError: the cache, where the rows' places are kept, cannot be written.
        """
        if self._starts is None:
            self._starts = [0, *accumulate(len(shard) for shard in self.shards)]
        return self._starts

    def __len__(self) -> int:
        """Rows of all shards. The first call reads formats that do not say how many they hold; the cache keeps it."""
        return self.starts[-1]

    def __getitem__(self, row: int) -> Sample:
        """A row by its place in the dataset, counted over the shards.

        Raises:
            DataError: the row cannot be used; the message names file and place.
            IndexError: there is no such row.
        """
        shard, place = self.locate(row)
        return shard[place]

    def locate(self, row: int) -> tuple[Shard, int]:
        """The shard that holds a row, and the row's place in it.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} rows in the dataset {self.name}")
        number = bisect_right(self.starts, row) - 1
        return self.shards[number], int(row) - self.starts[number]

    def notes(self, rows: int = 20, files: int = 16) -> list[str]:
        """Notes on the first files: images nearly black, and the notes of each shard, each once.

        Args:
            rows: how many of each file are looked at.
            files: how many files are.
        """
        by_note: dict[str, list[str]] = {}
        for shard in self.shards[:files]:
            for note in shard.notes(rows):
                by_note.setdefault(note, []).append(shard.name)
        dim = [shard.dim_picture(_PICTURED_ROWS) for shard in self.shards[:files]]
        return [note for note in dim if note is not None][:1] + [
            f"{names[0]}{f' and {len(names) - 1} more files' * (len(names) > 1)}: {note}"
            for note, names in by_note.items()
        ]

    def fingerprint(self) -> str:
        """A digest of every file's name, size and time of change, and of how rows become samples.

        The media that rows name are not looked at.
        """
        return hashlib.sha256("".join(shard.description for shard in self.shards).encode()).hexdigest()[:32]

    def schema_fingerprint(self) -> str:
        """A digest of how rows become samples, wherever the files lie."""
        forms = set()
        for shard in self.shards:
            settings = {name: value for name, value in shard.reader.__getstate__().items() if name != "file"}
            columns = sorted(shard.normaliser.columns.items())
            form = (type(shard.reader).__name__, settings, replace(shard.normaliser, folder=""), columns)
            forms.add(repr(form + (shard.normaliser.sizes,) * bool(shard.normaliser.sizes)))
        return hashlib.sha256(repr(sorted(forms)).encode()).hexdigest()[:32]
