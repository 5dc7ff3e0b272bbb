"""Names of a run folder's files, whole writes of them, and the losses in its records.

config.yaml     the configuration as it was resolved
run.json        versions, device, git commit, peak and convention
metrics.jsonl   one record per step and per evaluation
resumes.jsonl   one line per continuation, with what the steps that were lost had trained on
samples.jsonl   answers in words, if `eval.generate` asks for them
profile/        traces of the steps that `run.profile` names
explain.json    what `headway explain` says of the run, once it was asked
summary.json    the run in one object, written at the end
memory.json     memory as predicted and as measured, by part; on CUDA
checkpoints/    see `checkpoint/`
export/         model folders made of checkpoints, one for each exported step
"""

import json
import re
import shutil
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway import hub, stores
from headway.cache import write_whole
from headway.errors import UsageError

CONFIG, RUN, METRICS, SUMMARY = "config.yaml", "run.json", "metrics.jsonl", "summary.json"
MANIFEST = "manifest.json"
"""File in the folder of a checkpoint; written last."""
_IN_STORE = re.compile(rf"{hub.EXPORTS}/.*\.safetensors|.*\.distcp")
CHECKPOINTS, EXPORTS, SAMPLES, RESUMES = "checkpoints", hub.EXPORTS, "samples.jsonl", "resumes.jsonl"


def run_copy(path: Path, *, here: Path | None = None) -> Path:
    """A run or a model to read: the path itself, or a copy on this machine of the files behind a URL.

    The pieces of checkpoints and the weights of exports stay in the store.

    Args:
        path: of a run folder, a model folder or a file of records.
        here: where it goes; the URL's copy if None.

    Raises:
        StoreError: the store cannot be read.
        UsageError: nothing is there, and `here` is None; or the folder holds runs alone.
    """
    holds_files = not path.is_dir() or any(child.is_file() for child in path.iterdir())
    below = () if holds_files else (*path.glob(f"*/{METRICS}"), *path.glob(f"*/*/{METRICS}"))  # runs/digits/run
    if runs := sorted(str(file.parent.relative_to(path)) for file in below):
        raise UsageError(f"{path} is no run's folder. Runs within it: {', '.join(runs[-5:])}. Name one of them.")
    copy = stores.fetch(path, lambda name: not _IN_STORE.fullmatch(name), here=here)
    if copy == path:
        return path
    if here is None and not copy.exists():
        raise UsageError(f"{stores.shown(path)} holds nothing. Check the URL.")
    for folder in (copy / CHECKPOINTS).glob("step-*"):
        if not (folder / MANIFEST).is_file():  # one that was cut off, or is written now, or was deleted
            shutil.rmtree(folder)
    return copy


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object so that it is there whole or not at all."""
    write_whole(path, lambda file: file.write(json.dumps(content, indent=1).encode() + b"\n"))


def further_losses(record: Mapping[str, Any]) -> dict[str, float]:
    """Losses that an objective records beside "loss", as NAME_loss, by their names.

    >>> further_losses({"loss": 1.0, "depth_loss": 0.5, "other_loss": None})
    {'depth': 0.5}
    """
    losses = {key.removesuffix("_loss"): value for key, value in record.items() if key.endswith("_loss")}
    return {name: value for name, value in losses.items() if value is not None}


@dataclass
class LossTally:
    """First and last losses of a run's steps, taken down as the records pass, so that none is read again at the end.

    Attributes:
        steps: step records seen.
        skipped: those whose update was left out because their numbers were not finite; they have no loss.
        empty: those with nothing to learn from, which have no loss either.
        first: the first loss [nats per supervised token]; None before it.
    """

    steps: int = 0
    skipped: int = 0
    empty: int = 0
    first: float | None = None
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    _further: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take down a record, if it is one of a step."""
        if record.get("kind") != "step":
            return
        self.steps += 1
        loss, further = record.get("loss"), further_losses(record)
        for name, value in further.items():
            self._further.setdefault(name, deque(maxlen=100)).append(value)
        if loss is not None:
            self.first = loss if self.first is None else self.first
            self._recent.append(loss)
        elif record.get("empty"):
            self.empty += 1
        elif not further:
            self.skipped += 1

    @property
    def last(self) -> float | None:
        """Mean of the last tenth of the losses, at most 100 and at least one of them; None without any.

        >>> tally = LossTally()
        >>> for loss in [9.0] * 18 + [1.0, 3.0]:
        ...     tally.add({"kind": "step", "loss": loss})
        >>> tally.last
        2.0
        """
        return self._mean_of_last(self._recent)

    @property
    def last_further(self) -> dict[str, float]:
        """The same of each further loss that the objective records, by its name."""
        means = {name: self._mean_of_last(losses) for name, losses in self._further.items()}
        return {name: mean for name, mean in means.items() if mean is not None}

    def _mean_of_last(self, losses: Iterable[float]) -> float | None:
        count = min(100, max(1, (self.steps - self.skipped - self.empty) // 10))
        last = list(losses)[-count:]
        return sum(last) / len(last) if last else None
