"""Measure any training loop: exact FLOPs against the wall clock, in three lines and at no cost to the loop."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from headway.count import CostModel, Workload
from headway.errors import RankLostError, UsageError
from headway.meter.batches import needed, workload_of
from headway.meter.late import Arrival, on_host
from headway.meter.sums import COUNTED, NS, Sums, quantities
from headway.meter.surroundings import device_of, largest_memory, num_graphs, peak_of, trace_of
from headway.meter.together import Together
from headway.meter.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headway.devices import Peak


@dataclass(slots=True)
class _Step:
    """One step as it was noted down; FLOPs are counted when it is logged."""

    number: int
    wall_s: float
    away_s: float
    data_wait_s: float
    skipped: bool
    left_out: bool
    batches: list[tuple[Any, bool]]
    end: Arrival
    extra: Mapping[str, Any]


class Meter:
    """Measure a training loop's useful FLOPs, MFU, tokens and waste.

    Steps follow each other without a gap: a step's time runs from the end of the one before to its own end, the wait
    for its data included; what is not training (`away`) is left out. Nothing here waits for the device: batches on an
    accelerator are copied aside and read when they have come, device time is read off events once they have passed.
    Ranks exchange one short list on the host whenever a window is logged, and nothing in between.

    Args:
        model: the model that is trained (its ledger is traced once, on shapes), or its `CostModel`.
        peak: what one device can do; looked up from the model's device and dtype when None. Where it is unknown there
            is no MFU, and one warning says so.
        log_every: steps between two windows.
        num_warmup_steps: first steps to leave out. Steps in which torch.compile compiles are left out as well.
        recompute: activation checkpointing of this loop: "none", "full" or a pattern of block names.
        ceiling: a measured peak, to see the MFU against it as well.
        on_window: called with each window that is complete, on every rank.
        timeout_s: how long other ranks are waited for when a window is logged [s].
        clock: monotonic clock [s].

    >>> meter = Meter(model, log_every=10, on_window=lambda w: print(f"{w.mfu:.1%}"))   # doctest: +SKIP
    >>> for batch in meter.batches(loader):                                             # doctest: +SKIP
    ...     meter.count(batch)
    ...     train(batch)
    ...     meter.step()
    """

    def __init__(
        self,
        model: Any,
        *,
        peak: Peak | None = None,
        log_every: int = 10,
        num_warmup_steps: int = 0,
        recompute: str = "none",
        ceiling: Peak | None = None,
        on_window: Callable[[Window], None] | None = None,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if log_every < 1 or num_warmup_steps < 0:
            raise UsageError(
                f"log_every={log_every} and num_warmup_steps={num_warmup_steps}: a window has at least 1 step, and a "
                "number of warm-up steps is 0 or more."
            )
        self.device = None if isinstance(model, CostModel) else device_of(model)
        self.cost_model = model if isinstance(model, CostModel) else trace_of(model)
        self.peak = peak if peak is not None else peak_of(model, self.device)
        self.log_every = log_every
        self.num_warmup_steps = num_warmup_steps
        self.recompute = recompute
        self.ceiling = ceiling
        self.num_steps = 0
        self._on_window = on_window
        self._clock = clock
        self._together: Together | None = None
        self._timeout_s = timeout_s
        self._pending: deque[_Step] = deque()
        self._keys = tuple(dict.fromkeys((row.component, row.driver) for row in self.cost_model.rows))
        self._needed = needed(self.cost_model)
        self._run: list[Sums] = []
        self._largest = 0
        self._extra: dict[str, float] = {}
        self._compiled = num_graphs()
        self._batches: list[tuple[Any, bool]] = []
        self._away_s = self._data_wait_s = 0.0
        self._last_s: float | None = None
        self._last_end: Arrival | None = None

    def start(self) -> None:
        """Start the clock; the first `count`, `batches` or `away` does so by itself."""
        if self._last_s is None:
            self._last_s = self._clock()
            self._last_end = Arrival(self.device)
            self._together = Together(self._timeout_s)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader, noting how long the loop waits for each batch."""
        self.start()
        iterator = iter(loader)
        while True:
            asked_s = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._data_wait_s += self._clock() - asked_s
            yield batch

    def count(self, batch: Any, *, forward_only: bool = False) -> None:
        """Add what one forward of a step computes, and its backward.

        Args:
            batch: a `Workload`, or the forward's arguments by name (see `workload_of`).
            forward_only: it has no backward, as that of a reference model. Its tokens are then not counted again.

        Raises:
            WorkloadError: the batch does not say what it computes.
        """
        self.start()
        if isinstance(batch, Workload):
            self._batches.append((batch, forward_only))
            return
        copied, late = on_host(batch, self._needed)
        self._batches.append((copied if late else workload_of(copied, self.cost_model), forward_only))

    @contextmanager
    def away(self) -> Iterator[None]:
        """Leave out of the steps' time what is not training: an evaluation, a checkpoint."""
        self.start()
        begin_s = self._clock()
        try:
            yield
        finally:
            self.was_away(self._clock() - begin_s)

    def was_away(self, seconds: float) -> None:
        """Leave out so many seconds that have just passed and were not training [s]."""
        self._away_s += seconds

    def step(self, *, skipped: bool = False, **extra: float) -> Window | None:
        """End an optimizer step.

        Args:
            skipped: the loop left the update out, as a gradient scaler does after an overflow.
            extra: the loop's own numbers for the log, such as `loss=...`.

        Returns:
            The window that this step completes; None for most.

        Raises:
            UsageError: nothing was counted since the last step, or the clock stepped back.
        """
        if self._last_s is None or not self._batches:
            raise UsageError(f"step {self.num_steps + 1} ends without a batch: call count(batch) for each micro-batch.")
        now_s = self._clock()
        wall_s = now_s - self._last_s - self._away_s
        if wall_s < 0:
            raise UsageError(
                f"the clock stepped back: step {self.num_steps + 1} would have taken {wall_s:.6f} s. Use a monotonic "
                "clock such as time.perf_counter."
            )
        self.num_steps += 1
        compiled, self._compiled = self._compiled, num_graphs()
        self._pending.append(
            _Step(
                self.num_steps,
                wall_s,
                self._away_s,
                min(self._data_wait_s, wall_s),
                skipped,
                self.num_steps <= self.num_warmup_steps or compiled != self._compiled,
                self._batches,
                Arrival(self.device),
                extra,
            )
        )
        self._batches, self._away_s, self._data_wait_s, self._last_s = [], 0.0, 0.0, now_s
        return self.log() if self.num_steps % self.log_every == 0 else None

    def log(self) -> Window | None:
        """Add up, over all ranks, the steps whose numbers have come since the last log.

        All ranks must call this equally often, as `step` does.

        Returns:
            The window; None if there is no counted step in it.
        """
        if self._together is None:
            return None
        sums = Sums(self._keys)
        workloads: dict[bool, list[Workload]] = {False: [], True: []}  # by forward_only
        while self._pending and self._pending[0].end.has_come():
            self._extra = dict(self._pending[0].extra)
            self._take(self._pending.popleft(), sums, workloads)
        workload, forwards = Workload.total(workloads[False]), Workload.total(workloads[True])
        sums.add_count(self.cost_model.count(workload, recompute=self.recompute))
        sums.add_count(self.cost_model.count(forwards, forward_only=True))
        for name, value in quantities(workload).items():
            sums.totals[name] += value
        try:
            every = self._together.exchange([largest_memory(self.device), *sums.numbers()])
        except RankLostError as error:
            warnings.warn(str(error), stacklevel=2)
            every = [[largest_memory(self.device), *sums.numbers()]]
        ranks = [Sums(self._keys, numbers) for _, *numbers in every]
        self._run = [a + b for a, b in zip(self._run or [Sums(self._keys)] * len(ranks), ranks, strict=False)]
        self._largest = max(self._largest, *(memory for memory, *_ in every))
        window = self._describe(ranks, self._largest)
        if window is not None and self._on_window is not None:
            self._on_window(window)
        return window

    def close(self) -> Window | None:
        """Wait for the device once and return the run: all counted steps of all ranks.

        Raises:
            UsageError: no step was counted.
        """
        for step in self._pending:
            step.end.wait()
        self.log()
        run = self._describe(self._run, self._largest) if self._run else None
        if run is None:
            raise UsageError(
                f"there is nothing to sum up: of {self.num_steps} steps, all were warm-up or compiled something. Run "
                "more steps, or lower num_warmup_steps."
            )
        for warning in run.warnings:
            warnings.warn(warning, stacklevel=2)
        return run

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is None and self.num_steps:
            self.close()

    def _take(self, step: _Step, sums: Sums, workloads: dict[bool, list[Workload]]) -> None:
        """Move a step whose numbers have come into a window's sums."""
        wall_s = step.wall_s
        if step.end.timed and self._last_end is not None:
            wall_s = max(step.end.seconds_since(self._last_end) - step.away_s, 0.0)
        self._last_end = step.end
        if step.left_out:
            sums.totals["num_left_out"] += 1
            return
        for batch, forward_only in step.batches:
            workload = batch if isinstance(batch, Workload) else workload_of(batch, self.cost_model)
            workloads[forward_only].append(workload)
        sums.totals["wall_ns"] += round(wall_s * NS)
        sums.totals["data_wait_ns"] += round(min(step.data_wait_s, wall_s) * NS)
        sums.totals["num_steps"] += 1
        sums.totals["num_skipped"] += step.skipped

    def _describe(self, ranks: list[Sums], memory: int) -> Window | None:
        """Describe what all ranks did together; None if no step was counted."""
        whole = sum(ranks[1:], ranks[0])
        if not whole.totals["num_steps"]:
            return None
        walls = [rank.totals["wall_ns"] for rank in ranks]
        slowest = max(range(len(ranks)), key=walls.__getitem__)
        first = ranks[0].totals
        return Window(
            flops=whole.count(),
            wall_s=walls[slowest] / NS,
            data_wait_s=ranks[slowest].totals["data_wait_ns"] / NS,
            peak=self.peak,
            world_size=len(ranks),
            step=self.num_steps - len(self._pending),
            num_steps=first["num_steps"],
            num_left_out=first["num_left_out"],
            num_skipped=first["num_skipped"],
            rank_flops=tuple(sum(sum(phase) for phase in rank.flops[:3]) for rank in ranks),
            rank_wall_s=tuple(wall / NS for wall in walls),
            peak_memory_bytes=memory,
            ceiling_flops_per_s=self.ceiling.flops_per_s if self.ceiling is not None else math.nan,
            extra=self._extra,
            **{name: whole.totals[name] for name in COUNTED},
        )
