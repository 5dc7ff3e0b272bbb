"""Profile a window of a loop's steps: traces that explain by themselves the work of each step, and its module."""

import itertools
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from headway.errors import UsageError
from headway.log.boundary import ErrorBoundary
from headway.meter import clock
from headway.meter.annotations import Annotations
from headway.meter.batch_share import rank_and_size
from headway.meter.pending import PendingStep
from headway.meter.step_clock import LoopWatcher, StepTime
from headway.meter.step_meter import StepMeter
from headway.meter.trace_file import facts_of, step_facts, write_trace
from headway.stores import refuse

if TYPE_CHECKING:
    from torch import nn

_OUTER = ("evaluation", "checkpoint")  # phases in which others may begin and end
_FEWEST = 3  # steps before the window whose phases are known; one alone may be the first, which is slow
_COMPARED = 10  # steps before the window that its steps' times are compared with


class ProfiledSteps(LoopWatcher):
    """Profile some steps of a loop while entered, with `torch.profiler`.

    Each chosen rank writes `FOLDER/steps-000020-000022-rank-0.json.gz`: open it in https://ui.perfetto.dev. Its
    annotations name the steps (`ProfilerStep#20`), their phases (`phase:data_wait`; `loop:rollout` of `Meter.phase`)
    and the modules by path (`module:model.layers.3.mlp`); its key `headway` says what each step was asked to compute
    and what that costs by component. What the profiler adds to a step is measured against the steps before, told once
    and kept in the file.
    Outside of the window nothing is installed; starting the profiler and writing the file are no step's time. A profile
    that fails is missing, with a warning, and the loop goes on.

    Args:
        meter: of the loop; None for the one that starts next in this process, as those of the integrations do.
        folder: of the traces.
        steps: to record, by the numbers that the meter gives them, one after the other.
        ranks: processes that record.
        model: whose modules are named; the meter's when None.
        report: is given the line about the profile.

    Attributes:
        path: of the file that was written; None before, or where there is none.

    Raises:
        UsageError: no steps, ranks that do not exist, or a folder that cannot be made.

    >>> with headway.profile(meter, "profile", steps=range(20, 23)):   # doctest: +SKIP
    ...     train()
    """

    product = "The profile"

    def __init__(
        self,
        meter: StepMeter | None,
        folder: str | Path,
        *,
        steps: range,
        ranks: Collection[int] = (0,),
        model: "nn.Module | None" = None,
        report: Callable[[str], None] = print,
    ) -> None:
        if not steps or steps.step != 1 or steps[0] < 1:
            raise UsageError(f"steps={steps} to profile: give steps in a row, from 1 on, such as range(20, 23).")
        if not ranks or min(ranks) < 0:
            raise UsageError(f"ranks={ranks!r} to profile: give at least one; the first is 0.")
        self.path: Path | None = None
        self._meter, self._model, self._report = meter, model, report
        refuse(Path(folder), "the folder of a profile")
        self._folder, self._steps, self._ranks = Path(folder), steps, ranks
        self._rank, self._world_size = 0, 1
        self._is_over = False
        self._profiler: Any = None
        self._annotations = Annotations(None)
        self._before: deque[StepTime] = deque(maxlen=_COMPARED + 1)  # times of the steps before the window
        self._recorded: list[PendingStep] = []
        self._outer: list[str] = []  # phases around the one that lasts
        self._named: list[str] = []  # phases that the loop names and that last
        self._switching_s = 0.0

    def __enter__(self) -> Self:
        if self._meter is None:
            LoopWatcher.waiting.append(self)
            return self
        self._meter.watchers.append(self)
        if self._meter.has_started:
            self.start(self._meter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the recording if the loop has ended early, and nothing if by an error."""
        boundary = ErrorBoundary() if self._meter is None else self._meter.boundary
        with boundary.guard(self.product):
            if kind is None:
                self.stop()
            else:
                self.give_up()
        self._let_go()

    def start(self, meter: StepMeter) -> None:
        """Note which rank this is, and begin to record if the window begins with the first step."""
        self._meter = meter
        self._rank, self._world_size = rank_and_size()
        if max(self._ranks) >= self._world_size:
            raise UsageError(
                f"rank {max(self._ranks)} is to be profiled, and there are {self._world_size} processes, ranks 0 to "
                f"{self._world_size - 1}."
            )
        if self._rank not in self._ranks:
            self._let_go()
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the folder {self._folder} for profiles cannot be made: {error.strerror or error}. Name another one."
            ) from error
        self._open_before(meter, meter.steps_before + meter.num_steps + 1)

    def begin(self, phase: str) -> None:
        """Name a phase that begins."""
        if self._profiler is None:
            return
        outer = self._annotations.phase
        if outer in _OUTER and phase != outer:  # an evaluation that logs goes on as one afterwards
            self._outer.append(outer)
        self._annotations.switch(phase)

    def end(self, phase: str) -> None:
        """End the name of a phase."""
        if self._profiler is not None and self._annotations.phase == phase:
            self._annotations.switch(self._outer.pop() if self._outer else None)
        elif phase in self._outer:
            self._outer.remove(phase)

    def enter(self, name: str) -> None:
        """Name a phase of the loop's own that begins."""
        self._named.append(name)
        if self._profiler is not None:
            self._annotations.enter(name)

    def leave(self) -> None:
        """End the name of the loop's innermost phase."""
        if self._named:
            self._named.pop()
        if self._profiler is not None:
            self._annotations.leave()

    def took(self, step: PendingStep) -> None:
        """Begin to record before the window's first step, and write the file after its last."""
        assert self._meter is not None
        number = self._meter.steps_before + step.number
        if self._profiler is None:
            self._before.append(step.time)
            self._open_before(self._meter, number + 1)
            return
        step.profiled = True
        self._recorded.append(step)
        self._outer.clear()
        if number == self._steps[-1]:
            with self._meter.away("idle"):
                self._close(self._meter)
        else:
            self._annotations.step(number + 1)

    def stop(self) -> None:
        """Write the recording of a loop that has ended within the window; warn if it is empty."""
        if self._is_over:
            return
        meter, first, last = self._meter, self._steps[0], self._steps[-1]
        if self._profiler is not None and meter is not None and self._recorded:
            self._close(meter)
            return
        self.give_up()
        if meter is None or not meter.has_started:
            outcome = "no loop with a meter has run"
        else:
            outcome = f"the loop took steps {meter.steps_before + 1} to {meter.steps_before + meter.num_steps}"
        warnings.warn(f"steps {first} to {last} were to be profiled, but {outcome}: there is no trace.", stacklevel=2)

    def give_up(self) -> None:
        """Record no more, and write nothing."""
        profiler = self._profiler
        self._let_go()
        if profiler is not None:
            self._annotations.close()
            profiler.stop()

    def _open_before(self, meter: StepMeter, number: int) -> None:
        """Begin to record if a step is in the window, also in the middle of it, where a run goes on."""
        if number not in self._steps:
            return
        import torch

        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # torch does not export it
            self._let_go()
            warnings.warn(
                f"step {number} is not profiled, since another profiler records in this process, and torch has one at "
                "a time. Take the other one away, or let it record other steps.",
                stacklevel=2,
            )
            return
        with meter.away("idle"):
            begin_s = clock.now_s()
            self._annotations = Annotations(meter.model if self._model is None else self._model)
            self._annotations.prepare()
            self._start_profiler(meter)
            self._annotations.open()
            self._switching_s = clock.now_s() - begin_s
        self._annotations.step(number)
        for name in self._named:
            self._annotations.enter(name)

    def _start_profiler(self, meter: StepMeter) -> None:
        from torch.profiler import ProfilerActivity, profile

        on_cuda = meter.device is not None and meter.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        profiler = profile(activities=activities, record_shapes=True)
        profiler.start()
        self._profiler = profiler

    def _close(self, meter: StepMeter) -> None:
        """Stop to record, write the file and report the cost of the profile."""
        begin_s = clock.now_s()
        self._annotations.close()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._switching_s += clock.now_s() - begin_s
        first, last = (meter.steps_before + step.number for step in (self._recorded[0], self._recorded[-1]))
        overhead_s, cost = self._overhead()
        facts = facts_of(meter, rank=self._rank, world_size=self._world_size, overhead_s=overhead_s)
        facts["host"] = self._annotations.host
        facts["host"]["added_ns"]["phases_ns"] = self._added_to_phases()
        facts["steps"] = {str(meter.steps_before + step.number): step_facts(meter, step) for step in self._recorded}
        path = self._folder / f"steps-{first:06d}-{last:06d}-rank-{self._rank}.json.gz"
        self._write(profiler, path, facts)
        self.path = path
        self._report(f"profile of steps {first} to {last}: {path}; {cost}")
        self._let_go()

    def _write(self, profiler: Any, path: Path, facts: dict[str, Any]) -> None:
        write_trace(profiler, path, facts)

    def _overhead(self) -> tuple[float | None, str]:
        """Compare the time of steps in the window with that of steps before it [s], and say so."""
        switching = f"starting and stopping it took {self._switching_s:.2f} s, which are no step's"
        times = [*self._before, *(step.time for step in self._recorded)]
        place = max(len(self._before), 1)  # the first step of all has no end of another before it
        before, inside = _durations(times[:place]), _durations(times[place - 1 :])
        if not before or not inside:
            return None, f"what the profiler adds to a step is not known without steps before and in it; {switching}"
        usual_s, slow_s = statistics.median(before), statistics.median(inside)
        return slow_s - usual_s, (
            f"a step took {slow_s * 1e3:,.1f} ms in it and {usual_s * 1e3:,.1f} ms before (medians of {len(inside)} "
            f"and {len(before)}); {switching}"
        )

    def _added_to_phases(self) -> dict[str, int]:
        """Say how much longer each phase takes in the window than before, by the least of each [ns]; {} if not known.

        The least is what a phase takes when nothing comes between, as another process does.
        """
        before, inside = (
            [time.phases.seconds() for time in times if time.phases is not None and time.phases.is_whole]
            for times in (self._before, [step.time for step in self._recorded])
        )
        if len(before) < _FEWEST or not inside:
            return {}
        least = [
            {name: min(seconds[name] for seconds in part if name in seconds) for name in part[0]}
            for part in (before, inside)
        ]
        return {name: round((least[1][name] - least[0][name]) * 1e9) for name in least[0] if name in least[1]}

    def _let_go(self) -> None:
        self._is_over, self._profiler = True, None
        self._recorded, self._before = [], deque()
        if self in LoopWatcher.waiting:
            LoopWatcher.waiting.remove(self)
        if self._meter is not None and self in self._meter.watchers:
            self._meter.watchers.remove(self)


profile = ProfiledSteps
"""The same, by the name that a loop calls it: `with headway.profile(...)`."""


def _durations(times: Sequence[StepTime]) -> list[float]:
    """Times of the steps that compiled nothing, the first step left out [s]."""
    return [
        time.end.seconds_since(before.end) - time.away_s
        for before, time in itertools.pairwise(times)
        if not time.compiled
    ]
