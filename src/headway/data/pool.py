"""Tasks done ahead by worker processes that may be killed, their results in order: for feeding and for indexing.

The processes are the standard library's ProcessPoolExecutor on a fork server: each begins without the training
process's CUDA context, threads and locks, and yet at once, as the server has imported torch and transformers already.
How far they run ahead is bounded by bytes, not by a number of packs, for packs differ by orders of magnitude.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from headway.data import transfer
from headway.data.transfer import SharedBlock, from_block, to_block
from headway.errors import ConfigError, DataError
from headway.safe_path import current_folder_kept_out
from headway.words import Words, adopt, current_words

Task = TypeVar("Task")
Result = TypeVar("Result")

PRELOAD = ("headway.data.feed", "headway.data.index.build")
"""Modules that the fork server imports once, so that workers begin at once; the first worker of a process decides."""

IMPORTED_AGAIN = 65
"""Exit code of a worker that would begin the trainer's own work."""

_ATTEMPTS = 3  # times that a task may kill a process of its own before that is an error
_MOST_AHEAD = 128  # jobs; each finished one holds a file descriptor, of which a process often has 1024


class Job(NamedTuple, Generic[Task]):
    """A task for the pool.

    Attributes:
        task: argument of the pool's function.
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


def _explain_pack(_: Any, times: int) -> str:
    return (
        f"A data worker was killed {times} times in a row while making the same pack. The system kills processes that "
        "take too much memory: look for that in its log, then lower data.workers or data.prefetch_bytes, or shrink "
        "what a pack holds."
    )


class Pool(Generic[Task, Result]):
    """Does tasks ahead of the one who asks for their results.

    When a worker is killed (for its memory, or by a decoder's crash), the tasks that it may have died of are done one
    at a time, each alone in a process, so that a task that kills is told from its neighbours; all others are done
    again as before. Nothing is lost or repeated.

    Args:
        work: does one task; with workers it is pickled and runs in other processes, with one torch thread each.
        workers: processes; 0 does the tasks in a thread of this process.
        prefetch_bytes: estimated bytes of the results that are being made or wait to be taken; one result is always
            allowed, so 0 makes each when it is asked for [bytes].
        keyed: whether every job has a key.
        pin_memory: whether the tensors of results lie in page-locked memory; a thread copies them there, ahead too.
        explain: says what such a task is and what to do, of the task and the number of attempts.

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
        explain: Callable[[Task, int], str] = _explain_pack,
    ) -> None:
        if workers < 0 or prefetch_bytes < 0:
            raise ConfigError(
                f"The worker pool got workers={workers}, prefetch_bytes={prefetch_bytes}; neither may be below 0."
            )
        self._work, self._workers = work, workers
        self._prefetch_bytes, self._explain = prefetch_bytes, explain
        self._pickled = b""
        if workers:
            try:
                self._pickled = pickle.dumps(work)
            except (pickle.PicklingError, TypeError, AttributeError) as error:  # pickle's errors, by kind of object
                raise ConfigError(
                    f"The data's sources and encoder cannot be sent to worker processes: {error}. Give importable "
                    "functions and classes, or set workers to 0."
                ) from error
        # Tasks without keys go to whichever process is free; each key has a process of its own group.
        self._groups: list[_Group | None] = [None] * (max(1, workers) if keyed else 1)
        self._pins = pin_memory
        self._pinner: ThreadPoolExecutor | None = None
        self.replaced = 0  # times that killed workers were replaced

    def run(self, jobs: Iterable[Job[Task]]) -> Iterator[Result]:
        """Yield the result of every job, in order; jobs are read no further than is prefetched.

        Raises:
            DataError: a task has killed several processes of its own, or shared memory is full.
            ConfigError: the script that runs does its work again wherever it is imported.
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
            group.shut_down(wait=wait)
        self._groups = [None] * len(self._groups)
        if self._pinner is not None:  # no job that it waits for is left under way
            self._pinner.shutdown(wait=wait, cancel_futures=True)
            self._pinner = None

    def _first_result(self, pending: "deque[_Pending[Task]]") -> Result:
        while True:
            try:
                outcome = (pending[0].pinned or pending[0].future).result()
            except BrokenProcessPool:
                self._replace_workers(pending)
                continue
            result: Result = from_block(outcome) if isinstance(outcome, SharedBlock) else outcome
            return result

    def _replace_workers(self, pending: "deque[_Pending[Task]]") -> None:
        """End the group of the first job, and repeat the jobs that its killed processes left undone."""
        place = self._place(pending[0].job)
        self._check_script(self._end(place))
        warnings.warn(
            f"A data worker was killed; what it left undone is done again ({self.replaced} times so far).",
            RuntimeWarning,
            stacklevel=2,
        )
        lost = [item for item in pending if self._place(item.job) == place and _is_lost(item.future)]
        # Tasks are begun in order: those under way, one of which is to blame, are among the first that are not done.
        num_suspects = max(1, self._workers // len(self._groups))
        for number, item in enumerate(lost):
            item.future = self._done_alone(item.job) if number < num_suspects else self._submit(item.job)
            self._begun(item)

    def _done_alone(self, job: Job[Task]) -> "Future[Any]":
        """Wait for a job that a group does alone, in its only process so far."""
        for _ in range(_ATTEMPTS):
            future = self._submit(job)
            if not isinstance(future.exception(), BrokenProcessPool):
                return future
            self._end(self._place(job))
        self.close()
        raise DataError(self._explain(job.task, _ATTEMPTS)) from future.exception()

    def _check_script(self, exit_codes: list[int]) -> None:
        """Say so if a group's processes have not been killed, but ended by themselves as they imported the script."""
        code = max(exit_codes, default=0)
        if code > 0:
            self.close()
            script = getattr(sys.modules["__main__"], "__file__", "the script that runs")
            raise ConfigError(
                f"The data workers ended with exit code {code} as they began. Each imports {script} first, "
                "and would begin its work there once more. Put what that script does, but for its imports and "
                'definitions, below the line `if __name__ == "__main__":`, or set workers to 0.'
            )

    def _end(self, place: int) -> list[int]:
        """End a group of which a process was killed; the next job starts another. Returns the exit codes."""
        self.replaced += 1
        group, self._groups[place] = self._groups[place], None
        return [] if group is None else group.shut_down(wait=True)

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
            return _Group(ThreadPoolExecutor(1, "headway-data", adopt, (current_words(),)), threading.Event())
        context = worker_context()
        stop, processes = context.Event(), self._workers // len(self._groups)
        executor = ProcessPoolExecutor(
            processes, mp_context=context, initializer=_begin, initargs=(self._pickled, stop, current_words())
        )
        return _Group(executor, stop)


def _is_lost(future: "Future[Any]") -> bool:
    return not future.done() or future.cancelled() or future.exception() is not None


def _pinned(future: "Future[Any]") -> Any:
    """Wait for a result and copy its tensors, all at once, into page-locked memory."""
    outcome = future.result()
    if not isinstance(outcome, SharedBlock):
        return from_block(to_block(outcome, transfer.pinned_block))
    block = transfer.pinned_block(outcome.block.numel())
    block.copy_(outcome.block)
    return from_block(SharedBlock(block, outcome.start))


class _Group(NamedTuple):
    """Processes that share their tasks, and the sign that they should do no more of them."""

    executor: Executor
    stop: Any

    def shut_down(self, *, wait: bool) -> list[int]:
        """End the worker processes. If one of them was killed before, kill the others.

        The executor sends SIGTERM to the processes that it has when it finds one dead, and then waits for all of them.
        In Python 3.11 `submit` can start another process in between, as the two share no lock (3.12 has one); that
        process may never end, as the dead one may have held the lock of the queue that it reads.

        Returns:
            Exit codes of the processes, if they were waited for; below zero for those that a signal ended.
        """
        processes = list((getattr(self.executor, "_processes", None) or {}).values())
        if getattr(self.executor, "_broken", False):
            for process in processes:
                process.kill()
        self.executor.shutdown(wait=wait, cancel_futures=True)
        # Asked for before the end, the executor's own thread asks too: one of both gets the code, the other gets 255.
        return [process.exitcode or 0 for process in processes] if wait else []


def leave_if_imported_again() -> None:
    """End this process if it is a worker on its way that imports its trainer's script, which would train once more."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(IMPORTED_AGAIN)


def worker_context() -> BaseContext:
    """Name how processes start: without this one's CUDA context, threads and locks."""
    leave_if_imported_again()
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headway.data.fork_server", "headway.quiet", *PRELOAD])
    # Ctrl-C waits until the fork server can ignore it. The tracker lets it through once it runs, so it starts before.
    with current_folder_kept_out():
        multiprocessing.resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        multiprocessing.forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def prepare_worker() -> None:
    """Begin in a worker: one thread, Ctrl-C left to the process that started it, and an end when that one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the trainer dies; the queue of work, which it holds open itself, would never tell."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


_pickled_work = b""
_work: Callable[[Any], Any] | None = None
_stop: Any = None


def _begin(pickled: bytes, stop: Any, words: tuple[Words, ...]) -> None:
    global _pickled_work, _stop
    _pickled_work, _stop = pickled, stop
    adopt(words)
    prepare_worker()


def _do(task: Any) -> SharedBlock | None:
    global _work  # noqa: PLW0603 - as in `_begin`
    if _stop.is_set():
        return None
    if _work is None:
        _work = pickle.loads(_pickled_work)  # a failure here is the task's own error
    result = _work(task)
    try:
        return None if result is None else to_block(result)
    except RuntimeError as error:
        raise DataError(
            f"A finished pack cannot be handed over by a data worker: {error}. It lies in shared memory (/dev/shm), "
            "which containers keep small: raise it (docker run --shm-size=8g), lower data.prefetch_bytes, or set "
            "data.workers to 0."
        ) from error
