"""Pauses of a loop: time of Python's garbage collections, and the code that its thread was in between the phases."""

import gc
import linecache
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from headway.log.boundary import ErrorBoundary
from headway.meter.phases import GAPS, PhaseTimer

PRODUCT = "The places that this loop pauses in"
_LOOK_S = 0.2  # from one look at the thread to the next [s]
_MOST_FRAMES = 60
_MOST_PLACES = 3  # of a record
_MOST_SAMPLES = 1000  # that wait for the end of their gap
_LEAST = 0.02  # share of the steps' time that is worth a line
# What a pause is for, by the file of a function that is under way, from the innermost one on.
# Source: CPython 3.11 to 3.14; torch 2.11; safetensors 0.6.
_BY_FILE = (
    ("logging/__init__.py", "logging"),
    ("torch/serialization.py", "checkpoint"),
    ("torch/distributed/checkpoint/", "checkpoint"),
    ("safetensors/torch.py", "checkpoint"),
    ("/subprocess.py", "another program"),
)
_READS = (".item()", ".tolist()", "float(", ".cpu()", ".numpy()")  # a line of code that reads numbers out of tensors
_PARAMETERS = ("parameters()", "param_groups", "in params")  # the head of a loop over a model's parameters


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


class CodePlace(NamedTuple):
    """Code that a thread was in.

    Attributes:
        code: file, line and function of the loop's own code.
        purpose: "logging", "checkpoint", "another program", "read-back", "parameter-loop"; "" where that is not known.
    """

    code: str
    purpose: str


class PlaceSampler:
    """Looks some times a second at the code that the loop's thread is in, while it is in a gap between phases.

    A thread of its own does so; the loop's thread is made to wait for some tens of microseconds each time.

    Args:
        phases: of the loop; knows in which gap it is.
        boundary: around the looks.
    """

    def __init__(self, phases: PhaseTimer, boundary: ErrorBoundary) -> None:
        self._phases = phases
        self._ident = threading.get_ident()
        self._samples: deque[tuple[str, CodePlace, float]] = deque()  # border, place, time that the look stands for [s]
        self._seconds: dict[tuple[str, CodePlace], float] = {}
        self._places: dict[tuple[str, int], str] = {}  # purposes of lines of code
        self._stop = threading.Event()
        arguments = weakref.ref(self), self._stop, boundary
        self._thread = threading.Thread(target=_watch, args=arguments, name="headway places", daemon=True)
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
        """Look once, where the loop is in a gap.

        Args:
            passed_s: time that the look stands for [s].
        """
        border = self._phases.border
        if border.startswith(" ") and len(self._samples) < _MOST_SAMPLES:  # which somebody takes
            self._look(border, passed_s)

    def _look(self, border: str, passed_s: float) -> None:
        """Note where the loop's thread is; a frame that were kept until the next look would keep all that it names."""
        frame = sys._current_frames().get(self._ident)
        if frame is not None:
            self._samples.append((border, self._place(frame), passed_s))

    def _place(self, innermost: FrameType) -> CodePlace:
        purpose, own = "", None
        frame: FrameType | None = innermost
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            path = frame.f_code.co_filename
            purpose = purpose or next((name for part, name in _BY_FILE if part in path), "")
            is_library = path.startswith(_LIBRARIES) or "-packages" in path or is_command(frame.f_code)
            if own is None and not is_library:
                own = frame
            frame = frame.f_back
        frame = own or innermost
        # between two lines a frame has none
        path, line = frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno
        if (path, line) not in self._places:
            self._places[path, line] = _purpose(path, line)
        return CodePlace(f"{Path(path).name}:{line} in {frame.f_code.co_name}", purpose or self._places[path, line])


def _watch(reference: "weakref.ref[PlaceSampler]", stop: threading.Event, boundary: ErrorBoundary) -> None:
    """Look at the loop again and again, until its meter is closed or nobody holds its model any more."""
    with boundary.guard(PRODUCT):
        last_s = time.monotonic()
        while not stop.wait(_LOOK_S) and (sampler := reference()) is not None:
            now_s = time.monotonic()
            passed_s, last_s = min(now_s - last_s, 4 * _LOOK_S), now_s
            if sampler.is_over:
                return
            sampler.look(passed_s)
            del sampler


def is_command(code: CodeType) -> bool:
    """Tell whether code is the entry of an installed command, such as `headway` itself: a script that calls a package.

    Source: pip writes such scripts without an extension.
    """
    return code.co_name == "<module>" and not Path(code.co_filename).suffix


def _purpose(path: str, line: int) -> str:
    """Read off a line of code, and the loop around it, what it does."""
    code = linecache.getline(path, line)
    if any(part in code for part in _READS):
        return "read-back"
    indent = len(code) - len(code.lstrip())
    for above in range(line - 1, max(0, line - 10), -1):
        head = linecache.getline(path, above)
        if head.strip() and len(head) - len(head.lstrip()) < indent:
            if head.lstrip().startswith("for ") and any(part in head for part in _PARAMETERS):
                return "parameter-loop"
            indent = len(head) - len(head.lstrip())
    return ""


_LIBRARIES = (
    sysconfig.get_paths()["stdlib"],
    str(Path(__file__).parent.parent),
    "<",  # code that has no file, such as what dataclasses make
)
