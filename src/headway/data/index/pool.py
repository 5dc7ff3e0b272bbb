"""Units measured here: in this process, or in worker processes that may die."""

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from headway.data.index.units import IndexJob, measure_unit
from headway.data.workers import prepare_worker, worker_context
from headway.errors import DataError

ATTEMPTS = 3
"""How often a unit may take a worker of its own with it before indexing stops."""

_PRELOAD = ("headway.data.encode", "headway.data.index.pool", "headway.data.sources")


def measure_here(job: IndexJob, units: Sequence[range]) -> Iterator[range]:
    """Measure units one after the other in this process.

    Yields:
        Each unit once its part is written.
    """
    for unit in units:
        measure_unit(job, unit)
        yield unit


def measure_in_processes(job: IndexJob, units: Sequence[range], workers: int) -> Iterator[range]:
    """Measure units in worker processes, which end with this one, however it ends.

    When a worker dies, the units that it may have died of are measured one at a time in a worker of their own, so that
    a sample that kills (a decoder's crash, more memory than there is) is told from its neighbours.

    Args:
        job: what is measured; it is pickled once and sent to each worker once.
        units: ranges of rows.
        workers: processes.

    Yields:
        Each unit once its part is written, in any order.

    Raises:
        DataError: a unit has killed its worker several times.
    """
    pickled = pickle.dumps(job)
    waiting = list(reversed(units))
    while waiting:
        suspects: list[range] = []
        with _pool(pickled, workers) as pool:
            yield from _until_broken(pool, waiting, 2 * workers, suspects)
        for unit in suspects:
            _measure_alone(pickled, unit, job)
            yield unit


def _until_broken(
    pool: ProcessPoolExecutor, waiting: list[range], ahead: int, suspects: list[range]
) -> Iterator[range]:
    """Take units from the end of `waiting` until none is left or a worker dies; put those under way to `suspects`."""
    running: dict[Future[None], range] = {}
    while running or (waiting and not suspects):
        while waiting and len(running) < ahead and not suspects:
            unit = waiting.pop()
            try:
                running[pool.submit(_measure, unit)] = unit
            except BrokenProcessPool:
                suspects.append(unit)
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            unit = running.pop(future)
            try:
                future.result()
            except BrokenProcessPool:
                suspects.append(unit)
            else:
                yield unit


def _measure_alone(pickled: bytes, unit: range, job: IndexJob) -> None:
    for _ in range(ATTEMPTS):
        with _pool(pickled, 1) as pool, contextlib.suppress(BrokenProcessPool):  # the next attempt, or the error below
            return pool.submit(_measure, unit).result()
    raise DataError(
        f"Rows {unit.start} to {unit.stop - 1} of {job.source.name} have ended their worker process {ATTEMPTS} times, "
        "each time alone. One of them needs more memory than the machine has, or crashes a decoder. Look into the "
        "system's log, then leave those rows out; finished rows are kept."
    )


@contextlib.contextmanager
def _pool(pickled: bytes, workers: int) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(workers, mp_context=worker_context(_PRELOAD), initializer=_begin, initargs=(pickled,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


_pickled_job = b""
_job: IndexJob | None = None


def _begin(pickled: bytes) -> None:
    global _pickled_job  # noqa: PLW0603  # an initializer has no other way to hand something to the tasks after it
    _pickled_job = pickled
    prepare_worker()


def _measure(unit: range) -> None:
    global _job  # noqa: PLW0603  # as in `_begin`; unpickled here so that a failure is the task's own error
    if _job is None:
        _job = pickle.loads(_pickled_job)
    assert _job is not None
    measure_unit(_job, unit)
