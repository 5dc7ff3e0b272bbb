"""Goodput: every second of a run in exactly one bucket, across restarts and kills.

`Goodput` keeps a file beside the run. Within a process time is that of the monotonic clock, in whole nanoseconds;
between processes it is the wall clock's, of which every line holds a reading. A line of the file is one of

    {"kind": "start", "schema_version": 1, "wall_s": ..., "pid": ..., "host": ...}   a process begins
    {"kind": "spans", "wall_s": ..., "ns": {"step": ..., "data wait": ...}}          time since the line before
    {"kind": "checkpoint", "step": ...}                                              a checkpoint is whole
    {"kind": "resumed", "step": ...}                                                 work after this step is lost
    {"kind": "failed", "error": "..."}                                               an error ends the process
"""

import atexit
import os
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from traceback import TracebackException
from typing import Any, Self

from headway.errors import HeadwayError, UsageError
from headway.log.jsonl import LineFile, read_jsonl
from headway.meter import clock as meter_clock
from headway.meter.goodput_report import BUCKETS, SCHEMA_VERSION, Bucket, GoodputReport, account

_LONGEST_ERROR = 1000  # text of the error that ended a run [characters]


class Goodput:
    """The ledger of a run's time. One process keeps it, such as rank 0, from one thread.

    The clock starts with the ledger, so make it first; a new run begins in `set-up`. A process that finds a ledger to
    go on with is a restart: it begins in `recovery`, and its set-up counts as `recovery` too. Changing the bucket costs
    about a microsecond and writes nothing; a thread of its own writes every `heartbeat_s`, so that a kill loses at most
    that much, and the lost time is `idle` as is all time until the restart.

    Args:
        path: the file, such as run/goodput.jsonl; continued if it is there.
        heartbeat_s: time from one line to the next [s].
        since_ns: reading of `clock` from which on the run's time is charged; now when None [ns].
        clock: monotonic clock [ns]; the meter's when None.
        wall_clock: seconds since 1970 [s].

    Raises:
        ConfigError: the file cannot be written, is something else, or is kept by somebody already.
        UsageError: `heartbeat_s` is not a duration.

    >>> ledger = Goodput("run/goodput.jsonl")       # doctest: +SKIP
    >>> ledger.switch("step")                       # doctest: +SKIP
    >>> with ledger.bucket("evaluation"):           # doctest: +SKIP
    ...     evaluate()
    >>> ledger.report().goodput                     # doctest: +SKIP
    0.93
    """

    def __init__(
        self,
        path: str | Path,
        *,
        heartbeat_s: float = 5.0,
        since_ns: int | None = None,
        clock: Callable[[], int] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if not heartbeat_s > 0:
            raise UsageError(f"heartbeat_s={heartbeat_s} is not a duration; give seconds, more than 0.")
        self._clock = clock = clock or meter_clock.now_ns
        self._wall_clock, self._heartbeat_s = wall_clock, heartbeat_s
        # time before this object: from the process's start, where that is known
        start_ns = clock()
        self._last_ns = start_ns if since_ns is None else since_ns
        start_s = wall_clock() - (start_ns - self._last_ns) / 1e9
        self._file = LineFile(Path(path), exclusive=True)
        self._is_open = True
        self._is_restart = not self._file.is_empty
        # seconds by bucket, and moves between buckets that are not applied yet
        self._current: Bucket = "recovery" if self._is_restart else "set-up"
        self._ns = dict.fromkeys(BUCKETS, 0)
        self._moves: dict[tuple[Bucket, Bucket], int] = {}
        origin = {"wall_s": start_s, "pid": os.getpid(), "host": socket.gethostname()}
        self._unwritten: list[dict[str, Any]] = [{"kind": "start", "schema_version": SCHEMA_VERSION, **origin}]
        self._has_warned = False
        # Both can be taken again by a signal handler that interrupts their holder.
        self._lock = threading.RLock()  # lock of the buckets: held for a microsecond
        self._writing = threading.RLock()  # lock of the file: a slow disk does not delay switch()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="headway-goodput", daemon=True)
        self._write()
        self._thread.start()
        atexit.register(self.close)
        _OPEN.add(self)

    def switch(self, bucket: Bucket) -> None:
        """Charge the time until now to the bucket so far, and the time from now on to another.

        Within `with ledger.bucket(...)` this lasts until its end.

        Raises:
            UsageError: there is no such bucket, or the ledger is closed.
        """
        if bucket not in self._ns:
            raise UsageError(f"there is no bucket {bucket!r}; the buckets are {', '.join(BUCKETS)}.")
        if not self._is_open:
            raise self._closed_error()
        with self._lock:
            self._charge()
            self._current = "recovery" if self._is_restart and bucket == "set-up" else bucket

    def move(self, source: Bucket, target: Bucket, ns: int) -> None:
        """Move time from the bucket that was charged to the bucket where the time belongs.

        What the file already has stays there; then later time of the source makes up for it, so that totals are right.

        Args:
            source: where the time was charged.
            target: where it belongs.
            ns: how much [ns].

        Raises:
            UsageError: the ledger is closed.
        """
        if not self._is_open:
            raise self._closed_error()
        with self._lock:
            self._moves[source, target] = self._moves.get((source, target), 0) + max(0, ns)

    def bucket(self, bucket: Bucket) -> "_Span":
        """Charge a `with` block to a bucket; an inner block wins, and afterwards the outer bucket goes on.

        Raises:
            UsageError: as for `switch`, when the block begins.
        """
        return _Span(self, bucket)

    def checkpoint_saved(self, step: int) -> None:
        """Note that the time so far is that of steps up to a checkpoint.

        Whether it became whole is for the checkpoint itself to say: the one that `resumed` names was. So a note before
        it is written is best, as a kill may come between the two.

        Raises:
            UsageError: the ledger is closed.
        """
        self._note("checkpoint", step=step)

    def resumed(self, from_step: int) -> None:
        """Note that work after this step is lost and will be done again: its time moves from `step` to `recovery`.

        Args:
            from_step: step of the checkpoint that was loaded; 0 if training starts over [steps].

        Raises:
            UsageError: the ledger is closed.
        """
        self._note("resumed", step=from_step)

    def failed(self, error: BaseException) -> None:
        """Note the error that ends the process; also done at the end of a `with` block that raises one.

        Raises:
            UsageError: the ledger is closed.
        """
        name = "Error" if isinstance(error, HeadwayError) else type(error).__name__
        text = TracebackException(type(error), error, None)  # also if the error's own text raises
        self._note("failed", error=f"{name}: {text}"[:_LONGEST_ERROR])

    def report(self) -> GoodputReport:
        """Sum up the run until now, the processes before included.

        Raises:
            LogError: a line of the file has been damaged.
        """
        if self._is_open:
            self._write()
        with self._writing:
            lines = [*read_jsonl(self._file.path), *self._unwritten]
        return account(lines, str(self._file.path))

    def close(self) -> None:
        """Write the last seconds and let go of the file; also done when the interpreter ends."""
        if not self._is_open:
            return
        self._is_open = False
        self._stop.set()
        self._thread.join()
        self._write()
        self._file.close()
        atexit.unregister(self.close)
        _OPEN.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and self._is_open:
            self.failed(error)
        self.close()

    def _closed_error(self) -> UsageError:
        return UsageError(f"the ledger {self._file.path} is closed, or belongs to the process that forked this one.")

    def _charge(self) -> None:
        now_ns = self._clock()
        self._ns[self._current] += max(0, now_ns - self._last_ns)  # some virtual machines' clocks do step back
        self._last_ns = now_ns

    def _settle(self) -> None:
        """Apply the moves that are owed, as far as the file does not have their time yet."""
        for (source, target), owed_ns in list(self._moves.items()):
            moved = min(owed_ns, self._ns[source])
            self._ns[source] -= moved
            self._ns[target] += moved
            self._moves[source, target] = owed_ns - moved

    def _note(self, kind: str, **fact: int | str) -> None:
        if not self._is_open:
            raise self._closed_error()
        self._write({"kind": kind, **fact})

    def _write(self, event: dict[str, Any] | None = None) -> None:
        """Write the time since the last line, and an event after it; lines that cannot be written wait for the next."""
        with self._writing:
            with self._lock:
                self._charge()
                self._settle()
                spans = {bucket: ns for bucket, ns in self._ns.items() if ns}
                self._ns = dict.fromkeys(BUCKETS, 0)
            line = {"kind": "spans", "wall_s": self._wall_clock(), "ns": spans}
            if self._unwritten and self._unwritten[-1]["kind"] == "spans":
                earlier = self._unwritten.pop()["ns"]
                line["ns"] = {b: earlier.get(b, 0) + spans.get(b, 0) for b in earlier.keys() | spans.keys()}
            self._unwritten += [line, event] if event else [line]
            try:
                while self._unwritten:
                    self._file.append(self._unwritten[0])
                    del self._unwritten[0]
            except OSError as error:
                self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"the ledger {self._file.path} cannot be written: {error.strerror}. Its lines are kept and tried again; "
            "until that succeeds a kill loses them.",
            RuntimeWarning,
            stacklevel=4,
        )

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            self._write()

    def _leave_to_parent(self) -> None:
        """Let go of the file in a forked child; the parent keeps the file."""
        self._is_open = False
        self._file.close()
        self._writing = threading.RLock()  # the thread that may have held the other one was not forked


class _Span:
    """A `with` block in a bucket: a class, which costs half as much as a generator."""

    __slots__ = ("_bucket", "_ledger", "_outer")

    def __init__(self, ledger: Goodput, bucket: Bucket) -> None:
        self._ledger, self._bucket = ledger, bucket

    def __enter__(self) -> None:
        self._outer = self._ledger._current
        self._ledger.switch(self._bucket)

    def __exit__(self, *exception: object) -> None:
        self._ledger.switch(self._outer)


_OPEN: "weakref.WeakSet[Goodput]" = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for ledger in list(_OPEN):
        ledger._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
