"""Sections of a report beside those of the mean step: sources, ranks, restarts, memory, evaluations, answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.explain.records import METRICS
from headway.log.jsonl import as_object
from headway.report import format_bytes, format_rate, format_share
from headway.report.charts import heat_strip, line_chart
from headway.report.numbers import number, numbers
from headway.report.page import chart_figure, html_table, safe

_MOST_RANKS, _MOST_SOURCES = 64, 12
_MOST_ANSWERS, _LONGEST = 12, 400  # of the last evaluation [characters]


def folder_sections(path: Path, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sections as HTML; what the records do not hold has none.

    Args:
        path: a run folder, or a file of records.
        records: of steps.
    """
    folder = path if path.is_dir() else path.parent if path.name == METRICS else None
    parts = [*_source_losses(records), *_ranks(records)]
    if folder is not None:
        parts += [*_restarts(folder), *_memory(folder), *_evaluations(folder), *_answers(folder)]
    return parts


def _source_losses(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The loss of each source over the steps, where there are several."""
    names = dict.fromkeys(name for one in records for name in _mapping(one.get("sources")))
    parts = []
    for name in [*names][:_MOST_SOURCES] if len(names) > 1 else ():
        values = [number(_mapping(_mapping(one.get("sources")).get(name)).get("loss")) for one in records]
        known = [(one["step"], value) for one, value in zip(records, values, strict=True) if value is not None]
        if known:
            title = f"Loss of source {name}"
            chart = line_chart(title, [float(one["step"]) for one in records], values, form=lambda v: f"{v:.4g}")
            ends = (("first", known[0]), ("last", known[-1]))
            rows = [[f"{which}, step {step}", f"{loss:.4g}"] for which, (step, loss) in ends]
            parts.append(chart_figure(title, chart, ["of the records", "loss"], rows))
    return parts


def _ranks(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Work and speed of each rank over the steps, where there are several."""
    parts = []
    for key, what, form in (
        ("rank_flops", "Work of each rank, useful FLOPs of a step over the mean of all ranks", format_share),
        ("rank_flops_per_busy_s", "Speed of each rank while it computes", format_rate),
    ):
        of_steps = [numbers(one.get(key)) for one in records]
        count = max((len(one) for one in of_steps), default=0)
        if count < 2 or count > _MOST_RANKS:
            continue
        if key == "rank_flops":
            of_steps = [[flops * len(one) / (sum(one) or 1.0) for flops in one] for one in of_steps]
        by_rank = [[one[rank] if rank < len(one) else None for one in of_steps] for rank in range(count)]
        known = [[value for value in row if value is not None] for row in by_rank]
        chart = heat_strip(what, [(f"rank {rank}", row) for rank, row in enumerate(by_rank)], form=form)
        rows = [[f"rank {rank}", form(sum(row) / len(row)), form(max(row))] for rank, row in enumerate(known) if row]
        parts.append(chart_figure(what, chart, ["rank", "mean of the steps", "most"], rows))
    return parts


def _restarts(folder: Path) -> list[str]:
    rows = []
    for one in _lines(folder / "resumes.jsonl"):
        if one.get("kind") == "resumed":
            lost = one.get("lost")
            rows.append([str(one.get("step")), str(len(lost) if isinstance(lost, list) else 0)])
    return _table("Restarts", ["went on after step", "steps that were taken again"], rows)


def _memory(folder: Path) -> list[str]:
    found = _object(folder / "memory.json")
    predicted, measured = _mapping(found.get("predicted")), _mapping(found.get("measured"))
    rows = [[name, _bytes(predicted.get(name)), _bytes(measured.get(name))] for name in {**predicted, **measured}]
    rows = [row for row in rows if any(row[1:])]
    return _table("Memory of a device, predicted and measured", ["part", "predicted", "measured"], rows)


def _evaluations(folder: Path) -> list[str]:
    rows = [
        [str(one.get("step")), f"{loss:.4f}" if (loss := number(one.get("loss"))) is not None else "",
         format_share(exact) if (exact := number(one.get("exact_match"))) is not None else ""]
        for one in _lines(folder / METRICS, b'"evaluation"') if one.get("kind") == "evaluation"
    ]  # fmt: skip
    return _table("Evaluations", ["after step", "loss", "exact match"], rows)


def _answers(folder: Path) -> list[str]:
    """Answers in words of the last evaluation that asked for them."""
    answers = [one for one in _lines(folder / "samples.jsonl") if one.get("kind") == "sample"]
    last = [one for one in answers if one.get("step") == answers[-1].get("step")]
    rows = [
        [
            *(str(one.get(name, ""))[-_LONGEST:] for name in ("prompt", "gold", "answer")),
            "yes" if one.get("exact") else "no",
        ]
        for one in last[:_MOST_ANSWERS]
    ]
    title = f"Answers after step {last[-1].get('step')}" if last else ""
    return _table(title, ["asked", "wanted", "answered", "exact"], rows)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"<h2>{safe(title)}</h2>", html_table(headings, rows)] if rows else []


def _lines(path: Path, holding: bytes = b"") -> list[dict[str, Any]]:
    """Objects of the lines of a file that hold some bytes."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [found for line in file if holding in line and (found := as_object(line)) is not None]


def _object(path: Path) -> dict[str, Any]:
    return (as_object(path.read_bytes()) or {}) if path.is_file() else {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _bytes(value: object) -> str:
    known = number(value)
    return "" if known is None else format_bytes(known)
