"""Work of the host in profiled steps that no operator shows: its stack from time to time, and collections of garbage.

Samples have the clock of `time.perf_counter_ns`; the trace has another one. So each step's beginning is noted by this
clock too, beside its annotation in the trace, and readers shift the samples by the difference.
"""

import gc
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from headway.meter.pauses import is_command

COLLECTION = "gc:collection"  # begins the name of the annotation of a collection
_EVERY_S = 0.005  # between two samples; a pause that is worth a word is longer
_MOST_RUNS = 4000  # of equal samples in a row; a full list is thinned, so that a file grows by 200 kB at most
_LEAST_DELAY_NS = 200_000  # for want of a core, between two samples
_DEPTH = 40  # innermost frames that are looked at
_SHOWN = 6  # frames of a stack that are kept
_INSTALLED = tuple(
    str(Path(path)) for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))
)
# Frames in which the loop hands over to PyTorch's engine say little; they stand between the caller and its hooks.
_ENGINE = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "torch/_dynamo/eval_frame.py")


class HostEvidence:
    """Samples the main thread's stack and annotates collections while some steps are profiled.

    A thread of its own reads the stack of the thread that opens it, every 5 ms; nothing else is installed but a
    callback of the collector. What the loop computes stays the same.

    Args:
        enter: begins an annotation of the trace; returns what ends it.
    """

    def __init__(self, enter: Callable[[str], Any]) -> None:
        self._enter = enter
        self._collections: list[Any] = []
        self._stacks: dict[tuple[str, ...], int] = {}
        self._runs: list[list[int]] = []  # first and last moment of equal samples in a row [ns], the stack's number
        self._names: dict[CodeType, tuple[str, bool]] = {}
        self._begins: dict[int, int] = {}
        self._delays: dict[int, int] = {}
        self._preempted: list[list[int]] = []  # between which samples [ns], and how long the thread had no core [ns]
        self._task = Path()
        self._every_s = _EVERY_S
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None
        self._is_anomaly_mode = False

    def open(self) -> None:
        """Begin to sample the calling thread."""
        import torch

        self._is_anomaly_mode = torch.is_anomaly_enabled()
        gc.callbacks.append(self._collected)
        thread = threading.get_ident()
        self._task = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._sampler = threading.Thread(target=self._sample, args=(thread,), name="headway profile", daemon=True)
        self._sampler.start()

    def close(self) -> None:
        """End the thread and take the callback away."""
        if self._delays:
            self._delays[max(self._delays) + 1] = _waited_for_core_ns(self._task)
        self._ended.set()
        if self._sampler is not None:
            self._sampler.join()
            self._sampler = None
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)
        while self._collections:
            self._collections.pop().__exit__(None, None, None)

    def step(self, number: int) -> None:
        """Note when a step begins, by the samples' clock."""
        self._begins[number] = time.perf_counter_ns()
        self._delays[number] = _waited_for_core_ns(self._task)

    def facts(self) -> dict[str, Any]:
        """Give what was seen, JSON-ready.

        Returns:
            `step_ns`: beginning of each step by number [ns]; `core_wait_ns`: what the thread had waited for a core by
            then, for its whole life [ns]; `stacks`: innermost frames first; `runs`: begin, end [ns] and stack of equal
            samples in a row; `preempted`: begin and end of times [ns], and for how much of each [ns] the thread or its
            sampler had no core; `anomaly_mode`.
        """
        return {
            "step_ns": {str(number): ns for number, ns in self._begins.items()},
            "core_wait_ns": {str(number): ns for number, ns in self._delays.items()},
            "stacks": [list(stack) for stack in self._stacks],
            "runs": self._runs,
            "preempted": self._preempted,
            "anomaly_mode": self._is_anomaly_mode,
        }

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        """Annotate a collection, in whichever thread it happens."""
        if phase == "start":
            self._collections.append(self._enter(f"{COLLECTION} of generation {info['generation']}"))
        elif self._collections:
            self._collections.pop().__exit__(None, None, None)

    def _sample(self, thread: int) -> None:
        own = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        before, delay_before = time.perf_counter_ns(), _waited_for_core_ns(self._task)
        while not self._ended.wait(self._every_s):
            own_delay_before = _waited_for_core_ns(own)
            frame = sys._current_frames().get(thread)
            if frame is None:
                return
            now, delay = time.perf_counter_ns(), _waited_for_core_ns(self._task)
            self._note_delay(before, now, delay - delay_before)
            before, delay_before = now, delay
            stack = self._stacks.setdefault(self._stack(frame), len(self._stacks))
            del frame  # it holds the loop's variables
            if self._runs:
                self._runs[-1][1] = now  # what a sample shows lasts until the next one
            if not self._runs or self._runs[-1][2] != stack:
                self._runs.append([now, now, stack])
            if len(self._runs) >= _MOST_RUNS:
                # Long pauses are what counts: half of the runs, the longest, stay, and samples become rarer.
                longest = sorted(self._runs, key=lambda run: run[0] - run[1])[: _MOST_RUNS // 2]
                self._runs = sorted(longest)
                self._every_s *= 2
            # A sampler that loses its core in the middle of a sample holds up the loop too, which needs Python's lock.
            self._note_delay(now, time.perf_counter_ns(), _waited_for_core_ns(own) - own_delay_before)

    def _note_delay(self, begin_ns: int, end_ns: int, delay_ns: int) -> None:
        """Note for how long a thread had no core in some time [ns]."""
        if delay_ns > _LEAST_DELAY_NS and len(self._preempted) < _MOST_RUNS:
            self._preempted.append([begin_ns, end_ns, delay_ns])

    def _stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """Name the innermost frames: those around the innermost one, and the first of the loop's own code."""
        frames: list[tuple[str, bool]] = []
        while frame is not None and len(frames) < _DEPTH:
            text, is_own = self._name(frame.f_code)
            if text:
                frames.append((f"{text}:{frame.f_lineno})", is_own))
            frame = frame.f_back
        own = next((place for place, (_, is_own) in enumerate(frames) if is_own), None)
        chosen = frames[:_SHOWN]
        if own is not None and own >= _SHOWN:
            chosen = [*frames[: _SHOWN - 1], frames[own]]
        return tuple(f"{'' if is_own else '~'}{text}" for text, is_own in chosen)

    def _name(self, code: CodeType) -> tuple[str, bool]:
        """Name a function with its file's last two parts, and tell whether it is no installed package's."""
        if code not in self._names:
            path = code.co_filename.replace("\\", "/")
            is_own = not path.startswith(("<", *_INSTALLED)) and "site-packages" not in path
            is_own = is_own and not code.co_filename.startswith(str(Path(__file__).parents[1])) and not is_command(code)
            short = "/".join(path.split("/")[-2:])
            text = "" if path.endswith(_ENGINE) else f"{code.co_name} ({short}"
            self._names[code] = text, is_own
        return self._names[code]


def _waited_for_core_ns(task: Path) -> int:
    """Time that a thread has waited for a core which others had, since it began; 0 where nobody tells [ns].

    Source: Linux, Documentation/scheduler/sched-stats: second number of /proc/PID/task/TID/schedstat.
    """
    try:
        return int(task.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
