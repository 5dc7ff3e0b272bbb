"""Time steps and count what they computed."""

import time
from collections.abc import Callable

from headway.count import CostModel, FlopCount, Workload
from headway.devices import Peak
from headway.errors import UsageError
from headway.meter.utilisation import RunUtilisation, StepUtilisation


class StepMeter:
    """Measure each training step's exact FLOPs against its wall time.

    The clock is the process's own; the meter never synchronises a device. On CUDA a single step's time is therefore the
    time until its last launch returned, unless the loop reads a result back (logging the loss does); over a run the
    times add up to the true wall time all the same, and the run's summary is exact.

    A step's time includes the wait for its data: call `start_step` before asking the loader for the batch.

    Args:
        cost_model: the model's cost rows, with what is frozen and adapted.
        peak: what one device can do, see `headway.devices.peak_for`.
        recompute: activation checkpointing of this run, as `CostModel.count` takes it.
        world_size: devices that share the work. The workloads handed to `add` must then be those of all of them
            together; to meter one rank alone, leave this at 1 and add that rank's workloads.
        num_warmup_steps: first steps to leave out of the run's summary (compilation, caches, allocator).
        clock: monotonic clock [s].

    >>> meter = StepMeter(cost_model, peak_for("cpu", "fp32"))      # doctest: +SKIP
    >>> meter.start_step()                                          # doctest: +SKIP
    >>> meter.add(batch.workload)                                   # doctest: +SKIP
    >>> meter.end_step().mfu                                        # doctest: +SKIP
    0.41
    """

    def __init__(
        self,
        cost_model: CostModel,
        peak: Peak,
        *,
        recompute: str = "none",
        world_size: int = 1,
        num_warmup_steps: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if world_size < 1:
            raise UsageError(f"world_size={world_size} is not a number of devices; it must be at least 1.")
        if num_warmup_steps < 0:
            raise UsageError(f"num_warmup_steps={num_warmup_steps} is negative; 0 leaves no step out.")
        self.cost_model = cost_model
        self.peak = peak
        self.recompute = recompute
        self.world_size = world_size
        self.num_warmup_steps = num_warmup_steps
        self._clock = clock
        self._start_s: float | None = None
        self._data_wait_s = 0.0
        self._workload = Workload()
        self._num_steps_seen = 0
        self._num_run_steps = 0
        self._compiled: list[StepUtilisation] = []
        self._run_flops: FlopCount | None = None
        self._run_wall_s = 0.0
        self._run_data_wait_s = 0.0
        self._run_tokens = 0
        self._run_slots = 0

    def start_step(self) -> None:
        """Start the clock of a step.

        Raises:
            UsageError: the step before has not been ended.
        """
        if self._start_s is not None:
            raise UsageError("start_step() was called twice without end_step() between; a step's time would be lost.")
        self._data_wait_s = 0.0
        self._workload = Workload()
        self._start_s = self._clock()

    def add(self, workload: Workload) -> None:
        """Add what one micro-batch computes; workloads of a step add up.

        Raises:
            UsageError: no step has been started.
        """
        self._check_running("add()")
        self._workload = self._workload + workload

    def data_wait(self, seconds: float) -> None:
        """Note a part of the step's time that was spent waiting for data [s]; waits of a step add up.

        Raises:
            UsageError: no step has been started, or the wait is negative.
        """
        self._check_running("data_wait()")
        if not seconds >= 0:
            raise UsageError(f"data_wait({seconds}) is not a duration; give seconds, 0 or more.")
        self._data_wait_s += seconds

    def end_step(self, *, compiled: bool = False) -> StepUtilisation:
        """Stop the clock and count the step.

        Args:
            compiled: whether something was compiled in it; the run's summary leaves it out, unless all were.

        Returns:
            The step's FLOPs, rates and shares.

        Raises:
            UsageError: no step has been started, nothing was added, or the wait for data exceeds the step.
        """
        start_s = self._check_running("end_step()")
        wall_s = self._clock() - start_s
        self._start_s = None
        if self._workload.slots == 0:
            raise UsageError("The step ended without a workload: call add(batch.workload) for each micro-batch before.")
        if self._data_wait_s > wall_s * 1.001 + 1e-6:  # rounding of two clock readings apart
            raise UsageError(
                f"The step took {wall_s:.6f} s but waited {self._data_wait_s:.6f} s for data. Call start_step() before "
                "asking the loader for the batch, so that the wait lies inside the step."
            )
        step = StepUtilisation(
            flops=self.cost_model.count(self._workload, recompute=self.recompute),
            wall_s=wall_s,
            data_wait_s=min(self._data_wait_s, wall_s),
            tokens=self._workload.tokens,
            slots=self._workload.slots,
            peak=self.peak,
            world_size=self.world_size,
        )
        self._num_steps_seen += 1
        if self._num_steps_seen > self.num_warmup_steps:
            if compiled:
                self._compiled.append(step)
            else:
                self._accumulate(step)
        return step

    def summary(self) -> RunUtilisation:
        """Sum the run up: total FLOPs over total time of the steps after the warm-up in which nothing was compiled.

        Raises:
            UsageError: no step has been measured after the warm-up.
        """
        if self._run_flops is None:
            for step in self._compiled:
                self._accumulate(step)
        if self._run_flops is None:
            raise UsageError(
                f"There is nothing to sum up: {self._num_steps_seen} steps were measured and the first "
                f"{self.num_warmup_steps} are left out as warm-up. Run more steps or lower num_warmup_steps."
            )
        return RunUtilisation(
            flops=self._run_flops,
            wall_s=self._run_wall_s,
            data_wait_s=self._run_data_wait_s,
            tokens=self._run_tokens,
            slots=self._run_slots,
            peak=self.peak,
            world_size=self.world_size,
            num_steps=self._num_run_steps,
            num_warmup_steps=self._num_steps_seen - self._num_run_steps,
        )

    def _accumulate(self, step: StepUtilisation) -> None:
        self._num_run_steps += 1
        self._run_flops = step.flops if self._run_flops is None else self._run_flops + step.flops
        self._run_wall_s += step.wall_s
        self._run_data_wait_s += step.data_wait_s
        self._run_tokens += step.tokens
        self._run_slots += step.slots

    def _check_running(self, call: str) -> float:
        if self._start_s is None:
            raise UsageError(f"{call} was called outside a step: call start_step() first.")
        return self._start_s
