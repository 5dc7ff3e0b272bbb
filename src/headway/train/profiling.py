"""Profile a window of a run's steps, with a snapshot of a GPU's memory if asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.config.run import ProfileConfig
from headway.data.feed import Feed
from headway.errors import ConfigError
from headway.meter.pending import PendingStep
from headway.meter.profile import ProfiledSteps
from headway.meter.step_meter import StepMeter
from headway.train.recorder import StepRecorder

if TYPE_CHECKING:
    from headway.models.router import RouterSummary

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
                f"run.profile.ranks names rank {max(settings.ranks)}, and the run has {size} processes, ranks 0 to "
                f"{size - 1}."
            )
        if settings.memory and meter.device.type != "cuda":
            raise ConfigError(
                f"run.profile.memory takes effect on CUDA only, whose allocator PyTorch can record; the run is on "
                f"{meter.device}. Take it out."
            )
        steps = range(settings.start, settings.last + 1)
        super().__init__(meter, folder / "profile", steps=steps, ranks=settings.ranks, report=note)
        self._memory = settings.memory
        self._feed, self._recorder = feed, recorder
        # By the step's number; of experts a function, since the device is not to be waited for within the window.
        self._told: dict[int, tuple[dict[str, float], Callable[[], RouterSummary | None]]] = {}

    def enter(self, phase: str) -> None:
        """Name the phase that the loop enters."""
        if self._profiler is not None and self._meter is not None:
            with self._meter.boundary.guard(self.product):
                self._annotations.switch(_PHASES.get(phase))

    def took(self, step: PendingStep) -> None:
        """Note what making the step's packs took, and how evenly experts were used, too."""
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
