"""Measure any training loop: exact FLOPs against the wall clock, in three lines and at no cost to the loop."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from headway.count import CostModel, Workload
from headway.errors import RankLostError, UsageError
from headway.meter.batches import needed, workload_of
from headway.meter.energy import WindowEnergy
from headway.meter.late import Arrival, on_host
from headway.meter.pending import PendingSteps, Step
from headway.meter.sinks import Sinks
from headway.meter.sums import COUNTED, NS, Sums
from headway.meter.surroundings import (
    Compilation,
    bandwidth_of,
    device_here,
    device_of,
    largest_memory,
    peak_of,
    trace_of,
    traffic_or_warn,
)
from headway.meter.together import Together
from headway.meter.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from headway.devices import Peak
    from headway.meter.goodput import Goodput
    from headway.meter.goodput_report import Bucket
    from headway.meter.sinks import Sink


class Meter:
    """Measure a training loop's useful FLOPs, MFU, tokens and waste.

    Steps follow each other without a gap: a step's time runs from the end of the one before to its own end, the wait
    for its data included; what is not training (`away`) is left out. Nothing here waits for the device: batches on an
    accelerator are copied aside and read when they have come, device time is read off events once they have passed.
    Ranks exchange one short list on the host whenever a window is logged, and nothing in between.

    Give `log_to` for records of the windows in files and trackers, and `goodput` for where every second went.

    Args:
        model: the model that is trained (its ledger is traced once, on shapes), or its `CostModel`.
        cost_model: of the model, where it is known already: nothing is traced then.
        peak: what one device can do; looked up from the model's device and dtype when None. Where it is unknown there
            is no MFU, and one warning says so.
        optimizer: of the loop, or several: then windows tell their MBU, for which the model is traced once more.
        memory_bytes_per_s: memory bandwidth of one device [B/s]; looked up when None.
        log_every: steps between two windows.
        num_warmup_steps: first steps to leave out. Steps in which torch.compile compiles are left out as well.
        recompute: activation checkpointing of this loop: "none", "full" or a pattern of block names.
        ceiling: a measured peak, to see the MFU against it as well.
        on_window: called with each window that is complete, on every rank.
        log_to: where rank 0 writes the record of each window, as for `headway.meter.open_sink`: "run/metrics.jsonl",
            "tensorboard:run", "wandb:PROJECT", "live", ...
        goodput: ledger of the run's time, kept by rank 0; the meter moves it between set-up, data wait, step, compile
            and what `leave` is told.
        smooth_over: windows, the last one included, over which a window's `smoothed` numbers go.
        packing_length: tokens that a micro-batch has room for, to see how full they are.
        others: cost models of what else the steps run, such as DPO's reference; `count` is told which of them.
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
        cost_model: CostModel | None = None,
        peak: Peak | None = None,
        optimizer: Any = None,
        memory_bytes_per_s: float | None = None,
        log_every: int = 10,
        num_warmup_steps: int = 0,
        recompute: str = "none",
        ceiling: Peak | None = None,
        on_window: Callable[[Window], None] | None = None,
        log_to: Sequence[str | Path | Sink] = (),
        goodput: Goodput | None = None,
        smooth_over: int = 1,
        packing_length: int | None = None,
        others: Sequence[CostModel] = (),
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if log_every < 1 or smooth_over < 1 or num_warmup_steps < 0:
            raise UsageError(
                f"log_every={log_every}, smooth_over={smooth_over}, num_warmup_steps={num_warmup_steps}: a window has "
                "at least 1 step, is smoothed over at least 1 window, and a number of warm-up steps is 0 or more."
            )
        self.device = device_here() if isinstance(model, CostModel) else device_of(model)
        given = model if isinstance(model, CostModel) else cost_model
        self.cost_model = given if given is not None else trace_of(model)
        self.peak = peak if peak is not None else peak_of(model, self.device)
        self.log_every = log_every
        self.num_warmup_steps = num_warmup_steps
        self.recompute = recompute
        self.ceiling = ceiling
        self.goodput = goodput
        self.packing_length = packing_length
        self.num_steps = 0
        self._traffic = None if optimizer is None else traffic_or_warn(model, optimizer, self.cost_model, recompute)
        self._peak_bytes_per_s = memory_bytes_per_s or bandwidth_of(self.device)
        self._on_window = on_window
        self._clock = clock
        self._together: Together | None = None
        self._timeout_s = timeout_s
        self._log_to = log_to
        self._sinks: Sinks | None = None
        self._models = (self.cost_model, *others)
        self._pending = PendingSteps(self._models, recompute, Arrival())
        self._needed = tuple({name for cost_model in self._models for name in needed(cost_model)})
        self._run: list[Sums] = []
        self._whole: Window | None = None
        self._recent: deque[list[Sums]] = deque(maxlen=smooth_over)
        self._memory = 0
        self._energy = WindowEnergy(None)
        self._has_warned = False
        self._compilation = Compilation()
        self._batches: list[tuple[Any, bool, int]] = []
        self._away_s = self._data_wait_s = 0.0
        self._last_s: float | None = None
        self._left_s: float | None = None
        self._waits_since_s: float | None = None

    def start(self) -> None:
        """Start the clock; the first `count`, `batches` or `away` does so by itself."""
        if self._whole is not None:
            raise UsageError("the meter is closed, and its run summed up: make a new Meter for another run.")
        if self._last_s is not None:
            return
        self._together = Together(self._timeout_s)
        if self._together.rank == 0 and self._log_to:
            self._sinks = Sinks.open(self._log_to)
        self._energy = WindowEnergy(self.device)
        if self.goodput is not None:
            self.goodput.switch("step")
            self._compilation.charge(self.goodput)
        self._pending = PendingSteps(self._models, self.recompute, Arrival(self.device), self._traffic)
        self._last_s = self._clock()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader, noting how long the loop waits for each batch."""
        self.start()
        iterator = iter(loader)
        while True:
            self.await_data()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.got_data()
            yield batch

    def await_data(self) -> None:
        """Note that the loop waits for data from now on, until `got_data`; `batches` does so by itself."""
        self.start()
        self.back()
        self.got_data()
        self._waits_since_s = self._clock()
        if self.goodput is not None:
            self.goodput.switch("data wait")

    def got_data(self) -> None:
        """Note that the loop has its batch; without an `await_data` before, nothing happens."""
        if self._waits_since_s is None:
            return
        self._data_wait_s += self._clock() - self._waits_since_s
        self._waits_since_s = None
        if self.goodput is not None:
            self.goodput.switch("step")

    def count(self, batch: Any, *, forward_only: bool = False, cost_model: CostModel | None = None) -> None:
        """Add what one forward of a step computes, and its backward.

        Args:
            batch: a `Workload`, or the forward's arguments by name (see `workload_of`).
            forward_only: it has no backward, as that of a reference model. Its tokens are then not counted again.
            cost_model: one of `others` where it is not the trained model's; its tokens are not counted again either.

        Raises:
            UsageError: the cost model is not one of `others`.
            WorkloadError: the batch does not say what it computes.
        """
        self.start()
        which = 0 if cost_model is None else self._place_of(cost_model)
        if isinstance(batch, Workload):
            self._batches.append((batch, forward_only, which))
            return
        copied, late = on_host(batch, self._needed)
        self._batches.append((copied if late else workload_of(copied, self._models[which]), forward_only, which))

    def _place_of(self, cost_model: CostModel) -> int:
        for place, known in enumerate(self._models):
            if known is cost_model:
                return place
        raise UsageError(
            f"this meter does not know the cost model {cost_model.name}: pass it to Meter as others=[...]."
        )

    def leave(self, bucket: Bucket = "evaluation") -> None:
        """Leave the time from now until `back` out of the steps': it is not training.

        Args:
            bucket: what it is in the run's goodput, such as "evaluation" or "checkpoint".
        """
        self.start()
        self.got_data()
        self.back()
        self._left_s = self._clock()
        self._energy.leave()
        if self.goodput is not None:
            self.goodput.switch(bucket)

    def back(self) -> None:
        """Go on with training; without a `leave` before, nothing happens."""
        if self._left_s is None:
            return
        self._away_s += self._clock() - self._left_s
        self._left_s = None
        self._energy.back()
        if self.goodput is not None:
            self.goodput.switch("step")

    @contextmanager
    def away(self, bucket: Bucket = "evaluation") -> Iterator[None]:
        """Leave a block out of the steps' time, as `leave` and `back` do."""
        self.leave(bucket)
        try:
            yield
        finally:
            self.back()

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
        self.back()
        now_s = self._clock()
        wall_s = now_s - self._last_s - self._away_s
        if wall_s < 0:
            raise UsageError(
                f"the clock stepped back: step {self.num_steps + 1} would have taken {wall_s:.6f} s. Use a monotonic "
                "clock such as time.perf_counter."
            )
        self.num_steps += 1
        left_out = self._compilation.happened() or self.num_steps <= self.num_warmup_steps
        wait_s, end = min(self._data_wait_s, wall_s), Arrival(self.device)
        self._pending.add(Step(wall_s, self._away_s, wait_s, skipped, left_out, self._batches, end, extra))
        self._energy.step(left_out=left_out)
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
        sums = self._pending.take()
        self._energy.add_to(sums)
        mine = [largest_memory(self.device), *sums.numbers()]
        try:
            every = self._together.exchange(mine)
        except RankLostError as error:
            warnings.warn(str(error), stacklevel=2)
            every, own = [mine], self._together.rank
            self._run, self._recent = self._run[own : own + 1], deque(maxlen=self._recent.maxlen)
        ranks = [self._pending.sums(numbers) for _, *numbers in every]
        self._run = [a + b for a, b in zip(self._run, ranks, strict=True)] if self._run else ranks
        self._recent.append(ranks)
        self._memory = max(self._memory, *(memory for memory, *_ in every))
        window = self._describe(ranks)
        if window is None:
            return None
        if len(self._recent) > 1:
            recent = [sum(rank[1:], rank[0]) for rank in zip(*self._recent, strict=True)]
            window = replace(window, smoothed=self._describe(recent))
        self._warn(window)
        if self._sinks is not None:
            self._sinks.write(window.as_record())
        if self._on_window is not None:
            self._on_window(window)
        return window

    def close(self) -> Window:
        """Wait for the device once and return the run: all counted steps of all ranks. The meter is then done.

        Raises:
            UsageError: no step was counted.
        """
        if self._whole is not None:
            return self._whole
        self.back()
        self._pending.wait()
        self.log()
        self._let_go()
        run = self._describe(self._run) if self._run else None
        if run is None:
            raise UsageError(
                f"there is nothing to sum up: of {self.num_steps} steps, all were warm-up or compiled something. Run "
                "more steps, or lower num_warmup_steps."
            )
        self._warn(run)
        self._whole = run
        return run

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is None and self.num_steps:
            self.close()
        else:
            self._let_go()

    def _let_go(self) -> None:
        """End what was opened for the run."""
        if self._sinks is not None:
            self._sinks.close()
        if self._together is not None:
            self._together.close()
        self._compilation.let_go()
        if self.goodput is not None:
            self.goodput.switch("idle")

    def _warn(self, window: Window) -> None:
        """Say once what cannot be right."""
        for warning in window.warnings if not self._has_warned else ():
            self._has_warned = True
            warnings.warn(warning, stacklevel=3)

    def _describe(self, ranks: Sequence[Sums]) -> Window | None:
        """Describe what all ranks did together; None if no step was counted."""
        whole = sum(ranks[1:], ranks[0])
        if not whole.totals["num_steps"]:
            return None
        walls = [rank.totals["wall_ns"] for rank in ranks]
        slowest = max(range(len(ranks)), key=walls.__getitem__)
        first = ranks[0].totals
        counted: dict[str, Any] = {name: whole.totals[name] for name in COUNTED}
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
            peak_memory_bytes=self._memory,
            energy_j=math.nan if whole.totals["num_without_energy"] else whole.totals["energy_mj"] / 1000,
            packing_length=self.packing_length,
            bytes_moved=whole.totals["bytes_moved"],
            peak_bytes_per_s=self._peak_bytes_per_s,
            num_batches=whole.totals["num_batches"],
            ceiling_flops_per_s=self.ceiling.flops_per_s if self.ceiling is not None else math.nan,
            extra=self._pending.extra,
            **counted,
        )
