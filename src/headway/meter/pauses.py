"""Pauses of a loop: its garbage collections, and the code that its thread is in.

One sampler looks at the stack of the loop's thread, from a thread of its own: `PlaceSampler` some times a second while
the loop is in a gap between phases, for records; `HostEvidence` every 5 ms while steps are profiled. A profile's
samples have the clock of `time.perf_counter_ns`; the trace has another one. So each step's beginning is noted by this
clock too, beside its annotation in the trace, and readers shift the samples by the difference.
"""

import gc
import linecache
import re
import sys
import sysconfig
import threading
import time
import tomllib
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from headway.log.boundary import ErrorBoundary
from headway.meter.clock import CoreWait
from headway.meter.phases import GAPS, PhaseTimer

PRODUCT = "The places that this loop pauses in"
_LOOK_S = 0.2  # from one look at the thread to the next [s]
_EVERY_S = 0.005  # between two samples; a pause that is worth a word is longer
_MOST_FRAMES = 60  # innermost ones that are looked at
_MOST_PLACES = 3  # places of a record, the longest pauses first
_MOST_SAMPLES = 1000  # samples that wait for the end of their gap
_LEAST = 0.02  # share of the steps' time that is worth a line
COLLECTION = "gc:collection"  # begins the name of the annotation of a collection
_MOST_RUNS = 4000  # runs of equal samples; a full list is thinned, so that a file grows by 200 kB at most
_LEAST_DELAY_NS = 200_000  # time without a core between two samples
_DEPTH = 40  # innermost frames that are looked at
_SHOWN = 6  # frames of a stack that are kept
# Frames in which the loop hands over to PyTorch's engine say little; they stand between the caller and its hooks.
_ENGINE = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "torch/_dynamo/eval_frame.py")
_NOT_OWN = (
    "<",  # code that has no file, such as what dataclasses make
    str(Path(__file__).parents[1]),
    *(str(Path(path)) for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))),
)


@dataclass(frozen=True, slots=True)
class Purpose:
    """Purpose of a pause, and the code that shows it (`purposes.toml`).

    Attributes:
        name: of it; "" of the one that nobody knows.
        functions: names of functions that tell it, a pattern of the whole name; "" if none does.
        files: files of installed packages that tell it, a pattern; "" if none does.
        code: parts of a line of code that tell it.
        loop: parts of the head of a loop around a line that tell it.
        in_trace: words of a finding of a trace: message, cause, advice, setting; empty without one.
        in_records: words of a finding of records: cause, advice; empty without one.
    """

    name: str
    functions: str = ""
    files: str = ""
    code: tuple[str, ...] = ()
    loop: tuple[str, ...] = ()
    in_trace: Mapping[str, str] = field(default_factory=dict)
    in_records: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_chore(self) -> bool:
        """True if pauses of this purpose have a finding of their own."""
        return "message" in self.in_trace

    def is_told_by_file(self, path: str) -> bool:
        """Tell whether a file of an installed package shows this purpose."""
        return bool(self.files) and re.search(self.files, path) is not None

    def is_told_by(self, frame: str) -> bool:
        """Tell whether a frame shows this purpose: "name (folder/file.py:line)", behind a ~ in an installed package."""
        name, _, place = frame.removeprefix("~").partition(" (")
        is_named = bool(self.functions) and re.fullmatch(self.functions, name) is not None
        return is_named or (frame.startswith("~") and self.is_told_by_file(place))


_TABLE = tomllib.loads(Path(__file__).with_name("purposes.toml").read_text("utf-8"))
PURPOSES = {row["name"]: Purpose(**row) for row in _TABLE["purpose"]}


class _Code(NamedTuple):
    """A function as frames of it are named.

    Attributes:
        text: its name and the last two parts of its file's path: "step (loop/train.py"; "" of what is left out.
        is_own: whether it is the loop's own, and not Headway's or of an installed package.
        purpose: that its file tells; "" of most.
    """

    text: str
    is_own: bool
    purpose: str


@lru_cache(maxsize=4096)
def _code(path: str, name: str) -> _Code:
    """Facts of a function, by its names: a code object equals that of another file which does the same."""
    parts = path.replace("\\", "/").split("/")
    is_own = not path.startswith(_NOT_OWN) and "-packages" not in path and not _is_command(path, name)
    short = "/".join(parts[-3:])
    names = [purpose.name for purpose in PURPOSES.values() if not is_own and purpose.is_told_by_file(short)]
    text = "" if path.replace("\\", "/").endswith(_ENGINE) else f"{name} ({'/'.join(parts[-2:])}"
    return _Code(text, is_own, names[0] if names else "")


def _is_command(path: str, name: str) -> bool:
    """Tell whether code is the entry of an installed command, such as `headway` itself: a script that calls a package.

    Source: pip writes such scripts without an extension.
    """
    return name == "<module>" and not Path(path).suffix


class CollectionTimer:
    """Adds up the time of garbage collections in this process.

    Args:
        clock: the host's [s].
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Listen from now on."""
        gc.callbacks.append(self._on_collection)

    def take(self) -> float:
        """Give the time since the last call [s]."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Listen no more."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._since_s = self._clock()
        elif self._since_s is not None:
            self._seconds += self._clock() - self._since_s
            self._since_s = None


class StackSampler(ABC):
    """Samples the stack of the thread that makes the sampler, from a thread of its own.

    Args:
        name: of the thread.
        every_s: from one look to the next [s].
        guard: around the looks, for their errors.
    """

    def __init__(self, name: str, every_s: float, guard: AbstractContextManager[Any] | None = None) -> None:
        self._every_s, self._ident, self._stop = every_s, threading.get_ident(), threading.Event()
        arguments = weakref.ref(self), self._stop, guard or nullcontext()
        self._thread = threading.Thread(target=_watch, args=arguments, name=name, daemon=True)

    @property
    def is_over(self) -> bool:
        """True if there is nothing left to look at."""
        return False

    @abstractmethod
    def look(self, passed_s: float) -> None:
        """Look once.

        Args:
            passed_s: time that the look stands for [s].
        """

    def _frame(self) -> FrameType | None:
        """Innermost frame of the thread; one that is kept until the next look would keep all that it names."""
        return sys._current_frames().get(self._ident)


def _watch(reference: "weakref.ref[StackSampler]", stop: threading.Event, guard: AbstractContextManager[Any]) -> None:
    """Look at the loop again and again, until its sampler is closed or nobody holds that any more."""
    sampler, last_s = reference(), time.monotonic()
    every_s = 0.0 if sampler is None else sampler._every_s
    del sampler
    with guard:
        while not stop.wait(every_s) and (sampler := reference()) is not None and not sampler.is_over:
            now_s = time.monotonic()
            sampler.look(min(now_s - last_s, 4 * every_s))
            last_s, every_s = now_s, sampler._every_s
            del sampler


class CodePlace(NamedTuple):
    """Code that a thread was in.

    Attributes:
        code: file, line and function of the loop's own code.
        purpose: a name of `PURPOSES`; "" where it is not known.
    """

    code: str
    purpose: str


class PlaceSampler(StackSampler):
    """Looks some times a second at the code that the loop's thread is in, while it is in a gap between phases.

    A thread of its own does so; the loop's thread is made to wait for some tens of microseconds each time.

    Args:
        phases: of the loop; knows in which gap it is.
        boundary: around the looks.
    """

    def __init__(self, phases: PhaseTimer, boundary: ErrorBoundary) -> None:
        super().__init__("headway places", _LOOK_S, boundary.guard(PRODUCT))
        self._phases = phases
        self._samples: deque[tuple[str, CodePlace, float]] = deque()  # border, place, time that the look stands for [s]
        self._seconds: dict[tuple[str, CodePlace], float] = {}
        self._places: dict[tuple[str, int], str] = {}  # purposes of lines of code
        phases.looks, phases.on_gap = self._samples, self._gap_ended
        self._thread.start()

    def take(self, num_steps: int, wall_s: float) -> list[dict[str, str | float]]:
        """List the places that the loop was in longest since the last call, with the time of a step [s]."""
        seconds, self._seconds = self._seconds, {}
        rows = sorted(seconds.items(), key=lambda item: -item[1])[:_MOST_PLACES]
        return [
            {"phase": gap, "code": place.code, "purpose": place.purpose, "s": spent_s / num_steps}
            for (gap, place), spent_s in rows
            if spent_s >= _LEAST * wall_s
        ]

    def close(self) -> None:
        """Look no more.

        A look holds the frame that the loop is in. Its thread may be the last to let go of the tensors there, and a
        process aborts if the interpreter ends meanwhile, so the thread is waited for.
        """
        self._stop.set()
        self._thread.join(_LOOK_S)
        self._phases.looks = ()

    def _gap_ended(self, border: str, name: str) -> None:
        """Give the looks since the last border the name of the gap that ends, in the loop's own thread."""
        while self._samples:
            seen_at, place, seconds = self._samples.popleft()
            if seen_at == border and name in GAPS:
                self._seconds[name, place] = self._seconds.get((name, place), 0.0) + seconds

    @property
    def is_over(self) -> bool:
        """True if there is no loop left to look at."""
        return self._phases.is_over

    def look(self, passed_s: float) -> None:
        """Look once, where the loop is in a gap."""
        border = self._phases.border
        # a gap whose looks somebody takes
        if border.startswith(" ") and len(self._samples) < _MOST_SAMPLES and (frame := self._frame()) is not None:
            self._samples.append((border, self._place(frame), passed_s))

    def _place(self, innermost: FrameType) -> CodePlace:
        purpose, own = "", None
        frame: FrameType | None = innermost
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            code = _code(frame.f_code.co_filename, frame.f_code.co_name)
            purpose = purpose or code.purpose
            own = own or (frame if code.is_own else None)
            frame = frame.f_back
        frame = own or innermost
        # between two lines a frame has none
        path, line = frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno
        if (path, line) not in self._places:
            self._places[path, line] = _purpose(path, line)
        return CodePlace(f"{Path(path).name}:{line} in {frame.f_code.co_name}", purpose or self._places[path, line])


def _purpose(path: str, line: int) -> str:
    """Read the purpose of a line of code off the line and the loop around it."""
    code = linecache.getline(path, line)
    for purpose in PURPOSES.values():
        if any(part in code for part in purpose.code):
            return purpose.name
    indent = len(code) - len(code.lstrip())
    for above in range(line - 1, max(0, line - 10), -1):
        head = linecache.getline(path, above)
        if head.strip() and len(head) - len(head.lstrip()) < indent:
            for purpose in PURPOSES.values() if head.lstrip().startswith("for ") else ():
                if any(part in head for part in purpose.loop):
                    return purpose.name
            indent = len(head) - len(head.lstrip())
    return ""


class HostEvidence(StackSampler):
    """Samples the main thread's stack and annotates collections while some steps are profiled.

    A thread of its own reads the stack of the thread that opens it, every 5 ms; nothing else is installed but a
    callback of the collector. What the loop computes stays the same.

    Args:
        enter: begins an annotation of the trace; returns what ends it.
    """

    def __init__(self, enter: Callable[[str], Any]) -> None:
        super().__init__("headway profile", _EVERY_S)
        self._enter = enter
        self._collections: list[Any] = []
        self._stacks: dict[tuple[str, ...], int] = {}
        self._runs: list[list[int]] = []  # first and last moment of equal samples in a row [ns], the stack's number
        self._begins: dict[int, int] = {}
        self._delays: dict[int, int] = {}
        self._preempted: list[list[int]] = []  # between which samples [ns], and how long the thread had no core [ns]
        self._core_wait = CoreWait()
        self._last = 0, 0  # look and what the thread had waited for a core by then [ns]
        self._is_anomaly_mode = False

    def open(self) -> None:
        """Begin to sample the calling thread."""
        import torch

        self._is_anomaly_mode = torch.is_anomaly_enabled()
        gc.callbacks.append(self._collected)
        self._ident, self._core_wait = threading.get_ident(), CoreWait()
        self._last = time.perf_counter_ns(), self._core_wait.read_ns()
        self._thread.start()

    def close(self) -> None:
        """End the thread and take the callback away."""
        if self._delays:
            self._delays[max(self._delays) + 1] = self._core_wait.read_ns()
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)
        while self._collections:
            self._collections.pop().__exit__(None, None, None)

    def step(self, number: int) -> None:
        """Note when a step begins, by the samples' clock."""
        self._begins[number] = time.perf_counter_ns()
        self._delays[number] = self._core_wait.read_ns()

    def facts(self) -> dict[str, Any]:
        """Give the samples and their facts, JSON-ready.

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

    def look(self, _passed_s: float) -> None:
        """Note the stack, and for how long the thread or its sampler had no core."""
        own_wait = CoreWait()
        own_delay_before = own_wait.read_ns()
        if (frame := self._frame()) is None:
            self._stop.set()
            return
        (before, delay_before), now, delay = self._last, time.perf_counter_ns(), self._core_wait.read_ns()
        self._note_delay(before, now, delay - delay_before)
        self._last = now, delay
        stack = self._stacks.setdefault(self._stack(frame), len(self._stacks))
        del frame  # a frame holds the loop's variables
        if self._runs:
            self._runs[-1][1] = now  # a sample lasts until the next one
        if not self._runs or self._runs[-1][2] != stack:
            self._runs.append([now, now, stack])
        if len(self._runs) >= _MOST_RUNS:
            # Long pauses are what counts: half of the runs, the longest, stay, and samples become rarer.
            longest = sorted(self._runs, key=lambda run: run[0] - run[1])[: _MOST_RUNS // 2]
            self._runs = sorted(longest)
            self._every_s *= 2
        # A sampler that loses its core in the middle of a sample holds up the loop too, which needs Python's lock.
        self._note_delay(now, time.perf_counter_ns(), own_wait.read_ns() - own_delay_before)

    def _note_delay(self, begin_ns: int, end_ns: int, delay_ns: int) -> None:
        """Note for how long a thread had no core in some time [ns]."""
        if delay_ns > _LEAST_DELAY_NS and len(self._preempted) < _MOST_RUNS:
            self._preempted.append([begin_ns, end_ns, delay_ns])

    def _stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """Name the innermost frames of a stack, the first frame of the loop's own code included."""
        frames: list[tuple[str, bool]] = []
        while frame is not None and len(frames) < _DEPTH:
            code = _code(frame.f_code.co_filename, frame.f_code.co_name)
            if code.text:
                frames.append((f"{code.text}:{frame.f_lineno})", code.is_own))
            frame = frame.f_back
        own = next((place for place, (_, is_own) in enumerate(frames) if is_own), None)
        chosen = frames[:_SHOWN]
        if own is not None and own >= _SHOWN:
            chosen = [*frames[: _SHOWN - 1], frames[own]]
        return tuple(f"{'' if is_own else '~'}{text}" for text, is_own in chosen)
