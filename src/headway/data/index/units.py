"""The work of indexing, cut into ranges of rows that are measured apart, by any process that sees the files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from headway.data.index.table import BAD, bad_rows, table_of, write_table
from headway.data.policy import sample_error
from headway.data.samples import SampleError
from headway.errors import DataError

if TYPE_CHECKING:
    from headway.data.encode import Encoder
    from headway.data.media.lengths import SampleLengths
    from headway.data.sources import Source

_LEAST_ROWS = 256
_MOST_ROWS = 2000
_PROGRESS_STEPS = 64
_MOST_UNITS = 4096


@dataclass(frozen=True)
class IndexJob:
    """What is measured, by what, and where the results go; every worker gets one.

    Attributes:
        source: the rows.
        encoder: measures them.
        folder: of this index in the cache.
    """

    source: "Source"
    encoder: "Encoder"
    folder: Path

    @property
    def index_file(self) -> Path:
        """The finished index."""
        return self.folder / "index.parquet"

    @property
    def parts_folder(self) -> Path:
        """Where finished units wait for the others."""
        return self.folder / "parts"

    def part(self, unit: range) -> Path:
        """The file of one unit."""
        return self.parts_folder / f"{unit.start:012d}-{unit.stop:012d}.parquet"

    def has(self, unit: range) -> bool:
        """Whether a unit is finished; a file that is damaged does not count, and is measured again."""
        try:
            return int(pq.read_metadata(self.part(unit)).num_rows) == len(unit)
        except (FileNotFoundError, NotADirectoryError, pa.ArrowInvalid):
            return False

    def bad_rows(self, unit: range) -> list[SampleError]:
        """Why rows of a finished unit cannot be used.

        Raises:
            FileNotFoundError: the unit is not finished, or another process has joined the parts already.
        """
        return list(bad_rows(pq.read_table(self.part(unit), columns=[BAD])[BAD], self.source.name).values())


def units_of(rows: int) -> Sequence[range]:
    """Cut rows into units; by their number alone, so that another number of workers finds the same ones.

    >>> units_of(600)
    [range(0, 256), range(256, 512), range(512, 600)]
    """
    size = max(_LEAST_ROWS, min(_MOST_ROWS, -(-rows // _PROGRESS_STEPS)), -(-rows // _MOST_UNITS))
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def measure_unit(job: IndexJob, unit: range) -> None:
    """Measure the rows of a unit and write its part, unless another process has done so meanwhile.

    Args:
        job: what is measured.
        unit: rows of the source.

    Raises:
        OSError: the part cannot be written.
        DataError: a file of the source is gone or was changed, or this process does not see it.
    """
    if job.index_file.exists() or job.has(unit):
        return
    write_table(job.part(unit), table_of(list(_measured(job, unit))))


def _measured(job: IndexJob, unit: range) -> "Iterator[SampleLengths | SampleError]":
    """SampleLengths of each row, or why it cannot be used; a file that is gone or was changed is an error."""
    for row in unit:
        try:
            sample = job.source[row]
        except SampleError as error:
            yield error
            continue
        try:
            yield job.encoder.measure(sample)
        except DataError as error:
            yield sample_error(error, sample.origin)
