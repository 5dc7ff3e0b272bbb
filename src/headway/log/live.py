"""The numbers of a run on the screen while it goes: a panel on a terminal, a line now and then anywhere else."""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from headway.errors import ConfigError, UsageError
from headway.log.run_files import further_losses
from headway.log.sink import Sink, flatten
from headway.report import format_bytes, format_count, format_duration, format_rate, format_rounded, format_share

_SLOW = 0.9  # speed of a rank over the median of all, below which it is told
_HEAVY = 1.1  # work of a rank over the mean of all, above which it is told


@functools.cache
def shared_console() -> Console:
    """The one console on stderr: printed lines stand above a panel or bar, and do not cut it up."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


class LiveSink(Sink):
    """MFU, tokens/s, padding, loss and the time left, on stderr. Records of another kind than "step" are not shown.

    Args:
        num_steps: steps of the whole run, for the time left; none is shown without it [steps].
        every: records from one plain line to the next, where there is no terminal.
        console: where to show it.
        clock: monotonic clock [s].

    Raises:
        UsageError: `every` is below 1.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        *,
        every: int = 10,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every < 1:
            raise UsageError(f"every={every} is not a number of records. Give 1 to show every record.")
        self._num_steps, self._every, self._left = num_steps, every, TimeLeft(num_steps, clock)
        self._console = console or shared_console()
        self._live: Live | None = None
        self._num_records = 0

    @classmethod
    def parse(cls, place: str) -> "LiveSink":
        """Open from "" or "STEPS"."""
        if place and not place.isdecimal():
            raise ConfigError(f"live:{place} names no number of steps. Give live, or live:1000 to see the time left.")
        return cls(int(place) if place else None)

    def write(self, record: Mapping[str, Any]) -> None:
        """Show a record."""
        flatten(record)
        if record.get("kind", "step") != "step":
            return
        fields = [("step", self._progress(record["step"])), *shown_fields(record), *self._left.after(record["step"])]
        self._num_records += 1
        if self._console.is_terminal:
            self._show(fields)
        elif self._num_records % self._every == 1 or self._every == 1:
            self._console.print(joined(fields))

    def close(self) -> None:
        """Leave the last numbers on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, fields: list[tuple[str, str]]) -> None:
        grid = Table.grid(padding=(0, 2))
        for name, value in fields:
            grid.add_row(name, value)
        panel = Panel(grid, title="headway", expand=False)
        if self._live is None:
            self._live = Live(panel, console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(panel, refresh=True)

    def _progress(self, step: int) -> str:
        return format_count(step) + (f" of {format_count(self._num_steps)}" if self._num_steps is not None else "")


class TimeLeft:
    """Time that a run has left, at its pace since the first recorded step, evaluations and checkpoints included.

    Args:
        num_steps: of the whole run; None where that is not known [steps].
        clock: monotonic clock [s].
    """

    def __init__(self, num_steps: int | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._num_steps, self._clock = num_steps, clock
        self._first: tuple[int, float] | None = None

    def after(self, step: int) -> list[tuple[str, str]]:
        """Name and value for a line, after a step; nothing if the time is unknown yet, or nothing is left."""
        now_s = self._clock()
        if self._first is None:
            self._first = step, now_s
        first_step, first_s = self._first
        if self._num_steps is None or not first_step < step < self._num_steps:
            return []
        return [("left", format_duration((now_s - first_s) / (step - first_step) * (self._num_steps - step)))]


_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {  # key of a record -> its name on the screen, and how it reads
    "loss": ("loss", "{:.4f}".format),
    "lr": ("lr", "{:.2e}".format),
    "grad_norm": ("grad", "{:.2f}".format),
    "step_s": ("time", format_duration),
    "tokens_per_s": ("tokens/s", format_rounded),
    "data_wait_share": ("wait", format_share),
    "padding_share": ("padding", format_share),
    "flops_per_s": ("useful", format_rate),
    "mfu": ("MFU", format_share),
    "peak_memory_bytes": ("memory", format_bytes),
}


_LEAST_MISSED = ("useful", "memory", "padding", "grad", "lr", "time", "wait", "tokens/s")


def shown_fields(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and format the numbers of a step that a person watches.

    A loss that is None was not finite, or of a step that had nothing to learn from; either way the update was left
    out. Other numbers that are None are not shown.

    >>> shown_fields({"step": 7, "mfu": 0.412, "tokens_per_s": 12800.4})
    [('tokens/s', '12,800'), ('MFU', '41.2 %')]
    """
    fields = []
    further = further_losses(record)
    if record.get("loss", 0.0) is None and not further:
        fields.append(("loss", "none, nothing to learn" if record.get("empty") else "not finite, update left out"))
    pairs = record.get(str(record.get("objective")))
    for key, (name, show) in _SHOWN.items():
        fields += [(name, show(record[key]))] if record.get(key) is not None else []
        if key == "loss":
            fields += [(name, f"{value:.4f}") for name, value in further.items()]
        if key == "loss" and isinstance(pairs, Mapping):
            fields += [("right", format_share(pairs["accuracy"]))] if "accuracy" in pairs else []
            fields += [(name, f"{pairs[name]:.3f}") for name in ("margin", "kl") if name in pairs]
    return fields + [("straggler", text) for text in _stragglers(record)]


def joined(fields: Iterable[tuple[str, str]]) -> str:
    """Join fields to one line.

    >>> joined([("step", "7"), ("MFU", "41.2 %")])
    'step 7  MFU 41.2 %'
    """
    return "  ".join(f"{name} {value}" for name, value in fields)


def fitted(fields: Iterable[tuple[str, str]], width: int | None) -> str:
    """Join fields to one line of limited width, without the fields that are missed least.

    Args:
        fields: names and values.
        width: columns of the screen; None for any.

    >>> fitted([("step", "7"), ("memory", "62.1 GiB"), ("MFU", "41.2 %")], 20)
    'step 7  MFU 41.2 %'
    """
    shown = list(fields)
    for name in _LEAST_MISSED:
        if width is None or len(joined(shown)) <= width:
            break
        shown = [field for field in shown if field[0] != name]
    return joined(shown)


def _stragglers(record: Mapping[str, Any]) -> list[str]:
    """Name the rank that the other ranks wait for, and why: its device is slow, or its pack is heavy."""
    notes = []
    if (record.get("slowest_rank_speed") or 1.0) < _SLOW:
        share = format_share(record["slowest_rank_speed"])
        notes.append(f"rank {record['slowest_rank']} computes at {share} of the median speed")
    if (record.get("heaviest_rank_load") or 1.0) > _HEAVY:
        notes.append(f"rank {record['heaviest_rank']} has {record['heaviest_rank_load']:.2f} times the mean work")
    return notes
