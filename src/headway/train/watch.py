"""Where a run stands, who watches that it moves on, and what is said when it cannot.

The loop tells a `Place` what it is about to do. A watchdog ends the process when that has not changed for too long; an
error of the memory or of the processes' connection is told together with it.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from headway.data import Batch
from headway.errors import OutOfMemoryError, RankLostError

HUNG = 1  # exit code; any but 0 lets torchrun start the processes again
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")  # as gloo says it


@dataclass
class Place:
    """Where the loop of this process stands.

    Attributes:
        step: the step being taken.
        phase: what it is doing: "set-up", "data wait", "exchange", "forward and backward", ...
        batch: the pack that it computes, if it does.
        since_s: reading of the monotonic clock when it began [s].
    """

    step: int = 0
    phase: str = "set-up"
    batch: Batch | None = None
    since_s: float = field(default_factory=time.monotonic)

    def at(self, phase: str, *, step: int | None = None, batch: Batch | None = None) -> None:
        """Note what comes next.

        Args:
            phase: what is about to be done.
            step: the step that it belongs to; the one before, if not given.
            batch: the pack that is computed.
        """
        self.step = self.step if step is None else step
        self.phase, self.batch, self.since_s = phase, batch, time.monotonic()

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


class Watchdog:
    """Ends this process if it makes no progress: stack traces of all threads go to a file, and the exit code is not 0.

    Args:
        place: where the process stands.
        limit_s: longest time in one place [s]; None watches nothing.
        path: file of the stack traces.
        rank: of this process.
    """

    def __init__(self, place: Place, limit_s: float | None, path: Path, rank: int) -> None:
        self._place, self._limit_s, self._path, self._rank = place, limit_s, path, rank
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._limit_s is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        assert self._limit_s is not None
        while not self._over.wait(min(1.0, self._limit_s / 4)):
            stood_s = time.monotonic() - self._place.since_s
            if stood_s > self._limit_s:
                self._end(stood_s)

    def _end(self, stood_s: float) -> None:
        text = (
            f"rank {self._rank} has made no progress for {stood_s:.0f} s (run.watchdog_s is {self._limit_s:g}) in "
            f"{self._place}. Where all ranks wait in an exchange, the one that left no such file, or stands somewhere "
            f"else, is the cause. The stack traces of its threads are in {self._path}."
        )
        with self._path.open("w", encoding="utf-8") as file:
            file.write(text + "\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        sys.stderr.write(f"Error: {text}\n")
        sys.stderr.flush()
        os._exit(HUNG)  # the main thread cannot be reached: it hangs


@contextmanager
def told(place: Place, explain_memory: Callable[[BaseException], str]) -> Iterator[None]:
    """Turn errors of the memory and of the processes' connection into ones that say where, and what to do.

    Args:
        place: where the process stands.
        explain_memory: says what was held when there was no more memory, and what would need less.

    Raises:
        OutOfMemoryError: there was no memory left.
        RankLostError: another process ended.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemoryError(explain_memory(error)) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error) or "bad_alloc" in str(error):  # PyTorch's allocators on a CPU
            raise OutOfMemoryError(explain_memory(error)) from error
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST):
            raise RankLostError(
                f"another rank ended or did not answer in {place}: {str(error).strip().splitlines()[0]} Its own output "
                "says why. Start again with --resume-if-any; torchrun --max-restarts does so by itself."
            ) from error
        raise
