"""Where records go: a file of JSON lines, a table, trackers, a scrape, the screen.

A record is what `as_record()` of a step or window gives: JSON-ready, possibly nested, with an integer `step`. `Sinks`
hands each record to several sinks and keeps one sink's failure from the others and from the training loop.
"""

import csv
import math
import warnings
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Self

from headway.errors import ConfigError
from headway.log.jsonl import LineFile
from headway.log.sink import Scalar, Sink, flatten


class Sinks(Sink):
    """Several sinks as one. A sink that fails is closed with one warning, and the others go on without it.

    A record that is none is the caller's mistake and an error.

    Args:
        sinks: where every record goes.

    >>> with Sinks.open(["jsonl:run/metrics.jsonl", "tensorboard:run/tb"]) as sinks:    # doctest: +SKIP
    ...     sinks.write({"step": 1, "mfu": 0.41})
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    @classmethod
    def open(cls, specs: Sequence[str | Path | Sink], *, rank: int = 0) -> Self:
        """Open all of some sinks, or none.

        Args:
            specs: as for `open_sink`.
            rank: as for `open_sink`.

        Raises:
            ConfigError: one of them cannot be opened.
        """
        sinks: list[Sink] = []
        try:
            for spec in specs:
                sinks.append(open_sink(spec, rank=rank))
        except BaseException:
            for sink in sinks:
                sink.close()
            raise
        return cls(sinks)

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand a record to every sink that still works.

        Raises:
            UsageError: the record has no integer `step`, or holds what JSON cannot.
        """
        flatten(record)  # a record that is wrong is wrong for all of them
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:  # noqa: BLE001 - trackers raise anything, and none of it may end the training
                self._sinks.remove(sink)
                self._warn(sink, error, "It is closed; training and the other sinks go on.")
                self._close(sink)

    def close(self) -> None:
        """Close every sink."""
        while self._sinks:
            self._close(self._sinks.pop(0))

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001 - as in write
            self._warn(sink, error, "What it still held may be lost.")

    def _warn(self, sink: Sink, error: Exception, consequence: str) -> None:
        warnings.warn(
            f"{type(sink).__name__} failed: {type(error).__name__}: {error}. {consequence}",
            RuntimeWarning,
            stacklevel=4,
        )


class JsonlSink(Sink):
    """One JSON object per line, in the system's hands when `write` returns.

    An existing file is continued, as after a resume, and never shortened by a whole line: steps that are done again
    appear again, and the last line of a step is the one that holds. Values that are not finite, for which JSON has no
    word, are the strings "NaN", "Infinity" and "-Infinity", which `float` reads back.

    Args:
        path: the file.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        flatten(record)
        self._file.append(_finite(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvSink(Sink):
    """A table with a row per record and a column per number or text, nested names joined by "/".

    A record with a name that is new adds a column: the file is then written anew, and the rows before have an empty
    cell there. An existing file is continued. A missing value is an empty cell, and a line break in a text a space.

    Args:
        path: the file.

    Raises:
        ConfigError: the file cannot be read or written, or is not such a table.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            self._columns, rows = self._parse(text)
            if not text.endswith("\n"):  # the last row was torn by a kill
                self._rewrite(rows)
            self._file = path.open("a", encoding="utf-8", newline="")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise ConfigError(f"{path} cannot be continued as a CSV file: {reason}. Give another path.") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record as a row."""
        cells = flatten(record)
        new = [name for name in cells if name not in self._columns]
        if new:
            _, rows = self._parse(self._path.read_text(encoding="utf-8"))
            self._columns += new
            self._file.close()
            self._rewrite(rows)
            self._file = self._path.open("a", encoding="utf-8", newline="")
        self._file.write(_csv_line([_cell(cells.get(name)) for name in self._columns]))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _parse(self, text: str) -> tuple[list[str], list[list[str]]]:
        lines = text[: text.rfind("\n") + 1].splitlines()
        columns, *rows = list(csv.reader(lines)) or [[]]
        if text and ("step" not in columns or any(len(row) != len(columns) for row in rows)):
            raise ConfigError(
                f"{self._path} is not a table of records: it has no column 'step', or rows of another width. Give "
                "another path, or move the file away."
            )
        return columns, rows

    def _rewrite(self, rows: list[list[str]]) -> None:
        if not self._columns:
            self._path.write_text("", encoding="utf-8")
            return
        width = len(self._columns)
        lines = [self._columns, *(row + [""] * (width - len(row)) for row in rows)]
        temporary = self._path.with_name(f".{self._path.name}.writing")
        temporary.write_text("".join(map(_csv_line, lines)), encoding="utf-8")
        temporary.replace(self._path)


def open_sink(spec: str | Path | Sink, *, rank: int = 0) -> Sink:
    """Open the sink that a few words describe.

    Args:
        spec: "jsonl:FILE", "csv:FILE", "tensorboard:FOLDER", "wandb[:[ENTITY/]PROJECT]",
            "mlflow[:[URI][#EXPERIMENT]]", "prometheus:[HOST:]PORT" or "live[:STEPS]" with the steps of the whole
            run; a path that ends in .jsonl or .csv; or a sink, which is given back.
        rank: rank of this process among those that train, for Prometheus' label.

    Raises:
        ConfigError: the words describe no sink, a package is missing, or the place cannot be opened.

    >>> open_sink("jsonl:run/metrics.jsonl")    # doctest: +SKIP
    """
    if isinstance(spec, Sink):
        return spec
    if isinstance(spec, Path):
        spec = f"{spec.suffix.removeprefix('.')}:{spec}" if spec.suffix in {".jsonl", ".csv"} else str(spec)
    kind, place = _parse(spec)
    if kind == "jsonl":
        sink: Sink = JsonlSink(Path(place))
    elif kind == "csv":
        sink = CsvSink(Path(place))
    elif kind == "live":
        from headway.log.live import LiveSink

        sink = LiveSink.parse(place)
    else:
        from headway.log import trackers

        if kind == "tensorboard":
            sink = trackers.TensorBoardSink(Path(place))
        elif kind == "wandb":
            sink = trackers.WandbSink.parse(place)
        elif kind == "mlflow":
            sink = trackers.MlflowSink.parse(place)
        else:
            sink = trackers.PrometheusSink.parse(place, rank=rank)
    return sink


def check_spec(spec: str) -> None:
    """Check that a few words describe a sink, without opening it.

    Raises:
        ConfigError: they describe none.
    """
    _parse(spec)


def _parse(spec: str) -> tuple[str, str]:
    kind, _, place = spec.partition(":")
    if kind not in _FORMS or (not place and kind in _NEEDS_PLACE):
        raise ConfigError(
            f"{spec!r} is not a place for records. Give one of {', '.join(_FORMS.values())}, or a path that ends in "
            ".jsonl or .csv."
        )
    return kind, place


_FORMS = {
    "jsonl": "jsonl:FILE",
    "csv": "csv:FILE",
    "tensorboard": "tensorboard:FOLDER",
    "wandb": "wandb[:[ENTITY/]PROJECT]",
    "mlflow": "mlflow[:[URI][#EXPERIMENT]]",
    "prometheus": "prometheus:[HOST:]PORT",
    "live": "live[:STEPS]",
}
_NEEDS_PLACE = {"jsonl", "csv", "tensorboard", "prometheus"}


def _finite(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {str(key): _finite(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_finite(value) for value in node]
    if isinstance(node, float) and not math.isfinite(node):
        return "NaN" if math.isnan(node) else "Infinity" if node > 0 else "-Infinity"
    return node


def _cell(value: Scalar) -> str:
    return "" if value is None else " ".join(value.splitlines()) if isinstance(value, str) else str(value)


def _csv_line(cells: Sequence[str]) -> str:
    line = StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
