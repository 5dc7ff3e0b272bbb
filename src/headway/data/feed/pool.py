"""Tasks done ahead by worker processes, their results in order.

The processes are the standard library's ProcessPoolExecutor on a fork server: each begins without the training
process's CUDA context, threads and locks, and yet at once, as the server has imported torch and transformers already.
How far they run ahead is bounded by bytes, not by a number of packs, for packs differ by orders of magnitude.
"""

import pickle
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from headway.data.feed import parcel
from headway.data.feed.parcel import Parcel, unwrap, wrap
from headway.data.workers import prepare_worker, worker_context
from headway.errors import ConfigError, DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

_PRELOAD = ("headway.data.feed",)
_MOST_AHEAD = 128  # jobs; each finished one holds a file descriptor, of which a process often has 1024


class Job(NamedTuple, Generic[Task]):
    """A task for the pool.

    Attributes:
        task: what is to be done.
        size_bytes: estimated size of the result [bytes].
        key: tasks of one key are done by one and the same process, in order; None leaves the choice to the pool.
    """

    task: Task
    size_bytes: int
    key: int | None = None


@dataclass(slots=True)
class _Pending(Generic[Task]):
    job: Job[Task]
    future: "Future[Any]"
    pinned: "Future[Any] | None" = None


class Pool(Generic[Task, Result]):
    """Does tasks ahead of the one who asks for their results.

    Args:
        work: does one task; with workers it is pickled and runs in other processes, with one torch thread each.
        workers: processes; 0 does the tasks in a thread of this process.
        prefetch_bytes: estimated bytes of the results that are being made or wait to be taken; one result is always
            allowed, so 0 makes each when it is asked for [bytes].
        keyed: whether every job has a key.
        pin_memory: whether the tensors of results lie in page-locked memory; a thread copies them there, ahead too.
        restarts: how often in a row, without a result in between, processes may be replaced because one was killed.

    Raises:
        ConfigError: a negative number, or work that cannot be sent to another process.
    """

    def __init__(
        self,
        work: Callable[[Task], Result],
        *,
        workers: int,
        prefetch_bytes: int,
        keyed: bool = False,
        pin_memory: bool = False,
        restarts: int = 3,
    ) -> None:
        if workers < 0 or prefetch_bytes < 0 or restarts < 0:
            raise ConfigError(
                f"The feed got workers={workers}, prefetch_bytes={prefetch_bytes}, restarts={restarts}; none may be "
                "below 0."
            )
        self._work, self._workers = work, workers
        self._prefetch_bytes, self._restarts = prefetch_bytes, restarts
        self._pickled = b""
        if workers:
            try:
                self._pickled = pickle.dumps(work)
            except (pickle.PicklingError, TypeError, AttributeError) as error:  # what pickle raises, by kind of object
                raise ConfigError(
                    f"The data's sources and encoder cannot be sent to worker processes: {error}. Give importable "
                    "functions and classes, or set workers to 0."
                ) from error
        # Tasks without keys go to whichever process is free; each key has a process of its own group.
        self._groups: list[_Group | None] = [None] * (max(1, workers) if keyed else 1)
        self._pins = pin_memory
        self._pinner: ThreadPoolExecutor | None = None
        self._failures = 0
        self.replaced = 0  # times that killed workers were replaced

    def run(self, jobs: Iterable[Job[Task]]) -> Iterator[Result]:
        """Yield the result of every job, in order; jobs are read no further than is prefetched.

        Raises:
            DataError: a worker was killed again and again, or shared memory is full.
        """
        pending: deque[_Pending[Task]] = deque()
        in_flight_bytes = 0
        remaining = iter(jobs)
        upcoming = next(remaining, None)
        while pending or upcoming is not None:
            while upcoming is not None and (
                not pending
                or (in_flight_bytes + upcoming.size_bytes <= self._prefetch_bytes and len(pending) < _MOST_AHEAD)
            ):
                pending.append(self._begun(_Pending(upcoming, self._submit(upcoming))))
                in_flight_bytes += upcoming.size_bytes
                upcoming = next(remaining, None)
            result = self._first_result(pending)
            in_flight_bytes -= pending.popleft().job.size_bytes
            yield result

    def close(self, *, wait: bool = True) -> None:
        """Give up what is under way and end the processes; a later `run` starts others.

        Args:
            wait: whether to return after they have ended. Not from a finalizer, which may run in the very thread that
                is to end.
        """
        groups = [group for group in self._groups if group is not None]
        for group in groups:  # all are told before any is waited for
            group.stop.set()
        for group in groups:
            group.executor.shutdown(wait=wait, cancel_futures=True)
        self._groups = [None] * len(self._groups)
        if self._pinner is not None:  # no job that it waits for is left under way
            self._pinner.shutdown(wait=wait, cancel_futures=True)
            self._pinner = None

    def _first_result(self, pending: "deque[_Pending[Task]]") -> Result:
        while True:
            try:
                made = (pending[0].pinned or pending[0].future).result()
            except BrokenProcessPool as error:
                self._replace_workers(pending, error)
                continue
            self._failures = 0
            result: Result = unwrap(made) if isinstance(made, Parcel) else made
            return result

    def _replace_workers(self, pending: "deque[_Pending[Task]]", error: BrokenProcessPool) -> None:
        """Start new processes for the group that made the first job, and give them what the killed ones left undone."""
        self._failures += 1
        if self._failures > self._restarts:
            self.close()
            raise DataError(
                f"A data worker was killed {self._failures} times in a row while making the same packs. The system "
                "kills processes that take too much memory: look for that in its log, then lower data.workers or "
                "data.prefetch_bytes, or shrink what a pack holds."
            ) from error
        self.replaced += 1
        warnings.warn(
            f"A data worker was killed; its packs are made again by new ones ({self.replaced} times so far).",
            RuntimeWarning,
            stacklevel=2,
        )
        place = self._place(pending[0].job)
        group = self._groups[place]
        if group is not None:
            group.executor.shutdown(wait=True, cancel_futures=True)
            self._groups[place] = None
        for item in pending:
            lost = not item.future.done() or item.future.cancelled() or item.future.exception() is not None
            if lost and self._place(item.job) == place:
                item.future = self._submit(item.job)
                self._begun(item)

    def _begun(self, item: _Pending[Task]) -> _Pending[Task]:
        """Let the result of a job that was just submitted be pinned as soon as it is there, those before it first."""
        if self._pins:
            if self._pinner is None:
                self._pinner = ThreadPoolExecutor(1, thread_name_prefix="headway-pin")
            item.pinned = self._pinner.submit(_pinned, item.future)
        return item

    def _place(self, job: Job[Task]) -> int:
        return 0 if job.key is None else job.key % len(self._groups)

    def _submit(self, job: Job[Task]) -> "Future[Any]":
        place = self._place(job)
        group = self._groups[place]
        if group is None:
            group = self._groups[place] = self._start()
        try:
            if self._workers:
                return group.executor.submit(_do, job.task)
            return group.executor.submit(self._work, job.task)
        except BrokenProcessPool as error:  # killed since the last result; found again where this one is asked for
            broken: Future[Any] = Future()
            broken.set_exception(error)
            return broken

    def _start(self) -> "_Group":
        if not self._workers:
            return _Group(ThreadPoolExecutor(1, thread_name_prefix="headway-data"), threading.Event())
        context = worker_context(_PRELOAD)
        stop, processes = context.Event(), self._workers // len(self._groups)
        executor = ProcessPoolExecutor(
            processes, mp_context=context, initializer=_begin, initargs=(self._pickled, stop)
        )
        return _Group(executor, stop)


def _pinned(future: "Future[Any]") -> Any:
    """Wait for a result and copy its tensors, all at once, into page-locked memory."""
    made = future.result()
    if not isinstance(made, Parcel):
        return unwrap(wrap(made, parcel.pinned_block))
    block = parcel.pinned_block(made.block.numel())
    block.copy_(made.block)
    return unwrap(Parcel(block, made.start))


class _Group(NamedTuple):
    """Processes that share their tasks, and the sign that they should do no more of them."""

    executor: Executor
    stop: Any


_pickled_work = b""
_work: Callable[[Any], Any] | None = None
_stop: Any = None


def _begin(pickled: bytes, stop: Any) -> None:
    """Prepare a worker process."""
    global _pickled_work, _stop
    _pickled_work, _stop = pickled, stop
    prepare_worker()


def _do(task: Any) -> Parcel | None:
    """Do a task in a worker process."""
    global _work  # noqa: PLW0603 - as in `_begin`
    if _stop.is_set():
        return None
    if _work is None:
        _work = pickle.loads(_pickled_work)
    result = _work(task)
    try:
        return wrap(result)
    except RuntimeError as error:
        raise DataError(
            f"A finished pack cannot be handed over by a data worker: {error}. It lies in shared memory (/dev/shm), "
            "which containers keep small: raise it (docker run --shm-size=8g), lower data.prefetch_bytes, or set "
            "data.workers to 0."
        ) from error
