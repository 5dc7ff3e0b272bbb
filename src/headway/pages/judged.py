"""A folder that holds evaluations and no step of training, as one HTML page or as Markdown."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.log.run_files import CONFIG, METRICS, RUN
from headway.pages.folder import changed_settings, folder_sections, held_out, provenance
from headway.pages.names import names_of_runs
from headway.pages.run import SCHEMA_VERSION, texts_of
from headway.pages.verdict import scores
from headway.report import format_count
from headway.report.markdown import markdown_text
from headway.report.numbers import number
from headway.report.page import render
from headway.report.section import ReportSection


def judged_alone(path: Path) -> list[Mapping[str, Any]]:
    """Read the evaluations of a run folder, or of its metrics.jsonl; none where there is no such file.

    Args:
        path: of a run without a record of a step.
    """
    file = path / METRICS if path.is_dir() else path
    return held_out(file.parent) if file.name == METRICS and file.is_file() else []


def judged_page(path: Path, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Render evaluations as one HTML page."""
    (name,) = names_of_runs([path])
    sections = _sections(path)
    return render(
        "run.html.jinja",
        name=name,
        verdict=_sentence(evaluations),
        findings=(),
        facts=(),
        has_goodput=False,
        first=(),
        legend="",
        phases=None,
        by_heading=sections,
        notes=(),
        files=texts_of(path),
        numbers={"schema_version": SCHEMA_VERSION, "name": name, "evaluations": [*evaluations]},
    )


def judged_markdown(path: Path, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Render evaluations as Markdown."""
    sections = [section for of_heading in _sections(path).values() for section in of_heading]
    return "\n\n".join(
        [f"**{markdown_text(_sentence(evaluations))}**", *(section.as_markdown() for section in sections)]
    )


def _sentence(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Number of evaluations, and the results of the last one."""
    count = len(evaluations)
    many = f"{format_count(count)} evaluation{'' if count == 1 else 's'} and no step of training"
    step, score = number(evaluations[-1].get("step")), scores(evaluations[-1])
    when = "" if step is None else f", after step {step:,.0f}"
    result = f"the loss was {score}" if number(evaluations[-1].get("loss")) is not None else score
    return f"{many}; at the last one{when}, {result or 'no score is recorded'}."


def _sections(path: Path) -> dict[str, list[ReportSection]]:
    """Sections of the folder beside those of steps, by heading."""
    folder, texts = path if path.is_dir() else path.parent, texts_of(path)
    of_folder = folder_sections(folder, ())
    files = [changed_settings(texts.get(CONFIG, ""), texts.get(RUN, "")), provenance(texts.get(RUN, ""))]
    by_heading = of_folder | {"The run": [*of_folder["The run"], *files]}
    shown = {heading: [section for section in parts if section.rows] for heading, parts in by_heading.items()}
    return {heading: parts for heading, parts in shown.items() if parts}
