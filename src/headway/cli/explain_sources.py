"""Sources of `headway explain`: one trace or several, a run folder, its records, another tool's log, or two."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError, LogError, UsageError
from headway.explain.events import Trace
from headway.explain.explanation import PER_SECOND_NOTE, JobExplanation
from headway.explain.logs import LoggedStep, explain_log
from headway.explain.profiles import TRACES, newest_window
from headway.explain.records import explain_records
from headway.explain.stated_work import StatedWork
from headway.explain.trace import read_traces
from headway.explain.trace_files import foreign_kind, is_packed
from headway.explain.waterfall import explain as explain_traces
from headway.files import open_plain, read_text
from headway.log.run_files import METRICS, run_copy
from headway.report.numbers import quantity

if TYPE_CHECKING:
    from headway.audit.rows import Reading

Pair = tuple[tuple[str, JobExplanation], tuple[str, JobExplanation]]
_BEGINNING = 1 << 16  # bytes of a file by which its format is recognised
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*(\{\s*[\"}]|\[\s*[{\]])")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of the command line that hold for every kind of source."""

    step: int | None
    rank: int | None
    as_one_step: bool
    work: StatedWork | None
    device: str | None


def explained(paths: Sequence[Path], chosen: SourceOptions, *, compares: bool) -> JobExplanation | Pair:
    """Explain one run, one file of records, one log or the traces of one job; or two things, by name, to compare.

    Two are compared where one is not a trace, or both are traces of one rank, or `compares` says so; other traces are
    ranks of one job.

    Raises:
        UsageError: neither one thing nor two that can be compared, or both are the same.
        ConfigError: a source cannot be explained.
    """
    paths = [run_copy(path) for path in paths]
    if len(paths) == 1 and not compares:
        return _explained(paths[0], chosen)
    are_traces = all(_is_trace(path) for path in paths)
    if are_traces and len(paths) > 2 and not compares:
        return _of_traces([trace for path in paths for trace in read_traces(path)], chosen)
    if len(paths) != 2:
        raise UsageError(
            f"two things can be compared, not {len(paths)}. Compare run folders or single traces; several ranks of a "
            "job stand in one folder each, as `headway.profile` writes them. Traces of the ranks of one job are "
            "explained together, without --compare."
        )
    a, b = paths
    if _source_of(a).resolve() == _source_of(b).resolve():
        raise UsageError(f"{a} and {b} are the same: there is nothing to compare. Give another run or trace as B.")
    if not are_traces:
        return (str(a), _explained(a, chosen)), (str(b), _explained(b, chosen))
    first, second = read_traces(a), read_traces(b)
    if not compares and not {trace.rank for trace in first} & {trace.rank for trace in second}:
        return _of_traces([*first, *second], chosen)
    return (str(a), _of_traces(first, chosen)), (str(b), _of_traces(second, chosen))


def _explained(path: Path, chosen: SourceOptions) -> JobExplanation:
    if path.is_dir():
        traces, about = newest_window(path)
        if traces:
            if (path / METRICS).is_file():
                about += f" All other steps, without a profile: headway explain {path / METRICS}"
            explanation = _of_traces([trace for file in traces for trace in read_traces(file)], chosen)
            return replace(explanation, notes=(about, *explanation.notes))
    source = _source_of(path)
    if _is_trace(source):
        return _of_traces(read_traces(source), chosen)
    unused = {"--whole": chosen.as_one_step, "--model": chosen.work, "--device": chosen.device}
    for option in (option for option, value in unused.items() if value):
        raise UsageError(f"{option} is about a trace, and {path} has none. Leave it out, or profile some steps.")
    if not _is_records(source) and (kind := foreign_kind(source, _beginning(source))):
        raise ConfigError(f"{source} is {kind}.")
    if _is_records(source):
        return explain_records(source, step=chosen.step, rank=chosen.rank)
    return _of_log(source, chosen)


def _of_traces(traces: Sequence[Trace], chosen: SourceOptions) -> JobExplanation:
    return explain_traces(
        traces,
        step=chosen.step,
        rank=chosen.rank,
        as_one_step=chosen.as_one_step,
        work=chosen.work,
        device=chosen.device,
    )


def _source_of(path: Path) -> Path:
    """The file that stands for an argument: of a folder without a trace, its records.

    Raises:
        ConfigError: there is no such file, or the folder holds neither.
    """
    if not path.is_dir():
        if not path.exists():
            raise ConfigError(f"{path} is not there. Give a trace, a run folder, its {METRICS}, or a training log.")
        return path
    traces, _ = newest_window(path)
    if traces:
        return traces[0]
    if not (path / METRICS).is_file():
        runs = sorted(file.parent.name for file in path.glob(f"*/{METRICS}"))
        within = f" Runs within it: {', '.join(runs[:5])}; name one of them." if runs else ""
        raise ConfigError(
            f"{path} holds neither records ({METRICS}) nor a profile (profile/{TRACES}).{within} A run folder of "
            "`headway train` has records once it has taken a step; `Meter(log_to=[...])` writes them in any loop."
        )
    return path / METRICS


def _is_trace(path: Path) -> bool:
    """Tell whether a file is a trace as far as its beginning tells: compressed, or JSON that is no record."""
    if path.is_dir() or _is_records(path) or _is_log_of_json(path):
        return False
    beginning = _beginning(path)
    is_utf_16 = beginning.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = beginning.decode("utf-16", "ignore").encode() if is_utf_16 else beginning
    return is_packed(beginning) or _JSON.match(text) is not None


def _is_log_of_json(path: Path) -> bool:
    """Tell whether the lines of a file are JSON objects that another tool writes, such as ms-swift's logging.jsonl."""
    from headway.audit.formats import is_log

    beginning = _beginning(path)
    return _JSON.match(beginning) is not None and is_log(beginning.decode(errors="replace").splitlines())


def _is_records(path: Path) -> bool:
    """Tell whether a file's first line is a record by itself; a new run's metrics.jsonl may be empty, or cut off."""
    if _is_log_of_json(path):
        return False
    try:
        first = json.loads(_beginning(path).partition(b"\n")[0])
    except (ValueError, RecursionError):
        first = None
    return path.name == METRICS or (isinstance(first, dict) and bool({"step", "kind"} & first.keys()))


def _beginning(path: Path) -> bytes:
    try:
        with open_plain(path) as file:
            return file.read(_BEGINNING)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Name a trace, a run or a log.") from error


def records_of_log(path: Path) -> tuple[JobExplanation, list[dict[str, float]]] | None:
    """Read another tool's log as records of its steps, and explain them; None of a file that is none.

    Args:
        path: a file.

    Raises:
        ConfigError: it is neither a log that is known, nor records.
    """
    if path.is_dir() or not path.exists() or _is_records(path) or _is_trace(path):
        return None
    explanation, lines = _explained_log(path, SourceOptions(None, None, as_one_step=False, work=None, device=None))
    by_step = {line.step: line for line in lines}
    records, before = [], None
    # A line stands for the steps since the one before it.
    for waterfall in explanation.steps:
        line, step = by_step[waterfall.step], waterfall.step
        facts = {"mfu": line.mfu, "tokens_per_s": line.tokens_per_s, "step_s": waterfall.duration_ns / 1e9}
        if PER_SECOND_NOTE in explanation.notes:
            del facts["step_s"]
        num_steps = 1 if before is None else max(1, step - before)
        records.append({"step": step, "num_steps": num_steps} | {k: v for k, v in facts.items() if v is not None})
        before = step
    return explanation, records


def _of_log(path: Path, chosen: SourceOptions) -> JobExplanation:
    return _explained_log(path, chosen)[0]


def _explained_log(path: Path, chosen: SourceOptions) -> tuple[JobExplanation, list[LoggedStep]]:
    from headway.audit import read_log

    try:
        log = read_log(read_text(path, errors="replace"), str(path))
    except LogError as error:
        raise ConfigError(
            f"{path} is neither a trace of torch.profiler nor the records of a run, and it was read as a log. {error}"
        ) from error
    # rows of any tool's log as steps, with what it prints of them
    lines = [
        LoggedStep(
            step=row.step,
            duration_s=_known(row.step_s),
            stamp_s=row.stamp_s,
            mfu=_known(row.mfu),
            flops_per_s=_known(row.flops_per_s),
            tokens_per_s=_known(row.tokens_per_s),
            memory_share=row.memory_share,
        )
        for row in log.rows
    ]
    explanation = explain_log(lines, log.tool, str(path), step=chosen.step, rank=chosen.rank)
    # what the log leaves out goes into the notes
    skipped = tuple(f"{count:,} lines are left out: {why}." for why, count in log.skipped.items())
    smoothed = (f"the MFU of {log.tool} is a running mean, not that of its step.",) if log.smoothed else ()
    notes = (*explanation.notes, *smoothed, *skipped)
    return JobExplanation(explanation.steps, notes, explanation.findings), lines


def _known(printed: "Reading | None") -> float | None:
    """A number of a log; None where there is none, or one that no step could have."""
    return None if printed is None else quantity(printed.value)
