"""Records of a run as it writes them: metrics.jsonl, a line per step and evaluation; and the software it ran with."""

import os
import platform
import subprocess
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from headway.errors import TrainingError
from headway.log.boundary import ErrorBoundary
from headway.log.held_out import HeldOutTally
from headway.log.jsonl import LineFile, append_whole
from headway.log.records import RecordLines, RecordReader, StepRecord, is_header, known
from headway.log.run_files import LossTally
from headway.log.sinks import Sinks
from headway.version import __version__
from headway.words import Argument

if TYPE_CHECKING:
    from io import FileIO

_MOST_WAITING = 10_000  # records of about 2 kB that wait in memory for a disk that takes none
_WAITING = "The records wait in memory until the file can be written. Training goes on."


def describe_software() -> dict[str, Any]:
    """Versions of the software, and the git commit of the working directory if it is in a repository."""
    return {
        "headway": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "platform": platform.platform(),
        "git_commit": _git_commit(),
    }


class MetricsLog:
    """metrics.jsonl, one JSON object per line, in the system's hands when `write` returns; trackers get the same.

    Records that the disk does not take are a warning; they wait, and go to the file in their order once it does.

    Args:
        path: the file; appended to. None writes nowhere, as on all ranks but the first.
        last_step: records of later steps are cut off, as a continuation from this step will write them again.
        trackers: other places, as for `headway.log.sinks.open_sink`; unused where there is no file.
        lost: a file that gets a line about this continuation first, with what the steps that are cut off trained on;
            None for a run that begins.
        damaged: checkpoints that this continuation passes over, with their faults; for that line.
        boundary: around the writing of records.

    Attributes:
        losses: of the steps in the file.
        held_out: losses of its evaluations beside those.
        resumes: continuations that `lost` tells of, this one included.
        num_missing: records that the file does not have.

    Raises:
        TrainingError: a record before `last_step` cannot be read, or the file cannot be opened.
        ConfigError: a tracker cannot be opened.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        last_step: int,
        trackers: Sequence[str] = (),
        lost: Path | None = None,
        damaged: Sequence[str] = (),
        boundary: ErrorBoundary | None = None,
    ) -> None:
        self._path, self.losses, self.held_out, self.resumes = path, LossTally(), HeldOutTally(), 0
        self._boundary = boundary or ErrorBoundary()
        self._waiting: deque[bytes] = deque()
        self._lines = RecordLines()
        self.num_missing = 0
        self._file: FileIO | None = None
        self._trackers = Sinks.open(trackers, run=path.parent) if path is not None else Sinks(())
        if path is None:
            return
        with _refusals(path):
            if path.exists():
                self._go_back(path, last_step, lost, damaged)
            self._file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, and hand it to the trackers."""
        self.losses.add(record)
        self.held_out.add(record)
        if self._path is None:
            return
        self.num_missing += 1
        with self._boundary.guard(f"Records in {self._path}", _WAITING):
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append(self._lines.encode(record if isinstance(record, StepRecord) else known(record)))
            self._flush(self._path)
        with self._boundary.guard("Records in trackers"):
            self._trackers.write(record)

    def _flush(self, path: Path) -> None:
        """Append the records that wait, as far as the disk takes them."""
        if self._file is None:
            self._file = self._opened(path)
        if os.fstat(self._file.fileno()).st_nlink == 0:
            warnings.warn(
                f"{path} was deleted during the run, so the records so far are lost. Later records go to a new file "
                "of that name.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._file.close()
            self._file = None  # should the next line fail
            self._file = self._opened(path)
        while self._waiting:
            append_whole(self._file, self._waiting[0], path)
            self._waiting.popleft()
            self.num_missing -= 1

    def _opened(self, path: Path) -> "FileIO":
        """Open the file again; a new one has to begin with the headers of the lines that come."""
        file = path.open("ab", buffering=0)
        try:
            if os.fstat(file.fileno()).st_size == 0:
                append_whole(file, self._lines.headers, path)
        except OSError:
            file.close()
            raise
        return file

    def _go_back(self, path: Path, last_step: int, lost: Path | None, damaged: Sequence[str]) -> None:
        """Cut the file after a step, and remove a line that a kill left unfinished at the end."""
        kept_bytes, ended = 0, b"\n"
        redone: list[dict[str, Any]] = []
        reader = RecordReader()
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                record = reader.read(line)
                if record is None or (not is_header(record) and not isinstance(record.get("step"), int)):
                    if not file.read(1):
                        break  # torn by a kill
                    raise TrainingError(
                        f"{path}, line {number} is not the record of a step. Repair or delete the line, then "
                        "resume again."
                    )
                if redone or record.get("step", last_step) > last_step:
                    redone.append({name: record.get(name) for name in ("kind", "step", "packs", "samples_digest")})
                else:
                    kept_bytes += len(line)
                    ended = line[-1:]
                    self.losses.add(record)
                    self.held_out.add(record)
        if lost is not None:
            steps = [record for record in redone if record.pop("kind") == "step"]
            resumes = LineFile(lost)
            passed_over = {"damaged": [*damaged]} if damaged else {}
            resumes.append({"kind": "resumed", "step": last_step, "lost": steps, **passed_over})
            resumes.close()
            self.resumes = lost.read_bytes().count(b"\n")
        os.truncate(path, kept_bytes)
        if ended != b"\n":  # a kill between a record and its line break
            with path.open("ab") as file:
                file.write(b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._trackers.close()
        if self._path is not None and self._waiting:
            with self._boundary.guard(f"Records in {self._path}", _WAITING):
                self._flush(self._path)
        if self._file is not None:
            self._file.close()


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Turn a refused write into an error that names the file and says that nothing is lost."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written: {error.strerror or error}. Make room or bring the disk back, then go on with "
            f"{Argument('resume', True)}. Existing checkpoints are complete, and the run repeats the steps since the "
            "last one."
        ) from error


def _git_commit() -> str | None:
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
