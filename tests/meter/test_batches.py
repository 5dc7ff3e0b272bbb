"""Workloads read off what transformers' batches carry."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening

from headway.count import CostModel, Workload
from headway.count.rows import Row
from headway.errors import WorkloadError
from headway.meter import workload_of

IDS = torch.zeros(2, 6, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
GRIDS = torch.tensor([[1, 4, 6], [2, 8, 4]])
CASES = {
    "ids alone: rows are segments": ({"input_ids": IDS}, Workload([6, 6])),
    "a flat row of ids": ({"input_ids": IDS[0]}, Workload([6])),
    "embeddings instead of ids": ({"inputs_embeds": torch.zeros(2, 6, 8)}, Workload([6, 6])),
    "a padding mask": ({"input_ids": IDS, "attention_mask": MASK}, Workload([4, 6], slots=12)),
    "padding on the left": ({"input_ids": IDS, "attention_mask": MASK.flip(1)}, Workload([4, 6], slots=12)),
    "a mask without padding": ({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, Workload([6, 6])),
    "a mask of booleans": ({"input_ids": IDS, "attention_mask": MASK > 0}, Workload([4, 6], slots=12)),
    "padding in the middle of a row": (
        {"input_ids": IDS[:1], "attention_mask": torch.tensor([[1, 1, 0, 0, 1, 1]])},
        Workload([4], slots=6),
    ),
    "segments numbered up to the last slot": (
        {"input_ids": IDS[:1], "attention_mask": torch.tensor([[1, 1, 2, 2, 2, 2]])},
        Workload([2, 4]),
    ),
    "segments numbered in the mask": (
        {"input_ids": IDS[:1], "attention_mask": torch.tensor([[1, 1, 2, 2, 2, 0]])},
        Workload([2, 3], slots=6),
    ),
    "positions that restart": (
        {"input_ids": IDS[:1], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
        Workload([3, 3]),
    ),
    "positions that restart, with padding": (
        {
            "input_ids": IDS,
            "attention_mask": MASK,
            "position_ids": torch.tensor([[0, 1, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5]]),
        },
        Workload([2, 2, 6], slots=12),
    ),
    "one row of positions for all rows": (
        {"input_ids": IDS, "position_ids": torch.arange(6)[None], "attention_mask": MASK},
        Workload([4, 6], slots=12),
    ),
    "boundaries": (
        {"input_ids": torch.zeros(1, 8, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 3, 7], dtype=torch.int32)},
        Workload([3, 4], slots=8),
    ),
    "images and videos": (
        {"input_ids": IDS, "image_grid_thw": GRIDS, "video_grid_thw": GRIDS[:1]},
        Workload([6, 6], images=GRIDS, videos=GRIDS[:1]),
    ),
    "a workload made by the collator": (
        {"input_ids": IDS, "workload": Workload([5], slots=12)},
        Workload([5], slots=12),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_batch_says_what_it_computes(case):
    batch, expected = CASES[case]
    assert workload_of(batch) == expected


def test_what_transformers_collators_make_is_read():
    features = [{"input_ids": [1] * n, "labels": [1] * n} for n in (3, 5)]
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
    packed = Workload([3, 5], supervised=2 + 4)  # of each segment all but the first are learnt
    assert workload_of(flat) == packed
    assert workload_of(DataCollatorWithFlattening()(features)) == packed

    class Tokenizer:
        padding_side = "right"

        def pad(self, batch, **_):
            width = max(len(one["input_ids"]) for one in batch)
            rows = [one["input_ids"] + [0] * (width - len(one["input_ids"])) for one in batch]
            mask = [[1] * len(one["input_ids"]) + [0] * (width - len(one["input_ids"])) for one in batch]
            return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}

    padded = DataCollatorForSeq2Seq(Tokenizer())(features)
    assert workload_of(padded) == Workload([3, 5], slots=10, supervised=2 + 4)


def cost_model(*driven):
    return CostModel("m", tuple(Row("x", "linear", "language.mlp", d, 2) for d in driven), ())


def test_an_encoder_decoder_has_segments_of_the_decoder_and_sources():
    model = cost_model("tokens", "sources")
    labels = torch.tensor([[7, 8, -100], [7, 8, 9]])
    read = workload_of({"input_ids": IDS, "attention_mask": MASK, "labels": labels}, model)
    assert read == Workload([2, 3], slots=6, sources=[4, 6])
    speech = {"input_features": torch.zeros(2, 80, 3000), "decoder_input_ids": torch.zeros(2, 4, dtype=torch.long)}
    assert workload_of(speech, model) == Workload([4, 4], sources=[3000, 3000])
    with pytest.raises(WorkloadError, match="neither decoder_input_ids nor labels"):
        workload_of({"input_ids": IDS}, model)


def test_images_of_one_size_are_counted_by_their_frames():
    batch = {"input_ids": IDS, "pixel_values": torch.zeros(2, 5, 3, 28, 28)}
    assert workload_of(batch, cost_model("tokens", "frames:2:2")).images.tolist() == [[1, 2, 2]] * 10
    with pytest.raises(WorkloadError, match="does not say how large an image is"):
        workload_of(batch, cost_model("tokens"))


def test_pictures_are_all_of_a_batch_for_a_model_that_reads_nothing_else():
    sees = cost_model("frames:2:2")
    assert workload_of({"pixel_values": torch.zeros(5, 3, 28, 28), "labels": torch.zeros(5)}, sees) == Workload(
        images=[(1, 2, 2)] * 5
    )
    counted = replace(sees, source={"pixels": "28"})
    assert workload_of({"pixel_values": torch.zeros(5, 3, 28, 28)}, counted).num_images == 5
    with pytest.raises(WorkloadError, match=r"56 x 28 pixels, and .* was counted on 28 x 28"):
        workload_of({"pixel_values": torch.zeros(5, 3, 56, 28)}, counted)


def test_a_batch_without_tokens_is_refused():
    with pytest.raises(WorkloadError, match="holds pixels, and none of input_ids, inputs_embeds"):
        workload_of({"pixels": np.zeros(3)})


def test_a_workload_that_bills_other_tokens_than_the_batch_holds_is_refused():
    with pytest.raises(WorkloadError, match="bills 24 slots, but its tensors hold 2 x 6 = 12"):
        workload_of({"input_ids": IDS, "workload": Workload([24])})
