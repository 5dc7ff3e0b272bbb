"""Records of a run's steps, each step once and in a bounded number, and facts beside them in its folder."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.devices.names import named_devices
from headway.errors import ConfigError, HeadwayError
from headway.explain.events import UNKNOWN_DEVICE
from headway.files import open_plain
from headway.log.jsonl import as_object, sharing_decoder
from headway.log.records import Measured, RecordReader, StepRecord, can_be_joined, is_header, joined
from headway.log.run_files import CONFIG, SUMMARY
from headway.report import format_duration
from headway.report.quantity import integer, quantity

UNFINISHED_NOTE = "the run has not ended, or was killed"  # beginning of the note on such a run
TRACES = "steps-*-rank-*.json.gz"  # names that `headway.profile` gives to traces
_TRACE = re.compile(r"steps-(\d+)-(\d+)-rank-(\d+)\.json\.gz")
BESIDE = ("compile", "evaluation", "checkpoint")


def notes_of_run(folder: Path, last_step: int) -> list[str]:
    """Make notes of the resumes and the end of a run, as its folder from `headway train` shows them."""
    notes = []
    resumes = [as_object(line) or {} for line in _lines(folder / "resumes.jsonl")]
    steps = [str(resume["step"]) for resume in resumes if resume.get("kind") == "resumed" and "step" in resume]
    if steps:
        times = "once" if len(steps) == 1 else f"{len(steps):,} times"
        notes.append(f"the run was resumed {times}, after step {', '.join(steps[:5])}.")
    if (folder / CONFIG).exists() and not (folder / SUMMARY).exists():
        notes.append(f"{UNFINISHED_NOTE}: these are its records up to step {last_step}.")
    return notes


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


def device_of_run(folder: Path) -> tuple[str, int | None]:
    """The device's name, as run.json has it, and its memory [bytes], where that is known."""
    run = as_object((folder / "run.json").read_bytes()) if (folder / "run.json").is_file() else None
    device = (run or {}).get("device")
    name = device.get("name") if isinstance(device, Mapping) else None
    if not isinstance(name, str):
        return UNKNOWN_DEVICE, None
    try:
        sizes = [entry.total_memory_bytes for entry in named_devices(name) if entry.total_memory_bytes]
    except HeadwayError:
        sizes = []
    return name, min(sizes, default=None)


def time_beside(
    folder: Path, of_records: Mapping[str, int], *, steps_tell: bool
) -> tuple[Mapping[str, int], list[str]]:
    """Time of the run that was no training, from its ledger, else its records: evaluations, checkpoints, compiling.

    Args:
        folder: of the run.
        of_records: sums over the records, by the names in `BESIDE` [ns].
        steps_tell: whether records say in which steps it came.

    Returns:
        Time by name [ns], and notes about it.
    """
    from headway.meter.goodput_report import FILE_NAME, read_goodput  # the meter takes a while to load

    if not (folder / FILE_NAME).is_file():
        return {name: ns for name, ns in of_records.items() if ns}, []
    try:
        report = read_goodput(folder)
    except HeadwayError as error:
        return {}, [f"where the time between the steps went is not known: {error}"]
    spent: dict[str, int] = {name: ns for name, ns in report.ns.items() if ns and name in BESIDE}
    if not spent:
        return {}, []
    spent_text = ", ".join(f"{name} {format_duration(ns / 1e9)}" for name, ns in spent.items())
    where = (
        "Each step has the time since the step before, and no step has the time after the last"
        if steps_tell
        else "The records do not say in which steps"
    )
    return spent, [f"besides training the run spent: {spent_text}. {where}; `headway goodput` shows the whole run."]


def newest_window(folder: Path) -> tuple[list[Path], str]:
    """Find the traces of the steps that were profiled last, of all ranks, with a phrase about them."""
    windows: dict[tuple[int, int], dict[int, Path]] = {}
    for where in (folder / "profile", folder):
        for path in where.glob(TRACES):
            if match := _TRACE.fullmatch(path.name):
                windows.setdefault((int(match[1]), int(match[2])), {})[int(match[3])] = path
        if windows:
            break
    if not windows:
        return [], ""
    newest = max(windows)
    by_rank = windows[newest]
    traces = [by_rank[rank] for rank in sorted(by_rank)]
    others = "" if len(windows) == 1 else f", the last of {len(windows)} windows. To see another, name its files"
    ranks = "1 rank" if len(traces) == 1 else f"{len(traces)} ranks"
    return traces, f"this is the profile of steps {newest[0]} to {newest[1]}, {ranks}, in {traces[0].parent}{others}."


_MOST_RECORDS = 2**15  # most records in memory; those of a longer run are joined, two by two, as often as is needed
_MOST_STEPS = 2**53  # a larger number is no float


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One record of steps, checked, with the entries that all of explain needs."""

    step: int
    num_steps: int
    wall_ns: int  # time of all steps of the record
    away_ns: int  # within them, and not training
    world_size: int
    record: Mapping[str, Any]
    is_left_out: bool = False  # all its steps were warm-up or compiled something: it tells their time alone

    def ns(self, name: str) -> int:
        """Time of a step that the record has under a name in seconds, its share of the record's [ns]."""
        return round((quantity(self.record.get(name)) or 0.0) * 1e9) // self.num_steps

    def phases_ns(self) -> dict[str, int]:
        """Phases of a step [ns], divided as in the sampled steps; none where no step was sampled."""
        times = self.record.get("phases_s")
        seconds = {} if not isinstance(times, Mapping) else {str(k): quantity(s) or 0.0 for k, s in times.items()}
        total_s = sum(seconds.values())
        if not total_s:
            return {}
        return {name: round(s / total_s * self.wall_ns / self.num_steps) for name, s in seconds.items()}


class _RecordSeries:
    def __init__(self, single: int | None) -> None:
        self.by_step: dict[int, RecordedStep] = {}
        self.size = 1  # records that stand in a window
        self.repeated = 0
        self._single, self._room, self._most = single, 0, _MOST_RECORDS

    def add(self, entry: RecordedStep) -> None:
        """Take in a record; in a resumed run the last record of each step counts, if it stands by itself."""
        last = next(reversed(self.by_step.values()), entry)
        if self.size > 1 and entry.step <= last.step:
            self.repeated += 1
            return
        window = _joined(last, entry, self._single) if self._room else None
        if window is not None:
            del self.by_step[last.step]
        self._room = self.size - 1 if window is None else self._room - 1
        self.repeated += self.by_step.pop(entry.step, None) is not None
        self.by_step[entry.step] = window or entry
        if len(self.by_step) >= self._most and not self._room:  # each window is full
            self._halve()

    def _halve(self) -> None:
        entries = [*self.by_step.values()][::-1]
        self.by_step = {}
        while entries:
            entry = entries.pop()
            if entries and (window := _joined(entry, entries[-1], self._single)) is not None:
                entry = window
                entries.pop()
            self.by_step[entry.step] = entry
        self.size, self._room = 2 * self.size, 0
        self._most = max(_MOST_RECORDS, 2 * len(self.by_step))  # records of an older file hardly join


def _joined(before: RecordedStep, after: RecordedStep, single: int | None) -> RecordedStep | None:
    first, second = (
        entry.record.measured if isinstance(entry.record, StepRecord) else entry.record for entry in (before, after)
    )
    if single in (before.step, after.step) or not (isinstance(first, Measured) and isinstance(second, Measured)):
        return None
    if before.is_left_out != after.is_left_out or not can_be_joined(first, second):
        return None
    try:
        return checked_record(joined(first, second))
    except (KeyError, TypeError, ValueError, ArithmeticError):  # the lines were edited
        return None


def read_steps(path: Path, single: int | None) -> tuple[list[RecordedStep], list[str]]:
    """Read the records of steps, each step once, and describe the rest of the file."""
    series = _RecordSeries(single)
    # Lines of other kinds and damaged lines are counted, so that the notes say what is left out.
    others, timeless, unreadable = 0, 0, list[int]()
    is_torn, reader = False, RecordReader(sharing_decoder())
    try:
        with open_plain(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                record = reader.read(line, derives=series.size == 1)
                if record is None:
                    unreadable.append(number)
                    # Only the last line of a file can lack its end.
                    is_torn = not line.endswith(b"\n")
                    continue
                if is_header(record):
                    continue
                entry = checked_record(record)
                if entry is None:
                    others += 1
                    timeless += record.get("kind", "step") == "step"
                    continue
                series.add(entry)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}. Name a run folder or its file."
        ) from error
    if not series.by_step:
        raise _no_steps(path, others)
    notes = _notes(path, unreadable, series, timeless=timeless, is_torn=is_torn)
    return sorted(map(_whole, series.by_step.values()), key=lambda entry: entry.step), notes


def _whole(entry: RecordedStep) -> RecordedStep:
    """Derive the record of a window; edited lines stay as they are, and explain names their step."""
    if not isinstance(entry.record, Measured):
        return entry
    try:
        return replace(entry, record=StepRecord(entry.record))
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return entry


def _notes(path: Path, unreadable: list[int], series: _RecordSeries, *, timeless: int, is_torn: bool) -> list[str]:
    notes = []
    if is_torn:
        unreadable.pop()
        notes.append("the last line was not written to its end, as of a run that was killed or is being written.")
    if unreadable:
        numbers = ", ".join(map(str, unreadable[:5])) + (", ..." if unreadable[5:] else "")
        notes.append(f"line {numbers} of {path.name} cannot be read and is left out.")
    if timeless:
        notes.append(f"{timeless} records of steps do not tell how long they took, and are left out.")
    if series.size > 1:
        notes.append(f"the run is long: up to {series.size} records that follow each other are joined into one.")
    if series.repeated:
        notes.append(
            f"{series.repeated} steps were recorded again after a restart; the last record of each step counts."
        )
    return notes


def _no_steps(path: Path, others: int) -> ConfigError:
    lines = f"only {others} other records" if others else "no line that can be read"
    return ConfigError(
        f"{path} holds no record of a step with its time (wall_s, or step_s), {lines}. Let the run take a step, or "
        "give the metrics.jsonl of `headway train` or of `Meter(log_to=[...])`."
    )


def checked_record(record: Mapping[str, Any]) -> RecordedStep | None:
    """The record of one or more steps; None of anything else, such as an evaluation."""
    if record.get("kind", "step") != "step":
        return None
    try:
        num_steps = integer(record.get("num_steps", 1))
        is_left_out = num_steps == 0 and bool(record.get("num_left_out"))
        if is_left_out:
            num_steps = integer(record["num_left_out"])
            wall_s, away_s = record["left_out_s"], record.get("compile_s") or 0.0
        else:
            wall_s = record["wall_s"] if record.get("wall_s") is not None else record["step_s"] * num_steps
            away_s = record.get("away_s") or 0.0
        world_size = integer(record.get("world_size", 1))
        wall_ns, away_ns = (integer(round(seconds * 1e9)) for seconds in (wall_s, away_s))
        step = integer(record["step"])
        if record["step"] is not step:
            record = {**record, "step": step}
        entry = RecordedStep(step, num_steps, wall_ns, away_ns, world_size, record, is_left_out)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    is_sound = num_steps >= 1 and world_size >= 1 and entry.wall_ns >= num_steps and abs(entry.step) < _MOST_STEPS
    return entry if is_sound else None
