"""Every format, written by the library that people write it with, read in order and by row."""

import csv
import gzip
import io
import itertools
import json
import multiprocessing
import pickle
import tarfile
import zipfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import webdataset
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headway.data import Document, Media
from headway.data.samples import SampleError
from headway.data.sources import open_source
from headway.errors import DataError

END = 7  # the token id that ends documents of token files


def json_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def spaced_json_lines(path, rows):
    lines = [json.dumps(row, ensure_ascii=False) + "\r\n \t\n\n" for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + "".join(lines).encode().rstrip())


def json_array(path, rows, indent=None):
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=indent), "utf-8")


def delimited(path, rows, **options):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), **options)
        writer.writeheader()
        writer.writerows(rows)


def pandas_csv(path, rows):
    pd.DataFrame(rows).to_csv(path, encoding="utf-8-sig")  # with its index, and as spreadsheets want it


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)


def arrow(path, rows, new=pa.ipc.new_file):
    table = pa.Table.from_pylist(rows)
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def feather(path, rows):
    pa.feather.write_feather(pa.Table.from_pylist(rows), str(path), compression="zstd", chunksize=2)


def tar(path, rows):
    with webdataset.TarWriter(str(path)) as writer:
        for number, row in enumerate(rows):
            writer.write({"__key__": f"folder/{number:05d}", "json": row})


def compressed(write, compress, suffix, path, rows):
    plain = path.with_name(path.name.removesuffix(suffix))
    write(plain, rows)
    path.write_bytes(compress(plain.read_bytes()))
    plain.unlink()


def frames(content):
    """Two zstd frames, as parallel compressors write them."""
    half = len(content) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))


WRITERS = {
    "a.jsonl": json_lines,
    "spaced.ndjson": spaced_json_lines,
    "a.jsonl.gz": partial(compressed, json_lines, gzip.compress, ".gz"),
    "a.jsonl.zst": partial(compressed, json_lines, frames, ".zst"),
    "a.json": json_array,
    "indented.json": partial(json_array, indent=2),
    "a.json.gz": partial(compressed, json_array, gzip.compress, ".gz"),
    "a.csv": delimited,
    "a.tsv": partial(delimited, delimiter="\t", lineterminator="\n"),
    "semicolons.csv": partial(delimited, delimiter=";", quoting=csv.QUOTE_ALL),
    "pandas.csv": pandas_csv,
    "a.csv.gz": partial(compressed, delimited, gzip.compress, ".gz"),
    "a.parquet": parquet,
    "a.arrow": arrow,
    "stream.arrow": partial(arrow, new=pa.ipc.new_stream),
    "a.feather": feather,
    "a.tar": tar,
    "a.tar.gz": partial(compressed, tar, gzip.compress, ".gz"),
    "a.tgz": partial(compressed, tar, gzip.compress, ".tgz"),
    "a.tar.zst": partial(compressed, tar, frames, ".zst"),
}

texts = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=9)


def words_of(samples):
    return [sample.content for sample in samples]


def check(source, expected):
    """Rows by number, in order, and in order from any row on are the same ones."""
    assert len(source) == len(expected)
    assert words_of(source[row] for row in reversed(range(len(source)))) == expected[::-1]
    (shard,) = source.shards
    for start in range(len(expected) + 1):
        rows = list(shard.rows(start))
        assert [row for row, _ in rows] == list(range(start, len(expected)))
        assert [sample for _, sample in rows] == [source[row] for row in range(start, len(expected))]
    with pytest.raises(IndexError, match=f"row {len(expected)} of {len(expected)} rows"):
        source[len(expected)]


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=12)
@given(texts)
def test_rows_by_number_are_those_in_order(tmp_path_factory, name, words):
    path = tmp_path_factory.mktemp("written") / name
    WRITERS[name](path, [{"text": text, "more": [{"a": "b"}]} for text in words])
    check(open_source(path), words)


@pytest.mark.parametrize("name", WRITERS)
def test_a_remote_file_gives_the_same_rows(tmp_path, memory, name):
    words = ["één", "zwei", "three"]
    WRITERS[name](tmp_path / name, [{"text": text} for text in words])
    memory.pipe_file(f"/data/{name}", (tmp_path / name).read_bytes())
    check(open_source(f"memory://data/{name}"), words)
    check(open_source((tmp_path / name).as_uri()), words)


@pytest.mark.parametrize("name", WRITERS)
def test_a_source_is_small_to_pickle_and_finds_its_tables_again(tmp_path, name):
    words = [f"text {number}" for number in range(400)]
    WRITERS[name](tmp_path / name, [{"text": text} for text in words])
    source = open_source(tmp_path / name)
    assert source[399].content == "text 399"
    copy = pickle.dumps(source)
    assert len(copy) < 1000
    assert words_of(pickle.loads(copy)[row] for row in (0, 150, 399)) == ["text 0", "text 150", "text 399"]


def _last(pickled):
    source = pickle.loads(pickled)
    return source[len(source) - 1].content


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.parquet", pytest.param("a.jsonl.gz", marks=pytest.mark.long)])
def test_processes_that_make_the_same_tables_at_once_do_not_meet(tmp_path, name):
    WRITERS[name](tmp_path / name, [{"text": f"text {number}"} for number in range(20_000)])
    pickled = pickle.dumps(open_source(tmp_path / name))
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(_last, [pickled] * 6)) == ["text 19999"] * 6


def test_elements_longer_than_a_chunk_are_read(tmp_path):
    words = ["a" * 3_000_000, "ü", "b" * 1_500_000, '"}],[{\\']
    json_array(tmp_path / "a.json", [{"text": text} for text in words])
    check(open_source(tmp_path / "a.json"), words)


def test_rows_of_large_tables_are_found_in_any_batch(tmp_path):
    words = [f"text {number}" for number in range(1000)]
    pq.write_table(pa.table({"text": words}), tmp_path / "a.parquet", row_group_size=300)
    source = open_source(tmp_path / "a.parquet")
    assert words_of(source[row] for row in range(1000)) == words
    for start in (0, 1, 299, 300, 301, 450, 999, 1000):
        assert words_of(sample for _, sample in source.shards[0].rows(start)) == words[start:]


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_folder_of_datasets_gives_what_datasets_gives(tmp_path, num_shards):
    content = {
        "messages": [
            [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}] for i in range(20)
        ]
    }
    saved = datasets.Dataset.from_dict(content).shuffle(seed=0).select(range(11))
    saved.save_to_disk(tmp_path / "saved", num_shards=num_shards)
    source = open_source(tmp_path / "saved")
    expected = [[turn["content"] for turn in row["messages"]] for row in datasets.load_from_disk(tmp_path / "saved")]
    assert [[turn.text for turn in source[row].messages] for row in range(len(source))] == expected
    assert len(source.shards) == num_shards


def test_the_splits_of_a_saved_folder_are_named(tmp_path):
    split = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        DataError, match=r"holds the splits train, test\. Give the folder of one of them, such as .*/train"
    ):
        open_source(tmp_path / "saved")
    assert open_source(tmp_path / "saved" / "train")[0].content == "a"


def test_images_of_datasets_come_as_bytes(tmp_path):
    image = Image.new("RGB", (8, 8))
    features = datasets.Features({"images": [datasets.Image()], "messages": datasets.Value("string")})
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    dataset = datasets.Dataset.from_dict({"images": [[image]], "messages": [json.dumps(turns)]}, features=features)
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "a.parquet")
    for path in ("saved", "a.parquet"):
        (media,) = open_source(tmp_path / path)[0].images
        assert media.read().startswith(b"\x89PNG")


def test_members_of_a_shard_are_the_samples_media(tmp_path):
    with webdataset.ShardWriter(str(tmp_path / "%03d.tar"), maxcount=2, verbose=0) as writer:
        for number in range(3):
            turns = [{"from": "human", "value": "<image><image>?"}, {"from": "gpt", "value": str(number)}]
            media = {"0.png": b"first%d" % number, "1.jpg": b"second%d" % number}
            writer.write({"__key__": f"{number:04d}", "json": {"conversations": turns}, **media})
    source = open_source(tmp_path)
    assert [len(shard) for shard in source.shards] == [2, 1]
    for row in range(3):
        assert source[row].images == (Media(data=b"first%d" % row), Media(data=b"second%d" % row))
        assert source[row].origin.place == f"sample {row:04d}"


def test_members_may_be_named_by_the_columns(tmp_path):
    turns = [
        {"role": "user", "content": [{"type": "image", "image": "1.jpg"}, {"type": "image", "image": "x.0.png"}]},
        {"role": "assistant", "content": [{"type": "video", "video": "mp4"}]},
    ]
    members = {"0.png": b"first", "1.jpg": b"second", "mp4": b"film"}
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "in/x", "json": {"messages": turns}, **members})
    (chat,) = (sample for _, sample in open_source(tmp_path / "a.tar").shards[0].rows())
    assert [part.media.data for part in chat.parts] == [b"second", b"first", b"film"]


def test_a_caption_beside_an_image_is_the_answer_to_it(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "x", "jpg": b"...", "txt": "A cat.", "json": {"url": "http://a", "width": 3}})
    chat = open_source(tmp_path / "a.tar")[0]
    assert (chat.images, chat.messages[0].role, chat.answer) == ((Media(data=b"..."),), "user", "A cat.")


@pytest.mark.parametrize(
    "names",
    [
        "0.json 0.png 1.json 1.png",
        "0.json ._0.png 0.png ._1.json 1.json 1.png",  # as macOS packs files
        "0.json 1.json 0.png 1.png",
        "0.png 1.png 0.json 1.json",
    ],
)
def test_members_of_a_sample_that_do_not_lie_side_by_side_are_told(tmp_path, names):
    row = {"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A dot."}]}
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    content = {"json": json.dumps(row).encode(), "png": (tmp_path / "a.png").read_bytes()}
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names.split():
            member = tarfile.TarInfo(name)
            member.size = len(content[name.rpartition(".")[2]])
            archive.addfile(member, io.BytesIO(content[name.rpartition(".")[2]]))
    rows = [sample for _, sample in open_source(tmp_path / "a.tar").shards[0].rows()]
    if " 0.png " in names.partition(" 1.")[0] + " ":
        assert [len(sample.images) for sample in rows] == [1, 1]
        return
    assert all(isinstance(row, DataError) for row in rows)  # the json alone is a marker without its picture
    assert "members of the sample 0 do not lie side by side: 0." in str(rows[-1])
    with pytest.raises(DataError, match="do not lie side by side"):
        open_source(tmp_path / "a.tar")[2]


def test_archives_of_tar_itself_are_read(tmp_path):
    """Folders, long names and hidden files are no samples; long names take blocks of their own."""
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("deep", f"{'deep/' * 40}1.json", ".hidden.json", f"{'deep/' * 40}2.json", "__meta__.json"):
            member = tarfile.TarInfo(name)
            if name == "deep":
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
            else:
                content = json.dumps({"text": name}).encode()
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    check(open_source(tmp_path / "a.tar"), [f"{'deep/' * 40}1.json", f"{'deep/' * 40}2.json"])


TEXT = "First line,\nsecond.\n\n \nNext é paragraph\r\n\r\nlast"


@pytest.mark.parametrize(
    ("sample_by", "expected", "places"),
    [
        ("line", ["First line,", "second.", "Next é paragraph", "last"], ["line 1", "line 2", "line 5", "line 7"]),
        (None, ["First line,\nsecond.", "Next é paragraph", "last"], ["line 1", "line 5", "line 7"]),
        ("document", [TEXT], ["document 1"]),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_text_is_read_by_line_paragraph_or_document(tmp_path, name, sample_by, expected, places):
    content = TEXT.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    source = open_source(tmp_path / name, sample_by=sample_by)
    check(source, expected)
    assert [source[row].origin.place for row in range(len(source))] == places


def ids_of(source):
    return [source[row].content for row in range(len(source))]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_token_files_are_split_behind_the_end_token(tmp_path, dtype):
    tokens = np.array([1, 2, END, END, 3, END, 65535 % 2**15, 4], dtype)
    tokens.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", tokens)
    expected = [(1, 2, END), (END,), (3, END), (32767, 4)]
    check(open_source(tmp_path / "a.bin", token_dtype=dtype, end_token=END), expected)
    check(open_source(tmp_path / "a.npy", end_token=END), expected)


def test_long_token_files_are_split_alike_across_chunks(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 200_000, 2_500_000).astype("uint32")
    tokens.tofile(tmp_path / "a.bin")
    source = open_source(tmp_path / "a.bin", token_dtype="uint32", end_token=END)
    ends = np.flatnonzero(tokens == END) + 1
    expected = [part for part in np.split(tokens, ends) if len(part)]
    assert len(source) == len(expected) > 5
    for row, part in enumerate(expected):
        assert source[row].content == tuple(part.tolist())


def test_a_matrix_of_tokens_has_a_document_on_each_row(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(12).reshape(3, 4))
    check(open_source(tmp_path / "a.npy"), [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)])


@pytest.mark.parametrize("write", [json_lines, parquet, arrow])
def test_token_ids_in_a_column_are_a_document(tmp_path, write):
    suffix = {json_lines: "jsonl", parquet: "parquet", arrow: "arrow"}[write]
    write(tmp_path / f"a.{suffix}", [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    assert ids_of(open_source(tmp_path / f"a.{suffix}")) == [(1, 2, 3), (4,)]


def test_shards_follow_each_other_in_the_order_of_their_names(tmp_path, memory):
    words = iter(f"text {number}" for number in itertools.count())
    counts = {"b/1.jsonl": 3, "a/9.jsonl": 2, "a/10.jsonl": 1}
    for name in sorted(counts):
        rows = [{"text": next(words)} for _ in range(counts[name])]
        memory.pipe_file(f"/in/{name}", "\n".join(map(json.dumps, rows)).encode())
    for path in ("memory://in", "memory://in/**/*.jsonl", "memory://in/*/*"):
        source = open_source(path)
        assert [sample.content for sample in map(source.__getitem__, range(6))] == [f"text {n}" for n in range(6)]
        assert [shard.name.rpartition("/in/")[2] for shard in source.shards] == sorted(counts)
        assert source[5].origin == Document("text 5", source[5].origin).origin
        assert (source[5].origin.row, source[5].origin.file) == (2, "memory:///in/b/1.jsonl")
        assert source.locate(4) == (source.shards[2], 1)
        assert type(source[np.int64(5)].origin.row) is int  # plans hand out NumPy's, and origins are written as JSON


def test_options_of_a_store_are_those_of_fsspecs_own_configuration(tmp_path, monkeypatch):
    json_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "a.jsonl", "a.jsonl")
    with pytest.raises(DataError, match=r"zip://a\.jsonl cannot be read"):
        open_source("zip://a.jsonl")
    monkeypatch.setitem(fsspec.config.conf, "zip", {})  # put back behind the test
    fsspec.config.set_conf_env(fsspec.config.conf, {"FSSPEC_ZIP": json.dumps({"fo": str(tmp_path / "a.zip")})})
    assert open_source("zip://a.jsonl")[0].content == "x"


NO_WORDS = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff\xfe a", b"b"], pa.binary()).buffers())
UNREADABLE = {
    "date": (pa.array([2**31 - 1] * 2, pa.date32()), 'the column "text" cannot be read: days=2147483647'),
    "time": (pa.array([10**15] * 2, pa.timestamp("s")), 'the column "text" cannot be read: Python int too large'),
    "no UTF-8": (NO_WORDS, 'the column "text" cannot be read: .* invalid start byte'),
    "no JSON": (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{", "1"])), "text holds what is not JSON"),
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("extension", ["parquet", "arrow"])
def test_a_value_that_python_does_not_have_is_named_where_it_is_wanted_and_stops_nothing_else(
    tmp_path, name, extension
):
    def written(columns):
        table, path = pa.table(columns), tmp_path / f"a.{extension}"
        if extension == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        return open_source(path)

    column, message = UNREADABLE[name]
    source = written({"text": ["a", "b"], "d": column})
    assert [source[row].content for row in range(2)] == ["a", "b"]
    with pytest.raises(SampleError, match=message):
        written({"text": column})[0]


def test_a_map_is_an_object_bytes_are_no_words_and_a_name_stands_once(tmp_path):
    turns = [[("role", "user"), ("content", "a"), ("name", None)], [("role", "assistant"), ("content", "b")]]
    maps = pa.array([turns], pa.list_(pa.map_(pa.string(), pa.string())))
    pq.write_table(pa.table({"messages": maps}), tmp_path / "map.parquet")
    assert [message.parts[0].text for message in open_source(tmp_path / "map.parquet")[0].messages] == ["a", "b"]

    pq.write_table(pa.table({"text": pa.array([b"words"])}), tmp_path / "bytes.parquet")
    with pytest.raises(SampleError, match=r'"text" is 5 bytes, to be cast to string where they are words, but'):
        open_source(tmp_path / "bytes.parquet")[0]

    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"]), tmp_path / "twice.parquet")
    with pytest.raises(SampleError, match='several columns of the name "text"'):
        open_source(tmp_path / "twice.parquet")[0]


def test_thousands_of_columns_that_nobody_reads_are_one_line(tmp_path):
    columns = {f"c{number}": pa.array([number]) for number in range(3000)}
    pq.write_table(pa.table({"text": ["a"], **columns}), tmp_path / "a.parquet")
    (note,) = open_source(tmp_path / "a.parquet").notes()
    assert "c0, c1, c10, " in note
    assert " and 2,988 more are not looked at" in note
    assert len(note) < 300
