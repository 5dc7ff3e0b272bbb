import json
import random

import numpy as np
import pytest
from PIL import Image

from headway.data.bad_rows import BadSamples, SampleCounts
from headway.data.index import build_index
from headway.data.sources import open_source
from headway.errors import DataError

ROWS = 400
BROKEN = sorted(random.Random(5).sample(range(ROWS), ROWS // 20))


@pytest.fixture
def pictures(tmp_path):
    """A source of 400 chats with a picture each, 5 % of them damaged in three ways, and the damage by row."""
    rng = np.random.default_rng(0)
    lines, damage = [], {}
    for row in range(ROWS):
        file = tmp_path / f"{row}.png"
        height, width = rng.integers(16, 80, 2)
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file)
        if row in BROKEN:
            damage[row] = ("empty", "noise", "missing")[BROKEN.index(row) % 3]
            if damage[row] == "missing":
                file.unlink()
            else:
                file.write_bytes(b"" if damage[row] == "empty" else rng.bytes(500))
        parts = [{"type": "image", "image": file.name}, {"type": "text", "text": "Which digits?"}]
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": f"It is {row}."}]
        lines.append(json.dumps({"messages": turns}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return open_source(tmp_path / "chats.jsonl"), damage


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_damaged_images_are_counted_and_named_and_the_rest_indexed(pictures, encoder, tmp_path, workers):
    source, damage = pictures
    assert set(damage.values()) == {"empty", "noise", "missing"}
    counts, quarantine = SampleCounts(), tmp_path / "bad.jsonl"

    index = build_index(
        source,
        encoder,
        tmp_path / "indices",
        workers=workers,
        policy=BadSamples("skip", quarantine=quarantine),
        counts=counts,
    )

    assert sorted(index.bad) == BROKEN
    assert all(f"{row}.png" in error.reason for row, error in index.bad.items())
    assert (counts["chats"]["read"].samples, counts["chats"]["skipped"].samples) == (400, 20)
    named = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert [(line["row"], line["place"]) for line in named] == [(row, f"line {row + 1}") for row in BROKEN]
    for row in np.flatnonzero(index.ok).tolist():
        encoded = encoder.encode(source[row])
        assert (index.tokens[row], index.patches[row]) == encoded.size
        assert index.media["images"][row].tolist() == encoded.media["images"].sizes.tolist()
        assert index.media_end[row] == encoded.media_end
    summary = index.summary()
    assert (summary.samples, summary.bad, summary.items["images"]) == (400, 20, 380)


def test_more_damage_than_allowed_stops_early_and_counts(pictures, encoder, tmp_path):
    source, _ = pictures
    seen = []

    with pytest.raises(DataError, match=r"at most 5 may be skipped"):
        build_index(
            source,
            encoder,
            tmp_path,
            workers=0,
            policy=BadSamples("skip", limit=5),
            progress=lambda measured, *_: seen.append(measured),
        )

    assert seen == [0]  # 12 of the first 256 rows are damaged
    assert sum(row < 256 for row in BROKEN) > 5


def test_the_policy_holds_for_an_index_that_is_there_already(pictures, encoder, tmp_path):
    source, _ = pictures
    build_index(source, encoder, tmp_path, workers=0, policy=BadSamples("skip"))

    with pytest.raises(DataError, match=rf"chats\.jsonl, line {BROKEN[0] + 1}: "):
        build_index(source, encoder, tmp_path)


def test_no_pixel_is_decoded(pictures, encoder, tmp_path, monkeypatch):
    source, _ = pictures

    def decode(*_):
        raise AssertionError("a picture was decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)

    assert build_index(source, encoder, tmp_path, workers=0, policy=BadSamples("skip")).ok.sum() == 380
