"""Run folders: names by which a reader distinguishes them, and sections of a report: tables, charts and settings."""

import itertools
import json
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headway.config import TrainConfig
from headway.config.tree import ITEM, Setting, walk
from headway.files import open_plain
from headway.log.held_out import HeldOutTally
from headway.log.jsonl import as_object
from headway.log.run_files import METRICS, RESUMES, SUMMARY
from headway.plugins import hooks_of_all
from headway.report import format_bytes, format_flops, format_rate, format_share, printable
from headway.report.charts import ChartMark, DrawnLine, lines_chart
from headway.report.quantity import number, numbers
from headway.report.secrets import HIDDEN, hide_people
from headway.report.section import ReportSection

_LONGEST_NAME = 48  # length of a name [characters]
_BEFORE = 12  # beginning of a window of a long name before the place where names differ [characters]


def names_of_runs(paths: Sequence[Path]) -> list[str]:
    """Name run folders, or files of records, each differently for the eye.

    Args:
        paths: at least one, which is named with the folder that it is in; metrics.jsonl stands for its folder.

    Returns:
        As many names of at most 48 characters, a number in brackets behind them where paths alone do not differ.

    >>> names_of_runs([Path("/runs/before/run"), Path("/runs/after/run")])
    ['before', 'after']
    >>> names_of_runs([Path("/runs/digits/run/metrics.jsonl")])
    ['digits/run']
    """
    parts = [_parts(path) for path in paths]
    last = [path[-1] for path in parts]
    if len(parts) == 1:
        own, with_folder = (printable("/".join(parts[0][-count:])) for count in (1, 2))
        return _shortened([with_folder if len(with_folder) <= _LONGEST_NAME else own])
    # An ending that all paths share tells nothing, as `run` in a/run and b/run.
    while all(len(path) > 1 for path in parts) and len({path[-1] for path in parts}) == 1:
        parts = [path[:-1] for path in parts]
    most = max(map(len, parts))
    suffixes = (["/".join(path[-length:]) for path in parts] for length in range(1, most + 1))
    names = next((tried for tried in suffixes if len({*tried}) == len(paths)), last)
    shown = _shortened([printable(name) for name in names])
    # Names that look alike nevertheless are numbered, past numbers that are names themselves.
    looks = Counter(map(_look, shown))
    used = {look for look, count in looks.items() if count == 1}
    names = []
    for name in shown:
        numbered = (f"{name} ({n})" for n in itertools.count(1))
        distinct = name if looks[_look(name)] == 1 else next(tried for tried in numbered if _look(tried) not in used)
        used.add(_look(distinct))
        names.append(distinct)
    return names


def _parts(path: Path) -> tuple[str, ...]:
    absolute = path.absolute()
    folder = absolute.parent if absolute.name == METRICS else absolute
    parts = hide_people(str(folder)).split("/")  # pages are shown to others
    return tuple(part for part in parts if part not in ("", ".", "..")) or (str(folder),)


def _shortened(names: Sequence[str]) -> list[str]:
    """Names of bounded length, each with the place where it differs from the rest."""
    room = _LONGEST_NAME - 6  # for "..." on both sides
    differs = next((place for place, letters in enumerate(zip(*names, strict=False)) if len({*letters}) > 1), 0)
    start = max(0, differs - _BEFORE)
    return [name if len(name) <= _LONGEST_NAME else _window(name, min(start, len(name) - room), room) for name in names]


def _window(name: str, start: int, room: int) -> str:
    end = start + room
    return f"{'...' if start else ''}{name[start:end]}{'...' if end < len(name) else ''}"


def _look(name: str) -> str:
    """A name as the eye has it: letters that are composed in another way look the same."""
    return unicodedata.normalize("NFKC", name)


_BASE64 = re.compile(r"[A-Za-z0-9+/=]{100,40000}")
_MOST_RANKS, _MOST_SOURCES = 64, 12
_MOST_ANSWERS, _LONGEST_ANSWER = 12, 400  # answers of the last evaluation, and length of one [characters]


_NOTHING = ReportSection("", (), ())


def folder_sections(
    folder: Path | None, records: Sequence[Mapping[str, Any]], marks: Sequence[ChartMark] = ()
) -> dict[str, list[ReportSection]]:
    """Sections of a run beside its mean step, by heading; a section without rows stands for missing files."""
    ranks, sources = _ranks(records), _source_losses(records, marks)
    if folder is None:
        return {"Speed and memory": ranks, "Data": sources}
    return {
        "Learning": [_evaluations(folder, records), _answers(folder), *_of_families(folder)],
        "Speed and memory": [*ranks, _memory(folder)],
        "Data": sources,
        "The run": [_restarts(folder), _conventions(folder)],
    }


def held_out_loss(evaluations: Sequence[Mapping[str, Any]]) -> DrawnLine | None:
    """Loss of held-out samples over the steps; None without evaluations."""
    pairs = [(number(record.get("step")), number(record.get("loss"))) for record in evaluations]
    points = sorted((step, loss) for step, loss in pairs if step is not None and loss is not None)
    return DrawnLine("held out", *zip(*points, strict=True)) if points else None


def _source_losses(records: Sequence[Mapping[str, Any]], marks: Sequence[ChartMark]) -> list[ReportSection]:
    names = dict.fromkeys(name for record in records for name in _mapping(record.get("sources")))
    shown = [*names][:_MOST_SOURCES] if len(names) > 1 else []
    parts = []
    for name in shown:
        values = [number(_mapping(_mapping(record.get("sources")).get(name)).get("loss")) for record in records]
        points = [value for value in values if value is not None]
        if points:
            title = f"Loss of source {name}"
            steps = [float(record["step"]) for record in records]
            chart = lines_chart(title, [DrawnLine("", steps, values)], form="plain", marks=marks, is_noisy=True)
            parts.append(ReportSection(title, chart=chart, remark=f"from {points[0]:.4g} to {points[-1]:.4g}"))
    return parts


def _ranks(records: Sequence[Mapping[str, Any]]) -> list[ReportSection]:
    parts = []
    for key, what, form in (
        ("rank_flops", "Work of each rank, useful FLOPs of a step over the mean of all ranks", format_share),
        ("rank_flops_per_busy_s", "Speed of each rank while it computes", format_rate),
    ):
        of_steps = [numbers(record.get(key)) for record in records]
        count = max((len(values) for values in of_steps), default=0)
        if count < 2 or count > _MOST_RANKS:
            continue
        if key == "rank_flops":
            of_steps = [[flops * len(values) / (sum(values) or 1.0) for flops in values] for values in of_steps]
        by_rank = [[values[rank] if rank < len(values) else None for values in of_steps] for rank in range(count)]
        finite = [[value for value in row if value is not None] for row in by_rank]
        rows = [[f"rank {rank}", *map(form, (min(row), sum(row) / len(row), max(row)))]
                for rank, row in enumerate(finite) if row]  # fmt: skip
        parts.append(ReportSection(what, ["rank", "least", "mean of the steps", "most"], rows))
    return parts


def _conventions(folder: Path) -> ReportSection:
    """Bills of other tools for the last step of a run that has ended, and the MFU that they print of the same peak."""
    summary = _object(folder / SUMMARY)
    mfu, conventions = number(summary.get("mfu")), summary.get("conventions")
    rows = []
    for convention in conventions if isinstance(conventions, list) else ():
        flops, ratio = (number(_mapping(convention).get(name)) for name in ("flops", "ratio_to_useful"))
        if not isinstance(convention, Mapping):
            continue
        rows.append(
            [
                f"{convention.get('name')}/{convention.get('version')}",
                "" if flops is None else format_flops(flops),
                "" if ratio is None else f"{ratio:.3f}",
                "" if ratio is None or mfu is None else format_share(ratio * mfu),
                str(convention.get("why", ""))[:_LONGEST_ANSWER],
            ]
        )
    headings = ["convention", "FLOPs of the last step", "x useful", "MFU with this run's time and peak", "counts"]
    return ReportSection("What other tools would print", headings, rows)


def restarts(folder: Path) -> list[float]:
    """The steps after which a run went on."""
    steps = [number(record.get("step")) for record in _resumes(folder)]
    return [step for step in steps if step is not None]


def _resumes(folder: Path) -> list[dict[str, Any]]:
    return [record for record in _lines(folder / RESUMES) if record.get("kind") == "resumed"]


def _restarts(folder: Path) -> ReportSection:
    lost = [(record, value if isinstance(value := record.get("lost"), list) else []) for record in _resumes(folder)]
    rows = [[str(record.get("step")), str(len(steps))] for record, steps in lost]
    return ReportSection("Restarts", ["went on after step", "steps that were taken again"], rows)


def _memory(folder: Path) -> ReportSection:
    parts = _object(folder / "memory.json")
    predicted, measured = _mapping(parts.get("predicted")), _mapping(parts.get("measured"))
    rows = [[name, _bytes(predicted.get(name)), _bytes(measured.get(name))] for name in {**predicted, **measured}]
    rows = [row for row in rows if any(row[1:])]
    title = "Memory of a device by part, predicted and measured"
    return ReportSection(title, ["part", "predicted", "measured"], rows)


def held_out(folder: Path) -> list[Mapping[str, Any]]:
    """Records of evaluations, in the order of their steps."""
    return [record for record in _lines(folder / METRICS, b'"evaluation"') if record.get("kind") == "evaluation"]


def _evaluations(folder: Path, records: Sequence[Mapping[str, Any]]) -> ReportSection:
    evaluations = held_out(folder)
    rows = [
        [str(record.get("step")), f"{loss:.4f}" if (loss := number(record.get("loss"))) is not None else "",
         format_share(exact) if (exact := number(record.get("exact_match"))) is not None else ""]
        for record in evaluations
    ]  # fmt: skip
    return ReportSection("Evaluations", ["after step", "loss", "exact match"], rows, _overfitting(records, evaluations))


def _overfitting(records: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> str:
    """A sentence if held-out loss has parted from training loss; "" if it has not."""
    tally = HeldOutTally()
    steps = [{**record, "kind": "step"} for record in records]  # an evaluation comes after the step of its number
    for record in sorted([*steps, *evaluations], key=lambda record: number(record.get("step")) or 0.0):
        tally.add(record)
    if tally.parting is None:
        return ""
    return (
        f"Overfitting: {tally.parting}. Since then the model has learnt its training samples by heart rather than what "
        "they have in common. The checkpoint of that time (`checkpoint.keep_best`), fewer epochs or more data help."
    )


def _answers(folder: Path) -> ReportSection:
    answers = [record for record in _lines(folder / "samples.jsonl") if record.get("kind") == "sample"]
    last = [record for record in answers if record.get("step") == answers[-1].get("step")]
    rows = [
        [
            *(str(record.get(name, ""))[-_LONGEST_ANSWER:] for name in ("prompt", "gold", "answer")),
            "yes" if record.get("exact") else "no",
        ]
        for record in last[:_MOST_ANSWERS]
    ]
    by_sample = {record.get("where"): record["picture"] for record in answers if _is_picture(record.get("picture"))}
    pictures = [by_sample.get(record.get("where"), "") for record in last[:_MOST_ANSWERS]]
    title = f"Answers after step {last[-1].get('step')}" if last else ""
    headings = ["asked", "wanted", "answered", "exact"]
    return ReportSection(title, headings, rows, pictures=pictures if any(pictures) else ())


def _is_picture(value: object) -> bool:
    """Tell whether a record holds a small JPEG in base64, which begins with the bytes FF D8 FF."""
    return isinstance(value, str) and value.startswith("/9j/") and _BASE64.fullmatch(value) is not None


def _of_families(folder: Path) -> list[ReportSection]:
    return [section for sections in hooks_of_all("sections") for section in sections(folder)]


def _lines(path: Path, holding: bytes = b"") -> list[dict[str, Any]]:
    """Objects of the lines of a file that hold some bytes."""
    if not path.is_file():
        return []
    with open_plain(path) as file:
        return [record for line in file if holding in line and (record := as_object(line)) is not None]


def _object(path: Path) -> dict[str, Any]:
    return (as_object(path.read_bytes()) or {}) if path.is_file() else {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}  # JSON has dicts; to ask for a Mapping takes ten times as long


def _bytes(value: object) -> str:
    num_bytes = number(value)
    return "" if num_bytes is None else format_bytes(num_bytes)


_LONGEST = 120  # length of a value [characters]
_UNSAID = "not set"


def changed_settings(config: str, facts: str) -> ReportSection:
    """The settings that differ from the recipe's file or from the default; no rows where the texts are no run's."""
    try:
        resolved, run = yaml.safe_load(config), json.loads(facts or "{}")
    except (yaml.YAMLError, ValueError, RecursionError):
        return _NOTHING
    recipe = run.get("recipe") if isinstance(run, Mapping) else None
    path, overridden = "", dict[str, str]()
    if isinstance(recipe, Mapping) and isinstance(recipe.get("overridden"), list):
        path = str(recipe.get("path") or "")
        pairs = (str(override).partition("=") for override in recipe["overridden"])
        overridden = {name: value or _UNSAID for name, _, value in pairs}
    settings = {setting.name: setting for setting in walk(TrainConfig)}
    changed, others = [], []
    for name, value, default in _leaves(resolved, settings):
        is_other = _differs(value, default)
        above = next((key for key in overridden if name == key or name.startswith(f"{key}.")), None)
        if above is not None and (name == above or is_other):  # a file may name a section by one word, as data.eval
            changed.append([name, _cut(_json(value)), _cut(overridden[above]), _cut(default)])
        elif above is None and is_other:
            others.append([name, _cut(_json(value)), "the same" if path else "", _cut(default)])
    rows = changed + others
    headings = ["setting", "this run", "the recipe's file", "default"]
    if not path:
        headings, rows = [*headings[:2], headings[3]], [[*row[:2], row[3]] for row in rows]
    says = f"The recipe is {path}: {len(overridden)} settings were given another value than it says." if path else ""
    return ReportSection("Settings that are not the defaults", headings, rows, says)


def provenance(facts: str) -> ReportSection:
    """Command, host, device and versions of a run; no rows where the text is no run's."""
    run = as_object(facts.encode()) or {}
    command, device, software = run.get("command"), run.get("device"), run.get("software")
    facts_by_name = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        "host": run.get("host"),
        "device": device.get("name") if isinstance(device, Mapping) else None,
        "precision": run.get("precision"),
        **(software if isinstance(software, Mapping) else {}),
    }
    rows = [[name.replace("_", " "), str(value)] for name, value in facts_by_name.items() if value is not None]
    return ReportSection("Made with", ["what", "value"], rows)


def _leaves(node: Any, settings: Mapping[str, Setting], name: str = "") -> Iterator[tuple[str, Any, str]]:
    """Name, value and default of each setting that holds no further settings; "required" without a default."""
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        path = f"{name}.{key}" if name else str(key)
        setting = settings.get(".".join(ITEM if part.isdecimal() else part for part in path.split(".")))
        is_item = isinstance(node, list) and isinstance(child, Mapping)
        if setting is not None and (setting.section is None or child is None):
            yield path, child, "required" if setting.default is None else setting.default
        elif setting is not None or is_item:
            yield from _leaves(child, settings, path)


def _differs(value: Any, default: str) -> bool:
    if value == HIDDEN:  # nobody can tell
        return False
    try:
        return bool(value != yaml.safe_load(default)) and _json(value) != default  # YAML reads 1e-08 as text
    except yaml.YAMLError:
        return _json(value) != default


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
