"""Tasks done ahead by worker processes, their results in order.

The processes are the standard library's ProcessPoolExecutor on a fork server: each begins without the training
process's CUDA context, threads and locks, and yet at once, as the server has imported torch and transformers already.
How far they run ahead is bounded by bytes, not by a number of packs, for packs differ by orders of magnitude.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from headway.data.feed.parcel import Parcel, unwrap, wrap
from headway.errors import ConfigError, DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

_PRELOAD = ["headway.data.feed"]


@dataclass(slots=True)
class _Pending(Generic[Task]):
    task: Task
    size_bytes: int
    future: "Future[Any]"


class Pool(Generic[Task, Result]):
    """Does tasks ahead of the one who asks for their results.

    Args:
        work: does one task; with workers it is pickled and runs in other processes, with one torch thread each.
        workers: processes; 0 does the tasks in a thread of this process.
        prefetch_bytes: estimated bytes of the results that are being made or wait to be taken; one result is always
            allowed, so 0 makes each when it is asked for [bytes].
        restarts: how often in a row, without a result in between, the processes may be replaced because one was killed.

    Raises:
        ConfigError: a negative number, or work that cannot be sent to another process.
    """

    def __init__(self, work: Callable[[Task], Result], *, workers: int, prefetch_bytes: int, restarts: int = 3) -> None:
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
        self._executor: Executor | None = None
        self._failures = 0
        self.replaced = 0  # times that killed workers were replaced

    def run(self, tasks: Iterable[tuple[Task, int]]) -> Iterator[Result]:
        """Yield the result of every task, in order.

        Args:
            tasks: each with the estimated size of its result [bytes]; read no further than is prefetched.

        Raises:
            DataError: a worker was killed again and again, or shared memory is full.
        """
        pending: deque[_Pending[Task]] = deque()
        in_flight_bytes = 0
        remaining = iter(tasks)
        upcoming = next(remaining, None)
        while pending or upcoming is not None:
            while upcoming is not None and (not pending or in_flight_bytes + upcoming[1] <= self._prefetch_bytes):
                task, size_bytes = upcoming
                pending.append(_Pending(task, size_bytes, self._submit(task)))
                in_flight_bytes += size_bytes
                upcoming = next(remaining, None)
            result = self._first_result(pending)
            in_flight_bytes -= pending.popleft().size_bytes
            yield result

    def close(self) -> None:
        """Give up what is under way and end the processes; a later `run` starts others."""
        if self._executor is not None:
            self._stop.set()
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def _first_result(self, pending: "deque[_Pending[Task]]") -> Result:
        while True:
            try:
                made = pending[0].future.result()
            except BrokenProcessPool as error:
                self._replace_workers(pending, error)
                continue
            self._failures = 0
            result: Result = unwrap(made) if isinstance(made, Parcel) else made
            return result

    def _replace_workers(self, pending: "deque[_Pending[Task]]", error: BrokenProcessPool) -> None:
        """Start new processes and give them what the killed ones left undone."""
        self._failures += 1
        self.close()
        if self._failures > self._restarts:
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
        for item in pending:
            if not item.future.done() or item.future.cancelled() or item.future.exception() is not None:
                item.future = self._submit(item.task)

    def _submit(self, task: Task) -> "Future[Any]":
        if self._executor is None:
            self._executor = self._start()
        try:
            if self._workers:
                return self._executor.submit(_do, task)
            return self._executor.submit(self._work, task)
        except BrokenProcessPool as error:  # killed since the last result; found again where this one is asked for
            broken: Future[Any] = Future()
            broken.set_exception(error)
            return broken

    def _start(self) -> Executor:
        if not self._workers:
            self._stop: Any = threading.Event()
            return ThreadPoolExecutor(1, thread_name_prefix="headway-data")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._stop = context.Event()
        return ProcessPoolExecutor(
            self._workers, mp_context=context, initializer=_begin, initargs=(self._pickled, self._stop)
        )


_pickled_work = b""
_work: Callable[[Any], Any] | None = None
_stop: Any = None


def _begin(pickled: bytes, stop: Any) -> None:
    """Prepare a worker process. It leaves Ctrl-C to the training process, and goes when that one is gone."""
    global _pickled_work, _stop
    _pickled_work, _stop = pickled, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a killed trainer cannot stop its workers, which would wait for tasks for ever


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
