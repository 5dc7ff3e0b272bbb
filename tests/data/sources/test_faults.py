"""Files that are cut, gone, changed or empty: one clear error each, after the rows before the damage."""

import gzip
import io
import json
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
import zstandard

from headway.cache import cache_root
from headway.data import read_samples
from headway.data.samples import SampleError
from headway.data.sources import files, open_source
from headway.errors import DataError

WORDS = [f"text {number} " + "x" * (number * 37 % 50) for number in range(400)]
CUT = "the file cannot be read further: "


def lines():
    return "".join(json.dumps({"text": text}) + "\n" for text in WORDS).encode()


def tar(path, records=WORDS):
    with webdataset.TarWriter(str(path)) as writer:
        for number, text in enumerate(records):
            writer.write({"__key__": f"{number:05d}", "txt": text})
    return path.read_bytes()


def arrow(path, new=pa.ipc.new_stream):
    table = pa.table({"text": WORDS})
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return path.read_bytes()


def parquet(path):
    pq.write_table(pa.table({"text": WORDS}), path, row_group_size=100)
    return path.read_bytes()


def in_order(source):
    (shard,) = source.shards
    rows = [sample for _, sample in shard.rows()]
    return [row.content for row in rows[:-1]], rows[-1]


def by_number(source):
    with pytest.raises(SampleError) as caught:
        source[len(source) - 1]
    return [source[row].content for row in range(len(source) - 1)], caught.value


def cut_at_half(content):
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("name", "content", "least"),
    [
        ("a.jsonl.gz", lambda _: cut_at_half(gzip.compress(lines())), 150),
        ("a.jsonl.zst", lambda _: cut_at_half(zstandard.compress(lines(), level=1)), 0),
        ("a.json", lambda _: cut_at_half(json.dumps([{"text": text} for text in WORDS]).encode()), 199),
        ("a.json.gz", lambda _: gzip.compress(b'[{"text": "a"}, {"text": "b"} {'), 1),
        ("a.tar", lambda path: cut_at_half(tar(path)), 199),
        ("a.tar", lambda path: tar(path)[: 90 * 2048 + 100], 89),  # four blocks each: an extended header
        ("a.tar.gz", lambda path: cut_at_half(gzip.compress(tar(path))), 100),
        ("a.arrow", lambda path: cut_at_half(arrow(path)), 150),
    ],
)
def test_a_cut_file_gives_the_rows_before_the_damage(tmp_path, name, content, least):
    path = tmp_path / name
    path.write_bytes(content(tmp_path / "whole"))
    source = open_source(path)
    words, error = in_order(source)
    expected = ["a", "b"] if "json.gz" in name else WORDS
    assert len(words) >= least
    assert words == expected[: len(words)]
    assert str(error).startswith(f"{path}, ")
    assert CUT in str(error)
    assert error.origin.row == len(words)
    assert by_number(source)[0] == words
    assert str(by_number(source)[1]) == str(by_number(pickle.loads(pickle.dumps(source)))[1]) == str(error)
    (shard,) = source.shards
    assert [row for row, _ in shard.rows(len(words))] == [len(words)]
    with pytest.raises(DataError, match=CUT):
        read_samples(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.parquet", lambda path: cut_at_half(parquet(path))),
        ("a.arrow", lambda path: cut_at_half(arrow(path, pa.ipc.new_file))[:-8]),
        ("a.npy", lambda _: b"not an array at all"),
        ("a.tar", lambda _: b"not a tar archive " * 100),
        ("a.jsonl.gz", lambda _: b'{"text": "not gzip"}'),
        ("a.jsonl.zst", lambda _: b'{"text": "not zstd"}'),
        ("a.json", lambda _: b'{"text": "not an array"}'),
        ("a.arrow", lambda _: b"not a table"),
    ],
)
def test_a_file_of_which_nothing_can_be_read_is_one_error(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content(tmp_path / "whole"))
    source = open_source(path, end_token=1 if name == "a.npy" else None)
    for words, error in (in_order(source), by_number(source)):
        assert words == []
        assert str(error).startswith(f"{path}, at its start: {CUT}")
        assert "\n" not in str(error)


def test_a_damaged_row_group_ends_the_file_after_the_whole_ones(tmp_path):
    path = tmp_path / "a.parquet"
    content = bytearray(parquet(path))
    chunk = pq.ParquetFile(path).metadata.row_group(2).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(content)
    source = open_source(path)
    for words, error in (in_order(source), by_number(source)):
        assert words == WORDS[:200]
        assert str(error).startswith(f"{path}, after row 199: {CUT}")


@pytest.mark.parametrize("dimensions", [1, 2])
def test_a_cut_array_of_tokens_is_told(tmp_path, dimensions):
    ids = np.arange(1000).reshape((1000,) if dimensions == 1 else (100, 10))
    np.save(tmp_path / "a.npy", ids)
    path = tmp_path / "a.npy"
    path.write_bytes(path.read_bytes()[:-44])
    source = open_source(path, end_token=499 if dimensions == 1 else None)
    for ids, error in (in_order(source), by_number(source)):
        assert len(ids) == (1 if dimensions == 1 else 99)
        assert CUT in str(error)


def test_a_line_cut_in_the_middle_is_a_bad_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines()[:-10])
    source = open_source(path)
    for words, error in (in_order(source), by_number(source)):
        assert words == WORDS[:-1]
        assert str(error).startswith(f"{path}, line 400: not valid JSON")


def test_a_bad_row_does_not_hide_those_behind_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n[]\n{"text": "b"}\n')
    rows = list(open_source(path).shards[0].rows())
    assert [row for row, _ in rows] == [0, 1, 2, 3]
    assert str(rows[1][1]).startswith(f"{path}, line 2: it is not UTF-8 text: 'utf-8' codec can't decode byte 0xff")
    assert str(rows[2][1]).startswith(f"{path}, line 3: got [], but it must be an object")
    assert rows[3][1].content == open_source(path)[3].content == "b"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (r'{"text": "\uD83D"}', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": "a"} {"text": "b"}', "not valid JSON (Extra data"),
        ("NaN", "it must be an object"),
    ],
)
def test_odd_lines_are_bad_rows(tmp_path, line, says):
    path = tmp_path / "a.jsonl"
    path.write_text(line + '\n{"text": "\\ud83d\\ude00"}')
    (_, bad), (_, good) = open_source(path).shards[0].rows()
    assert says in str(bad)
    assert good.content == "\N{GRINNING FACE}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.tar", "a.jsonl.gz", "a.parquet", "a.arrow", "a.bin"])
def test_a_file_without_rows_is_an_error(tmp_path, name):
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    elif name == "a.arrow":
        with pa.ipc.new_file(str(path), pa.schema({"text": pa.string()})):
            pass
    else:
        empty = {"a.json": b" [ ] ", "a.jsonl.gz": gzip.compress(b" \n"), "a.tar": bytes(10240)}
        path.write_bytes(empty.get(name, b""))
    settings = {"token_dtype": "uint16", "end_token": 0} if name == "a.bin" else {}
    source = open_source(path, **settings)
    for words, error in (in_order(source), by_number(source)):
        assert words == []
        assert str(error).startswith(f"{path}, at its start: it holds no samples")


def test_a_file_that_disappears_is_an_error_and_not_kept_in_mind(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines())
    status = path.stat()
    source = open_source(path)
    path.rename(tmp_path / "elsewhere")
    words, error = in_order(source)
    assert words == []
    assert str(error).startswith(f"{path}, at its start: {CUT}No such file or directory")
    with pytest.raises(DataError, match=rf"{path}: {CUT}No such file"):
        len(source)
    (tmp_path / "elsewhere").rename(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert source[399].content == WORDS[399]
    other = pickle.loads(pickle.dumps(source))
    path.unlink()
    files._handle.cache_clear()  # a process that had the file open reads on
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read: No such file"):
        other[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_that_changes_is_an_error(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(lines() if name == "a.jsonl" else parquet(path))
    source = open_source(path)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(DataError, match="changed while it was in use"):
        source[0]
    with pytest.raises(DataError, match="changed while it was in use"):
        list(source.shards[0].rows())


def test_a_remote_damage_is_not_kept_in_mind(memory):
    memory.pipe_file("/a.jsonl.gz", cut_at_half(gzip.compress(lines())))
    source = open_source("memory://a.jsonl.gz")
    assert len(in_order(source)[0]) > 100
    with pytest.raises(DataError, match=rf"memory:///a\.jsonl\.gz: {CUT}"):
        len(source)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "file"))
    (tmp_path / "a.jsonl").write_bytes(lines())
    source = open_source(tmp_path / "a.jsonl")
    assert next(source.shards[0].rows())[1].content == WORDS[0]
    with pytest.raises(DataError, match=r"cannot be written: .*HEADWAY_CACHE"):
        len(source)


def test_a_failed_copy_leaves_nothing_behind(tmp_path, memory):
    memory.pipe_file("/a.parquet", cut_at_half(parquet(tmp_path / "whole")))
    with pytest.raises(DataError):
        len(open_source("memory://a.parquet"))
    assert [path for path in cache_root().rglob("*") if path.is_file()] == []


def test_links_in_an_archive_are_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("x.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(SampleError, match=r"sample x: the member x\.json is a link"):
        open_source(path)[0]


def npy_bomb(path):
    header = b"(" * 5000 + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64))


def sparse_tar(path, **headers):
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("a.json")
        member.size = 9
        member.pax_headers = {f"GNU.sparse.{name}": value for name, value in headers.items()}
        archive.addfile(member, io.BytesIO(b'{"a": 1}\n'))


def flipped_page(path):
    """A page one of whose letters was changed; uncompressed, so that nothing but its checksum can tell."""
    table = pa.table({"text": [f"some words of row {row:05d} here" for row in range(500)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"some words of row 00100", b"same words of row 00100"))
    assert path.read_bytes() != content


STRANGE = {
    "header.npy": (npy_bomb, "cannot be read further: "),
    "a.tar": (partial(sparse_tar, major="1", minor="0", realsize="99999999999", name="b.json"), "cannot be read "),
    "b.tar": (partial(sparse_tar, major="0", minor="1", map="x,y", name="b.json"), "cannot be read "),
    "page.parquet": (flipped_page, "CRC checksum verification failed"),
} | {
    f"{kind}{extension}": (lambda path, words=words: path.write_text(words), says)
    for extension in (".jsonl", ".jsonl.gz", ".json", ".csv", ".tar", ".parquet", ".arrow")
    for kind, words, says in (
        (
            "pointer",
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n",
            "that Git LFS left",
        ),
        ("page", "\n<!doctype html>\n<html>Sign in</html>\n", "it is a web page"),
    )
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strangers_file_ends_in_a_sentence_whatever_its_library_raises(tmp_path, name):
    write, says = STRANGE[name]
    write(tmp_path / name)
    source = open_source(tmp_path / name)
    with pytest.raises(SampleError, match=says):
        source[len(source) - 1]
    *_, (_, last) = source.shards[0].rows()
    assert isinstance(last, SampleError)
    assert re.search(says, str(last))


READ_ALL = """
import sys
from headway.data.sources import open_source
from headway.errors import HeadwayError
bad = 0
for path in sys.argv[1:]:
    source = open_source(path)
    for row in range(len(source)):
        try:
            source[row]
        except HeadwayError:
            bad += 1
print(bad)
"""


def test_offsets_that_lead_out_of_an_arrow_file_end_no_process(tmp_path):
    # Arrow reads such offsets as they are: without a look at them a process ends by a signal, so one of its own reads.
    words = [f"hello {row}" for row in range(50)]
    turns = [[{"role": "user", "content": word}, {"role": "assistant", "content": "fine"}] for word in words]
    rng, paths = random.Random(1), []
    for number in range(60):
        table = pa.table({"messages": turns} if number % 2 else {"text": words})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        content = bytearray(sink.getvalue().to_pybytes())
        for _ in range(3):
            content[rng.randrange(8, len(content) - 8)] = rng.choice((127, 128, 255))
        paths.append(tmp_path / f"{number}.arrow")
        paths[-1].write_bytes(content)
    run = subprocess.run([sys.executable, "-c", READ_ALL, *paths], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 100


def test_a_row_of_an_arrow_file_whose_words_are_no_utf_8_is_bad_alone(tmp_path):
    words = pa.StringArray.from_buffers(3, *pa.array([b"a", b"\xff", b"c"]).buffers()[1:])
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": words}))
    source = open_source(tmp_path / "a.arrow")
    with pytest.raises(SampleError, match="row 1: the column"):
        source[1]
    assert [row.content for row in (source[0], source[2])] == ["a", "c"]


def test_a_web_page_is_a_text_among_texts(tmp_path):
    (tmp_path / "page.txt").write_text("<html>\n</html>\n")
    assert len(read_samples(tmp_path / "page.txt")) == 1


@pytest.mark.parametrize("path", ["{}/na\udcffme.jsonl", "{}/*.jsonl", "{}"])
def test_a_name_that_is_not_utf_8_is_refused_by_name(tmp_path, path):
    Path(f"{tmp_path}/na\udcffme.jsonl").write_bytes(lines())
    with pytest.raises(DataError, match=r"na\\udcffme.jsonl is not UTF-8.* Rename it"):
        open_source(path.format(tmp_path))
