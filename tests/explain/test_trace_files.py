import bz2
import gzip
import io
import json
import lzma
import random
import sqlite3
import struct
import sys
import tarfile
import zipfile
from contextlib import suppress

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.explain import trace_files
from headway.explain.events import NONE, Kind
from headway.explain.trace import read_trace, read_traces
from headway.explain.trace_files import foreign_kind, is_packed
from headway.explain.waterfall import explain
from helpers.traces import US, nsight_export, two_kernels_a_step


def written(rank=0):
    return two_kernels_a_step(3).text(distributedInfo={"rank": rank, "world_size": 3}).encode()


def zipped(members, method=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(members, mode="w"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zstandard_of(content):
    return pytest.importorskip("zstandard").compress(content)


PACKED = {
    "plain": lambda content: content,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "zstd": zstandard_of,
    "mark": lambda content: b"\xef\xbb\xbf" + content,
    "utf-16": lambda content: content.decode().encode("utf-16"),
    "zip": lambda content: zipped({"run/trace.json": content, "run/notes.txt": b"x", "__MACOSX/run/t.json": b"x"}),
    "tar": lambda content: tarred({"run/trace.json": content, "run/notes.txt": b"x"}),
    "tar.gz of gzip": lambda content: tarred({"trace.json.gz": gzip.compress(content)}, "w:gz"),
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("name", ["trace.json", "no_suffix"])
def test_a_trace_is_read_however_it_is_packed_and_whatever_its_name_says(tmp_path, packed, name):
    path = tmp_path / name
    path.write_bytes(PACKED[packed](written(rank=2)))
    trace = read_trace(path)
    assert (trace.rank, trace.world_size, len(trace.device), len(trace.steps)) == (2, 3, 6, 3)
    assert is_packed(path.read_bytes()[:512]) == (packed not in ("plain", "mark", "utf-16"))
    assert foreign_kind(path, path.read_bytes()[:512]) is None or is_packed(path.read_bytes()[:512])


@pytest.mark.parametrize("pack", [zipped, tarred, lambda members: tarred(members, "w:xz")])
def test_an_archive_of_ranks_is_one_job(tmp_path, pack):
    path = tmp_path / "job"
    path.write_bytes(pack({f"rank{rank}.json": written(rank) for rank in (0, 1, 2)}))
    traces = read_traces(path)
    assert [trace.rank for trace in traces] == [0, 1, 2]
    assert str(traces[1].path) == f"{path}:rank1.json"
    with pytest.raises(ConfigError, match="holds 3 traces, and one is wanted here"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped({"notes.txt": b"x"}), "is an archive without a trace: no file in it ends in .json"),
        (tarred({"notes.txt": b"x"}), "is an archive without a trace"),
        (zipped({"t.json": written()})[:200], "is cut off or damaged: zip says"),
        (tarred({"t.json": written()})[:700], "is cut off or damaged: tar says|the file is cut off"),
        (lzma.compress(written())[:300], "is cut off or damaged: xz says"),
        (bz2.compress(written())[:300], "is cut off or damaged: bzip2 says"),
        (zipped({"t.json": b"[3]"}), r"job:t\.json is no whole trace"),
    ],
)
def test_a_damaged_archive_is_told_in_a_sentence(tmp_path, content, message):
    path = tmp_path / "job"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_traces(path)
    assert str(error.value).startswith(str(path))


def test_links_and_folders_of_an_archive_are_not_followed(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_bytes(written())
    path = tmp_path / "job.tar"
    with tarfile.open(path, "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo("link.json")
            member.type, member.linkname = kind, str(secret)
            archive.addfile(member)
    with pytest.raises(ConfigError, match="is an archive without a trace"):
        read_traces(path)


def test_an_archive_of_more_files_than_a_job_has_ranks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_files, "MOST_TRACES", 2)
    for pack in (zipped, tarred):
        path = tmp_path / "job"
        path.write_bytes(pack({f"{i}.json": written(i) for i in range(3)}))
        with pytest.raises(ConfigError, match="holds more than 2 files of JSON"):
            read_traces(path)


def test_a_header_of_an_archive_cannot_ask_for_all_memory(tmp_path):
    """A name of 64 GB in the header of a tar, and a file that unpacks to as many zeros."""
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_LONGNAME
    header[124:136] = b"\x80" + struct.pack(">Q", 2**36).rjust(11, b"\0")
    header[148:156] = b"        "
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    path = tmp_path / "job.tar.gz"
    path.write_bytes(gzip.compress(bytes(header) + b"\0" * 2**22))
    with pytest.raises(ConfigError, match="is cut off or damaged: gzip says"):
        read_traces(path)


def test_an_archive_of_more_headers_than_memory_holds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_files, "_MOST_MEMBERS", 20)
    monkeypatch.setattr(trace_files, "_LONGEST_DIRECTORY", 1000)
    for pack in (zipped, tarred):
        path = tmp_path / "job"
        path.write_bytes(pack({f"notes {i}.txt": b"" for i in range(30)}))
        with pytest.raises(ConfigError, match="holds more files than the ranks of a job have"):
            read_traces(path)


def test_zstd_without_a_reader_names_the_way_out(tmp_path, monkeypatch):
    path = tmp_path / "t.json.zst"
    path.write_bytes(zstandard_of(written()))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(ConfigError, match=r"compressed by zstd.*pip install zstandard, or unpack the file \(zstd -d t"):
        read_trace(path)


@pytest.mark.parametrize("packed", [*PACKED, "sqlite"])
def test_no_changed_byte_of_a_file_ends_in_another_error(tmp_path, packed):
    path = tmp_path / "t"
    if packed == "sqlite":
        nsight_export(path).commit()
        content = path.read_bytes()
    else:
        content = PACKED[packed](written())
    dice = random.Random(1)
    for _ in range(40):
        changed = bytearray(content)
        for _ in range(dice.choice([1, 3, 30])):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        path.write_bytes(changed[: dice.choice([len(changed), dice.randrange(len(changed))])])
        with suppress(ConfigError):
            explain(read_traces(path))


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("t.json", b"", "empty: a program that was killed"),
        ("snapshot.pickle", b"\x80\x04\x95", "a pickle of Python"),
        ("host.xplane.pb", b"\n\x10\x00/host:CPU", "a protobuf, as JAX and TensorFlow write profiles"),
        ("run.nsys-rep", b"\x00\x01", "a report of Nsight Systems. Export it: nsys export --type sqlite"),
        ("t.parquet", b"PAR1\x00", "a Parquet table"),
        ("t", b"\x01\x00\x02", "a binary file of no kind that Headway reads"),
        ("train.log", b"step 1 loss 2.3", None),
        ("t.json", json.dumps({"traceEvents": []}).encode(), None),
        ("t.json", "[]".encode("utf-16"), None),
    ],
)
def test_what_is_no_trace_is_refused_by_what_it_is(tmp_path, name, content, kind):
    message = foreign_kind(tmp_path / name, content)
    assert message is None if kind is None else (message or "").startswith(kind)


@pytest.mark.parametrize("step_name", ["iteration {}", "step_{}", "ProfilerStep#{}", "Train Iter: {}"])
def test_an_export_is_explained_like_a_trace(tmp_path, step_name):
    path = tmp_path / "report.sqlite"
    database = nsight_export(path, step_name=step_name)
    # Another process with numbers of its own, and fewer kernels.
    database.execute(
        f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({10**15}, {10**15 + 30 * US}, 1, 1, 7, 1, {78 * 2**24}, 0, 0)"
    )
    database.commit()
    explanation = explain([read_trace(path)])
    (step,) = explanation.steps  # the first and the last are left out
    assert (step.step, step.duration_ns, step.device_name) == (8, 100 * US, "NVIDIA H200")
    lines = {line.key: line.ns / US for line in step.lines if line.ns}
    assert lines == {"matmul": 30, "unexplained": 20, "copies": 10, "idle.launch": 40}
    assert "1 other process with few kernels left out." in explanation.notes


def test_processes_that_compute_are_ranks_in_the_order_of_their_devices(tmp_path):
    """As two ranks of a job are in one report: nsys-ai's h100_2gpu_1s.sqlite and mfu_2gpu_before.sqlite."""
    path = tmp_path / "report.sqlite"
    database = nsight_export(path)
    for table in ("KERNEL", "MEMCPY", "RUNTIME"):
        name, process = f"CUPTI_ACTIVITY_KIND_{table}", "globalTid" if table == "RUNTIME" else "globalPid"
        database.execute(f"CREATE TEMP TABLE other AS SELECT * FROM {name}")
        database.execute(f"UPDATE other SET {process} = {process} - {2**24}")
        if table != "RUNTIME":
            database.execute("UPDATE other SET deviceId = 1, end = start + (end - start) / 2")
        database.executescript(f"INSERT INTO {name} SELECT * FROM other; DROP TABLE other")
    database.commit()
    traces = read_traces(path)
    assert [(trace.rank, trace.world_size) for trace in traces] == [(0, 2), (1, 2)]
    busy = [int((trace.device.end_ns - trace.device.start_ns).sum()) for trace in traces]
    assert busy == [3 * 60 * US, 3 * 30 * US]
    explanation = explain(traces, rank=1, as_one_step=True)
    assert [step.rank for step in explanation.steps] == [1]
    assert any("2 processes with kernels, which are taken for ranks" in note for note in explanation.notes)


def test_copies_of_an_export_have_their_memory_and_bytes(tmp_path):
    """Columns of later exports, in Kineto's words; the first ones lack them."""
    path = tmp_path / "report.sqlite"
    database = nsight_export(path)
    database.commit()
    first = read_trace(path)
    assert "Memcpy HtoD" in first.names
    for column, kind in (("srcKind", 1), ("dstKind", 2)):
        database.execute(f"ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY ADD COLUMN {column} INT DEFAULT {kind}")
    database.commit()
    trace = read_trace(path)
    copies = np.flatnonzero(trace.device.kind == Kind.MEMCPY)
    assert {trace.names[i] for i in trace.device.name[copies]} == {"Memcpy HtoD (Pinned -> Device)"}
    assert trace.device.num_bytes[copies].tolist() == [4096] * 3
    assert set(trace.device.num_bytes.tolist()) == {4096, NONE}


def test_an_export_without_named_steps_is_taken_whole(tmp_path):
    path = tmp_path / "report.sqlite"
    nsight_export(path, step_name="forward pass {}").commit()
    explanation = explain([read_trace(path)])
    assert [step.duration_ns for step in explanation.steps] == [260 * US]
    assert any(note.startswith("the trace has no steps") for note in explanation.notes)


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ("CREATE TABLE t (a INT)", "without kernels of Nsight Systems"),
        # A view that would never end.
        (
            "CREATE TABLE StringIds (id INT, value TEXT); CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE "
            "n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT start, start AS end FROM n",
            "without kernels of Nsight Systems",
        ),
        ("CREATE TABLE StringIds (id INT); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT)", "cannot be read as"),
    ],
)
def test_another_database_is_refused_by_what_it_lacks(tmp_path, statements, message):
    path = tmp_path / "other.sqlite"
    sqlite3.connect(path).executescript(statements)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_damaged_database_is_refused(tmp_path):
    path = tmp_path / "report.sqlite"
    path.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    with pytest.raises(ConfigError, match="cannot be read as an export of Nsight Systems"):
        read_trace(path)
