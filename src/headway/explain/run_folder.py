"""Facts of a run folder beside the records of its steps: profile, device, resumes, end, time between the steps."""

import re
from collections.abc import Mapping
from pathlib import Path

from headway.devices.names import named_devices
from headway.errors import HeadwayError
from headway.log.jsonl import as_object
from headway.log.run_files import CONFIG, SUMMARY
from headway.report import format_duration

UNFINISHED_NOTE = "the run has not ended, or was killed"  # beginning of the note on such a run
TRACES = "steps-*-rank-*.json.gz"  # names that `headway.profile` gives to traces
_TRACE = re.compile(r"steps-(\d+)-(\d+)-rank-(\d+)\.json\.gz")
BESIDE = ("compile", "evaluation", "checkpoint")


def notes_of_run(folder: Path, last_step: int) -> list[str]:
    """Make notes of the resumes and the end of a run, as its folder from `headway train` shows them.

    Args:
        folder: of the run.
        last_step: number of the last step that has a record.
    """
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
        return "unknown device", None
    try:
        sizes = [entry.memory_bytes for entry in named_devices(name) if entry.memory_bytes]
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
        "each step has what came since the one before, and what came after the last is in none"
        if steps_tell
        else "the records do not say in which steps"
    )
    return spent, [f"beside training the whole run spent: {spent_text}; {where} (`headway goodput` has all of it)."]


def newest_window(folder: Path) -> tuple[list[Path], str]:
    """Find the traces of the steps that were profiled last, of all ranks, with a phrase about them.

    Args:
        folder: of a run, with its traces in profile/; or one that holds traces itself.
    """
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
    others = (
        "" if len(windows) == 1 else f", the last of {len(windows)} windows there; name a file of another to see it"
    )
    ranks = "1 rank" if len(traces) == 1 else f"{len(traces)} ranks"
    return traces, f"of the profile of steps {newest[0]} to {newest[1]}, {ranks}, in {traces[0].parent}{others}."
