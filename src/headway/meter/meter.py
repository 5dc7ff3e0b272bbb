"""Measure any training loop: exact FLOPs against the one clock, in three lines and at no cost to the loop."""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from headway.count import CostModel, Workload
from headway.devices import Peak
from headway.errors import RankLostError, UsageError
from headway.log.sink import Sink
from headway.log.sinks import Sinks
from headway.meter.batches import input_gradients_of, read_or_copy
from headway.meter.clock import ForwardTimer
from headway.meter.environment import (
    bandwidth_of,
    device_here,
    device_of,
    largest_memory,
    peak_of,
    traffic_or_warn,
)
from headway.meter.goodput import Goodput
from headway.meter.host_gather import HostAllGather
from headway.meter.pending import Billing, PendingStep, PendingSteps
from headway.meter.step_clock import LoopWatcher, StepClock
from headway.meter.tally import Tally, Yardstick
from headway.meter.window import Window


class Meter(StepClock):
    """Measure a training loop's useful FLOPs, MFU, tokens and waste.

    Steps follow each other without a gap: a step's time runs from the end of the one before to its own end on the
    device's clock, the wait for its data included; what is not training (`away`, and compiling) is left out. Between
    steps nothing waits for the device: batches on an accelerator are copied aside and read when they have come, times
    are read off events once they have passed. Only where training stops or goes on (`leave`, `back`, `close`) is the
    device waited for, so that its lag is charged to the steps and not to what comes next. Ranks exchange two short
    lists on the host whenever a window is logged, and nothing in between.

    Give `log_to` for records of the windows in files and trackers, and `goodput` for where every second went.

    Args:
        model: the model that is trained (its ledger is traced once, on shapes), or its `CostModel`.
        cost_model: of the model, where it is known already: nothing is traced then.
        results: from which of its results the model's backward starts, as for `headway.trace`.
        peak: what one device can do; looked up from the model's device and dtype when None. Where it is unknown there
            is no MFU, and one warning says so.
        device: that computes, a `torch.device`; the one that the model lies on when None.
        optimizer: of the loop, or several: then windows tell their MBU, for which the model is traced once more.
        memory_bytes_per_s: memory bandwidth of one device [B/s]; looked up when None.
        log_every: steps between two windows.
        num_warmup_steps: first steps to leave out. Steps in which torch.compile compiles, on any rank, are left out as
            well.
        recompute: activation checkpointing of this loop: "none", "full" or a pattern of block names.
        ceiling: a measured peak, to see the MFU against it as well.
        on_window: called with each window that is complete, on every rank.
        log_to: where rank 0 writes the record of each window, as for `headway.meter.open_sink`: "jsonl:FILE",
            "tensorboard:run", "wandb:PROJECT", "live", ...
        goodput: ledger of the run's time, kept by rank 0; the meter moves it between set-up, data wait, step, compile
            and what `leave` is told.
        smooth_over: windows, the last one included, over which a window's `smoothed` numbers go.
        packing_length: tokens that a micro-batch has room for, to see how full they are.
        batch_ranks: ranks in a row that work on each batch together, of which the first counts it.
        steps_before: steps that earlier processes of the run took; windows number steps from there.
        exchanges: whether ranks exchange their numbers here, when a window is logged. If not, each step is a window of
            its own, and the loop exchanges with its own messages what `finished` gives and hands it to `merge`.
        others: cost models of what else the steps run, such as DPO's reference; `count` is told which of them.
        timeout_s: how long other ranks are waited for when a window is logged [s].
        clock: monotonic clock [s]; the host's when None.

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
        results: Any = None,
        peak: Peak | None = None,
        device: Any = None,
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
        batch_ranks: int = 1,
        steps_before: int = 0,
        exchanges: bool = True,
        others: Sequence[CostModel] = (),
        timeout_s: float = 60.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if log_every < 1 or smooth_over < 1 or num_warmup_steps < 0:
            raise UsageError(
                f"log_every={log_every}, smooth_over={smooth_over}, num_warmup_steps={num_warmup_steps}: a window has "
                "at least 1 step, is smoothed over at least 1 window, and a number of warm-up steps is 0 or more."
            )
        # a cost model is on no device, so that the process's own is meant
        if device is None:
            device = device_here() if isinstance(model, CostModel) else device_of(model)
        super().__init__(device, goodput, clock)
        # the ledger: given, or traced here
        ledger = model if isinstance(model, CostModel) else cost_model
        if ledger is not None and results is not None:
            raise UsageError(
                f"results={results!r} of a model with a cost model: nothing is traced. Give one of the two."
            )
        if ledger is None:
            from headway.tracing import trace

            ledger = trace(model, results=results)
        self.cost_model = ledger
        self.peak = peak if peak is not None else peak_of(model, self.device)
        self.log_every = log_every
        self.num_warmup_steps = num_warmup_steps
        self.recompute = recompute
        self.num_steps = 0
        self.steps_before = steps_before
        self._exchanges = exchanges
        self._traffic = (
            None if optimizer is None else traffic_or_warn(model, optimizer, self.cost_model, recompute, results)
        )
        # where windows go
        self._on_window = on_window
        self._ranks: HostAllGather | None = None
        self._timeout_s = timeout_s
        self._log_to = log_to
        self._sinks: Sinks | None = None
        self.models = (self.cost_model, *others)
        self.ceiling, self.batch_ranks = ceiling, batch_ranks
        self.memory_bytes_per_s = memory_bytes_per_s or bandwidth_of(self.device)
        # what steps add up to, and what rates are compared with
        self._tally = Tally(
            Yardstick(
                self.peak,
                math.nan if ceiling is None else ceiling.flops_per_s,
                self.memory_bytes_per_s,
                packing_length,
                batch_ranks,
            ),
            smooth_over,
        )
        self._arrived: list[list[list[int]]] = []  # of each rank, steps that not all ranks have passed yet
        self._num_merged = 0
        self._left_out: list[int] = []  # steps since the last log
        self._run: Window | None = None
        self._has_warned = self._has_warned_of_no_batch = False
        # forwards are timed where there is a module, and steps wait here until the device has passed them
        self._forwards = None if isinstance(model, CostModel) else ForwardTimer(model, self._mark)
        self._batches: list[tuple[Any, Billing]] = []
        self._pending = PendingSteps(self.models, recompute, self._last)

    def start(self) -> None:
        """Start the clock; the first `count`, `batches` or `away` does so by itself. The device is waited for once."""
        if self._run is not None:
            raise UsageError("the meter is closed, and its run summed up: make a new Meter for another run.")
        if self.has_started:
            return
        if self._exchanges:
            self._ranks = HostAllGather(self._timeout_s)
        if self._log_to and (self._ranks is None or self._ranks.rank == 0):
            self._sinks = Sinks.open(self._log_to)
        super().start()
        several = self._ranks is not None and self._ranks.size > 1
        self._pending = PendingSteps(
            self.models, self.recompute, self._last, self._traffic, self.goodput, keeps_steps=several
        )
        self.watchers += LoopWatcher.waiting
        LoopWatcher.waiting.clear()
        for watcher in tuple(self.watchers):
            watcher.start(self)

    def count(
        self,
        batch: Any,
        *,
        forward_only: bool = False,
        cost_model: CostModel | None = None,
        input_gradients: Sequence[str] | None = None,
        elsewhere: bool = False,
    ) -> None:
        """Add what one forward of a step computes, and its backward.

        Args:
            batch: a `Workload`, or the forward's arguments by name (see `workload_of`).
            forward_only: it has no backward, as that of a reference model. Its tokens are then not counted again.
            cost_model: one of `others` where it is not the trained model's; its tokens are not counted again either.
            input_gradients: names of the arguments that require a gradient, since something in front of the model is
                trained (see `CostModel.with_input_gradients`); those of the batch's tensors that do when None.
            elsewhere: another rank, which works on this batch too, counts it (`batch_ranks`); here it is known to
                profiles alone.

        Raises:
            UsageError: the cost model is not one of `others`.
            WorkloadError: the batch does not say what it computes, or the cost model what an input's gradient costs.
        """
        self.start()
        which = 0 if cost_model is None else self._place_of(cost_model)
        if input_gradients is None:
            input_gradients = () if isinstance(batch, Workload) else input_gradients_of(batch)
        billed = Billing(which, forward_only, () if forward_only else tuple(input_gradients), elsewhere)
        if billed.input_gradients:
            self.models[which].with_input_gradients(billed.input_gradients)  # refuses those that it does not know
        self._batches.append((read_or_copy(batch, self.models[which]), billed))

    @property
    def model(self) -> Any:
        """The model whose forwards run here; None where the meter was given a cost model alone."""
        return None if self._forwards is None else self._forwards.model

    def _place_of(self, cost_model: CostModel) -> int:
        for place, candidate in enumerate(self.models):
            if candidate is cost_model:
                return place
        raise UsageError(
            f"this meter does not know the cost model {cost_model.name}: pass it to Meter as others=[...]."
        )

    def step(self, *, skipped: bool = False, **extra: float) -> Window | None:
        """End an optimizer step.

        A step without a batch is one without work on this rank, as the last of an epoch may be; the first such step of
        a loop that does not say so by `count(Workload())` is warned of.

        Args:
            skipped: the loop left the update out, as a gradient scaler does after an overflow.
            extra: the loop's own numbers for the log, such as `loss=...`.

        Returns:
            The window that this step completes; None for most.

        """
        time = self._end_step()
        self.num_steps += 1
        if not self._batches and not self._has_warned_of_no_batch:
            self._has_warned_of_no_batch = True
            warnings.warn(
                f"step {self.num_steps} ends without a batch and counts as one without work: call count(batch) for "
                "each micro-batch, or count(Workload()) where this rank has none.",
                stacklevel=2,
            )
        left_out = time.compiled or self.num_steps <= self.num_warmup_steps
        forwards = [] if self._forwards is None else self._forwards.take()
        self._left_out += [self.num_steps] if left_out else []
        step = PendingStep(self.num_steps, time, forwards, skipped, left_out, self._batches, extra)
        self._pending.add(step)
        self._energy.step(left_out=left_out and self._exchanges)
        self._batches = []
        self._tell_watchers(lambda watcher: watcher.took(step))
        if not self._exchanges:
            return None
        self._pending.add_up()
        return self.log() if self.num_steps % self.log_every == 0 else None

    def log(self) -> Window | None:
        """Add up, over all ranks, the steps whose numbers have come since the last log.

        All ranks must call this equally often, as `step` does.

        Returns:
            The window; None if there is no counted step in it.
        """
        if self._ranks is None:
            return None
        self._begin("logging")
        window = self._tell(self._of_all(self._ranks))
        self._end("logging")
        return window

    def _of_all(self, all_ranks: HostAllGather) -> Window | None:
        mine: list[int] = []
        try:
            self._pending.leave_out(all_ranks.all_steps(self._left_out))
            mine = self._take()
            every = all_ranks.exchange(mine)
        except RankLostError as error:
            warnings.warn(str(error), stacklevel=3)
            every = [mine or self._take()]
            self._tally.only(all_ranks.rank)
        ranks = [self._pending.sums(numbers) for _, *numbers in every]
        memory = max(memory for memory, *_ in every)
        window = self._tally.window(ranks, memory, self._step, self._pending.extra)
        self._warn(window)
        return window

    def _take(self) -> list[int]:
        self._left_out = []
        sums = self._pending.take()
        self._energy.add_to(sums)
        return [self._largest_memory(), *sums.numbers()]

    def _largest_memory(self) -> int:
        largest = 0  # where unknown
        with self.boundary.guard("The peak of this rank's memory"):
            largest = largest_memory(self.device)
        return largest  # noqa: RET504 - a reading that fails leaves it as it was

    def finished(self) -> list[list[int]]:
        """Take the steps that this rank's device has passed since the last call, as numbers for the other ranks.

        For a loop that exchanges by itself (`exchanges=False`); nothing is waited for.
        """
        steps = self._pending.take_each()
        if steps:
            self._energy.add_to(steps[-1])
        memory = self._largest_memory() if steps else 0
        return [[memory, *sums.numbers()] for sums in steps]

    def merge(self, every: Sequence[list[list[int]]]) -> list[Window]:
        """Describe the steps that all ranks have passed.

        Args:
            every: what `finished` gave on each rank, in the order of the ranks.

        Returns:
            A window for each step, in their order; none are lost, those that some rank has not passed come later.
        """
        self._arrived = self._arrived or [[] for _ in every]
        for arrived, new in zip(self._arrived, every, strict=True):
            arrived.extend(new)
        windows = []
        for _ in range(min(map(len, self._arrived))):
            parts = [arrived.pop(0) for arrived in self._arrived]
            self._num_merged += 1
            ranks = [self._pending.sums(numbers) for _, *numbers in parts]
            memory = max(memory for memory, *_ in parts)
            window = self._tally.one_step(ranks, memory, self.steps_before + self._num_merged)
            windows.append(window)
            self._tell(window)
        return windows

    @property
    def _step(self) -> int:
        """Number of the last step that the device is known to have passed."""
        return self.steps_before + self.num_steps - len(self._pending)

    def _tell(self, window: Window | None) -> Window | None:
        if window is None:
            return None
        if self._sinks is not None:
            with self.boundary.guard("Records of the meter's windows"):
                self._sinks.write(window.to_dict())
        if self._on_window is not None:
            self._on_window(window)
        return window

    def close(self) -> Window:
        """Wait for the device once and return the run: all counted steps of all ranks. The meter is then done.

        Where there are none, that is a warning, and the run is a window of 0 steps without any rate.
        """
        if self._run is not None:
            return self._run
        self._finish()
        self._tell_watchers(lambda watcher: watcher.stop())
        self.log()
        self._let_go()
        run = self._tally.run(self._step, self._pending.extra)
        if not run.num_steps:
            warnings.warn(
                f"there is nothing to sum up: of {self.num_steps} steps, all were warm-up or compiled something. Run "
                "more steps, or lower num_warmup_steps.",
                stacklevel=2,
            )
        if self._exchanges:
            self._warn(run)
        self._run = run
        return run

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None and self.num_steps:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the model, files and other ranks without summing up, as after an error."""
        self._let_go()

    def _let_go(self) -> None:
        if self._sinks is not None:
            self._sinks.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._forwards is not None:
            self._forwards.close()
        self._stop()

    def _warn(self, window: Window | None) -> None:
        for warning in window.warnings if window is not None and not self._has_warned else ():
            self._has_warned = True
            warnings.warn(warning, stacklevel=3)
