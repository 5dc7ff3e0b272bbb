"""Profile a window of a run's steps, with a snapshot of a GPU's memory if asked for; or some of every long run."""

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from headway.config.run import ProfileConfig
from headway.data.feed import Feed
from headway.errors import ConfigError
from headway.meter import clock
from headway.meter.pending import PendingStep
from headway.meter.profile import ProfiledSteps
from headway.meter.step_clock import LoopWatcher, StepTime
from headway.meter.step_meter import StepMeter
from headway.train.recorder import StepRecorder

if TYPE_CHECKING:
    from headway.models.experts import RouterSummary

LARGEST_SHARE = 0.005  # largest share of a run's time for its automatic profiles
FIRST_S = 4.0  # assumed cost of a profile before the first, as on a busy machine [s]
_STEPS, _COMPARED = 2, 20  # steps that are recorded; steps of which a speed is the median
_CHANGED, _LOOKS = 1.5, 3  # times as fast or slow as when the last profile was taken, at so many looks in a row
_MOST_FILES, _LARGEST_BYTES = 4, 64 << 20  # in a run's folder; of a file
# Phases of the loop by the names that a trace has for them; others, such as exchanges between ranks, have none.
_PHASES = {
    "data wait": "data_wait",
    "forward": "forward",
    "backward": "backward",
    "update": "optimizer",
    "logging": "logging",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}


class ProfileWindow(ProfiledSteps):
    """Records some steps of this process, if it is to: a trace, and on CUDA a memory snapshot if asked for.

    profile/steps-000011-000013-rank-0.json.gz    open in https://ui.perfetto.dev or chrome://tracing
    profile/steps-000011-000013-rank-0.pickle     open in https://pytorch.org/memory_viz

    Args:
        settings: which steps and ranks.
        folder: of the run.
        meter: of the run.
        size: number of processes.
        feed: of the run; what its workers spent on the packs of each step goes into the trace.
        recorder: of the run; how evenly experts were used goes there too.
        tell: is given the line about the profile.

    Raises:
        ConfigError: a rank that does not exist, or a memory snapshot of a device that has none.
    """

    def __init__(
        self,
        settings: ProfileConfig,
        folder: Path,
        meter: StepMeter,
        *,
        size: int,
        feed: Feed,
        recorder: StepRecorder,
        note: Callable[[str], None],
    ) -> None:
        if max(settings.ranks) >= size:
            raise ConfigError(
                f"run.profile.ranks names rank {max(settings.ranks)}, but the run has {size} processes, ranks 0 to "
                f"{size - 1}."
            )
        if settings.memory and meter.device.type != "cuda":
            raise ConfigError(
                f"run.profile.memory takes effect on CUDA only, but the run is on {meter.device}. Take it out."
            )
        steps = range(settings.start, settings.last + 1)
        super().__init__(meter, folder / "profile", steps=steps, ranks=settings.ranks, report=note)
        self._memory = settings.memory
        self._feed, self._recorder = feed, recorder
        # By the step's number; of experts a function, since the device is not to be waited for within the window.
        self._told: dict[int, tuple[dict[str, float], Callable[[], RouterSummary | None]]] = {}

    @property
    def is_over(self) -> bool:
        """True if the window records no more."""
        return self._is_over

    def compare_with(self, times: Iterable[StepTime]) -> None:
        """Take in the times of the steps before the window, if it did not watch them itself."""
        self._before.extend(times)

    def enter(self, phase: str) -> None:
        """Name the phase that the loop enters."""
        if self._profiler is not None and self._meter is not None:
            with self._meter.boundary.guard(self.product):
                self._annotations.switch(_PHASES.get(phase))

    def took(self, step: PendingStep) -> None:
        """Note the time of making the step's packs, and the step's routing to experts, too."""
        assert self._meter is not None
        if self._profiler is not None:
            facts = dict(self._feed.making_s), self._recorder.router_of_last()
            self._told[self._meter.steps_before + step.number] = facts
        super().took(step)

    def _start_profiler(self, meter: StepMeter) -> None:
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        super()._start_profiler(meter)

    def _write(self, profiler: Any, path: Path, facts: dict[str, Any]) -> None:
        for number, (making_s, router) in self._told.items():
            balance = router()
            facts["steps"][str(number)]["making_s"] = making_s
            facts["steps"][str(number)]["router"] = None if balance is None else balance._asdict()
        super()._write(profiler, path, facts)
        if self._memory:
            snapshot = path.with_name(path.name.replace(".json.gz", ".pickle"))
            torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _let_go(self) -> None:
        super()._let_go()
        if self._memory:
            torch.cuda.memory._record_memory_history(enabled=None)


class AutoProfile(LoopWatcher):
    """Records a few steps of a run by itself, within a part of its time that nobody misses.

    Once the run is warm two steps are recorded, and again when its speed has changed for long: so that `headway
    explain` and `headway report` have a whole step of every run that is long enough. A run is long enough if its
    profiles take at most a two-hundredth of its time: the first is assumed to cost four seconds, later ones what those
    before have cost. Files that are large, or more than a few, are not kept.

    Args:
        folder: of the run.
        meter: of the run.
        num_steps: after which it ends.
        window: makes the window of some steps.
    """

    product = "The automatic profile"

    def __init__(
        self, folder: Path, meter: StepMeter, *, num_steps: int, window: Callable[[range], ProfileWindow]
    ) -> None:
        self._folder, self._meter, self._num_steps, self._make = folder / "profile", meter, num_steps, window
        self._window: ProfileWindow | None = None
        self._recent: deque[float] = deque(maxlen=_COMPARED)  # times of the last steps [s]
        self._times: deque[StepTime] = deque(maxlen=_COMPARED // 2)  # times that the window's steps are compared with
        self._last_s: float | None = None
        self._usual_s: float | None = None  # time of a step when the last profile was taken [s]
        self._num_changed = 0  # looks in a row at which steps took another time than then
        self._num_profiles, self._cost_s, self._trained_s = 0, 0.0, 0.0

    def __enter__(self) -> "AutoProfile":
        self._meter.watchers.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._meter.boundary.guard(self.product):
            self.give_up()

    def enter(self, phase: str) -> None:
        """Name the phase that the loop enters, in the window that is open."""
        if self._window is not None:
            self._window.enter(phase)

    def begin(self, phase: str) -> None:
        """Name a phase that begins, in the window that is open."""
        if self._window is not None:
            self._window.begin(phase)

    def end(self, phase: str) -> None:
        """End the name of a phase, in the window that is open."""
        if self._window is not None:
            self._window.end(phase)

    def took(self, step: PendingStep) -> None:
        """Hand a step to the window that is open; else look whether to open one before the next step."""
        now_s, before_s = step.time.end.host_s, self._last_s
        self._last_s = now_s
        step_s = 0.0 if before_s is None else max(0.0, now_s - before_s - step.time.away_s)
        if self._window is not None:
            self._go_on(self._window, step, step_s)
            return
        self._times.append(step.time)
        if step.time.compiled or before_s is None:
            self._recent.clear()  # the run is not warm, or no longer
            return
        self._recent.append(step_s)
        self._trained_s += step_s
        number = self._meter.steps_before + step.number
        # Looks are as far apart as the steps that they compare, so that each sees others.
        if len(self._recent) == _COMPARED and step.number % _COMPARED == 0 and self._is_worth_it(number):
            self._open(number + 1)

    def stop(self) -> None:
        """Write the recorded part of a loop that has ended within the window."""
        if self._window is not None:
            self._window.stop()
        self._window = None

    def give_up(self) -> None:
        """Record no more."""
        window, self._window = self._window, None
        if window is not None:
            window.give_up()
        if self in self._meter.watchers:
            self._meter.watchers.remove(self)

    def _is_worth_it(self, step: int) -> bool:
        """Say whether there is something new to see, and time and room for it."""
        now_s, usual_s = median(self._recent), self._usual_s
        if usual_s is not None:
            is_changed = max(now_s, usual_s) > _CHANGED * min(now_s, usual_s)
            self._num_changed = self._num_changed + 1 if is_changed else 0
            if self._num_changed < _LOOKS:
                return False
        next_s = self._cost_s / self._num_profiles if self._num_profiles else FIRST_S
        # Steps ahead are taken at the higher of the two speeds: a run that is slow for a while gains no time by that.
        run_s = self._trained_s + (self._num_steps - step) * min(now_s, usual_s or now_s)
        is_cheap = self._cost_s + next_s <= LARGEST_SHARE * run_s
        is_room = step + _STEPS < self._num_steps and len(list(self._folder.glob("*.json.gz"))) < _MOST_FILES
        return is_cheap and is_room and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # not exported

    def _open(self, first: int) -> None:
        begin_s = clock.now_s()
        self._usual_s, self._num_changed = median(self._recent), 0
        self._window = self._make(range(first, first + _STEPS))
        self._window.compare_with(self._times)
        self._window.start(self._meter)
        self._num_profiles += 1
        self._cost_s += clock.now_s() - begin_s

    def _go_on(self, window: ProfileWindow, step: PendingStep, step_s: float) -> None:
        begin_s = clock.now_s()
        window.took(step)
        # A slower step is a cost as well as starting, stopping and writing.
        self._cost_s += clock.now_s() - begin_s + max(0.0, step_s - (self._usual_s or 0.0))
        if window.is_over:
            self._window = None
            self._last_s = None
            self._recent.clear()
            self._times.clear()
            if window.path is not None and window.path.stat().st_size > _LARGEST_BYTES:
                window.path.unlink()
