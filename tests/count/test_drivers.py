"""Drivers: what their texts mean, that they add up, and what they refuse."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.count import Workload
from headway.count.drivers import parse_driver, tower
from headway.count.modalities import MODALITIES
from headway.errors import CostModelError, WorkloadError

# two segments that read 4 and 0 source tokens, two images of one size, clips of 8 and 5 frames
STEP = Workload([3, 2], images=[(1, 4, 6), (2, 4, 6)], sources=[4, 0], audio=[8, 5])
VALUES = [
    ("tokens", 5, "language"),
    ("segments", 2, "language"),
    ("transitions", 2 + 1, "language"),
    ("pairs:causal", 3 + 2 + 1 + 2 + 1, "language"),
    ("pairs:sliding:2", 1 + 2 + 2 + 1 + 2, "language"),
    ("pairs:chunked:2", 1 + 2 + 1 + 1 + 2, "language"),
    ("pairs:topk:2", 1 + 2 + 2 + 1 + 2, "language"),
    ("pairs:blocks:2:1", 1 + 2 + 1 + 1 + 2, "language"),
    ("pairs:pools:2:1", 1 + 2 + 3 + 1 + 2, "language"),
    ("pairs:compressed:2", 0 + 1 + 1 + 0 + 1, "language"),
    ("pairs:compressed:topk:1:2", 1 + 2 + 2 + 1 + 2, "language"),
    ("pairs:cross", 3 * 4 + 2 * 0, "source"),
    ("patches", 24 + 48, "vision"),
    ("patches/4", 6 + 12, "vision"),
    ("patch_pairs:frame", 3 * 24**2, "vision"),
    ("patch_pairs:frame/4", 3 * 24 * 6, "vision"),
    ("patch_pairs:grid", 24**2 + 48**2, "vision"),
    ("grids", 2, "vision"),
    ("frames", 3, "vision"),
    ("frames:4:6", 3, "vision"),
    ("sources", 4, "source"),
    ("sources/3", 2, "source"),
    ("source_pairs:full", 16, "source"),
    ("audio", 13, "audio"),
    ("audio/4", 2 + 2, "audio"),
    ("audio_pairs:full", 64 + 25, "audio"),
    ("clips", 2, "audio"),
]


@pytest.mark.parametrize(("driver", "value", "whose"), VALUES, ids=[v[0] for v in VALUES])
def test_a_driver_counts_what_its_name_says(driver, value, whose):
    assert parse_driver(driver)(STEP) == value
    assert tower(driver) == whose


steps = st.builds(
    lambda segments, sources, grids, audio: Workload(
        segments, images=grids, sources=sources[: len(segments)] if sources else (), audio=audio
    ),
    st.lists(st.integers(1, 40), max_size=5),
    st.one_of(st.none(), st.lists(st.integers(0, 30), min_size=5, max_size=5)),
    st.lists(st.just((2, 4, 6)), max_size=3),
    st.lists(st.just(8), max_size=3),
)


@given(steps, steps)
def test_every_driver_adds_over_workloads(one, other):
    for driver in [v[0] for v in VALUES] + ["clips:8"]:
        assert parse_driver(driver)(one + other) == parse_driver(driver)(one) + parse_driver(driver)(other)


@pytest.mark.parametrize(
    "driver", ["speed", "patches:4", "pairs:sliding", "pairs:sliding:0", "pairs:causal:3", "frames:4", "frames:4:6:1"]
)
def test_an_unknown_driver_is_refused(driver):
    with pytest.raises(CostModelError, match=f"unknown driver '{driver}'"):
        parse_driver(driver)


def test_images_and_videos_are_told_apart_and_one_alone_is_held_to_its_size():
    step = Workload([3, 2], images=[(1, 4, 6)] * 2, videos=[(2, 4, 6)])
    assert [parse_driver(f"{kind}frames:4:6")(step) for kind in ("", "image_", "video_")] == [4, 2, 2]
    assert tower("video_frames:4:6") == "vision"
    assert parse_driver("lone:1:4:6")(Workload([3, 2], images=[(1, 4, 6)] * 2)) == 2
    with pytest.raises(WorkloadError, match=r"3 images in 2 segments.*Give 1x4x6 at most once"):
        parse_driver("lone:1:4:6")(Workload([3, 2], images=[(1, 4, 6)] * 3))
    with pytest.raises(WorkloadError, match=r"grid 2x4x6 does not fit this model. Give 1x4x6 patches"):
        parse_driver("lone:1:4:6")(step)


def test_towers_of_one_size_refuse_another():
    with pytest.raises(WorkloadError, match=r"grid 1x4x6 does not fit this model.*24 x 24 patches.*give 1x24x24"):
        parse_driver("frames:24:24")(STEP)
    with pytest.raises(WorkloadError, match=r"clip of 8 frames.*pads every audio clip to 7 frames"):
        parse_driver("clips:7")(STEP)


def test_a_tower_that_fills_clips_up_computes_as_much_of_a_shorter_one():
    assert parse_driver("clips:3000")(STEP) == parse_driver("clips:8")(STEP) == 2


def test_two_kinds_of_input_may_share_a_tower(monkeypatch):
    music = replace(MODALITIES["audio"], name="music", kind="music", items_driver="songs")
    monkeypatch.setitem(MODALITIES, "music", music)
    assert {tower(driver) for driver in ("audio/2", "clips", "music/2", "songs")} == {"audio"}
    with pytest.raises(ValueError, match="name the driver that counts its items"):
        replace(music, items_driver="")
