"""The clock of the throughput benchmark, and a `headway` command with that clock at the end of its optimizer steps.

    .venv/bin/python benchmarks/step_clock.py ENDS.json cpu train CONFIG     # as headway_run.py starts it

The command runs as it is. The clock hangs on PyTorch's public hook that any optimizer calls once it has stepped, and
its times go to ENDS.json when the command ends.
"""

import json
import multiprocessing
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Clock:
    """Times the end of each step; on CUDA only after the device is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ends_s: list[float] = []
        self.cpu_ends_s: list[float] = []

    def step_ended(self) -> None:
        """Note the wall time, and the processor time of this process and its data workers; called after each step."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.ends_s.append(time.perf_counter())
        self.cpu_ends_s.append(time.process_time() + sum(map(_spent_by, _workers())))

    def spent_s(self, warmup: int) -> tuple[float, float]:
        """Wall time and processor time from the end of the last warm-up step to the end of the last step [s]."""
        wall_s, cpu_s = (ends[-1] - ends[warmup - 1] for ends in (self.ends_s, self.cpu_ends_s))
        return wall_s, cpu_s

    def write(self, path: Path) -> None:
        """Write the times to a file, for another process."""
        path.write_text(json.dumps([self.ends_s, self.cpu_ends_s]), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Clock":
        """Take up the times that another process has written."""
        clock = cls(torch.device("cpu"))
        clock.ends_s, clock.cpu_ends_s = json.loads(path.read_text(encoding="utf-8"))
        return clock


class OneAhead:
    """Lets the host be one step ahead of the device, as `headway train` does, and reads losses once they have come."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._before: torch.cuda.Event | None = None

    def step_ended(self, loss: torch.Tensor) -> torch.Tensor:
        """Wait for the end of the step before; return where this step's loss will be, on the host."""
        if not self._is_cuda:
            return loss
        copy = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        end.record()
        if self._before is not None:
            self._before.synchronize()
        self._before = end
        return copy

    def wait(self) -> None:
        """Wait until the device is done."""
        if self._is_cuda:
            torch.cuda.synchronize()


def _workers() -> list[int | None]:
    return [child.pid for child in multiprocessing.active_children()]


def _spent_by(pid: int | None) -> float:
    """Processor time of a process [s], where the system tells (Linux); 0 once it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def main() -> None:
    """Run the command with the clock."""
    from headway.cli.app import main as headway

    path, device, *arguments = sys.argv[1:]
    clock = Clock(torch.device(device))
    register_optimizer_step_post_hook(lambda *_: clock.step_ended())
    sys.argv = ["headway", *arguments]
    try:
        headway()
    finally:
        clock.write(Path(path))


if __name__ == "__main__":
    main()
