"""Rows that are wrong in ways nobody means: refused as bad rows, with their places, and subject to the policy."""

import gzip
import io
import json
import os
import stat
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.data import Encoder
from headway.data.collate import Collator
from headway.data.feed.make import PackMaker, Piece
from headway.data.media.images import Picture
from headway.data.samples import Document, Media, Origin, SampleError
from headway.data.sources import open_source
from headway.errors import DataError

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\nshowpage\n"


def test_postscript_is_not_handed_to_ghostscript_whatever_its_name(tmp_path, monkeypatch):
    gs = tmp_path / "gs"
    gs.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    gs.chmod(gs.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # what an earlier search for it found
    (tmp_path / "x.png").write_bytes(POSTSCRIPT)
    for media in (Media(str(tmp_path / "x.png")), Media(data=POSTSCRIPT)):
        with pytest.raises(DataError, match=r"line 1: the image .* it is no picture in a format that is read"):
            Picture(media, "line 1").decode()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_a_number_of_thousands_of_digits_is_one_bad_row(form, tmp_path):
    rows = ['{"text": "one"}', '{"text": "two", "id": ' + "7" * 5000 + "}", '{"text": "three"}']
    file = tmp_path / f"data.{form}"
    file.write_text("\n".join(rows) if form == "jsonl" else f"[{', '.join(rows)}]")
    found = [sample for _, sample in open_source(file).shards[0].rows()]
    assert [getattr(sample, "content", None) for sample in found] == ["one", None, "three"]
    assert "a number in it has too many digits" in str(found[1])


@pytest.mark.parametrize("form", ["jsonl", "json", "csv"])
def test_two_columns_of_one_name_are_refused_and_not_two_keys_in_a_column_that_nobody_reads(form, tmp_path):
    rows = ['{"text": "a", "more": {"x": 1, "x": 2}}', '{"text": "a", "id": 1, "text": "b"}']
    content = {"jsonl": "\n".join(rows), "json": f"[{', '.join(rows)}]", "csv": "text,id,text\na,1,b"}[form]
    (tmp_path / f"a.{form}").write_text(content)
    source = open_source(tmp_path / f"a.{form}")
    with pytest.raises(SampleError, match=r'several columns of the name "text"|names text twice'):
        source[len(source) - 1]
    assert form == "csv" or source[0].content == "a"


def _tarred(*members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _array(shape):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": shape})
    return file.getvalue() + b"\1\0\0\0" * 5000


LONG = {  # rows beyond the bounds of the test below
    "line.jsonl": b'{"text": "one"}\n{"text": "' + b"a" * 5000 + b'"}\n',
    "line.jsonl.gz": gzip.compress(b'{"text": "one"}\n{"text": "' + b"a" * 5000),
    "hole.jsonl": b'{"text": "one"}\n' + b"\0" * 5000,
    "element.json": b'[{"text": "one"}, {"text": "' + b"a" * 5000 + b'"}]',
    "paragraph.txt": b"one\n\n" + b"a\n" * 2500,
    "value.csv": b"text\none\n" + b"a" * 5000,
    "member.tar": _tarred(("0.txt", b"one"), ("1.txt", b"a" * 50_000)),
    "name.tar": _tarred(("0.txt", b"one"), ("1" * 50_000 + ".txt", b"two")),
    "row.npy": _array((3, 2**40)),
}


@pytest.mark.parametrize("name", LONG)
def test_a_row_that_is_longer_than_the_memory_may_be_ends_its_file_before_it_is_read(name, tmp_path, monkeypatch):
    monkeypatch.setattr("headway.data.sources.reader.MOST_ROW_BYTES", 3000)
    monkeypatch.setattr("headway.data.sources.tar._MOST_SAMPLE_BYTES", 30_000)  # it is read by 10,240
    (tmp_path / name).write_bytes(LONG[name])
    source = open_source(tmp_path / name)
    found = [sample for _, sample in source.shards[0].rows()]
    assert [sample.content for sample in found[:-1]] == ["one"] * (name not in ("row.npy", "name.tar"))
    assert " MiB, the most that a row may have" in str(found[-1])
    with pytest.raises(SampleError, match="the most that a row may have"):
        source[len(source) - 1]


def test_a_member_of_a_stated_exabyte_is_not_read_to_its_end(tmp_path):
    member = tarfile.TarInfo("1.txt")
    member.size = 2**60
    (tmp_path / "a.tar").write_bytes(_tarred(("0.txt", b"one"))[:1024] + member.tobuf() + b"two" * 500)
    found = [sample for _, sample in open_source(tmp_path / "a.tar").shards[0].rows()]
    assert [type(sample) for sample in found] == [Document, SampleError]
    assert "cannot be read further" in str(found[1])


def test_a_document_that_is_a_whole_file_has_the_same_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.data.sources.reader.MOST_ROW_BYTES", 3000)
    (tmp_path / "a.txt").write_bytes(b"a\n\n" * 2000)
    found = [sample for _, sample in open_source(tmp_path / "a.txt", sample_by="document").shards[0].rows()]
    assert "the document is longer than" in str(found[0])


@pytest.mark.parametrize("shape", [(2**40, 0), (0, 5)])
def test_an_array_without_ids_is_no_endless_dataset(shape, tmp_path):
    (tmp_path / "a.npy").write_bytes(_array(shape))
    found = [sample for _, sample in open_source(tmp_path / "a.npy").shards[0].rows()]
    assert f"the array has the shape {shape}, so no documents" in str(found[0])


def test_lists_nested_too_deeply_end_an_array_with_a_bad_row(tmp_path):
    (tmp_path / "data.json").write_text('[{"text": "one"}, ' + "[" * 100_000 + "]" * 100_000 + "]")
    found = [sample for _, sample in open_source(tmp_path / "data.json").shards[0].rows()]
    assert [type(sample) for sample in found] == [Document, SampleError]
    assert "nested too deeply" in str(found[1])


def _document(*ids):
    return Document(ids, Origin("data", "data.jsonl", 2, "line 3"))


@pytest.mark.parametrize("work", ["measure", "encode"])
def test_a_token_that_the_model_does_not_know_is_a_bad_row(work, processor):
    known = max(processor.tokenizer.get_vocab().values()) + 1
    text = processor.tokenizer
    assert getattr(Encoder(text), work)(_document(1, known - 1))
    for token in (known, 999_999, 2**70, -1):
        with pytest.raises(DataError, match=r"line 3: it holds the token id .* run from 0 to"):
            getattr(Encoder(text), work)(_document(1, token))
    fewer = Encoder(text, num_embeddings=known - 1)
    with pytest.raises(DataError, match=rf"token id {known - 1}\. .* added to it and not to the model.*new_tokens"):
        getattr(fewer, work)(_document(1, known - 1))
    with pytest.raises(DataError, match=f"token id {known}, but the ids of this model run from 0 to {known - 2}"):
        getattr(fewer, work)(_document(1, known))
    assert fewer.fingerprint() != Encoder(text).fingerprint() == Encoder(text, num_embeddings=known).fingerprint()


def test_a_text_beyond_the_limit_is_a_bad_row_and_changes_what_is_indexed(processor):
    text = processor.tokenizer
    short, limited = Document("word " * 10, Origin("a", "a", 0, "line 1")), Encoder(text, max_characters=49)
    assert Encoder(text, max_characters=50).measure(short)
    with pytest.raises(DataError, match="line 1: its text has 50 characters, more than the limit of 49"):
        limited.measure(short)
    assert limited.fingerprint() != Encoder(text).fingerprint()


@pytest.mark.parametrize("skips", [True, False])
def test_a_sample_that_changed_since_it_was_indexed_is_subject_to_the_policy(skips, tmp_path, text_encoder):
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "Which digits do you see?"}))
    collator = Collator(geometry=None, pixel_scale=None, position_rows=1)
    make = PackMaker((open_source(tmp_path / "data.jsonl"),), text_encoder, collator, skips)
    planned = [Piece(0, 0, 0, 1000)]
    if skips:
        made = make(planned)
        assert [str(each.error.origin) for each in made.skipped] == [f"{tmp_path}/data.jsonl, line 1"]
        assert made.pieces == ()
    else:
        with pytest.raises(SampleError, match="--refresh"):
            make(planned)


@pytest.mark.parametrize("skips", [True, False])
def test_training_on_answers_takes_neither_rejected_answers_nor_bad_ones(skips, tmp_path, text_encoder):
    rows = [
        {"prompt": "Which digits?", "chosen": "Two.", "rejected": "One."},
        {"prompt": "Which digits?", "completion": "One.", "label": False},
        {"prompt": "Which digits?", "completion": "Two.", "label": True},
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = open_source(tmp_path / "data.jsonl")
    planned = [Piece(0, row, 0, text_encoder.measure(source[row]).tokens) for row in range(3)]
    make = PackMaker((source,), text_encoder, Collator(geometry=None, pixel_scale=None, position_rows=1), skips)
    if skips:
        made = make(planned)
        assert made.pieces == (planned[2],)
        assert [each.error.origin.row for each in made.skipped] == [0, 1]
    for row, reason in ((0, "holds 2 answers of which some are better"), (1, "graded as a bad one")):
        with pytest.raises(SampleError, match=reason):
            PackMaker((source,), text_encoder, make.collator, skips=False)([planned[row]])


def test_a_file_rewritten_in_place_during_a_run_is_an_error(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"}\n')
    source = open_source(file)
    assert source[0].content == "one"
    with file.open("r+") as opened:
        opened.write('{"text": "won"}\n')
    os.utime(file, ns=(1, 1))  # whatever the clock's grain
    with pytest.raises(DataError, match="changed while it was in use"):
        source[0]


def test_a_file_that_grows_while_it_is_read_is_an_error(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "one"}\n')
    rows = open_source(file).shards[0].rows()
    next(rows)
    with file.open("a") as opened:
        opened.write('{"text": "two"}\n')
    with pytest.raises(DataError, match="changed while it was in use"):
        list(rows)


def _is_cut(path):
    path.write_bytes(path.read_bytes()[:-8])


def _is_linked(path):
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    "damage",
    [
        _is_cut,
        _is_linked,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"garbage"),
        lambda path: path.write_bytes(b"PK\x03\x04 no archive"),
        lambda path: np.save(path, np.array([{}], object), allow_pickle=True),
        lambda path: np.save(path, np.zeros(5, np.int64)),
        lambda path: np.save(path, np.zeros((0, 3), np.int64)),
        lambda path: np.save(path, np.array([[0, 10**9, 1], [0, 5, 2]])),
        lambda path: np.save(path, np.array([[9, 5, 1], [0, 5, 2]])),
        lambda path: np.save(path, np.array([[0, -1, 0], [0, 5, 2]])),
        lambda path: np.save(path, np.array([[0, 5, 0], [0, -1, 2]])),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_table_of_rows_in_the_cache_is_made_again(damage, packed, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    content = b'{"text": "one"}\n{"text": "two"}\n'
    file = tmp_path / ("data.jsonl.gz" if packed else "data.jsonl")
    file.write_bytes(gzip.compress(content) if packed else content)
    assert len(open_source(file)) == 2
    (table,) = (tmp_path / "cache/rows").glob("*.npy")
    damage(table)
    again = open_source(file)
    assert [again[row].content for row in range(len(again))] == ["one", "two"]
    assert not table.is_symlink()


def test_a_copy_that_is_gone_from_the_cache_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n'))
    assert len(open_source(tmp_path / "data.jsonl.gz")) == 1
    next((tmp_path / "cache/rows").glob("*.bytes")).unlink()
    assert open_source(tmp_path / "data.jsonl.gz")[0].content == "one"


@pytest.mark.parametrize(
    "damage", [_is_cut, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"junk")]
)
def test_a_damaged_copy_of_a_table_in_the_cache_is_made_again(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "data.parquet")
    assert len(open_source(tmp_path / "data.parquet")) == 2
    damage(next((tmp_path / "cache/rows").glob("*.arrow")))
    again = open_source(tmp_path / "data.parquet")
    assert [again[row].content for row in range(len(again))] == ["one", "two"]
