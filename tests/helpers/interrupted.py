"""Signals that fall into a stated moment of a run: its processes are held while the moment is looked for."""

import os
import signal
import time
from pathlib import Path

from helpers.run_records import read_metrics

_LIMIT_S = 300.0  # until a run comes to a moment [s]


def recorded(folder):
    """The last step that a run has recorded, 0 before its first."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open(encoding="utf-8") as file:
        return sum('"kind": "step"' in line for line in file if line.endswith("\n"))


def is_writing(folder, kind):
    """Whether a run is writing a checkpoint ("checkpoints") or an exported folder ("export")."""
    return any(path.name.endswith(".writing") for path in (Path(folder) / kind).glob(".step-*"))


def _stop(pid):
    """Hold a process, and wait until it stands."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
        time.sleep(0.0005)


def interrupt(processes, is_moment, number, targets=None):
    """Send a signal at a moment of a run: all processes are held, looked at, and let go again until it is there.

    Args:
        processes: of the run, by rank; with `pid` and `poll`.
        is_moment: whether the run's files show the moment.
        number: the signal.
        targets: process ids that get it; those of all processes, if not given.
    """
    pids = [process.pid for process in processes]
    deadline_s = time.monotonic() + _LIMIT_S
    while True:
        assert time.monotonic() < deadline_s, "the run never came to this moment"
        assert all(process.poll() is None for process in processes), "the run ended before this moment"
        if is_moment():
            try:
                for pid in pids:
                    _stop(pid)
                if is_moment():
                    for target in pids if targets is None else targets:
                        os.kill(target, number)
                    return
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)


def trained(folder):
    """What the data and the weights decide in each step's record."""
    names = ("step", "loss", "grad_norm", "tokens", "slots", "flops", "samples", "sources", "samples_digest")
    records = read_metrics(Path(folder) / "metrics.jsonl")
    return [{name: record.get(name) for name in names} for record in records if record["kind"] == "step"]
