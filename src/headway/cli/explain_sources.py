"""Sources of `headway explain`: one trace or several, a run folder, its records, another tool's log, or two."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError, LogError, UsageError
from headway.explain.events import Trace
from headway.explain.explanation import JobExplanation
from headway.explain.run_folder import TRACES, newest_window
from headway.explain.trace import read_traces
from headway.explain.trace_files import foreign_kind, is_packed
from headway.explain.waterfall import explain as explain_traces
from headway.files import open_plain, read_text
from headway.log.run_files import METRICS, run_copy

if TYPE_CHECKING:
    from headway.audit import Log
    from headway.explain.stated_work import StatedWork

Pair = tuple[tuple[str, JobExplanation], tuple[str, JobExplanation]]
_BEGINNING = 1 << 16  # bytes of a file by which its kind is told
_TRAINER_STATE = re.compile(rb'"log_history"\s*:\s*\[')
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*(\{\s*[\"}]|\[\s*[{\]])")


class SourceKind(Enum):
    """Kind of a source, by the beginning of its file."""

    TRACES = auto()
    RECORDS = auto()
    LOG = auto()
    FOREIGN = auto()


@dataclass(frozen=True, slots=True)
class ExplainSource:
    """Source of an explanation, as its name and the beginning of its file tell."""

    path: Path  # path that the user gives: a file, or a run folder
    kind: SourceKind  # kind of its files
    files: tuple[Path, ...]  # traces of all ranks of a profile, else the one file
    about: str = ""  # note on the profile of a run folder, or what a foreign file is; "" of others

    @property
    def is_trace_file(self) -> bool:
        """True if the source is a trace itself, and not a folder with traces."""
        return self.kind is SourceKind.TRACES and self.files == (self.path,)


def source_of(path: Path) -> ExplainSource:
    """Recognise a source: the one place that asks what a path is.

    Raises:
        ConfigError: there is no such file, it cannot be read, or the folder holds neither a profile nor records.
    """
    if path.is_dir():
        traces, about = newest_window(path)
        if traces:
            if (path / METRICS).is_file():
                about += f" `headway explain {path / METRICS}` shows the other steps, without a profile."
            return ExplainSource(path, SourceKind.TRACES, tuple(traces), about)
        if not (path / METRICS).is_file():
            raise _empty_folder(path)
    elif not path.exists():
        raise ConfigError(f"{path} is not there. Give a trace, a run folder, its {METRICS}, or a training log.")
    file = path / METRICS if path.is_dir() else path
    try:
        with open_plain(file) as opened:
            beginning = opened.read(_BEGINNING)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}. Name a trace, a run or a log.") from error
    kind = _kind(file, beginning)
    return ExplainSource(path, kind, (file,), foreign_kind(file, beginning) or "" if kind is SourceKind.FOREIGN else "")


def _empty_folder(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} holds neither records ({METRICS}) nor a profile (profile/{TRACES}). A run folder of "
        "`headway train` has records once it has taken a step; `Meter(log_to=[...])` writes them in any loop."
    )


def _kind(file: Path, beginning: bytes) -> SourceKind:
    """Kind of a file by its beginning; a new run's metrics.jsonl may be empty, or cut off."""
    try:
        first = json.loads(beginning.partition(b"\n")[0])
    except (ValueError, RecursionError):
        first = None
    if _JSON.match(beginning) and (_TRAINER_STATE.search(beginning) or _is_log_of_objects(first, beginning)):
        return SourceKind.LOG
    if file.name == METRICS or (isinstance(first, dict) and {"step", "kind"} & first.keys()):
        return SourceKind.RECORDS
    is_utf_16 = beginning.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = beginning.decode("utf-16", "ignore").encode() if is_utf_16 else beginning
    if is_packed(beginning) or _JSON.match(text):
        return SourceKind.TRACES
    return SourceKind.FOREIGN if foreign_kind(file, beginning) else SourceKind.LOG


def _is_log_of_objects(first: object, beginning: bytes) -> bool:
    """Tell a log of lines of JSON, such as ms-swift's logging.jsonl, from a trace, whose object has many lines."""
    if not isinstance(first, dict):
        return False
    from headway.audit.formats import is_log

    return is_log(beginning.decode(errors="replace").splitlines())


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of the command line that hold for every kind of source."""

    step: int | None
    rank: int | None
    as_one_step: bool
    work: "StatedWork | None"
    device: str | None


def explained(paths: Sequence[Path], chosen: SourceOptions, *, compares: bool) -> JobExplanation | Pair:
    """Explain one run, one file of records, one log or the traces of one job; or two things, by name, to compare.

    Two are compared where one is not a trace, or both are traces of one rank, or `compares` says so; other traces are
    ranks of one job.

    Raises:
        UsageError: neither one thing nor two that can be compared, or both are the same.
        ConfigError: a source cannot be explained.
    """
    sources = [source_of(run_copy(path)) for path in paths]
    if len(sources) == 1 and not compares:
        return _explained(sources[0], chosen)
    are_traces = all(source.is_trace_file for source in sources)
    if are_traces and len(sources) > 2 and not compares:
        return _of_traces([trace for source in sources for trace in read_traces(source.path)], chosen)
    if len(sources) != 2:
        raise UsageError(
            f"--compare takes two sources, not {len(sources)}. Give run folders or single traces. Put the traces of "
            "a job's ranks into one folder for each job, as `headway.profile` does. To explain the ranks of one job "
            "together, leave --compare out."
        )
    a, b = sources
    if a.files[0].resolve() == b.files[0].resolve():
        raise UsageError(
            f"{a.path} and {b.path} are the same, so there is nothing to compare. Give another run or trace as B."
        )
    if not are_traces:
        return (str(a.path), _explained(a, chosen)), (str(b.path), _explained(b, chosen))
    first, second = read_traces(a.path), read_traces(b.path)
    if not compares and not {trace.rank for trace in first} & {trace.rank for trace in second}:
        return _of_traces([*first, *second], chosen)
    return (str(a.path), _of_traces(first, chosen)), (str(b.path), _of_traces(second, chosen))


def _explained(source: ExplainSource, chosen: SourceOptions) -> JobExplanation:
    if source.kind is SourceKind.TRACES:
        explanation = _of_traces([trace for file in source.files for trace in read_traces(file)], chosen)
        notes = (source.about,) if source.about else ()
        return replace(explanation, notes=(*notes, *explanation.notes))
    unused = {"--whole": chosen.as_one_step, "--model": chosen.work, "--device": chosen.device}
    for option in (option for option, value in unused.items() if value):
        raise UsageError(
            f"{option} needs a trace, but {source.path} has none. Leave the option out, or profile some steps."
        )
    (file,) = source.files
    if source.kind is SourceKind.FOREIGN:
        raise ConfigError(f"{file} is {source.about}.")
    if source.kind is SourceKind.RECORDS:
        from headway.explain.records import explain_records

        return explain_records(file, step=chosen.step, rank=chosen.rank)
    from headway.audit.waterfalls import explain_log

    return explain_log(_log_in(file), str(file), step=chosen.step, rank=chosen.rank)


def _of_traces(traces: Sequence[Trace], chosen: SourceOptions) -> JobExplanation:
    return explain_traces(
        traces,
        step=chosen.step,
        rank=chosen.rank,
        as_one_step=chosen.as_one_step,
        work=chosen.work,
        device=chosen.device,
    )


def records_of_log(path: Path) -> tuple[JobExplanation, list[dict[str, float]]] | None:
    """Read another tool's log as records of its steps, and explain them; None if the file is no log.

    Raises:
        ConfigError: it is neither a log that is known, nor records.
    """
    if path.is_dir() or not path.exists() or source_of(path).kind in (SourceKind.RECORDS, SourceKind.TRACES):
        return None
    from headway.audit.waterfalls import explain_log, records_of

    log = _log_in(path)
    explanation = explain_log(log, str(path))
    return explanation, records_of(log, explanation)


def _log_in(path: Path) -> "Log":
    from headway.audit import read_log

    try:
        return read_log(read_text(path, errors="replace"), str(path), needs_rate=False)
    except LogError as error:
        raise ConfigError(
            f"{path} is neither a trace of torch.profiler nor the records of a run, so Headway read it as a log. "
            f"{error}"
        ) from error
