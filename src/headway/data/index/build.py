"""Making a length index: in parallel, going on where it was stopped, and at once if it is there already."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.cache import CACHE_VARIABLE, cache_root
from headway.data.index.length_index import METADATA, LengthIndex
from headway.data.index.pool import measure_here, measure_in_processes
from headway.data.index.table import LAYOUT, join_tables
from headway.data.index.units import IndexJob, units_of
from headway.data.policy import BadSamples, SampleCounts
from headway.errors import ConfigError, DataError
from headway.report import format_bytes
from headway.version import __version__

if TYPE_CHECKING:
    from headway.data.encode import Encoder
    from headway.data.sources import Source

Progress = Callable[[int, int, int], None]
"""Told the rows measured, all rows, and the bad ones among those measured."""

STOP = BadSamples("error")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def index_folder(source: "Source", encoder: "Encoder", cache: Path | None = None) -> Path:
    """Name the folder of an index, whether it exists or not.

    Its name is a key of all that the lengths depend on: the columns' layout, the source's content, the tokenizer, the
    chat template and the processor's settings.

    Args:
        source: the rows.
        encoder: measures them.
        cache: folder of all indices; `index` in Headway's cache if None.
    """
    parts = [str(LAYOUT), source.fingerprint(), encoder.fingerprint()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    return (cache if cache is not None else cache_root() / "index") / key


def build_index(
    source: "Source",
    encoder: "Encoder",
    cache: Path | None = None,
    *,
    workers: int | None = None,
    cluster: str | None = None,
    progress: Progress | None = None,
    policy: BadSamples = STOP,
    counts: SampleCounts | None = None,
    refresh: bool = False,
) -> LengthIndex:
    """Measure every row of a source, or read what was measured before.

    Rows are measured in units, whose results are kept one by one: a process that was killed at any time goes on from
    there when it is started again. Several processes may build the same index at once.

    Args:
        source: the rows.
        encoder: measures them, without decoding pixels.
        cache: folder of all indices; `index` in Headway's cache if None.
        workers: processes; 0 measures in this one; one for each usable core if None, and none for a few rows.
        cluster: address of a Dask scheduler whose workers measure instead.
        progress: told how far it is.
        policy: what happens to rows that cannot be used.
        counts: of all sources; this one's rows are counted there as read and skipped.
        refresh: measure anew, as where images were replaced under the same names.

    Returns:
        The index, bad rows included with their reasons.

    Raises:
        DataError: no rows; rows that cannot be used, by the policy; a full disk; a unit that kills its workers;
            files that are gone or were changed since the source was opened.
        ConfigError: a negative number of workers, or workers beside a cluster.
        UsageError: no scheduler at that address.
    """
    if workers is not None and (workers < 0 or cluster is not None):
        raise ConfigError(
            f"Indexing got workers={workers} and cluster={cluster!r}. Give a number of processes of 0 or more, or a "
            "cluster, not both."
        )
    if not len(source):
        raise DataError(f"The dataset {source.name} holds no rows, so there is nothing to index. Check its path.")
    job = IndexJob(source, encoder, index_folder(source, encoder, cache))
    if refresh:
        shutil.rmtree(job.folder, ignore_errors=True)  # not there, most of the time
    if not job.index_file.exists():
        _make(job, workers, cluster, progress or _silent, policy)
    index = LengthIndex.load(job.index_file, source=source.name)
    counts = SampleCounts() if counts is None else counts
    counts.count(source.name, "read", len(index), int(index.tokens.sum(dtype=np.int64)))
    for error in index.bad.values():
        policy.handle(error, counts)
    return index


def _make(job: IndexJob, workers: int | None, cluster: str | None, progress: Progress, policy: BadSamples) -> None:
    """Measure what is not measured yet and join all parts to the index."""
    rows = len(job.source)
    units = units_of(rows)
    early = replace(policy, quarantine=None)  # stops as soon as there are too many; each is named when all are known
    counts = SampleCounts()
    counts.count(job.source.name, "read", rows)
    try:
        measured = bad = 0
        progress(0, rows, 0)
        for unit in _finish(job, units, workers, cluster):
            found = job.bad_rows(unit)
            measured, bad = measured + len(unit), bad + len(found)
            for error in found:
                early.handle(error, counts)
            progress(measured, rows, bad)
        join_tables([job.part(unit) for unit in units], job.index_file, {METADATA: _description(job, bad)})
    except OSError as error:
        if not job.index_file.exists():  # otherwise another process was faster, and has cleared the parts away
            raise _cannot_write(job, units, error) from error
    shutil.rmtree(job.parts_folder, ignore_errors=True)  # another process may do the same, or still write a part


def _finish(job: IndexJob, units: Sequence[range], workers: int | None, cluster: str | None) -> Iterator[range]:
    """Yield every unit as it is finished: first those of an earlier run."""
    missing = []
    for unit in units:
        if job.has(unit):
            yield unit
        else:
            missing.append(unit)
    if cluster is not None:
        from headway.data.index.cluster import measure_on_cluster

        yield from measure_on_cluster(job, missing, cluster)
        return
    if workers is None:
        workers = min(_usable_cores(), len(missing)) if len(missing) > 1 else 0
    yield from measure_in_processes(job, missing, workers) if workers else measure_here(job, missing)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _description(job: IndexJob, bad: int) -> bytes:
    """What the index says of itself, as JSON."""
    return json.dumps(
        {
            "layout": LAYOUT,
            "source": job.source.name,
            "source_fingerprint": job.source.fingerprint(),
            "encoder_fingerprint": job.encoder.fingerprint(),
            "rows": len(job.source),
            "bad": bad,
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"headway": __version__}
            | {library: version(library) for library in ("transformers", "tokenizers")},
        }
    ).encode()


def _cannot_write(job: IndexJob, units: Sequence[range], error: OSError) -> DataError:
    """Say what is kept, and how to go on."""
    kept = sum(len(unit) for unit in units if job.has(unit))
    rest = (
        f"{kept:,} of {len(job.source):,} rows are kept there, and the same command goes on from them; or name another "
        f"folder with --cache or ${CACHE_VARIABLE}."
    )
    if error.errno in _FULL:
        free = format_bytes(shutil.disk_usage(job.folder).free)
        return DataError(
            f"The disk of the length index is full: {job.folder} cannot take more ({error.strerror}; {free} free). "
            f"Make room and run again: {rest}"
        )
    if isinstance(error, FileNotFoundError):
        return DataError(
            f"A measured part of the length index is not to be found: {error}. On a cluster the cache must be a folder "
            f"that this process and all workers share. {rest}"
        )
    return DataError(f"The length index cannot be written to {job.folder}: {error}. {rest}")


def _silent(measured: int, rows: int, bad: int) -> None:
    """Show nothing."""
