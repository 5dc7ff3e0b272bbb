"""Making a length index: in parallel, going on where it was stopped, and at once if it is there already.

The work is cut into units, ranges of rows that are measured apart; each finished unit is a file of its own.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headway.cache import CACHE_VARIABLE
from headway.data.bad_rows import BadSamples, SampleCounts, sample_error
from headway.data.encode import Encoder
from headway.data.index.length_index import METADATA, LengthIndex
from headway.data.index.store import INDEX_FILE, count_rows, folder_of
from headway.data.index.table import BAD, LAYOUT, bad_rows, join_tables, read_rows, table_of, write_table
from headway.data.pool import Job, Pool, leave_if_imported_again
from headway.data.samples import SampleError, SampleLengths
from headway.data.sources import Source, schemas
from headway.errors import ConfigError, DataError
from headway.report import format_bytes
from headway.version import __version__

Progress = Callable[[int, int, int], None]
"""Told the rows measured, all rows, and the bad ones among those measured."""

STOP = BadSamples("error")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LEAST_ROWS = 256  # fewest rows of a unit
_MOST_ROWS = 2000
_PROGRESS_STEPS = 64
_MOST_UNITS = 4096
_MOST_INDICES = 64  # newest indices that are searched for files in common


@dataclass(frozen=True)
class IndexJob:
    """A source, its encoder and the folder of results; every worker gets one.

    Attributes:
        source: the rows.
        encoder: measures them.
        folder: of this index in the cache.
    """

    source: Source
    encoder: Encoder
    folder: Path

    @property
    def index_file(self) -> Path:
        """The finished index."""
        return self.folder / INDEX_FILE

    @property
    def parts_folder(self) -> Path:
        """Folder of finished units, until all are."""
        return self.folder / "parts"

    def part(self, unit: range) -> Path:
        """The file of one unit."""
        return self.parts_folder / f"{unit.start:012d}-{unit.stop:012d}.parquet"

    def has(self, unit: range) -> bool:
        """Tell whether a unit is finished; a file that is damaged does not count, and is measured again."""
        try:
            return int(pq.read_metadata(self.part(unit)).num_rows) == len(unit)
        except (FileNotFoundError, NotADirectoryError, pa.ArrowInvalid):
            return False

    def bad_rows(self, unit: range) -> list[SampleError]:
        """Errors of the rows of a finished unit that cannot be used.

        Raises:
            FileNotFoundError: the unit is not finished, or another process has joined the parts already.
        """
        return list(
            bad_rows(
                pq.read_table(self.part(unit), columns=[BAD], page_checksum_verification=True)[BAD], self.source.name
            ).values()
        )


def index_folder(source: Source, encoder: Encoder, cache: Path | None = None) -> Path:
    """Name the folder of an index, whether it exists or not.

    Its name is a key of all that the lengths depend on: the columns' layout, the source's content, the tokenizer, the
    chat template and the processor's settings.

    Args:
        source: the rows.
        encoder: measures them.
        cache: folder of all indices; `index` in Headway's cache if None.
    """
    return folder_of(source, encoder.fingerprint(), cache)


def build_index(
    source: Source,
    encoder: Encoder,
    cache: Path | None = None,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    policy: BadSamples = STOP,
    counts: SampleCounts | None = None,
    refresh: bool = False,
) -> LengthIndex:
    """Measure every row of a source, or read an earlier measurement.

    Rows are measured in units, whose results are kept one by one: a process that was killed at any time goes on from
    there when it is started again. Several processes may build the same index at once.

    Args:
        source: the rows.
        encoder: measures them, without decoding pixels.
        cache: folder of all indices; `index` in Headway's cache if None.
        workers: processes; 0 measures in this one; one for each usable core if None, and none for a few rows.
        progress: told how far it is.
        policy: policy for rows that cannot be used.
        counts: counts of all sources; this one's rows are added as read and skipped.
        refresh: measure anew, as where images were replaced under the same names.

    Returns:
        The index, bad rows included with their reasons.

    Raises:
        DataError: no rows; rows that cannot be used, by the policy; a full disk; a unit that kills its workers;
            files that are gone or were changed since the source was opened.
        ConfigError: a negative number of workers, or bounds on media that the model's processor has not.
    """
    leave_if_imported_again()
    if workers is not None and workers < 0:
        raise ConfigError(f"Indexing got workers={workers}. Give a number of processes of 0 or more.")
    if not len(source):
        raise DataError(f"The dataset {source.name} holds no rows, so there is nothing to index. Check its path.")
    encoder.reader_of(source.sizes)  # bounds that the model's processor has not are told before anything is measured
    job = IndexJob(source, encoder, index_folder(source, encoder, cache))
    if refresh:
        shutil.rmtree(job.folder, ignore_errors=True)  # the folder is missing most of the time
    if not job.index_file.exists():
        _make(job, workers, progress or (lambda *_: None), policy, reuse=not refresh)
    index = LengthIndex.load(job.index_file, source=source.name)
    count_rows(index, source.name, policy, SampleCounts() if counts is None else counts)
    return index


@dataclass(frozen=True)
class _Span:
    """Rows of a source that lie side by side, and the place of their lengths in another index if they have one.

    Attributes:
        rows: of the source.
        path: another index that holds them.
        start: place of the first of them in it.
    """

    rows: range
    path: Path | None = None
    start: int = 0

    def joined(self, after: "_Span") -> "_Span | None":
        """This span and the one behind it as one; None where they have not one place."""
        follows = self.path == after.path and (self.path is None or self.start + len(self.rows) == after.start)
        return _Span(range(self.rows.start, after.rows.stop), self.path, self.start) if follows else None

    @property
    def units(self) -> list[range]:
        """The units in which its rows are measured; none where they are known."""
        first = self.rows.start
        return [] if self.path else [range(first + u.start, first + u.stop) for u in units_of(len(self.rows))]

    def tables(self, job: IndexJob) -> Iterator[pa.Table]:
        """The lengths of its rows."""
        if self.path is not None:
            yield from read_rows(self.path, range(self.start, self.start + len(self.rows)))
        for unit in self.units:
            yield from read_rows(job.part(unit))


def _file_keys(job: IndexJob) -> list[str]:
    """A key for each file: of all that its rows' lengths depend on."""
    common = f"{LAYOUT} {schemas.VERSION} {job.encoder.fingerprint()}"
    return [hashlib.sha256(f"{common}\n{shard.description}".encode()).hexdigest()[:16] for shard in job.source.shards]


def _spans(job: IndexJob, *, reuse: bool) -> list[_Span]:
    """Cut the rows into spans: those of files that other indices hold as they are now, and those to be measured."""
    files = [range(*ends) for ends in pairwise(job.source.starts)]
    places: dict[str, tuple[Path, range]] = {}
    indices = [path for path in job.folder.parent.glob(f"*/{INDEX_FILE}") if reuse and path != job.index_file]
    if len(files) > 1:
        for path in sorted(indices, key=lambda path: path.stat().st_mtime)[-_MOST_INDICES:]:
            with suppress(OSError, pa.ArrowException, ValueError, TypeError, KeyError):  # damaged, or gone meanwhile
                start = 0
                for key, rows in json.loads(pq.read_metadata(path).metadata[METADATA])["files"]:
                    places[key] = path, range(start, start + rows)
                    start += rows
    spans: list[_Span] = []
    for key, rows in zip(_file_keys(job), files, strict=True):
        path, place = places.get(key, (job.index_file, range(0)))
        span = _Span(rows, path, place.start) if len(place) == len(rows) else _Span(rows)
        joined = spans[-1].joined(span) if spans else None
        spans[-1:] = [joined] if joined else [*spans[-1:], span]
    if sum(span.path is None for span in spans) > _MOST_UNITS // 4:  # a file for each would be more than are kept
        return [_Span(range(len(job.source)))]
    return [span for span in spans if span.rows]


def _make(job: IndexJob, workers: int | None, progress: Progress, policy: BadSamples, *, reuse: bool) -> None:
    """Measure what is not measured yet and join all parts to the index."""
    rows = len(job.source)
    spans = _spans(job, reuse=reuse)
    units = [unit for span in spans for unit in span.units]
    early = replace(policy, quarantine=None)  # stops as soon as there are too many; each is named when all are known
    counts = SampleCounts()
    counts.count(job.source.name, "read", rows)
    try:
        measured, bad = rows - sum(map(len, units)), 0
        progress(measured, rows, 0)
        for unit in _finish(job, units, workers):
            errors = job.bad_rows(unit)
            measured, bad = measured + len(unit), bad + len(errors)
            for error in errors:
                early.handle(error, counts)
            progress(measured, rows, bad)
        tables = (table for span in spans for table in span.tables(job))
        join_tables(tables, job.index_file, {METADATA: _description(job)})
    except OSError as error:
        if error.errno in (None, errno.ENOENT) and any(span.path for span in spans):
            _make(job, workers, progress, policy, reuse=False)  # another index is damaged, or gone meanwhile
        elif not job.index_file.exists():  # otherwise another process was faster, and has cleared the parts away
            raise _cannot_write(job, units, error) from error
    shutil.rmtree(job.parts_folder, ignore_errors=True)  # another process may do the same, or still write a part


def _finish(job: IndexJob, units: Sequence[range], workers: int | None) -> Iterator[range]:
    """Yield every unit as it is finished: first those of an earlier run."""
    missing = []
    for unit in units:
        if job.has(unit):
            yield unit
        else:
            missing.append(unit)
    if workers is None:
        workers = min(_usable_cores(), len(missing)) if len(missing) > 1 else 0
    if not workers:
        for unit in missing:
            measure_unit(job, unit)
            yield unit
        return
    pool: Pool[range, None] = Pool(
        partial(measure_unit, job), workers=workers, prefetch_bytes=0, explain=partial(_deadly_unit, job)
    )
    try:
        for unit, _ in zip(missing, pool.run(Job(unit, size_bytes=0) for unit in missing), strict=True):
            yield unit
    finally:
        pool.close()


def _deadly_unit(job: IndexJob, unit: range, times: int) -> str:
    return (
        f"Rows {unit.start} to {unit.stop - 1} of {job.source.name} have ended their worker process {times} times, "
        "each time alone. One of them needs more memory than the machine has, or crashes a decoder. Look into the "
        "system's log, then leave those rows out; finished rows are kept."
    )


def units_of(rows: int) -> Sequence[range]:
    """Cut rows into units; by their number alone, so that another number of workers finds the same ones.

    >>> units_of(600)
    [range(0, 256), range(256, 512), range(512, 600)]
    """
    size = max(_LEAST_ROWS, min(_MOST_ROWS, -(-rows // _PROGRESS_STEPS)), -(-rows // _MOST_UNITS))
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def measure_unit(job: IndexJob, unit: range) -> None:
    """Measure the rows of a unit and write its part, unless another process has done so meanwhile.

    Raises:
        OSError: the part cannot be written.
        DataError: a file of the source is gone or was changed, or this process does not see it.
    """
    if job.index_file.exists() or job.has(unit):
        return
    write_table(job.part(unit), table_of(list(_measured(job, unit))))


def _measured(job: IndexJob, unit: range) -> Iterator[SampleLengths | SampleError]:
    """Measure each row, or say why it cannot be used; a file that is gone or was changed is an error."""
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


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _description(job: IndexJob) -> bytes:
    return json.dumps(
        {
            "layout": LAYOUT,
            "source": job.source.name,
            "source_fingerprint": job.source.fingerprint(),
            "encoder_fingerprint": job.encoder.fingerprint(),
            "rows": len(job.source),
            "files": [*zip(_file_keys(job), map(len, job.source.shards), strict=True)],
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"headway": __version__}
            | {library: version(library) for library in ("transformers", "tokenizers")},
        }
    ).encode()


def _cannot_write(job: IndexJob, units: Sequence[range], error: OSError) -> DataError:
    num_measured = sum(len(unit) for unit in units if job.has(unit))
    hint = (
        f"{num_measured:,} of {len(job.source):,} rows are kept there, and the same command goes on from them; or name "
        f"another folder by ${CACHE_VARIABLE}."
    )
    if error.errno in _FULL:
        free = format_bytes(shutil.disk_usage(job.folder).free)
        return DataError(
            f"The disk of the length index is full: {job.folder} cannot take more ({error.strerror}; {free} free). "
            f"Make room and run again: {hint}"
        )
    if isinstance(error, FileNotFoundError):
        return DataError(
            f"A measured part of the length index is not to be found: {error}. Another process may have cleared it "
            f"away. {hint}"
        )
    return DataError(f"The length index cannot be written to {job.folder}: {error}. {hint}")
