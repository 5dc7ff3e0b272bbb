"""Corpora have rows without words: they are left out and counted, and never end anything."""

import datasets
import pytest

from headway.data.feed import lane
from headway.data.sources import open_source, read_samples
from headway.errors import DataError
from headway.packing.order import Stage, StageSource
from helpers.data import Data, RememberingEncoder

WORDS = ["", "It is one.", " \n", "It is two.", None, "\n\n\n", "It is three.", ""]
FULL = [1, 3, 6]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    table = datasets.Dataset.from_dict({"text": WORDS})
    table.to_parquet(tmp_path / "corpus.parquet")
    table.to_json(tmp_path / "corpus.jsonl")
    table.save_to_disk(tmp_path / "saved")
    return tmp_path


@pytest.mark.parametrize("name", ["corpus.parquet", "corpus.jsonl", "saved"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_empty_documents_are_left_out_and_counted(text_encoder, corpus, name, ranks, kind):
    source = open_source(corpus / name, name="words")
    stages = (Stage((StageSource("words", epochs=1),)),)
    data = Data([source], RememberingEncoder.of(text_encoder), stages, lanes=3)
    together = data.ranks(kind, ranks)
    batches = [batch for step in together.steps() for batches in step for batch in batches]
    assert sorted(origin.row for batch in batches for origin in batch.origins) == FULL
    report = together.counts()
    counts, planned = report.samples["words"], report.planned.get("words")
    assert (counts["used"].samples, counts["skipped"].samples) == (len(FULL), 0)
    if planned:
        assert (planned["read"], planned["empty"], planned["bad"]) == (len(WORDS), len(WORDS) - len(FULL), 0)
    else:
        assert (counts["read"].samples, counts["dropped"].samples) == (len(WORDS), len(WORDS) - len(FULL))


def test_every_lane_of_a_corpus_with_a_blank_row_after_each_paragraph_has_words(text_encoder, tmp_path):
    words = [f"It is {number}." if number % 2 == 0 else "" for number in range(64)]
    datasets.Dataset.from_dict({"text": words}).to_json(tmp_path / "wiki.jsonl")
    stages = (Stage((StageSource("wiki"),)),)
    encoder = RememberingEncoder.of(text_encoder)
    data = Data([open_source(tmp_path / "wiki.jsonl")], encoder, stages, lanes=16, shuffle=1)
    steps = data.ranks("stream", 16).steps()
    for _ in range(3):
        assert all(batch.tokens for batches in next(steps) for batch in batches)


def test_a_stream_without_end_of_empty_documents_is_an_error(text_encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(lane, "_MOST_DROPPED_IN_A_ROW", 10)
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n' * 3)
    stages = (Stage((StageSource("blank"),)),)
    data = Data([open_source(tmp_path / "blank.jsonl")], RememberingEncoder.of(text_encoder), stages, lanes=1)
    with pytest.raises(
        DataError, match=r"blank\.jsonl, line \d: this and the 10 samples before it are empty or exceed a"
    ):
        next(data.ranks("stream", 1).steps())


def test_samples_that_are_read_together_have_no_empty_documents(corpus):
    assert [sample.origin.row for sample in read_samples(corpus / "corpus.parquet")] == FULL
