"""A run's records, its newest profile and the files beside them, read for its page."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError, LogError
from headway.explain.explanation import MOST, Finding, JobExplanation, MeanWaterfall, mean_of
from headway.explain.findings.rule import FindingPlace, TimeOf
from headway.explain.findings.rules import RULES
from headway.explain.records import explain_with_records
from headway.explain.run_folder import newest_window
from headway.explain.trace import read_traces
from headway.explain.waterfall import explain
from headway.log.run_files import CONFIG, METRICS, RUN
from headway.meter.goodput_report import FILE_NAME, GoodputReport, read_goodput
from headway.pages.folder import held_out, names_of_runs
from headway.pages.steps import marks_of
from headway.report.charts import ChartMark
from headway.report.secrets import without_secrets

_LONGEST_FILE = 20_000  # length of config.yaml and run.json on the page [characters]


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Sections of a profile on its steps."""

    about: str  # steps and ranks, in words
    mean: MeanWaterfall  # mean of the steps
    findings: tuple[Finding, ...]  # findings of its rules, the first to mend first


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run as its records show it."""

    name: str  # name of the run folder or file
    path: Path  # path of the run folder or file
    folder: Path | None  # folder of the run; None for a file of a meter's records
    records: Sequence[Mapping[str, Any]]  # records of steps, each step once
    explanation: JobExplanation  # explanation of its steps, as `headway explain` has it
    mean: MeanWaterfall  # mean step
    profile: StepProfile | None  # profile of the newest profiled steps; None where there is none
    findings: tuple[Finding, ...]  # findings of the profile and the records
    goodput: GoodputReport | None  # goodput of the whole run; None where there is no ledger that can be read
    notes: tuple[str, ...]  # remarks on the run
    files: Mapping[str, str]  # text of config.yaml and run.json, where they are
    marks: Sequence[ChartMark]  # restarts and stages
    evaluations: Sequence[Mapping[str, Any]]  # records of evaluations


def read_run(path: Path) -> ReportedRun:
    """Read a run folder, or a file of a meter's records.

    Raises:
        ConfigError: there is no record of a step.
    """
    file = path / METRICS if path.is_dir() else path
    with _without_search_for_cycles():
        explanation, records = explain_with_records(file)
    return assembled(path, explanation, records)


def assembled(path: Path, explanation: JobExplanation, records: Sequence[Mapping[str, Any]]) -> ReportedRun:
    """Add the files that stand beside the records of a run, or another tool's log, to its explanation."""
    file = path / METRICS if path.is_dir() else path
    # Files that stand beside the records of a run folder.
    folder = file.parent
    notes, goodput = list(explanation.notes), None
    if (folder / FILE_NAME).is_file():
        try:
            goodput = read_goodput(folder)
            notes += goodput.warnings
        except LogError as error:
            notes.append(f"goodput is not known: {error}")
    profile, about_profile = read_profile(folder) if file.name == METRICS else (None, ())
    (name,) = names_of_runs([path])
    return ReportedRun(
        name=name,
        path=path,
        folder=folder if file.name == METRICS else None,
        records=records,
        explanation=explanation,
        mean=mean_of(explanation.steps),
        profile=profile,
        findings=in_order(None if profile is None else profile.findings, explanation.findings),
        goodput=goodput,
        notes=(*notes, *about_profile),
        files=texts_of(path),
        marks=marks_of(folder if file.name == METRICS else None, records),
        evaluations=evaluations_of(path),
    )


def read_profile(folder: Path) -> tuple[StepProfile | None, tuple[str, ...]]:
    """Read the newest profile of a run folder.

    Returns:
        The profile, None where there is none or it cannot be read; and what a reader must know of it.
    """
    paths, _ = newest_window(folder)
    if not paths:
        return None, ()
    stamps = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    profile = _read_traces(stamps)
    if isinstance(profile, str):
        return None, (f"the profile cannot be read, and records alone tell where the time went: {profile}",)
    return profile, ()


@lru_cache(maxsize=2)  # a page that is shown again and again, as by --serve, reads a profile once
def _read_traces(stamps: tuple[tuple[Path, int, int], ...]) -> StepProfile | str:
    try:
        explanation = explain([trace for path, *_ in stamps for trace in read_traces(path)])
    except (HeadwayError, OSError) as error:
        return str(error)
    numbers, num_ranks = [step.step for step in explanation.steps], len({step.rank for step in explanation.steps})
    about = f"profiled steps {min(numbers):,} to {max(numbers):,}" + (f" of {num_ranks} ranks" if num_ranks > 1 else "")
    return StepProfile(about, mean_of(explanation.steps), explanation.findings)


def in_order(by_profile: Sequence[Finding] | None, by_records: Sequence[Finding]) -> tuple[Finding, ...]:
    """Put findings of a profile and of the records of its run in one order, the first to mend first.

    A profile sees all of its steps, so that it goes before what records suspect of the time within them; what lies
    between the steps it cannot see. What names no cause, the records have nothing to add to.

    Args:
        by_profile: of the profiled steps; None without a profile.
        by_records: of all steps.
    """
    if by_profile is None:
        return tuple(by_records)
    places = {rule.name: observer.place for rule in RULES for observer in rule.observers}
    between = {rule.name for rule in RULES if rule.in_records is not None and rule.in_records.time is TimeOf.BESIDE}
    names = {finding.id for finding in by_profile}
    more = [f for f in by_records if f.id not in names and places.get(f.id) not in (FindingPlace.VAGUE, None)]

    def order(finding: Finding) -> tuple[FindingPlace, bool, float]:
        is_suspected = finding.id not in names and finding.id not in between
        return places.get(finding.id, FindingPlace.UNEXPLAINED), is_suspected, -finding.share

    return tuple(sorted([*by_profile, *more], key=order)[:MOST])


def texts_of(path: Path) -> dict[str, str]:
    """Texts of config.yaml and run.json of a run folder, where they are, without secrets."""
    folder = path if path.is_dir() else path.parent
    return {
        name: without_secrets((folder / name).read_text(encoding="utf-8", errors="replace"), longest=_LONGEST_FILE)
        for name in (CONFIG, RUN)
        if (path.is_dir() or path.name == METRICS) and (folder / name).is_file()
    }


@contextmanager
def _without_search_for_cycles() -> Iterator[None]:
    """Leave the garbage collector out: a million small objects without cycles took it a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def evaluations_of(path: Path) -> list[Mapping[str, Any]]:
    """Read the evaluations of a run folder, or of its metrics.jsonl; none where there is no such file."""
    file = path / METRICS if path.is_dir() else path
    return held_out(file.parent) if file.name == METRICS and file.is_file() else []
