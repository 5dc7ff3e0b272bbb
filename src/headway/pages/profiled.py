"""The steps of a run that were profiled last: their mean waterfall, and what to mend first by it and by the records."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from headway.errors import HeadwayError
from headway.explain.comparison import MeanStep, mean_step
from headway.explain.explanation import MOST, Finding
from headway.explain.findings.rule import FindingPlace, TimeOf
from headway.explain.findings.rules import RULES
from headway.explain.run_folder import newest_window
from headway.explain.trace import read_traces
from headway.explain.waterfall import explain


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Sections of what a profile says of its steps.

    Attributes:
        about: which steps, on how many ranks.
        mean: their mean.
        findings: of its rules, what to mend first.
    """

    about: str
    mean: MeanStep
    findings: tuple[Finding, ...]


def read_profile(folder: Path) -> tuple[StepProfile | None, tuple[str, ...]]:
    """Read the newest profile of a run folder.

    Args:
        folder: of the run.

    Returns:
        The profile, None where there is none or it cannot be read; and what a reader must know of it.
    """
    paths, about = newest_window(folder)
    if not paths:
        return None, ()
    stamps = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    profile = _read(stamps, about)
    if isinstance(profile, str):
        return None, (f"the profile cannot be read, and records alone tell where the time went: {profile}",)
    return profile, ()


@lru_cache(maxsize=2)  # a page that is shown again and again, as by --serve, reads a profile once
def _read(stamps: tuple[tuple[Path, int, int], ...], about: str) -> StepProfile | str:
    try:
        explanation = explain([trace for path, *_ in stamps for trace in read_traces(path)])
    except (HeadwayError, OSError) as error:
        return str(error)
    return StepProfile(about, mean_step("profile", explanation), explanation.findings)


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
