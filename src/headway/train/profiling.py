"""Profile a window of steps by `torch.profiler`, with a snapshot of a GPU's memory if asked for."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from headway.errors import ConfigError
from headway.meter import Meter
from headway.train.config.run import ProfileConfig


class ProfileWindow:
    """Records some steps of this process, if it is to: a Chrome trace, and on CUDA a memory snapshot if asked for.

    profile/steps-000011-000013-rank-0.json.gz    open in https://ui.perfetto.dev or chrome://tracing
    profile/steps-000011-000013-rank-0.pickle     open in https://pytorch.org/memory_viz

    Args:
        settings: which steps and ranks; None for none.
        folder: of the run.
        rank: of this process.
        size: number of processes.
        device: where this process computes.

    Raises:
        ConfigError: a rank that does not exist, or a memory snapshot of a device that has none.
    """

    def __init__(
        self, settings: ProfileConfig | None, folder: Path, *, rank: int, size: int, device: torch.device
    ) -> None:
        self._settings = settings if settings is not None and rank in settings.ranks else None
        self._profiler: profile | None = None
        if settings is None:
            return
        if max(settings.ranks) >= size:
            raise ConfigError(
                f"run.profile.ranks names rank {max(settings.ranks)}, and the run has {size} processes, ranks 0 to "
                f"{size - 1}."
            )
        if settings.memory and device.type != "cuda":
            raise ConfigError(
                f"run.profile.memory takes effect on CUDA only, whose allocator PyTorch can record; the run is on "
                f"{device}. Take it out."
            )
        self._stem = folder / "profile" / f"steps-{settings.start:06d}-{settings.last:06d}-rank-{rank}"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]

    def before(self, step: int) -> None:
        """Begin to record if a step is the window's first."""
        if self._settings is None or step != self._settings.start:
            return
        if self._settings.memory:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        self._profiler = profile(activities=self._activities, record_shapes=True)
        self._profiler.start()

    def after(self, step: int, meter: Meter, tell: Callable[[str], None]) -> None:
        """Write what was recorded, if a step was the window's last, and tell where; that is no step's time."""
        if self._settings is None or self._profiler is None or step < self._settings.last:
            return
        with meter.away("idle"):
            self._write(self._settings, self._profiler, step, tell)
        self._profiler = None

    def _write(self, settings: ProfileConfig, profiler: profile, step: int, tell: Callable[[str], None]) -> None:
        profiler.stop()
        self._stem.parent.mkdir(exist_ok=True)
        trace = self._stem.with_name(f"{self._stem.name}.json.gz")
        profiler.export_chrome_trace(str(trace))
        if settings.memory:
            torch.cuda.memory._dump_snapshot(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                str(self._stem.with_name(f"{self._stem.name}.pickle"))
            )
            torch.cuda.memory._record_memory_history(enabled=None)
        tell(f"profile of steps {settings.start} to {step}: {trace}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of a profiler whose window was not reached to its end."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
