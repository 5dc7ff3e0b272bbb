"""Run choices for a few steps, each in processes of its own, and correct the predictions by the measurements.

The run is that of `headway train` on the recipe's own data, in a run folder that is removed afterwards. Memory that
runs out, a crash and a run that does not end are results like any other.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from headway.config import TrainConfig, parse_config
from headway.log.records import read_records
from headway.log.run_files import METRICS
from headway.predict.prediction import Prediction
from headway.safe_path import current_folder_kept_out

Outcome = Literal["measured", "out of memory", "failed", "did not end"]

STEPS, WARM_UP = 5, 2
"""Steps that are timed, and steps before them, in which blocks compile and the allocator fills."""

LIMIT_S = 600.0
_KILLED = -signal.SIGKILL  # the system's signal to a process if the host's memory ends
_LONGEST = 200  # characters of a reason
_NO_MEMORY = ("out of memory", "OutOfMemory", "cannot allocate memory")

Command = Callable[[Path, int], list[str]]
"""The command that trains a configuration's file in so many processes."""


@dataclass(frozen=True)
class Trial:
    """Outcome of a run of a few steps."""

    outcome: Outcome  # measured, or the reason why not
    flops_per_s: float | None = None  # useful FLOPs of the timed steps over their time, all devices [FLOP/s]
    step_s: float | None = None  # mean of the timed steps [s]
    tokens_per_s: float | None = None  # real tokens of the timed steps over their time, all devices
    peak_bytes: int | None = None  # most memory that a device held [bytes]; None if it is not recorded
    reason: str = ""  # reason why there is no time, in a line


def measure(
    config: TrainConfig,
    processes: int,
    *,
    steps: int = STEPS,
    limit_s: float = LIMIT_S,
    command: Command | None = None,
) -> Trial:
    """Train a configuration for a few steps.

    Args:
        config: what to run.
        processes: a device each.
        steps: that are timed, after those that warm up [steps].
        limit_s: after which it is ended [s].
        command: what runs it; `headway train`, under torchrun for several processes, if None.
    """
    with tempfile.TemporaryDirectory(prefix="headway-tune-") as name:
        folder = Path(name)
        path = folder / "train.yaml"
        path.write_text(yaml.safe_dump(_short(config, folder / "run", WARM_UP + steps).to_dict()), encoding="utf-8")
        with current_folder_kept_out():
            process = subprocess.Popen(
                (command or _train_command)(path, processes),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # data workers of the run end with it
            )
        try:
            _, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Trial("did not end", reason=f"ended after {limit_s:g} s")
        finally:
            _end(process)
        if process.returncode:
            return _failed(process.returncode, stderr)
        return _read(folder / "run" / METRICS)


def corrected(
    candidates: Sequence[Prediction], trials: Mapping[Prediction, Trial]
) -> list[tuple[Prediction, float, Trial | None]]:
    """Rank choices again by their measurements.

    What was measured has its measured rate; the others have the predicted one times the median of measured over
    predicted. Where memory ran out, no other choice that is planned to hold as much remains.

    Args:
        candidates: in the order of their predictions.
        trials: of those that were run.

    Returns:
        Choices with their useful FLOP/s and what was seen of them, the fastest first; those that failed are left out.
    """
    # one factor for all: what predictions miss is mostly the same for each choice
    ratios = [
        trial.flops_per_s / choice.flops_per_s for choice, trial in trials.items() if trial.flops_per_s is not None
    ]
    factor = statistics.median(ratios) if ratios else 1.0
    # the least plan with which memory ran out is the limit, unless a larger one was run
    burst = [choice.memory.peak for choice, trial in trials.items() if trial.outcome == "out of memory"]
    within = [choice.memory.peak for choice, trial in trials.items() if trial.outcome == "measured"]
    limit = min((size for size in burst if size > max(within, default=0)), default=None)
    ranked: list[tuple[Prediction, float, Trial | None]] = []
    for candidate in candidates:
        trial = trials.get(candidate)
        if trial is not None and trial.flops_per_s is not None:
            ranked.append((candidate, trial.flops_per_s, trial))
        elif trial is None and (limit is None or candidate.memory.peak < limit):
            ranked.append((candidate, factor * candidate.flops_per_s, None))
    return sorted(ranked, key=lambda row: -row[1])


def _short(config: TrainConfig, folder: Path, steps: int) -> TrainConfig:
    """The same run with so many steps, and with nothing beside them."""
    raw = config.to_dict()
    raw["optim"] |= {"steps": steps, "epochs": None, "warmup_steps": min(config.optim.warmup_steps, 1)}
    raw["eval"] = {}
    raw["checkpoint"] = {"export": "never"}
    raw["run"] |= {"folder": str(folder), "trackers": [], "profile": None, "log_every": 1}
    return parse_config(raw, source="the configuration of a measured run")


def _train_command(path: Path, processes: int) -> list[str]:
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    return [sys.executable, *several, "-m", "headway", "train", str(path)]


def _end(process: "subprocess.Popen[str]") -> None:
    """End the processes that a run has left behind: its workers, or all of the run."""
    with suppress(ProcessLookupError):  # all of it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _failed(code: int, stderr: str) -> Trial:
    is_memory = code == _KILLED or any(words.lower() in stderr.lower() for words in _NO_MEMORY)
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else f"exit code {code}")
    return Trial("out of memory" if is_memory else "failed", reason=reason[:_LONGEST])


def _read(path: Path) -> Trial:
    timed = [record for record in read_records(path) if record.get("kind") == "step"][WARM_UP:]
    seconds = sum(record["wall_s"] for record in timed)
    if not timed or not seconds:
        return Trial("failed", reason="the data ended before a step could be timed")
    flops = sum(record["flops"]["total"] for record in timed)
    peak_bytes = max((record.get("peak_memory_bytes") or 0 for record in timed), default=0)
    tokens = sum(record["tokens"] for record in timed)
    return Trial("measured", flops / seconds, seconds / len(timed), tokens / seconds, peak_bytes or None)
