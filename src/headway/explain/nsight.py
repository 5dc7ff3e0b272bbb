"""SQLite exports of Nsight Systems as the events of a trace of torch.profiler.

`nsys export --type sqlite` writes kernels, copies and calls of the runtime as tables, and NVTX ranges, which are the
annotations and, under `torch.autograd.profiler.emit_nvtx()`, the operators.

Source: NVIDIA Nsight Systems, "SQLite Export Schema Reference" (2021.5 to 2026.1).
"""

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headway.errors import ConfigError

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_TABLES = (_KERNELS, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_RUNTIME",
           "NVTX_EVENTS", "StringIds", "TARGET_INFO_GPU")  # fmt: skip
_LONGEST_VALUE = 1_000_000  # bytes of one cell
_PROCESS = 2**24  # a globalTid or globalPid is process x 2^24 + thread, below the bits of the machine
_PUSHED_RANGE = 59  # eventType of a range that its own thread opens and closes
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}  # CUpti_ActivityMemcpyKind
# Names of steps as loops give them, and of operators as emit_nvtx writes them: "aten::addmm, seq = 6".
_STEP = re.compile(r"(?:profiler|train(?:ing)?)?[ _]?(?:step|iter(?:ation)?)[ _#:]*(\d{1,18})", flags=re.IGNORECASE)
_OPERATOR = re.compile(r"((?:\w+::)+\w+(?:: \w+)?)(?:, .*)?")
_SEQUENCE = re.compile(r", seq = (\d{1,18})")


def read_export(path: Path, on_event: Callable[[dict[str, Any]], None], notes: list[str]) -> dict[str, Any]:
    """Read an export, hand over each event in the form of torch.profiler's, and return the facts beside the events.

    Args:
        path: a SQLite database.
        on_event: called with each event.
        notes: what a reader must know of the file is added here.

    Returns:
        `deviceProperties`, where the export names devices.

    Raises:
        ConfigError: it is no export of Nsight Systems, or holds no kernels.
    """
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)) as database:
            # The file may be a stranger's: its schema runs no functions, and no cell fills the memory.
            database.execute("PRAGMA trusted_schema = OFF")
            database.text_factory = _text
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            return _Export(database, path, notes).read(on_event)
    except (sqlite3.Error, OverflowError, TypeError, UnicodeError) as error:
        raise ConfigError(
            f"{path} is a SQLite database that cannot be read as an export of Nsight Systems: {error}. Export the "
            "report again: nsys export --type sqlite FILE.nsys-rep"
        ) from error


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


class _Export:
    def __init__(self, database: sqlite3.Connection, path: Path, notes: list[str]) -> None:
        self._database, self._notes = database, notes
        # Plain tables alone: a view or a virtual table of the same name could compute for ever.
        rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'")
        self._columns = {
            name: {column[1] for column in database.execute(f"PRAGMA table_info({name})")}
            for (name,) in rows.fetchall()
            if name in _TABLES
        }
        if _KERNELS not in self._columns or "StringIds" not in self._columns:
            raise ConfigError(
                f"{path} is a SQLite database without kernels of Nsight Systems (table {_KERNELS}): an export of "
                "another tool, or of a report without CUDA. Profile with nsys profile --trace cuda,nvtx."
            )

    def read(self, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        process = self._process()
        names = dict(self._database.execute("SELECT id, value FROM StringIds"))
        for event in (*self._on_device(process, names), *self._on_host(process, names)):
            on_event(event)
        if "TARGET_INFO_GPU" not in self._columns:
            return {}
        devices = self._database.execute("SELECT DISTINCT name FROM TARGET_INFO_GPU").fetchall()
        return {"deviceProperties": [{"name": str(name)} for (name,) in devices]}

    def _process(self) -> int | None:
        """The process whose kernels took longest, since each process numbers its launches by itself."""
        if "globalPid" not in self._columns[_KERNELS]:
            return None
        query = f"SELECT globalPid, SUM(end - start) AS ns FROM {_KERNELS} GROUP BY globalPid ORDER BY ns DESC"
        processes = self._database.execute(query).fetchall()
        if len(processes) > 1:
            self._notes.append(
                f"the export holds {len(processes)} processes with kernels; this is the one that computed longest."
            )
        return int(processes[0][0]) // _PROCESS if processes else None

    def _rows(self, table: str, columns: str, process: int | None) -> Iterator[tuple[Any, ...]]:
        if table not in self._columns:
            return iter(())
        of_process = "globalPid" if "globalPid" in self._columns[table] else "globalTid"
        where = "" if process is None else f" WHERE {of_process} / {_PROCESS} = {process}"
        return self._database.execute(f"SELECT {columns} FROM {table}{where}")

    def _on_device(self, process: int | None, names: dict[int, str]) -> Iterator[dict[str, Any]]:
        common = "start, end, deviceId, streamId, correlationId"
        for *times, name in self._rows(_KERNELS, f"{common}, demangledName", process):
            yield _device_event("kernel", names.get(name, f"kernel {name}"), *times)
        for *times, kind in self._rows("CUPTI_ACTIVITY_KIND_MEMCPY", f"{common}, copyKind", process):
            yield _device_event("gpu_memcpy", f"Memcpy {_COPY_KINDS.get(kind, 'of another kind')}", *times)
        for row in self._rows("CUPTI_ACTIVITY_KIND_MEMSET", common, process):
            yield _device_event("gpu_memset", "Memset (Device)", *row)

    def _on_host(self, process: int | None, names: dict[int, str]) -> Iterator[dict[str, Any]]:
        for start, end, thread, correlation, name in self._rows(
            "CUPTI_ACTIVITY_KIND_RUNTIME", "start, end, globalTid, correlationId, nameId", process
        ):
            # Names carry the version of their interface: cudaLaunchKernel_v7000.
            call = names.get(name, f"call {name}").partition("_v")[0]
            yield _host_event("cuda_runtime", call, start, end, thread, correlation=correlation)
        has_ids = "textId" in self._columns.get("NVTX_EVENTS", ())
        for start, end, thread, kind, text, text_id in self._rows(
            "NVTX_EVENTS", f"start, end, globalTid, eventType, text, {'textId' if has_ids else 'NULL'}", process
        ):
            label = text if text is not None else names.get(text_id)
            if kind != _PUSHED_RANGE or end is None or not label:
                continue
            if step := _STEP.fullmatch(label):
                yield _host_event("user_annotation", f"ProfilerStep#{int(step[1])}", start, end, thread)
            elif operator := _OPERATOR.fullmatch(label):
                sequence = _SEQUENCE.search(label)
                more = {"Sequence number": int(sequence[1])} if sequence else {}
                yield _host_event("cpu_op", operator[1], start, end, thread, **more)
            else:
                yield _host_event("user_annotation", label, start, end, thread)


def _device_event(
    category: str, name: str, start: int, end: int, device: int, stream: int, correlation: int
) -> dict[str, Any]:
    arguments = {"device": device, "stream": stream, "correlation": correlation}
    return _event(category, name, start, end, device, stream, arguments)


def _host_event(category: str, name: str, start: int, end: int, thread: int, **more: Any) -> dict[str, Any]:
    return _event(category, name, start, end, -1, thread, more)


def _event(
    category: str, name: str, start: int, end: int, process: int, thread: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    # Nanoseconds as the text of microseconds, as torch.profiler writes them.
    times = (f"{ns // 1000}.{ns % 1000:03d}" for ns in (int(start), max(0, int(end) - int(start))))
    ts, dur = times
    return {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": ts, "dur": dur,
            "args": arguments}  # fmt: skip
