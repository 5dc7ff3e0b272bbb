"""Files in which traces come: plain or compressed JSON, archives of several, and SQLite exports of Nsight Systems.

They are recognised by their first bytes. Nothing is written to disk and no name in an archive is followed: members are
read as they stand, up to a limit. `nsys export --type sqlite` writes kernels, copies and calls as tables, and NVTX
ranges, which are the annotations and, under `torch.autograd.profiler.emit_nvtx()`, the operators.

Source: NVIDIA Nsight Systems, "SQLite Export Schema Reference" (2021.5 to 2026.1).
"""

import bz2
import gzip
import importlib
import io
import itertools
import lzma
import re
import sqlite3
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, TypeVar, cast
from urllib.parse import quote

from headway.errors import ConfigError
from headway.files import open_plain
from headway.words import Argument

MOST_TRACES = 1024  # traces of one archive: ranks of a job
SQLITE_MAGIC = b"SQLite format 3\x00"
_GZIP, _XZ, _BZIP2, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh", b"\x28\xb5\x2f\xfd"
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_TAR_AT, _TAR = 257, b"ustar"
_HEAD = 512  # bytes by which a kind is told: a tar's header is as long
_LONGEST_READ = 2**26  # bytes at once, so that a header of an archive cannot ask for all memory
_MOST_MEMBERS = 100_000  # headers of a tar, of all kinds
_LONGEST_DIRECTORY = 2**24  # bytes of a zip's list of files
_ZIP_END_BYTES = 2**16 + 22  # the record at a zip's end, with the longest comment behind it
_ZSTD_MODULES = ("compression.zstd", "zstandard")
_ENCODINGS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}  # by byte-order mark
_NAMES = (".json", ".json.gz", ".json.xz", ".json.bz2", ".json.zst")
_DAMAGE = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    gzip.BadGzipFile,
    zipfile.BadZipFile,
    tarfile.TarError,
    NotImplementedError,  # a zip of a later version, or packed by another method
    UnicodeError,  # names of members
)
_KINDS_BY_SUFFIX = {
    ".nsys-rep": "a report of Nsight Systems. Export it: nsys export --type sqlite FILE",
    ".qdrep": "a report of Nsight Systems. Export it: nsys export --type sqlite FILE",
    ".pb": "a protobuf, as JAX and TensorFlow write profiles (XSpace), which Headway does not read; XProf does",
    ".pftrace": "a protobuf of Perfetto, which Headway does not read; torch.profiler writes JSON",
    ".perfetto-trace": "a protobuf of Perfetto, which Headway does not read; torch.profiler writes JSON",
}
_KINDS_BY_MAGIC = {
    b"\x80": "a pickle of Python, such as a snapshot of torch's memory. Headway opens none: opening one can run code",
    b"PAR1": "a Parquet table",
    b"\x89PNG": "a picture",
    b"%PDF": "a PDF",
    b"\x7fELF": "a program",
}


Text = TypeVar("Text")


class TraceText(NamedTuple):
    """One trace of a file: its name, with that of the archive's member, and its JSON from its beginning."""

    name: str
    text: TextIO


def is_packed(beginning: bytes) -> bool:
    """Tell by its first 512 bytes whether a file is compressed, an archive or a database, and no log."""
    magics = (_GZIP, _XZ, _BZIP2, _ZSTD, *_ZIP, SQLITE_MAGIC)
    return beginning.startswith(magics) or beginning[_TAR_AT:].startswith(_TAR)


def is_database(path: Path) -> bool:
    """Tell whether a file is a SQLite database, as Nsight Systems exports its reports."""
    try:
        with open_plain(path) as file:
            return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    except OSError:
        return False  # the reader of the file reports the error


def foreign_kind(path: Path, beginning: bytes) -> str | None:
    """Name the kind of a file that can be neither a trace nor a log; None if the file may be one."""
    if not beginning:
        return "empty: a program that was killed before it wrote leaves such a file"
    if b"\x00" not in beginning and not beginning.startswith((b"\x80", b"%PDF")):
        return None
    for magic, kind in _KINDS_BY_MAGIC.items():
        if beginning.startswith(magic):
            return kind
    by_suffix = _KINDS_BY_SUFFIX.get(path.suffix)
    if by_suffix is None and beginning.startswith(tuple(_ENCODINGS)):
        return None
    return by_suffix or "a binary file of no kind that Headway reads"


def read_texts(path: Path, parse: Callable[[str, TextIO], Text]) -> list[Text]:
    """Open the text of each trace of a file, one after the other, and read it.

    Args:
        path: JSON, compressed by gzip, xz, bzip2 or zstd or not, or a zip or tar of such files.
        parse: called with each trace's name, which is the file's and that of the archive's member, and its text.

    Returns:
        What `parse` gave for each.

    Raises:
        ConfigError: it cannot be read, is damaged, or holds no trace.
    """
    try:
        return [parse(trace.name, trace.text) for trace in _texts(path)]
    except _damage() as error:
        raise ConfigError(
            f"{path} is cut off or damaged: {_packer(path)} says {str(error)!r}. Copy or export it again; a profiler "
            "that was killed while it wrote leaves such a file."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Name a trace file.") from error


def _texts(path: Path) -> Iterator[TraceText]:
    with ExitStack() as stack:
        raw = stack.enter_context(open_plain(path))
        if not raw.read(1):
            raise ConfigError(f"{path} is {foreign_kind(path, b'')}.")
        head = _decompressed(raw, path, stack).read(_HEAD)
        content = _decompressed(raw, path, stack)
        if head.startswith(_ZIP):
            yield from _of_zip(raw, path)
        elif head[_TAR_AT:].startswith(_TAR):
            yield from _of_tar(content, path)
        else:
            yield TraceText(str(path), _as_text(content, head))


def _of_zip(raw: BinaryIO, path: Path) -> Iterator[TraceText]:
    _check_directory(raw, path)
    with zipfile.ZipFile(raw) as archive:
        members = [member for member in archive.infolist() if _is_trace_name(member.filename)]
        _check_members([member.filename for member in members], path)
        for member in members:
            if member.flag_bits & 1:
                raise ConfigError(f"{path}: {member.filename} in it is encrypted. Unpack it, and give the trace.")
            with archive.open(member) as file, ExitStack() as stack:
                yield _of_member(cast(BinaryIO, file), path, member.filename, stack)


def _check_directory(raw: BinaryIO, path: Path) -> None:
    """Refuse a zip whose list of files would fill the memory."""
    size = raw.seek(0, io.SEEK_END)
    raw.seek(max(0, size - _ZIP_END_BYTES))
    tail = raw.read()
    at = tail.rfind(b"PK\x05\x06")
    # Bytes 12 to 16 of the end record; all bits are set where a zip64 has a longer one.
    if at >= 0 and int.from_bytes(tail[at + 12 : at + 16], "little") > _LONGEST_DIRECTORY:
        raise _too_many(path)
    raw.seek(0)


def _too_many(path: Path) -> ConfigError:
    return ConfigError(f"{path} holds more files than the ranks of a job have. Unpack it, and give the traces.")


def _of_tar(content: BinaryIO, path: Path) -> Iterator[TraceText]:
    # The members' names come one by one, so how many there are is known only behind them.
    names: list[str] = []
    with tarfile.open(fileobj=_ShortReads(content), mode="r:") as archive:
        for count, member in enumerate(archive):
            if count > _MOST_MEMBERS:
                raise _too_many(path)
            if not member.isreg() or not _is_trace_name(member.name):
                continue
            names.append(member.name)
            _check_members(names, path)
            file = archive.extractfile(member)
            with ExitStack() as stack:
                yield _of_member(cast(BinaryIO, file), path, member.name, stack)
    _check_members(names, path)


def _is_trace_name(name: str) -> bool:
    return name.endswith(_NAMES) and not name.startswith("__MACOSX/")


def _check_members(names: list[str], path: Path) -> None:
    if not names:
        raise ConfigError(f"{path} is an archive without a trace: no file in it ends in {' or '.join(_NAMES[:2])}.")
    if len(names) > MOST_TRACES:
        raise ConfigError(f"{path} holds more than {MOST_TRACES:,} files of JSON, the most that are read of one job.")


def _of_member(file: BinaryIO, path: Path, member: str, stack: ExitStack) -> TraceText:
    content = _decompressed(file, path, stack)
    head = content.read(_HEAD)
    return TraceText(f"{path}:{member}", _as_text(_decompressed(file, path, stack), head))


def _decompressed(file: BinaryIO, path: Path, stack: ExitStack) -> BinaryIO:
    """The content of a file from its beginning, by its own first bytes."""
    file.seek(0)
    magic = file.read(6)
    file.seek(0)
    if magic.startswith(_GZIP):
        return stack.enter_context(cast(BinaryIO, gzip.GzipFile(fileobj=file)))
    if magic.startswith(_XZ):
        return stack.enter_context(cast(BinaryIO, lzma.LZMAFile(file)))
    if magic.startswith(_BZIP2):
        return stack.enter_context(cast(BinaryIO, bz2.BZ2File(file)))
    if magic.startswith(_ZSTD):
        return _of_zstd(file, path)
    return file


def _damage() -> tuple[type[Exception], ...]:
    """Errors of a damaged file, with the errors of the loaded readers of zstd, which are none of Python's."""
    loaded = [module for name in _ZSTD_MODULES if (module := sys.modules.get(name)) is not None]
    return (*_DAMAGE, *(module.ZstdError for module in loaded))


def _of_zstd(file: BinaryIO, path: Path) -> BinaryIO:
    """Read zstd by Python's own reader (3.14 on), or by the package zstandard."""
    for name in _ZSTD_MODULES:
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        if name == "zstandard":
            reader = module.ZstdDecompressor(max_window_size=2**27).stream_reader(
                file, read_across_frames=True, closefd=False
            )
            return cast(BinaryIO, reader)
        return cast(BinaryIO, module.ZstdFile(file))
    raise ConfigError(
        f"{path} is compressed by zstd, which Python reads from 3.14 on, or with the package zstandard: pip install "
        f"zstandard, or unpack the file (zstd -d {path.name})."
    )


def _as_text(content: BinaryIO, head: bytes) -> TextIO:
    encoding = next((name for mark, name in _ENCODINGS.items() if head.startswith(mark)), "utf-8")
    # The reader of a compressed file ends with its stack; the text's own end must not close it before.
    return io.TextIOWrapper(cast(Any, _ShortReads(content)), encoding=encoding, errors="replace")


def _packer(path: Path) -> str:
    with open_plain(path) as file:
        magic = file.read(6)
    names = {_GZIP: "gzip", _XZ: "xz", _BZIP2: "bzip2", _ZSTD: "zstd", **dict.fromkeys(_ZIP, "zip")}
    return next((name for begin, name in names.items() if magic.startswith(begin)), "tar")


class _ShortReads(io.BufferedIOBase):
    """A file of which at most some 64 MB are read at once, whatever an archive's header asks for."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LONGEST_READ:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)

    def read1(self, size: int = -1, /) -> bytes:
        return self._file.read(size if size >= 0 else io.DEFAULT_BUFFER_SIZE)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_TABLES = (_KERNELS, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_RUNTIME",
           "NVTX_EVENTS", "StringIds", "TARGET_INFO_GPU")  # fmt: skip
_LONGEST_VALUE = 1_000_000  # bytes of one cell
_PROCESS = 2**24  # a globalTid or globalPid is process x 2^24 + thread, below the bits of the machine
_LEAST_OF_A_RANK = 0.25  # share of the longest process's kernels; a data worker's are less
_PUSHED_RANGE = 59  # eventType of a range that its own thread opens and closes
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}  # CUpti_ActivityMemcpyKind
_MEMORY_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}  # Nsight's ENUM_CUDA_MEM_KIND
# Names of steps as loops give them, and of operators as emit_nvtx writes them: "aten::addmm, seq = 6".
_STEP = re.compile(r"(?:profiler|train(?:ing)?)?[ _]?(?:step|iter(?:ation)?)[ _#:]*(\d{1,18})", flags=re.IGNORECASE)
_OPERATOR = re.compile(r"((?:\w+::)+\w+(?:: \w+)?)(?:, .*)?")
_SEQUENCE = re.compile(r", seq = (\d{1,18})")


def read_export(path: Path, parse: Callable[[Iterator[dict[str, Any]], dict[str, Any], list[str]], Text]) -> list[Text]:
    """Read an export, one rank for each process with kernels, in the order of their devices.

    Args:
        path: of the export.
        parse: makes a trace of the events in the form of torch.profiler's, of the facts beside them
            (`deviceProperties` where the export names devices, `distributedInfo` where there are several processes),
            and of notes.

    Raises:
        ConfigError: it is no export of Nsight Systems, or holds no kernels.
    """
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)) as database:
            # The file may be a stranger's: its schema runs no functions, and no cell fills the memory.
            database.execute("PRAGMA trusted_schema = OFF")
            database.text_factory = _text
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            return [parse(*arguments) for arguments in _Export(database, path).processes()]
    except (sqlite3.Error, OverflowError, TypeError, UnicodeError) as error:
        raise ConfigError(
            f"{path} is a SQLite database that cannot be read as an export of Nsight Systems: {error}. Export the "
            "report again: nsys export --type sqlite FILE.nsys-rep"
        ) from error


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


class _Export:
    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database = database
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

    def processes(self) -> Iterator[tuple[Iterator[dict[str, Any]], dict[str, Any], list[str]]]:
        """Give the events, facts and notes of each process; each numbers its launches by itself."""
        names = dict(self._database.execute("SELECT id, value FROM StringIds"))
        devices: list[tuple[Any]] = []
        if "TARGET_INFO_GPU" in self._columns:
            devices = self._database.execute("SELECT DISTINCT name FROM TARGET_INFO_GPU").fetchall()
        facts: dict[str, Any] = {"deviceProperties": [{"name": str(name)} for (name,) in devices]}
        chosen, notes = self._chosen()
        for rank, process in enumerate(chosen):
            ranks = {"distributedInfo": {"rank": rank, "world_size": len(chosen)}} if len(chosen) > 1 else {}
            events = itertools.chain(self._on_device(process, names), self._on_host(process, names))
            yield events, facts | ranks, list(notes)

    def _chosen(self) -> tuple[list[int | None], list[str]]:
        """Choose the processes that compute, in the order of their devices, and make notes on the choice."""
        if "globalPid" not in self._columns[_KERNELS]:
            return [None], []
        rows = self._database.execute(
            f"SELECT globalPid / {_PROCESS} AS process, SUM(end - start) FROM {_KERNELS} GROUP BY process "
            "ORDER BY MIN(deviceId), process"
        ).fetchall()
        longest_ns = max((ns for _, ns in rows), default=0)
        chosen = [process for process, ns in rows if ns >= _LEAST_OF_A_RANK * longest_ns]
        notes = []
        if len(chosen) > 1:
            notes.append(
                f"the export holds {len(chosen)} processes with kernels, which are taken for ranks in the order of "
                f"their devices; {Argument('rank')} shows one."
            )
        if len(chosen) < len(rows):
            number = len(rows) - len(chosen)
            notes.append(f"{number} other process{'es' * (number > 1)} with few kernels left out.")
        return chosen or [None], notes

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
        # Copies in Kineto's words: direction, kinds of memory (which the first exports lack), and bytes.
        copies = "CUPTI_ACTIVITY_KIND_MEMCPY"
        fields = [name if name in self._columns.get(copies, ()) else "NULL" for name in ("bytes", "srcKind", "dstKind")]
        for *times, kind, num_bytes, source, target in self._rows(
            copies, ", ".join([common, "copyKind", *fields]), process
        ):
            name = f"Memcpy {_COPY_KINDS.get(kind, 'of another kind')}"
            if source in _MEMORY_KINDS and target in _MEMORY_KINDS:
                name += f" ({_MEMORY_KINDS[source]} -> {_MEMORY_KINDS[target]})"
            yield _device_event("gpu_memcpy", name, *times, **({} if num_bytes is None else {"bytes": num_bytes}))
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
    category: str, name: str, start: int, end: int, device: int, stream: int, correlation: int, **more: Any
) -> dict[str, Any]:
    arguments = {"device": device, "stream": stream, "correlation": correlation, **more}
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
