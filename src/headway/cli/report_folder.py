"""Sections of a report beside those of the mean step: sources, ranks, restarts, memory, evaluations, answers."""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.cli.report_section import ReportSection
from headway.files import open_plain
from headway.log.jsonl import as_object
from headway.log.run_files import METRICS
from headway.report import format_bytes, format_flops, format_rate, format_share
from headway.report.charts import DrawnLine, bar_chart, heat_strip, line_chart
from headway.report.numbers import number, numbers

SUMMARY, RESUMES = "summary.json", "resumes.jsonl"
EXPLANATION = "explain.json"
_PROFILE = re.compile(r"steps-(\d+)-\d+-rank-")
_RISEN = 1.05  # times its least, from which on the loss on held-out samples is said to have risen
_BASE64 = re.compile(r"[A-Za-z0-9+/=]{100,40000}")
_SEEN = 0.01  # of the time or the FLOPs; less stands in the table alone
_UNPROFILED = "Records tell no time of components; a profile does."
_MOST_RANKS, _MOST_SOURCES = 64, 12
_LARGEST_PICTURE = 100_000  # drawn.png of a larger size stays out of the page [bytes]
_MOST_ANSWERS, _LONGEST = 12, 400  # of the last evaluation [characters]


class FolderSections:
    """What a run folder tells beside the mean step; what the records do not hold has no section.

    Args:
        path: a run folder, or a file of records.
        records: of steps.
    """

    def __init__(self, path: Path, records: Sequence[Mapping[str, Any]]) -> None:
        self._folder = path if path.is_dir() else path.parent if path.name == METRICS else None
        self._records = records

    def held_out_loss(self) -> DrawnLine | None:
        """Loss of held-out samples over the steps; None where nothing was judged."""
        found = [] if self._folder is None else _held_out(self._folder)
        pairs = [(number(one.get("step")), number(one.get("loss"))) for one in found]
        known = sorted((step, loss) for step, loss in pairs if step is not None and loss is not None)
        return DrawnLine("held-out", *zip(*known, strict=True)) if known else None

    def learnt(self) -> list[ReportSection]:
        """Evaluations, answers of the last one, what was drawn."""
        return [part for of in (_evaluations, _answers, _drawn) for part in self._of_folder(of)]

    def speed(self) -> list[ReportSection]:
        """Time of components beside their FLOPs, ranks, memory by part."""
        times = [] if self._folder is None else _times(self._folder, self._records)
        return [*times, *_ranks(self._records), *self._of_folder(_memory)]

    def data(self) -> list[ReportSection]:
        """Loss and tokens of each source, where there are several."""
        return _source_losses(self._records)

    def history(self) -> list[ReportSection]:
        """Restarts, and what other tools would print."""
        return [part for of in (_restarts, _conventions) for part in self._of_folder(of)]

    def _of_folder(self, of: Callable[[Path], list[ReportSection]]) -> list[ReportSection]:
        return [] if self._folder is None else of(self._folder)


def _source_losses(records: Sequence[Mapping[str, Any]]) -> list[ReportSection]:
    """The loss of each source over the steps, where there are several."""
    names = dict.fromkeys(name for one in records for name in _mapping(one.get("sources")))
    shown = [*names][:_MOST_SOURCES] if len(names) > 1 else []
    parts = _source_shares(records, shown)
    for name in shown:
        values = [number(_mapping(_mapping(one.get("sources")).get(name)).get("loss")) for one in records]
        known = [(one["step"], value) for one, value in zip(records, values, strict=True) if value is not None]
        if known:
            title = f"Loss of source {name}"
            chart = line_chart(title, [float(one["step"]) for one in records], values, form=lambda v: f"{v:.4g}")
            ends = (("first", known[0]), ("last", known[-1]))
            rows = [[f"{which}, step {step}", f"{loss:.4g}"] for which, (step, loss) in ends]
            parts.append(ReportSection(title, ["of the records", "loss"], rows, chart=chart))
    return parts


def _source_shares(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[ReportSection]:
    """Share of each source in the tokens of the steps."""
    by_name: dict[str, list[float | None]] = {name: [] for name in names}
    for record in records:
        sources = _mapping(record.get("sources"))
        tokens = {name: max(number(_mapping(one).get("tokens")) or 0.0, 0.0) for name, one in sources.items()}
        whole = sum(tokens.values())
        for name, row in by_name.items():
            row.append(tokens.get(name, 0.0) / whole if whole else None)
    known = {name: [share for share in row if share is not None] for name, row in by_name.items()}
    if not any(known.values()):
        return []
    title = "Share of each source in the tokens of a step"
    chart = heat_strip(title, [*by_name.items()], form=format_share)
    rows = [[name, *(format_share(one) for one in (min(row), sum(row) / len(row), max(row)))]
            for name, row in known.items()]  # fmt: skip
    return [ReportSection(title, ["source", "least", "mean of the steps", "most"], rows, chart=chart)]


def _ranks(records: Sequence[Mapping[str, Any]]) -> list[ReportSection]:
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
        parts.append(ReportSection(what, ["rank", "mean of the steps", "most"], rows, chart=chart))
    return parts


def _times(folder: Path, records: Sequence[Mapping[str, Any]]) -> list[ReportSection]:
    """Share of FLOPs beside share of time of each component, in the steps that a profile explains."""
    steps = _object(folder / EXPLANATION).get("steps")
    profiled = [_mapping(one) for one in steps] if isinstance(steps, list) else []
    by_step = [_mapping(one.get("by")) for one in profiled]
    tables = [by.get("rows") for by in by_step if by.get("key") == "component"]
    found = [row for rows in tables if isinstance(rows, list) for row in rows]
    flops, ns = dict[str, float](), dict[str, float]()
    for row in map(_mapping, found):
        name = str(row.get("name"))
        flops[name] = flops.get(name, 0.0) + max(number(row.get("flops")) or 0.0, 0.0)
        ns[name] = ns.get(name, 0.0) + max(number(row.get("ns")) or 0.0, 0.0)
    title = "FLOPs against time by component"
    if not (all_ns := sum(ns.values())):
        if not any(_mapping(one.get("flops_by_component")) for one in records):
            return []
        rows = [
            [] if (folder / "profile").is_dir() else ["run.profile.start=N", "a setting of the run: profiles steps"]
        ]
        rows.append(["headway explain RUN --by component", "writes explain.json, which this page reads"])
        return [ReportSection(title, ["first", "why"], [row for row in rows if row], _UNPROFILED)]
    all_flops = sum(flops.values())
    ordered = sorted(ns, key=lambda name: (-ns[name], name))
    shown = [(name, flops[name] / all_flops if all_flops else 0.0, ns[name] / all_ns) for name in ordered]
    rows = [[name, format_share(work), format_share(time)] for name, work, time in shown]
    bars = [
        (f"{name}, {what}", share, kind)
        for name, *both in shown
        for kind, (what, share) in enumerate(zip(("FLOPs", "time"), both, strict=True))
        if share and max(both) >= _SEEN
    ]
    chart = _bars_of_two(title, bars, format_share)
    says = _which_steps(folder, profiled, records)
    says += " FLOPs with what was run again, time in which kernels of it ran."
    return [ReportSection(title, ["component", "share of FLOPs", "share of time"], rows, says, chart)]


def _which_steps(folder: Path, profiled: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> str:
    """Which steps explain.json is of, and whether the run has gone on to another profile since."""
    steps = [int(step) for one in profiled if (step := number(one.get("step"))) is not None]
    last = max((int(step) for one in records if (step := number(one.get("step"))) is not None), default=0)
    if not steps:
        return "Of steps that a profile explains."
    which = f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    said = f"Of {which}, which a profile explains, of a run with records up to step {last}."
    again = "`headway explain RUN --by component` makes explain.json anew."
    newest = max((int(found[1]) for path in folder.glob("profile/steps-*")
                  if (found := _PROFILE.match(path.name)) is not None), default=0)  # fmt: skip
    if max(steps) > last:
        return f"{said} That is not these records: {again}"
    if newest > max(steps):
        return f"{said} A later profile begins with step {newest}: {again}"
    return said


def _conventions(folder: Path) -> list[ReportSection]:
    """What other tools would charge for the last step of a run that has ended, and print against the same peak."""
    summary = _object(folder / SUMMARY)
    mfu, found = number(summary.get("mfu")), summary.get("conventions")
    rows = []
    for one in found if isinstance(found, list) else ():
        flops, ratio = (number(_mapping(one).get(name)) for name in ("flops", "ratio_to_useful"))
        if not isinstance(one, Mapping):
            continue
        rows.append(
            [
                f"{one.get('name')}/{one.get('version')}",
                "" if flops is None else format_flops(flops),
                "" if ratio is None else f"{ratio:.3f}",
                "" if ratio is None or mfu is None else format_share(ratio * mfu),
                str(one.get("why", ""))[:_LONGEST],
            ]
        )
    headings = ["convention", "FLOPs of the last step", "x useful", "MFU with this run's time and peak", "counts"]
    return _section("What other tools would print", headings, rows)


def restarts(path: Path) -> list[float]:
    """The steps after which a run went on."""
    folder = path if path.is_dir() else path.parent
    steps = [number(one.get("step")) for one in _lines(folder / RESUMES) if one.get("kind") == "resumed"]
    return [step for step in steps if step is not None]


def _restarts(folder: Path) -> list[ReportSection]:
    rows = []
    for one in _lines(folder / RESUMES):
        if one.get("kind") == "resumed":
            lost = one.get("lost")
            rows.append([str(one.get("step")), str(len(lost) if isinstance(lost, list) else 0)])
    says = "A dashed line across the charts over steps is a restart."
    return _section("Restarts", ["went on after step", "steps that were taken again"], rows, says)


def _memory(folder: Path) -> list[ReportSection]:
    found = _object(folder / "memory.json")
    predicted, measured = _mapping(found.get("predicted")), _mapping(found.get("measured"))
    rows = [[name, _bytes(predicted.get(name)), _bytes(measured.get(name))] for name in {**predicted, **measured}]
    rows = [row for row in rows if any(row[1:])]
    bars = [
        (f"{name}, {what}", value, kind)
        for name, *_ in rows
        for kind, (what, of) in enumerate({"predicted": predicted, "measured": measured}.items())
        if (value := number(of.get(name))) is not None and value >= 0
    ]
    title = "Memory of a device by part, predicted and measured"
    chart = _bars_of_two(title, bars, format_bytes)
    return [ReportSection(title, ["part", "predicted", "measured"], rows, chart=chart)] if rows else []


def _bars_of_two(title: str, bars: Sequence[tuple[str, float, int]], form: Callable[[float], str]) -> str:
    """Bars of two kinds below each other, by name, value and kind; "" of none."""
    kinds = [kind for *_, kind in bars]
    return bar_chart(title, [(name, value) for name, value, _ in bars], form=form, kinds=kinds) if bars else ""


def _held_out(folder: Path) -> list[Mapping[str, Any]]:
    """Records of evaluations, in the order of their steps."""
    return [one for one in _lines(folder / METRICS, b'"evaluation"') if one.get("kind") == "evaluation"]


def _evaluations(folder: Path) -> list[ReportSection]:
    found = _held_out(folder)
    rows = [
        [str(one.get("step")), f"{loss:.4f}" if (loss := number(one.get("loss"))) is not None else "",
         format_share(exact) if (exact := number(one.get("exact_match"))) is not None else ""]
        for one in found
    ]  # fmt: skip
    says = _overfitting([(one.get("step"), loss) for one in found if (loss := number(one.get("loss"))) is not None])
    return _section("Evaluations", ["after step", "loss", "exact match"], rows, says)


def _overfitting(losses: Sequence[tuple[object, float]]) -> str:
    """A sentence where the loss on held-out samples has risen since its least; "" where it has not."""
    if not losses:
        return ""
    (least_step, least), (last_step, last) = min(losses, key=lambda one: one[1]), losses[-1]
    if last <= _RISEN * least:
        return ""
    return (
        f"The held-out loss was least after step {least_step}, {least:.4f}, and is {last:.4f} after step {last_step}: "
        "since then the model has learnt its training samples by heart rather than what they have in common. The "
        "checkpoint of that time, fewer epochs or more data are what helps."
    )


def _answers(folder: Path) -> list[ReportSection]:
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
    by_sample = {one.get("where"): one["picture"] for one in answers if _is_picture(one.get("picture"))}
    pictures = [by_sample.get(one.get("where"), "") for one in last[:_MOST_ANSWERS]]
    title = f"Answers after step {last[-1].get('step')}" if last else ""
    headings = ["asked", "wanted", "answered", "exact"]
    return [ReportSection(title, headings, rows, pictures=pictures if any(pictures) else ())] if rows else []


def _is_picture(value: object) -> bool:
    """Whether a record holds a small JPEG in base64, whose first three bytes are FF D8 FF."""
    return isinstance(value, str) and value.startswith("/9j/") and _BASE64.fullmatch(value) is not None


def _drawn(folder: Path) -> list[ReportSection]:
    """What the drawing demo had its model draw, and who read it as what was asked for."""
    judged, picture = _object(folder / "drawn.json"), folder / "drawn.png"
    digits = _mapping(judged.get("digits"))
    if not digits or not picture.is_file() or picture.stat().st_size > _LARGEST_PICTURE:
        return []
    data = base64.b64encode(picture.read_bytes()).decode()
    alt = "What the model drew, a row for each digit"
    columns = ("asked", "classifier", "itself")
    rows = [[name, *(str(_mapping(of).get(column, "")) for column in columns)] for name, of in digits.items()]
    headings = ("digit", "drawn", "read so by a classifier", "read so by the model")
    return [ReportSection("Drawn", headings, rows, chart=f'<img alt="{alt}" src="data:image/png;base64,{data}">')]


def _section(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], says: str = "") -> list[ReportSection]:
    return [ReportSection(title, headings, rows, says)] if rows else []


def _lines(path: Path, holding: bytes = b"") -> list[dict[str, Any]]:
    """Objects of the lines of a file that hold some bytes."""
    if not path.is_file():
        return []
    with open_plain(path) as file:
        return [found for line in file if holding in line and (found := as_object(line)) is not None]


def _object(path: Path) -> dict[str, Any]:
    return (as_object(path.read_bytes()) or {}) if path.is_file() else {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}  # as JSON has it; to ask for a Mapping takes ten times as long


def _bytes(value: object) -> str:
    known = number(value)
    return "" if known is None else format_bytes(known)
