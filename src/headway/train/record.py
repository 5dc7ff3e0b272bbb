"""What a run leaves in its folder: the resolved configuration, the software and device, and a record per step.

config.yaml     the configuration as it was resolved
run.json        versions, device, git commit, peak and convention
metrics.jsonl   one record per step and per evaluation
samples.jsonl   answers in words, if `eval.generate` asks for them
profile/        traces of the steps that `run.profile` names
summary.json    the run in one object, written at the end
checkpoints/    see `checkpoint/`
export/         model folders made of checkpoints, one for each exported step
"""

import json
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch
import yaml

import headway
from headway.errors import ConfigError, TrainingError
from headway.meter.sinks import Sinks
from headway.train.config import TrainConfig, parse_config

CONFIG, RUN, METRICS, SUMMARY = "config.yaml", "run.json", "metrics.jsonl", "summary.json"
CHECKPOINTS, EXPORTS, SAMPLES = "checkpoints", "export", "samples.jsonl"
# What may change between a run and its continuation: it does not touch the sequence of losses.
_FREE_ON_RESUME = (
    "eval",
    "checkpoint",
    "parallel",
    "plan",
    "optim.accumulation",  # other processes, the same packs in a step
    "data.eval",
    "data.workers",
    "data.prefetch_bytes",
    "run.folder",
    "run.device",
    "run.log_every",
    "run.trackers",
    "run.profile",
    "run.watchdog_s",
)


def has_run(folder: Path) -> bool:
    """Whether a folder holds a run that began; one that failed before its first step left nothing worth keeping."""
    return (folder / METRICS).exists()


def refuse_existing_run(folder: Path) -> None:
    """Refuse to start a run where there is one.

    Raises:
        ConfigError: the folder holds a run.
    """
    if has_run(folder):
        raise ConfigError(
            f"the run folder {folder} already holds a run. Continue it with --resume, start another one elsewhere with "
            "--set run.folder=FOLDER, or delete the folder."
        )


def open_run_folder(config: TrainConfig, *, resume: bool) -> Path:
    """Make the folder of a new run, or find that of an interrupted one.

    Raises:
        ConfigError: the folder holds a run and `resume` is off, or none and it is on, or the configuration has changed
            since, or the folder cannot be written.
    """
    folder = config.run.folder
    if not resume:
        refuse_existing_run(folder)
    elif not has_run(folder):
        raise ConfigError(f"there is no run to resume in {folder}; start one without --resume, or give its run.folder.")
    try:
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        if resume:
            _check_unchanged(config, folder)
        (folder / CONFIG).write_text(yaml.safe_dump(config.as_dict(), sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be written: {error.strerror}. Give another with --set run.folder=FOLDER."
        ) from error
    return folder


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def describe_software() -> dict[str, Any]:
    """Versions of what computes the run, and the git commit of the working directory if it is in a repository."""
    return {
        "headway": headway.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "platform": platform.platform(),
        "git_commit": _git_commit(),
    }


class MetricsLog:
    """metrics.jsonl, one JSON object per line, each flushed as it is written; trackers get the same records.

    Args:
        path: the file; appended to. None writes nowhere, as on all ranks but the first.
        last_step: records of later steps are cut off, as a continuation from this step will write them again.
        trackers: other places, as for `headway.meter.sinks.open_sink`; unused where there is no file.

    Raises:
        TrainingError: a record before `last_step` cannot be read.
        ConfigError: a tracker cannot be opened.
    """

    def __init__(self, path: Path | None, *, last_step: int, trackers: Sequence[str] = ()) -> None:
        self._file: TextIO | None = None
        self._trackers = Sinks.open(trackers if path is not None else ())
        if path is None:
            return
        kept = _records_until(path, last_step) if path.exists() else []
        temporary = path.with_name(f".{path.name}.writing")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            self._trackers.write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trackers.close()
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _records_until(path: Path, last_step: int) -> list[str]:
    """The lines up to a step; what a killed process left unfinished at the end goes with the rest."""
    kept: list[str] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise TrainingError(
                f"{path}, line {number} is no record of a step. Repair or delete the line, then resume again."
            ) from error
        if step > last_step:
            break
        kept.append(line)
    return kept


def _check_unchanged(config: TrainConfig, folder: Path) -> None:
    raw = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    before = _flat(parse_config(raw, source=str(folder / CONFIG)).as_dict())
    now = _flat(config.as_dict())
    changes = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not _is_free(name)
    ]
    if changes:
        raise ConfigError(
            f"the run in {folder} began with other settings: {'; '.join(changes)}. A resumed run repeats exactly what "
            "an uninterrupted one would have done, so set them back, or start a new run in another run.folder."
        )


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(free + ".") for free in _FREE_ON_RESUME)


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if items is None:
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _git_commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
