from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.count import Workload
from headway.data import EncodedSample, Encoder, Origin, read_samples
from headway.data.collate import Collator
from headway.data.media.tensors import MediaTensors
from headway.errors import DataError
from headway.models import rope_index

collate = Collator()


def made_up(number, length, supervised, grids, rows=1):
    """A sample whose token ids tell the segment and the place: 1000 * number + place."""
    ids = 1000 * (number + 1) + torch.arange(length)
    labels = torch.where(torch.tensor(supervised), ids, -100)
    grids_M3 = torch.tensor(grids, dtype=torch.long).reshape(-1, 3)
    patches = int(grids_M3.prod(1).sum())
    return EncodedSample(
        input_ids_S=ids,
        labels_S=labels,
        position_ids_RS=torch.arange(length).repeat(rows, 1),
        media={"images": MediaTensors(grids_M3, torch.full((patches, 6), float(number)))} if patches else {},
        token_types_S=torch.zeros(length, dtype=torch.int32),
        origin=Origin("made up", "made up", number, f"line {number}"),
    )


@st.composite
def packs(draw):
    def one(number):
        supervised = draw(st.lists(st.booleans(), min_size=1, max_size=12))
        grids = draw(st.lists(st.tuples(st.just(1), st.integers(1, 3), st.integers(1, 3)), max_size=2))
        return made_up(number, len(supervised), supervised, grids)

    return [one(number) for number in range(draw(st.integers(1, 6)))]


@given(packs())
def test_no_target_crosses_a_segment_and_each_is_the_next_token(samples):
    batch = collate(samples)
    ids, labels = batch.input_ids_1T[0], batch.labels_1T[0]
    for place in (labels != -100).nonzero().flatten().tolist():
        assert labels[place] == ids[place + 1]
        assert labels[place] // 1000 == ids[place] // 1000
    assert all(labels[end - 1] == -100 for end in batch.cu_seqlens_N[1:].tolist())


@given(packs())
def test_the_pack_holds_every_token_target_and_patch_once_and_in_order(samples):
    batch = collate(samples)
    assert batch.input_ids_1T[0].tolist() == [token for s in samples for token in s.input_ids_S.tolist()]
    targets = [label for s in samples for label in s.labels_S[1:].tolist() if label != -100]
    assert [label for label in batch.labels_1T[0].tolist() if label != -100] == targets
    assert batch.num_supervised == len(targets) == sum(s.num_supervised for s in samples)
    owners = [number for number, s in enumerate(samples) for _ in range(s.patches)]
    assert ("images" not in batch.media) == (not owners)
    if "images" in batch.media:
        assert batch.media["images"].features[:, 0].tolist() == owners


@given(packs())
def test_boundaries_positions_and_workload_restart_with_each_segment(samples):
    batch = collate(samples)
    lengths = [s.tokens for s in samples]
    assert batch.cu_seqlens_N.tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    assert batch.cu_seqlens_N.dtype == torch.int32
    assert batch.max_seqlen == max(lengths)
    assert batch.position_ids_R1T[0, 0].tolist() == [place for length in lengths for place in range(length)]
    grids = [grid for s in samples if s.media for grid in s.media["images"].sizes.tolist()]
    assert batch.workload == Workload(lengths, images=grids)
    assert batch.workload.slots == batch.tokens == sum(lengths)
    assert batch.num_images == len(grids)
    assert batch.num_segments == len(samples)


def test_model_inputs_hold_what_the_forward_takes_and_no_labels():
    batch = collate([made_up(0, 4, [True] * 4, [[1, 2, 2]], rows=3), made_up(1, 3, [True] * 3, [], rows=3)])
    inputs = batch.model_inputs()
    assert set(inputs) == {
        "input_ids", "position_ids", "pack_cu_seqlens", "pack_max_seqlen", "pack_segments", "use_cache",
        "mm_token_type_ids", "pixel_values", "image_grid_thw",
    }  # fmt: skip
    assert inputs["pack_segments"] == ((4, 4), (3, 3))  # lengths, and positions that begin anew
    assert inputs["position_ids"].shape == (3, 1, 7)
    assert collate([made_up(0, 4, [True] * 4, [])]).model_inputs()["position_ids"].shape == (1, 4)


@given(packs())
def test_labels_are_listed_of_a_dealt_pack_alone_by_the_slots_of_its_process(samples):
    whole = collate(samples)
    assert whole.labelled_K is None
    half = whole.slots // 2
    for part, group in ((slice(None), None), (slice(0, half), "first"), (slice(half, None), "second")):
        with patch("headway.data.collate.local_slots", return_value=part):
            dealt = whole.dealt(group)
        labels = whole.labels_1T[0, part].tolist()
        assert dealt.labelled_K.tolist() == [place for place, label in enumerate(labels) if label != -100]


def test_a_pack_of_text_alone_has_no_pixels():
    batch = collate([made_up(0, 4, [True] * 4, []), made_up(1, 3, [True] * 3, [])])
    assert batch.media == {}
    assert "pixel_values" not in batch.model_inputs()


def test_moving_a_pack_moves_its_tensors_and_keeps_its_workload():
    batch = collate([made_up(0, 4, [True] * 4, [[1, 2, 2]])])
    moved = batch.to("meta")
    assert (
        moved.input_ids_1T.device.type
        == moved.media["images"].features.device.type
        == moved.cu_seqlens_N.device.type
        == "meta"
    )
    assert moved.workload is batch.workload
    assert moved.sources == ("made up, line 0",)


def test_positions_of_one_and_three_rows_do_not_mix():
    with pytest.raises(DataError, match=r"\[1, 3\] rows of positions"):
        collate([made_up(0, 4, [True] * 4, []), made_up(1, 4, [True] * 4, [], rows=3)])


def test_multi_axis_positions_equal_the_models_own_for_each_sample_alone(write, processor):
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    image = processor.image_token_id
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3VLConfig(
        text_config={**text, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 400},
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 8, "deepstack_visual_indexes": []},
        image_token_id=image,
    )
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    encoder = Encoder(processor, rope_index(model))

    def line(*names):
        parts = [{"type": "image", "image": name} for name in names]
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}
        return {"messages": [question, {"role": "assistant", "content": "One."}]}

    pictures = {"a.png": (48, 80), "b.png": (16, 64)}
    samples = [
        encoder.encode(s) for s in read_samples(write(line("a.png", "b.png"), line(), line("b.png"), pictures=pictures))
    ]
    batch = Collator(pixel_scale=encoder.pixel_scale)(samples)
    places = batch.position_ids_R1T[:, 0].split([s.tokens for s in samples], dim=1)
    for sample, ours in zip(samples, places, strict=True):
        if "images" not in sample.media:
            assert torch.equal(ours, torch.arange(sample.tokens).repeat(3, 1))
            continue
        # Written out: text advances all three rows by one; an image of h x w tokens spans a block from where it starts,
        # and the text after it goes on behind the longer side.
        expected, at = [], 0
        grids = iter(sample.media["images"].sizes.tolist())
        ids = sample.input_ids_S.tolist()
        place = 0
        while place < len(ids):
            if ids[place] != image:
                expected.append((at, at, at))
                at, place = at + 1, place + 1
                continue
            _, height, width = next(grids)
            height, width = height // 2, width // 2
            expected += [(at, at + y, at + x) for y in range(height) for x in range(width)]
            at, place = at + max(height, width), place + height * width
        assert ours.T.tolist() == [list(row) for row in expected]
