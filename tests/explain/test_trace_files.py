import bz2
import gzip
import io
import json
import lzma
import random
import struct
import sys
import tarfile
import zipfile
from contextlib import suppress

import pytest

from headway.errors import ConfigError
from headway.explain import trace_files
from headway.explain.trace import read_trace, read_traces
from headway.explain.trace_files import foreign_kind, is_packed
from headway.explain.waterfall import explain
from helpers.traces import nsight_export, two_kernels_a_step


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
