"""Lengths without data: read from a table (CSV or Parquet), or drawn from typical distributions (`MIXES`)."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.count import CostModel
from headway.errors import DataError
from headway.packing.budget import branch_costs, grid_costs, patch_costs, segment_costs, square_grid
from headway.packing.items import Overlong
from headway.packing.pieces import TargetRuns
from headway.version import install_command

Numbers = NDArray[Any]
Ints = NDArray[np.int64]


class SamplePlaces(NamedTuple):
    """Where in samples the targets and the media are.

    Attributes:
        first_target: place of each sample's first target [tokens], shape (N,).
        media_end: one past the last placeholder of an image, video or clip [tokens], shape (N,); 0 without.
        targets: runs of each sample's targets.
    """

    first_target: Numbers
    media_end: Numbers
    targets: TargetRuns


class DatasetLengths(NamedTuple):
    """The samples of a table that are of one dataset.

    Attributes:
        overlong: what becomes of those that exceed a pack; None where the dataset does not say.
        rows: of the table, shape (n,).
        table: of these samples alone.
    """

    overlong: Overlong | None
    rows: Numbers
    table: "LengthTable"


@dataclass(frozen=True, eq=False)
class LengthTable:
    """Lengths of samples of which little else is known.

    What a table does not say is taken thus: every token is a target, and a sample with patches has media to its end.

    Attributes:
        tokens: length of each sample [tokens], shape (N,).
        patches: vision patches of each sample [patches], shape (N,).
        grids: (t, h, w) of all images [patches], shape (M, 3); None where only their patches are known.
        grid_rows: the sample of each image, shape (M,); None without grids.
        segments: lengths of the views of samples that have several, by the sample [tokens].
        places: of targets and media; None where they are not known.
        source: number of each sample's dataset in `sources`, shape (N,); None where all are of the first.
        sources: name of each dataset, and its policy for samples that exceed a pack, if it has one.
        branches: of samples whose answers share a prompt, the prompt and each answer, by the sample [tokens].
    """

    tokens: Numbers
    patches: Numbers
    grids: Numbers | None = None
    grid_rows: Numbers | None = None
    segments: Mapping[int, Sequence[int]] = field(default_factory=dict)
    places: SamplePlaces | None = None
    source: Numbers | None = None
    sources: tuple[tuple[str, Overlong | None], ...] = (("planned", None),)
    branches: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def first_target(self) -> Numbers:
        """Place of the first target [tokens], shape (N,)."""
        return np.minimum(self.tokens, 1) if self.places is None else self.places.first_target

    @property
    def targets(self) -> TargetRuns:
        """Runs of each sample's targets."""
        if self.places is not None:
            return self.places.targets
        return TargetRuns(np.arange(len(self.tokens)), np.stack([self.first_target, self.tokens], axis=1))

    @property
    def media_end(self) -> Numbers:
        """One past the last placeholder of an image [tokens], shape (N,); 0 without."""
        return np.where(self.patches > 0, self.tokens, 0) if self.places is None else self.places.media_end

    @cached_property
    def parts(self) -> Mapping[str, DatasetLengths]:
        """The samples of each dataset, by its name; datasets without samples left out."""
        source = np.zeros(len(self.tokens), dtype=np.int64) if self.source is None else self.source
        rows = [np.flatnonzero(source == number) for number in range(len(self.sources))]
        return {
            name: DatasetLengths(overlong, own, self if len(own) == len(source) else self.take(own))
            for (name, overlong), own in zip(self.sources, rows, strict=True)
            if len(own)
        }

    def take(self, rows: Numbers) -> "LengthTable":
        """Pick samples, in the order of their rows as given, and each as often as its row is.

        Args:
            rows: of this table.
        """
        columns: dict[str, Any] = {}
        if self.grids is not None and self.grid_rows is not None:
            at, columns["grid_rows"] = _of_rows(self.grid_rows, rows, len(self.tokens))
            columns["grids"] = self.grids[at]
        if self.places is not None:
            first_target, media_end, targets = self.places
            at, owners = _of_rows(targets.rows, rows, len(self.tokens))
            columns["places"] = SamplePlaces(
                first_target[rows], media_end[rows], TargetRuns(owners, targets.values[at])
            )
        for name in ("segments", "branches"):
            if of_row := getattr(self, name):
                columns[name] = {place: of_row[row] for place, row in enumerate(rows.tolist()) if row in of_row}
        if self.source is not None:
            columns["source"] = self.source[rows]
        return replace(self, tokens=self.tokens[rows], patches=self.patches[rows], **columns)

    @property
    def ok(self) -> Numbers:
        """Mask of the rows that can be used, shape (N,)."""
        return np.ones(len(self.tokens), dtype=bool)

    def segments_of(self, row: int) -> Sequence[int]:
        """Lengths of the views of a sample with several views [tokens]; empty for a sample without."""
        return self.segments.get(row, ())

    @property
    def empty(self) -> Numbers:
        """Mask of the rows that hold nothing, shape (N,)."""
        return ~self.ok

    def costs(self, cost_model: CostModel) -> Numbers:
        """FLOPs of training on each sample, forward and backward, shape (N,).

        Where only the number of patches is known, they count as one picture, as square as can be.

        Raises:
            WorkloadError: patches for a model without a vision tower, or grids that it cannot take.
        """
        costs = segment_costs(cost_model, self.tokens)
        for row, segments in self.segments.items():
            costs[row] = segment_costs(cost_model, np.array(segments)).sum()
        for row, lengths in self.branches.items():
            costs[row] = branch_costs(cost_model, np.array(lengths), np.array([0])).sum()
        if self.grids is not None and self.grid_rows is not None:
            return costs + np.bincount(self.grid_rows, grid_costs(cost_model, self.grids), len(costs))
        return costs + patch_costs(cost_model, self.patches) if self.patches.any() else costs


def _of_rows(owners: Numbers, rows: Numbers, count: int) -> tuple[Numbers, Numbers]:
    """Look up the values of some rows, where each row has any number of them.

    Args:
        owners: the row of each value, shape (M,).
        rows: whose values are looked up, shape (n,).
        count: of all rows.

    Returns:
        Places of the values, row by row, and to which of `rows` each belongs.
    """
    order = np.argsort(owners, kind="stable")
    sizes = np.bincount(owners, minlength=count)
    first = (np.cumsum(sizes) - sizes)[rows]
    sizes = sizes[rows]
    before = np.cumsum(sizes) - sizes
    at = np.arange(int(sizes.sum())) - np.repeat(before - first, sizes)
    return order[at], np.repeat(np.arange(len(rows)), sizes)


def read_lengths(path: str | Path) -> LengthTable:
    """Read a table of lengths.

    Args:
        path: a Parquet file (.parquet), or CSV with a line of headings. `tokens` is required; `patches` and `grids` are
            not. A sample's grids are "1x32x48;1x16x16" in CSV, a list of [t, h, w] in Parquet.

    Raises:
        DataError: the file cannot be read, holds no rows, has no column `tokens`, or a number that is no length.
    """
    path = Path(path)
    columns = _parquet(path) if path.suffix.lower() in {".parquet", ".pq"} else _csv(path)
    tokens = _checked(columns["tokens"], "tokens", 1, path)
    if not len(tokens):
        raise DataError(f"{path} holds no rows. Write one row for each sample.")
    if "grids" in columns:
        return _with_grids(tokens, columns, path)
    patches = _checked(columns["patches"], "patches", 0, path) if "patches" in columns else np.zeros_like(tokens)
    return LengthTable(tokens, patches)


def _with_grids(tokens: Numbers, columns: dict[str, Any], path: Path) -> LengthTable:
    try:
        counts = [len(grids) for grids in columns["grids"]]
        values = np.array([grid for grids in columns["grids"] for grid in grids], dtype=np.int64).reshape(-1, 3)
    except (TypeError, ValueError) as error:
        raise DataError(
            f'{path}: a row of the column "grids" is no list of (t, h, w): {error}. In CSV write 1x32x48;1x16x16, '
            "and in Parquet write lists of three whole numbers."
        ) from error
    if values.size and values.min() < 1:
        raise DataError(
            f"{path}: a grid is {values[values.min(axis=1).argmin()].tolist()}, but t, h and w are at least 1."
        )
    rows = np.repeat(np.arange(len(tokens)), counts)
    patches = np.bincount(rows, values.prod(axis=1), len(tokens)).astype(np.int64)
    return LengthTable(tokens, patches, values, rows)


def _csv(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            headings = [heading.strip() for heading in next(reader, [])]
            places = {name: headings.index(name) for name in _wanted(headings, path)}
            columns: dict[str, list[Any]] = {name: [] for name in places}
            for number, row in enumerate(filter(None, reader), 1):
                # a number with commas for thousands has cells too many, and its first cell alone would be read
                if len(row) != len(headings):
                    raise DataError(
                        f"{path}, row {number} has {len(row)} cells below {len(headings)} headings. Write a cell below "
                        "each heading, and 1024 for 1,024."
                    )
                for name, place in places.items():
                    try:
                        columns[name].append(_grids(row[place]) if name == "grids" else _length(row[place]))
                    except ValueError as error:
                        allowed = "grids, such as 1x32x48;1x16x16" if name == "grids" else "a whole number below 2**31"
                        raise DataError(
                            f"{path}, row {number}: {name} is {row[place][:40]!r}. Write {allowed}, or leave the row "
                            "out."
                        ) from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"The lengths {path} cannot be read: {reason}. Give a CSV or Parquet file.") from error
    return columns


def _length(text: str) -> int:
    if abs(number := int(text)) >= 2**31:
        raise ValueError(f"{number} has more than 31 bits")
    return number


def _grids(text: str) -> list[list[int]]:
    return [[int(side) for side in grid.split("x")] for grid in text.split(";") if grid]


def _parquet(path: Path) -> dict[str, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise DataError(
            f"Reading {path} needs pyarrow, which is not installed. Install the extra, {install_command('train')}, "
            "or give the lengths as CSV."
        ) from error
    try:
        wanted = _wanted(pq.read_schema(path).names, path)
        table = pq.read_table(path, columns=wanted, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"The lengths {path} cannot be read: {error}. Give a CSV or Parquet file.") from error
    empty = [name for name in wanted if table[name].null_count]
    if empty:
        raise DataError(f"{path}: the column {empty[0]!r} has empty rows. Fill them, or leave those samples out.")
    return {name: table[name].to_pylist() if name == "grids" else table[name].to_numpy() for name in wanted}


def _wanted(headings: list[str], path: Path) -> list[str]:
    if "tokens" not in headings:
        raise DataError(
            f'{path} is no table of sample lengths, because it has no column "tokens". Its columns are '
            f"{', '.join(headings)[:200] or 'none'}. Separate columns by commas. Name the column of sample lengths "
            '"tokens", and the column of vision patches, if there is one, "patches". Or give the dataset itself: '
            "`headway pack DATA --model MODEL`."
        )
    for name in ("tokens", "patches", "grids"):
        if headings.count(name) > 1:
            raise DataError(f'{path} has several columns "{name}". Keep one of them.')
    if "grids" in headings:
        return ["tokens", "grids"]
    return [name for name in ("tokens", "patches") if name in headings]


def _checked(values: Any, name: str, least: int, path: Path) -> Numbers:
    numbers = np.asarray(values)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise DataError(f"{path}: the column {name!r} holds {numbers.dtype} values such as {numbers[0]!r}, no lengths.")
    numbers = numbers.astype(np.int64)
    if numbers.size and (numbers.min() < least or numbers.max() > np.iinfo(np.int32).max):
        row = int(((numbers < least) | (numbers > np.iinfo(np.int32).max)).argmax())
        raise DataError(
            f"{path}, row {row + 1}: {name} is {int(numbers[row])}, but must be at least {least} and below 2**31. "
            "Correct the row, or leave it out."
        )
    return numbers


PATCHES_PER_TOKEN = 4
"""Squares of 2 x 2 patches are a token, as in Qwen2-VL and what followed it."""

VIDEO_FRAME = (28, 28)
"""Height and width of a pair of video frames [patches]."""


@dataclass(frozen=True)
class Mix:
    """One distribution of sample lengths.

    Attributes:
        name: short.
        description: the distribution.
        kind: media that the samples hold beside text.
        source: where it is from.
        draw: makes, of so many samples, the lengths [tokens], how many of these are media's [tokens], and the number of
            images or videos, each of shape (N,).
    """

    name: str
    description: str
    kind: Literal["text", "images", "videos"]
    source: str
    draw: Callable[[np.random.Generator, int], tuple[Ints, Ints, Ints]]

    def lengths(self, num_samples: int, seed: int = 0) -> LengthTable:
        """Draw samples, with pictures about square and videos of frames of one size, rounded up to whole rows."""
        tokens, media, number = self.draw(np.random.default_rng(seed), num_samples)
        rows = np.repeat(np.arange(num_samples), number)
        medium_patches = media[rows] * PATCHES_PER_TOKEN // number[rows]
        grids = np.array([self._grid(int(patches)) for patches in medium_patches], dtype=np.int64).reshape(-1, 3)
        patches = np.bincount(rows, grids.prod(axis=1), num_samples).astype(np.int64)
        return LengthTable(tokens, patches, grids, rows)

    def _grid(self, patches: int) -> tuple[int, int, int]:
        if self.kind == "videos":
            return max(1, round(patches / math.prod(VIDEO_FRAME))), *VIDEO_FRAME
        return square_grid(patches, math.isqrt(PATCHES_PER_TOKEN))


def lognormal(rng: np.random.Generator, count: int, median: float, sigma: float, low: int, high: int) -> Ints:
    """Draw whole numbers whose logarithms are normal, cut off at both ends."""
    drawn: Ints = np.clip(np.round(rng.lognormal(np.log(median), sigma, count)), low, high).astype(np.int64)
    return drawn


def _text(tokens: Ints) -> tuple[Ints, Ints, Ints]:
    none = np.zeros_like(tokens)
    return tokens, none, none


def _chats(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    return _text(lognormal(rng, count, 800, 1.1, 16, 32_768))


def _images(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    words = lognormal(rng, count, 250, 1.0, 16, 16_384)
    pictures = rng.choice([0, 1, 2, 4], count, p=[0.25, 0.55, 0.12, 0.08])
    merged = lognormal(rng, count, 700, 0.7, 64, 4_096) * pictures
    return words + merged, merged, pictures


def _videos(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    tokens = rng.integers(3_000, 26_000, count, endpoint=True)
    return tokens, tokens * 9 // 10, np.ones(count, dtype=np.int64)


def _reasoning(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    return _text(lognormal(rng, count, 8_000, 0.9, 128, 51_200))


def _documents(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    return _text(lognormal(rng, count, 250, 1.0, 16, 8_192))


def _vqa(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    tokens = rng.integers(400, 800, count, endpoint=True)
    return tokens, tokens - 40, np.ones(count, dtype=np.int64)


_OURS = "our own, for benchmarks/packing.py"

MIXES = {
    mix.name: mix
    for mix in (
        Mix("chats", "lognormal, median 800 tokens, sigma 1.1, 16 to 32,768", "text", _OURS, _chats),
        Mix(
            "images",
            "text lognormal, median 250 tokens, sigma 1.0, 16 to 16,384; none, 1, 2 or 4 pictures in 25, 55, 12 and "
            "8 %, each lognormal with median 700 tokens, sigma 0.7, 64 to 4,096, of 4 patches a token",
            "images",
            _OURS,
            _images,
        ),
        Mix("videos", "uniform, 3,000 to 26,000 tokens, nine tenths of them video", "videos", _OURS, _videos),
        Mix("reasoning", "lognormal, median 8,000 tokens, sigma 0.9, 128 to 51,200", "text", _OURS, _reasoning),
        Mix(
            "documents",
            "web pages: lognormal, median 250 tokens, sigma 1.0, 16 to 8,192, a mean of about 410",
            "text",
            "C4's mean of 156 billion tokens over 365 million documents (Dodge et al. 2021, table 1); the spread is "
            "ours",
            _documents,
        ),
        Mix(
            "vqa",
            "one picture and a question: uniform, 400 to 800 tokens, all but 40 of them the picture's",
            "images",
            "torchtitan's Qwen3-VL experiments on VQAv2 (2025-12): 'short sequences (~400-800 tokens)'",
            _vqa,
        ),
    )
}
"""By name."""
