"""Places for records: a file of JSON lines, trackers, a scrape, the screen.

A record is what `to_dict()` of a step or window gives: JSON-ready, possibly nested, with an integer `step`. `Sinks`
hands each record to several sinks and keeps one sink's failure from the others and from the training loop.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from headway.errors import ConfigError
from headway.log.jsonl import LineFile
from headway.log.records import RecordLines, StepRecord
from headway.log.sink import Sink, flatten
from headway.stores import url_of


class Sinks(Sink):
    """Hands each record to several sinks; a sink that fails is closed with a warning, and the rest go on.

    A record that is none is the caller's mistake and an error.

    Args:
        sinks: where every record goes.

    >>> with Sinks.open(["jsonl:run/metrics.jsonl", "tensorboard:run/tb"]) as sinks:    # doctest: +SKIP
    ...     sinks.write({"step": 1, "mfu": 0.41})
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    @classmethod
    def open(cls, specs: Sequence[str | Path | Sink], *, rank: int = 0, run: Path | None = None) -> Self:
        """Open all of some sinks, or none.

        Raises:
            ConfigError: one of them cannot be opened.
        """
        sinks: list[Sink] = []
        try:
            for spec in specs:
                sinks.append(open_sink(spec, rank=rank, run=run))
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
        if self._sinks:
            flatten(record)  # a record that is wrong is wrong for all of them
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:  # noqa: BLE001 - trackers raise anything, and none of it may end the training
                self._sinks.remove(sink)
                self._warn(sink, error, "Headway closes this sink. Training and the other sinks go on.")
                self._close(sink)

    def close(self) -> None:
        """Close every sink."""
        while self._sinks:
            self._close(self._sinks.pop(0))

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001 - as in write
            self._warn(sink, error, "Records that it still held may be lost.")

    def _warn(self, sink: Sink, error: Exception, consequence: str) -> None:
        warnings.warn(
            f"{type(sink).__name__} failed: {type(error).__name__}: {str(error).rstrip('.')}. {consequence}",
            RuntimeWarning,
            stacklevel=4,
        )


class JsonlSink(Sink):
    """One JSON object per line, in the system's hands when `write` returns; `read_records` gives the records.

    An existing file is continued, as after a resume, and never shortened by a whole line: steps that are done again
    appear again, and the last line of a step is the one that holds. Values that are not finite, for which JSON has no
    word, are the strings "NaN", "Infinity" and "-Infinity", which `float` reads back.

    Args:
        path: the file.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._lines = LineFile(path), RecordLines()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        flatten(record)
        self._file.append_lines(self._lines.encode(record if isinstance(record, StepRecord) else _finite(record)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_sink(spec: str | Path | Sink, *, rank: int = 0, run: Path | None = None) -> Sink:
    """Open the sink that a few words describe.

    Args:
        spec: "jsonl:FILE", "tensorboard:FOLDER", "wandb[:[ENTITY/]PROJECT]", "mlflow[:[URI][#EXPERIMENT]]",
            "prometheus:[HOST:]PORT" or "live[:STEPS]" with the steps of the whole run; a `Path` that ends in .jsonl;
            or a sink, which is given back.
        rank: rank of this process among those that train, for Prometheus' label.
        run: folder of the run, which then has a folder of its own among those that TensorBoard shows.

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
        return JsonlSink(Path(place))
    if kind == "live":
        from headway.log.live import LiveSink

        return LiveSink.parse(place)
    if kind == "tensorboard":
        from headway.log.tensorboard import TensorBoardSink

        return TensorBoardSink.parse(place, run=run)
    from headway.log import trackers

    if kind == "prometheus":
        return trackers.PrometheusSink.parse(place, rank=rank)
    parsers: dict[str, Callable[[str], Sink]] = {
        "wandb": trackers.WandbSink.parse,
        "mlflow": trackers.MlflowSink.parse,
    }
    return parsers[kind](place)


def check_spec(spec: str) -> None:
    """Check that a few words describe a sink, without opening it.

    Raises:
        ConfigError: they describe none.
    """
    _parse(spec)


_FORMS = {
    "jsonl": "jsonl:FILE",
    "tensorboard": "tensorboard:FOLDER",
    "wandb": "wandb[:[ENTITY/]PROJECT]",
    "mlflow": "mlflow[:[URI][#EXPERIMENT]]",
    "prometheus": "prometheus:[HOST:]PORT",
    "live": "live[:STEPS]",
}
_OF_FILES = {"jsonl", "tensorboard"}
_NEEDS_PLACE = {*_OF_FILES, "prometheus"}


def _parse(spec: str) -> tuple[str, str]:
    kind, _, place = spec.partition(":")
    if kind == "csv":
        raise ConfigError(
            f"{spec!r}: Headway writes no CSV. Use JSON lines, jsonl:FILE, and read the table with "
            "pandas.read_json(FILE, lines=True)."
        )
    if kind not in _FORMS or (not place and kind in _NEEDS_PLACE):
        raise ConfigError(
            f"{spec!r} is not a place for records. Give one of {', '.join(_FORMS.values())}, or a Path that ends in "
            ".jsonl."
        )
    if kind in _OF_FILES and (url := url_of(place)) is not None:
        raise ConfigError(
            f"{spec!r}: Headway appends records line by line, but {url} cannot be appended to. Give a path of this "
            "machine. If run.folder is a URL, headway train sends its own records there."
        )
    return kind, place


def _finite(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {str(key): _finite(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_finite(value) for value in node]
    if isinstance(node, float) and not math.isfinite(node):
        return "NaN" if math.isnan(node) else "Infinity" if node > 0 else "-Infinity"
    return node
