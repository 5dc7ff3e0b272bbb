"""Faults of real processes and files: the policy's behaviour, exact counts, no hang."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headway.data import Encoder
from headway.data.bad_rows import BadSamples
from headway.data.sources import open_source
from headway.errors import DataError
from headway.packing.order import Stage, StageSource
from helpers.data import Data, chat, samples_of, write_shards

ONCE = (Stage((StageSource("pictures", epochs=1),)),)
KINDS = ("indexed", "stream")


@pytest.fixture
def pictures(tmp_path):
    """100 chats in 4 files, each with a picture of its own."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(100):
        pixels = rng.integers(0, 255, (16 + 16 * (number % 3), 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    write_shards(folder, 100, 4, lambda number: f"{number}.jpg")
    return folder


def cut_short(path: Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def numbers_of(steps):
    """The chats that were used, by their numbers; each file holds 25."""
    return Counter(
        25 * int(Path(file).stem[-2:]) + int(place.split()[-1]) - 1
        for step in steps
        for _, file, place in samples_of(step)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_five_percent_of_damaged_images_are_skipped_and_named(pictures, encoder, tmp_path, kind, workers):
    """JPEG data that end early: where the header is whole, only decoding finds out, after indexing."""
    damaged = (3, 20, 47, 71, 99)
    for number in damaged:
        cut_short(pictures / f"{number}.jpg")
    quarantine = tmp_path / "bad.jsonl"
    source = open_source(pictures / "*.jsonl", name="pictures")
    data = Data([source], encoder, ONCE, bad=BadSamples("skip", quarantine=quarantine))
    together = data.ranks(kind, 2, workers=workers, prefetch_bytes=100_000)
    steps = list(together.steps())
    together.close()
    assert numbers_of(steps) == Counter(set(range(100)) - set(damaged))
    report = together.counts()
    counts, known = report.samples["pictures"], report.planned.get("pictures", {}).get("bad", 0)
    assert (counts["read"].samples + known, counts["used"].samples, counts["skipped"].samples + known) == (100, 95, 5)
    named = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert {25 * int(Path(line["file"]).stem[-2:]) + line["row"] for line in named} == set(damaged)
    assert all("cannot be read" in line["reason"] for line in named)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_image_ends_the_run_by_default_and_again_when_asked_again(pictures, encoder, kind):
    cut_short(pictures / "47.jpg")
    source = open_source(pictures / "*.jsonl", name="pictures")
    together = Data([source], encoder, ONCE).ranks(kind, 1)
    for _ in range(2):
        with pytest.raises(DataError, match=r"part-01.jsonl, line 23: .*47.jpg .* cannot be read"):
            list(together.steps())


@pytest.mark.parametrize("kind", KINDS)
def test_more_bad_samples_than_allowed_end_the_run(pictures, encoder, kind):
    for number in range(10, 20):
        cut_short(pictures / f"{number}.jpg")
    source = open_source(pictures / "*.jsonl", name="pictures")
    data = Data([source], encoder, ONCE, bad=BadSamples("skip", limit=4, fraction=None))
    with pytest.raises(DataError, match="at most 4 may be skipped"):
        list(data.ranks(kind, 1).steps())


def test_a_pack_of_which_nothing_is_left_is_padding(pictures, encoder):
    """Every picture disappears after indexing: each rank still has its packs, and nothing to learn."""
    source = open_source(pictures / "*.jsonl", name="pictures")
    data = Data([source], encoder, ONCE, bad=BadSamples("skip", limit=None, fraction=None))
    together = data.ranks("indexed", 2)
    for image in pictures.glob("*.jpg"):
        image.unlink()
    steps = list(together.steps())
    assert all(batch.slots == 1 and not batch.num_supervised for step in steps for rank in step for batch in rank)
    assert together.counts().samples["pictures"]["skipped"].samples == 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_in_use_is_named(pictures, encoder, kind):
    source = open_source(pictures / "*.jsonl", name="pictures")
    together = Data([source], encoder, ONCE).ranks(kind, 1)
    together.step()
    cut_short(pictures / "part-02.jsonl")
    with pytest.raises(DataError, match=r"part-02.jsonl.*changed|part-02.jsonl.*ends"):
        list(together.steps())


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_of_a_feed_loses_and_repeats_nothing(pictures, encoder, kind, tmp_path):
    source = open_source(pictures / "*.jsonl", name="pictures")
    marking = MarkedEncoder(encoder, tmp_path)
    together = Data([source], marking, ONCE).ranks(kind, 1, workers=2, prefetch_bytes=60_000)
    steps = [together.step()]
    os.kill(int(next(tmp_path.glob("worker-*")).name.split("-")[1]), signal.SIGKILL)
    time.sleep(0.2)
    with pytest.warns(RuntimeWarning, match="killed"):
        steps += together.steps()
    together.close()
    assert numbers_of(steps) == Counter(range(100))
    assert together.counts().samples["pictures"]["used"].samples == 100


class MarkedEncoder(Encoder):
    """Notes the processes that encode, so that one of them can be killed."""

    def __init__(self, encoder, folder):
        super().__init__(encoder.processor, encoder.rope_index)
        self.folder = folder

    def encode(self, sample):
        (self.folder / f"worker-{os.getpid()}").touch()
        return super().encode(sample)


def test_the_helper_writes_what_it_says(pictures):
    assert json.loads((pictures / "part-01.jsonl").read_text().splitlines()[0]) == chat(25, "25.jpg")
