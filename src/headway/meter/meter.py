"""Measure any training loop: exact FLOPs against the one clock, in three lines and at no cost to the loop."""

import atexit
import math
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from headway.count import CostModel
from headway.devices import Peak
from headway.errors import RankLostError, UsageError
from headway.log.sink import Sink
from headway.log.sinks import Sinks
from headway.meter.batch_share import BatchShare, batch_share, rank_and_size, stage_of
from headway.meter.clock import ForwardTimer
from headway.meter.environment import (
    bandwidth_of,
    device_here,
    device_of,
    peak_of,
    recompute_of,
    settings_of,
    traffic_or_warn,
)
from headway.meter.goodput import Goodput
from headway.meter.hooks import CallStack
from headway.meter.phases import PhaseTimer
from headway.meter.step_meter import StepMeter
from headway.meter.tally import Sums, Tally
from headway.meter.window import Window

T = TypeVar("T")


class HostAllGather:
    """Exchange values between the ranks of a run over a gloo group of its own; pickle keeps whole numbers exact.

    Every rank must make one, after `torch.distributed` has been set up, and exchange equally often.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self.rank, self.size = rank_and_size()
        if self.size > 1:
            import torch.distributed as dist

            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
            atexit.register(self.close)

    def close(self) -> None:
        """End the group; from here on this rank's own numbers are all there are.

        A process must not end before: gloo's threads let go of tensors when the interpreter may be gone, and abort.
        """
        atexit.unregister(self.close)
        group, self._group = self._group, None
        if group is None:
            return
        import torch.distributed as dist

        if dist.is_initialized():  # the loop may have ended all groups, and this one with them
            dist.destroy_process_group(group)

    def exchange(self, value: T) -> list[T]:
        """Give every rank the values of all ranks, in the order of the ranks.

        Raises:
            RankLostError: a rank did not answer; it has died, or left the loop.
        """
        if self._group is None:
            return [value]
        import torch.distributed as dist

        every: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(every, value, group=self._group)
        except RuntimeError as error:
            self.close()
            raise RankLostError(
                f"rank {self.rank} of {self.size} could not add its numbers up with the others: "
                f"{str(error).splitlines()[0]}. A rank has died or left the loop; from here on this rank logs its own."
            ) from error
        return every


class Meter(StepMeter):
    """Measure a training loop's useful FLOPs, MFU, tokens and waste.

    Steps follow each other without a gap: a step's time runs from the end of the one before to its own end on the
    device's clock, the wait for its data included; what is not training (`away`, and compiling) is left out. Between
    steps nothing waits for the device: batches on an accelerator are copied aside and read when they have come, times
    are read off events once they have passed. Only where training stops or goes on (`leave`, `back`, `close`) is the
    device waited for, so that its lag is charged to the steps and not to what comes next. Ranks exchange two short
    messages on the host whenever a window is logged, and nothing in between.

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
        recompute: activation checkpointing of this loop: "none", "full" or a pattern of block names; read off the model
            when None.
        ceiling: a measured peak, to see the MFU against it as well.
        on_window: called with each window that is complete, on every rank.
        log_to: where rank 0 writes the record of each window, as for `headway.meter.open_sink`: "jsonl:FILE",
            "tensorboard:run", "wandb:PROJECT", "live", ...
        goodput: ledger of the run's time, kept by rank 0; the meter moves it between set-up, data wait, step, compile
            and what `leave` is told.
        smooth_over: windows, the last one included, over which a window's `smoothed` numbers go.
        packing_length: tokens that a micro-batch has room for, to see how full they are.
        batch_ranks: ranks in a row that work on each batch together, as those of tensor parallelism do: the first of
            them counts it, whatever the others are told. Read off the mesh of the model's parameters when None.
        steps_before: steps that earlier processes of the run took; windows number steps from there.
        watch: whether the forwards of the model are counted by themselves, so that `count` need not be called. One that
            takes neither `input_ids` nor latents is then traced for each shape of its arguments. None is True for such
            a model alone; of any other, what became of the forwards that `count` was told of is looked at.
        others: what else the steps run, such as a reference, a VAE, a text encoder: modules, whose forwards are
            counted by themselves, with a backward where they are trained; or cost models, of which `count` is told,
            alone or in a pair with their module, whose phases then tell an MBU.
        phases: whether some steps are divided into phases, and the code that the loop pauses in is looked at; where the
            model is not compiled as a whole.
        timeout_s: how long other ranks are waited for when a window is logged [s].
        by_messages: whether the loop exchanges the ranks' numbers with messages of its own, as `headway train` does. It
            then hands what `finished` gives of every rank to `merge`, and each step is a window.
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
        recompute: str | None = None,
        ceiling: Peak | None = None,
        on_window: Callable[[Window], None] | None = None,
        log_to: Sequence[str | Path | Sink] = (),
        goodput: Goodput | None = None,
        smooth_over: int = 1,
        packing_length: int | None = None,
        batch_ranks: int | BatchShare | None = None,
        steps_before: int = 0,
        watch: bool | None = None,
        others: Sequence[Any] = (),
        phases: bool = True,
        timeout_s: float = 60.0,
        by_messages: bool = False,
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
        self.results, self._watch, self._has_own_ledger = results, watch, cost_model is not None
        ledger = self._ledger(model, cost_model)
        # a stage of a pipeline counts what it runs itself, and the first of them the tokens
        share = batch_ranks if isinstance(batch_ranks, BatchShare) else batch_share(model, batch_ranks)
        self.batch_share = share
        if share.ranks > 1 and (stage := stage_of(model, ledger)) is not None:
            ledger, self._counts_tokens, self.batch_share = stage, share.is_first, batch_share(model)
        self.cost_model = ledger
        self.peak = peak if peak is not None else peak_of(model, self.device)
        self.recompute = recompute_of(model) if recompute is None else recompute
        self._reads_recompute = recompute is None
        self.steps_before = steps_before
        self._traffic = (
            None if optimizer is None else traffic_or_warn(model, optimizer, self.cost_model, self.recompute, results)
        )
        self.models = [self.cost_model]
        self._own = {0}  # places of the trained model's
        self._forward_traffic = {}
        self._note_traffic(0, model)
        self._warned, self.calls, self._watches = set(), CallStack(), []
        self._add_others(others)
        self.ceiling = ceiling
        self.memory_bytes_per_s = memory_bytes_per_s or bandwidth_of(self.device)
        # Sums of steps, and the rates that theirs are compared with.
        self._tally = Tally(
            self.peak,
            smooth_over,
            ceiling_flops_per_s=math.nan if ceiling is None else ceiling.flops_per_s,
            peak_bytes_per_s=self.memory_bytes_per_s,
            packing_length=packing_length,
            batch_ranks=self.batch_share.ranks,
            devices=self.phase_devices,
        )
        # forwards are timed where there is a module, and steps wait here until the device has passed them
        if not isinstance(model, CostModel):
            self._forwards = ForwardTimer(model, self._mark, self.stop_counting)
            has_queue = self.device is not None and self.device.type == "cuda"
            if phases:
                self._phases = PhaseTimer(self._forwards, self._mark, self.boundary, has_queue=has_queue)
        self._settings = settings_of(model, self.device)
        self._batches = []
        self._pending = self._make_pending(keeps_steps=False)
        if watch is not False and self.model is not None:
            from headway.meter.watch import ForwardWatch

            counts = bool(watch) or not self.cost_model.rows
            self.add_watch(ForwardWatch(model, self, counts=counts))
        self.log_every = log_every
        self.num_warmup_steps = num_warmup_steps
        self.by_messages = by_messages
        self._arrived: Sequence[list[tuple[int, Sums]]] = ()  # steps of each rank that not all ranks have passed yet
        self._num_merged = 0
        # Receivers of windows.
        self._on_window = on_window
        self._ranks: HostAllGather | None = None
        self._timeout_s = timeout_s
        self._log_to = log_to
        self._sinks: Sinks | None = None
        self._left_out: list[int] = []  # steps since the last log
        self._has_warned = False

    def _opens(self) -> bool:
        """Find the other ranks, and open the files of records on the first."""
        if self.by_messages:
            return False
        self._ranks = HostAllGather(self._timeout_s)
        if self._log_to and self._ranks.rank == 0:
            self._sinks = Sinks.open(self._log_to)
        return self._ranks.size > 1

    def step(self, *, skipped: bool = False, **extra: float) -> Window | None:
        """End an optimizer step.

        A step without a batch is one without work on this rank, as the last of an epoch may be; the first such step of
        a loop that does not say so by `count(Workload())` is warned of.

        Args:
            skipped: the loop left the update out, as a gradient scaler does after an overflow.
            extra: the loop's own numbers for the log, such as `loss=...`.

        Returns:
            The window that this step completes; None for most, and for all of a loop that merges its own.

        """
        step = self._ended_step(skipped, extra, self.num_warmup_steps)
        if self.by_messages:
            return None
        self._left_out += [self.num_steps] if step.left_out else []
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
        self._tell_watchers("begin", "logging")
        window = self._tell(self._of_all(self._ranks))
        self._tell_watchers("end", "logging")
        return window

    def finished(self) -> list[tuple[int, Sums]]:
        """Take the steps that this rank's device has passed since the last call; nothing is waited for."""
        steps = self._pending.take_each()
        memory = self._with_readings(steps[-1])[0] if steps else 0
        return [(memory, sums) for sums in steps]

    def merge(self, every: Sequence[list[tuple[int, Sums]]]) -> list[Window]:
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
            memory = max(memory for memory, _ in parts)
            window = self._tally.one_step([sums for _, sums in parts], memory, self.steps_before + self._num_merged)
            windows.append(self._of_loop(window))
        return windows

    def _of_all(self, all_ranks: HostAllGather) -> Window | None:
        mine: tuple[int, Sums] | None = None
        try:
            with self.exchanging():
                self._pending.leave_out(set().union(*all_ranks.exchange(self._left_out)))
                mine = self._take()
                every = all_ranks.exchange(mine)
        except RankLostError as error:
            warnings.warn(str(error), stacklevel=3)
            every = [mine or self._take()]
            self._tally.only(all_ranks.rank)
        memory = max(memory for memory, _ in every)
        window = self._tally.window([sums for _, sums in every], memory, self._step, self._pending.extra)
        self._warn(window)
        return None if window is None else self._of_loop(window)

    def _take(self) -> tuple[int, Sums]:
        self._left_out = []
        return self._with_readings(self._pending.take())

    def _tell(self, window: Window | None) -> Window | None:
        if window is None:
            return None
        if self._sinks is not None:
            with self.boundary.guard("Records of the meter's windows"):
                self._sinks.write(window.to_dict())
        if not window.num_steps:  # for the records alone: a run that compiles in every step has no other ones
            return None
        if self._on_window is not None:
            self._on_window(window)
        return window

    def abandon(self) -> None:
        """Close the sinks of records and the group of ranks too."""
        if self._sinks is not None:
            self._sinks.close()
        if self._ranks is not None:
            self._ranks.close()
        super().abandon()

    def _warn(self, window: Window | None) -> None:
        """Warn of impossible numbers, once; a loop that merges its steps has shown each of them."""
        if window is None or self.by_messages:
            return
        self._warn_of_slow_loop(window)
        if self._has_warned:
            return
        for warning in window.warnings:
            self._has_warned = True
            warnings.warn(warning, stacklevel=3)
