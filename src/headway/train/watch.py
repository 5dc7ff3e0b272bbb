"""The loop's phase, the watchdog over it, error texts that name it, and signals that stop the run.

The loop notes in a `LoopPhase` what it is about to do. A watchdog ends the process when that has not changed for too
long; an error of the memory or of the processes' connection is told together with it.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

import torch.distributed as dist

from headway.data import Batch
from headway.errors import HeadwayError, OutOfMemoryError, RankLostError, TrainingError, first_line, is_out_of_memory
from headway.words import Argument

# Ctrl-C; what Kubernetes, Slurm and torchrun send before they kill, and Slurm as `--signal=USR1` asks; and what comes
# when the terminal is closed.
STOPPING = {
    int(signal.SIGINT): "Ctrl-C",
    int(signal.SIGTERM): "SIGTERM",
    int(signal.SIGUSR1): "SIGUSR1",
    int(signal.SIGHUP): "SIGHUP",
}
HUNG = 1  # exit code; any but 0 lets torchrun start the processes again
_TELLING_S = 10.0  # longest time that a disk or terminal may take with the last words of a hung process [s]
# Messages of gloo, at work and while it connects.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "connectFullMesh")


@dataclass
class LoopPhase:
    """Phase of the training loop in this process.

    Attributes:
        step: the step being taken.
        name: what it is doing: "set-up", "data wait", "exchange", "forward", "backward", ...
        batch: the pack that it computes, if it does.
        is_watched: whether the watchdog limits how long it may last.
        since_s: reading of the monotonic clock when it began [s].
        on_enter: called with the name of each phase that is entered.
    """

    step: int = 0
    name: str = "set-up"
    batch: Batch | None = None
    is_watched: bool = True
    since_s: float = field(default_factory=time.monotonic)
    on_enter: Callable[[str], None] | None = None

    def at(self, name: str, *, step: int | None = None, batch: Batch | None = None, watched: bool = True) -> None:
        """Enter a phase.

        Args:
            name: what is about to be done.
            step: the step that it belongs to; the one before, if not given.
            batch: the pack that is computed.
            watched: whether the watchdog limits how long it may last.
        """
        self.step = self.step if step is None else step
        self.name, self.batch, self.is_watched, self.since_s = name, batch, watched, time.monotonic()
        if self.on_enter is not None:
            self.on_enter(name)

    def __str__(self) -> str:
        return f"step {self.step}, {self.name}"


class Watchdog:
    """Ends this process if it makes no progress: stack traces of all threads go to a file, and the exit code is not 0.

    A disk that is full, gone or hangs itself does not keep it from that; the traces then go to stderr.

    Args:
        phase: where the process stands.
        limit_s: longest time in one phase [s]; None watches nothing.
        path: file of the stack traces.
        rank: of this process.
    """

    def __init__(self, phase: LoopPhase, limit_s: float | None, path: Path, rank: int) -> None:
        self._phase, self._limit_s, self._path, self._rank = phase, limit_s, path, rank
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._limit_s is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        assert self._limit_s is not None
        look_s = min(1.0, self._limit_s / 4)
        looked_s, since_s, stood_s = time.monotonic(), self._phase.since_s, 0.0
        while not self._over.wait(look_s):
            now_s = time.monotonic()
            # A process that was suspended meanwhile (Ctrl-Z, Slurm) is not charged for the pause: it did not hang.
            stood_s += min(now_s - looked_s, 2 * look_s)
            looked_s = now_s
            if self._phase.since_s != since_s or not self._phase.is_watched:
                since_s, stood_s = self._phase.since_s, 0.0
            if stood_s > self._limit_s:
                self._end(stood_s)

    def _end(self, stood_s: float) -> None:
        text = (
            f"rank {self._rank} has made no progress for {stood_s:.0f} s (run.watchdog_s is {self._limit_s:g}) in "
            f"{self._phase}. If all ranks wait in an exchange, the cause is the rank that left no such file, or that "
            "stands somewhere else."
        )
        try:
            is_written = _in_time(lambda: self._write_traces(text))
            _in_time(lambda: self._say(text, is_written=is_written))
        finally:
            os._exit(HUNG)  # the main thread cannot be reached: it hangs

    def _write_traces(self, text: str) -> None:
        with self._path.open("w", encoding="utf-8") as file:
            file.write(text + "\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _say(self, text: str, *, is_written: bool) -> None:
        where = f"are in {self._path}" if is_written else f"follow, as {self._path} could not be written"
        sys.stderr.write(f"Error: {text} The stack traces of its threads {where}.\n")
        sys.stderr.flush()
        if not is_written:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)


def _in_time(report: Callable[[], None]) -> bool:
    """Run a report in a thread of its own, which may hang; whether it succeeded soon enough."""
    is_done = threading.Event()

    def try_to() -> None:
        with suppress(OSError, ValueError):
            report()
            is_done.set()

    teller = threading.Thread(target=try_to, name="watchdog's last words", daemon=True)
    teller.start()
    teller.join(_TELLING_S)
    return is_done.is_set()


@contextmanager
def explain_errors(phase: LoopPhase, explain_memory: Callable[[BaseException], str]) -> Iterator[None]:
    """Turn errors of memory, files and connections into ones that name the phase and the way out.

    Args:
        phase: where the process stands.
        explain_memory: says what was held when there was no more memory, and what would need less.

    Raises:
        OutOfMemoryError: there was no memory left.
        RankLostError: another process ended.
        TrainingError: a file could not be read or written, as on a full disk.
    """
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        raise TrainingError(
            f"{error.filename or 'a file'} could not be read or written in {phase}: {error.strerror or error}. Make "
            f"room or bring the disk back, then go on with {Argument('resume', example='None')}. Existing "
            "checkpoints are complete."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(explain_memory(error)) from error
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST):
            raise RankLostError(
                f"another rank ended or did not answer in {phase}: {first_line(error).partition('. ')[0]}. That "
                f"rank's output says why. Start again with {Argument('resume', example='None')}. torchrun "
                "--max-restarts restarts by itself."
            ) from error
        _note_rank(error, phase)
        raise
    except HeadwayError:
        raise
    except Exception as error:
        _note_rank(error, phase)
        raise


def _note_rank(error: Exception, phase: LoopPhase) -> None:
    """Have the traceback of an error that nobody foresaw end with the rank that it ended, and with the way on."""
    if dist.is_initialized() and dist.get_world_size() > 1 and not getattr(error, "__notes__", ()):
        error.add_note(
            f"Error: rank {dist.get_rank()} of {dist.get_world_size()} ended in {phase} by this error of its own, "
            f"and the other ranks end with it. Start again with {Argument('resume', example='None')}. Existing "
            "checkpoints are complete."
        )


@contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Turn each signal of `STOPPING` into a wish to stop after the step; a second Ctrl-C interrupts at once.

    The processes of a run then agree to finish the step, save and end. A signal that is ignored stays so, as SIGHUP
    under nohup.

    Yields:
        A function that gives the number of the signal that came, 0 as long as none has.
    """
    wished: list[int] = []

    def wish(number: int, _frame: FrameType | None) -> None:
        wished.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    def wish_of() -> int:
        return wished[0] if wished else 0

    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        yield wish_of
        return
    heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, wish) for number in heard}
    try:
        yield wish_of
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
