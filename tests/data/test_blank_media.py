"""Blank images and videos: they take a tower through its forward and backward, and change nothing else."""

import pytest
import torch
import torch.nn.functional as F

from headway.data.blank_media import vision_kinds, with_blanks
from headway.data.collate import Collator
from headway.data.encoded import EncodedSample
from headway.data.samples import Origin
from headway.models.load import load_model
from headway.models.vision import vision_geometry
from helpers.models import tiny_config

BOTH = frozenset({"images", "videos"})


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def model(request):
    torch.manual_seed(0)
    return load_model(tiny_config(request.param), random_init=True)


def text(length, seed):
    ids_S = torch.randint(20, 150, (length,), generator=torch.Generator().manual_seed(seed))
    return EncodedSample(
        input_ids_S=ids_S,
        labels_S=ids_S,
        position_ids_RS=torch.arange(length).expand(3, -1),
        token_types_S=torch.zeros(length, dtype=torch.int32),
        origin=Origin("s", "s", seed, f"row {seed}"),
    )


def run(model, batch):
    """Loss and gradients by name."""
    model.zero_grad(set_to_none=True)
    logits_TV = model(**batch.model_inputs()).logits[0]
    loss = F.cross_entropy(logits_TV, batch.labels_1T[0], ignore_index=-100, reduction="sum")
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("buckets", "slots"),
    [
        ({}, 32),  # 30 tokens and two of one blank each
        ({"bucket_tokens": 16}, 32),  # the padding has room for both
        ({"bucket_tokens": 10}, 40),  # there was no padding
        ({"bucket_tokens": 16, "bucket_patches": 16}, 48),  # four tokens each
    ],
)
def test_a_blank_changes_slots_alone_and_the_tower_gets_zeros(model, buckets, slots):
    collator = Collator(geometry=vision_geometry(model), position_rows=3, **buckets)
    plain = collator([text(13, 1), text(17, 2)])
    blank = with_blanks(plain, BOTH, collator)
    assert vision_kinds(plain) == frozenset()
    assert vision_kinds(blank) == BOTH
    assert with_blanks(blank, BOTH, collator) is blank
    assert blank.slots == blank.workload.slots == int(blank.cu_seqlens_N[-1]) == slots
    assert blank.max_seqlen == int(blank.cu_seqlens_N.diff().max())
    assert blank.workload.segments.tolist() == [13, 17]
    assert (blank.workload.patches, blank.workload.num_packs) == (0, 1)
    assert blank.supervised == plain.supervised
    assert torch.equal(blank.source_of_slots(), torch.zeros(slots, dtype=torch.long))

    loss, grads = run(model, plain)
    blank_loss, blank_grads = run(model, blank)
    assert blank_loss == pytest.approx(loss, rel=1e-6)
    assert not any(name.startswith("model.visual") for name in grads)
    assert set(blank_grads) == {name for name, _ in model.named_parameters()}
    for name, grad in blank_grads.items():
        if name in grads:
            torch.testing.assert_close(grad, grads[name], rtol=1e-4, atol=1e-6)
        else:
            assert not grad.any(), name


def test_a_pack_of_padding_takes_a_blank(model):
    collator = Collator(geometry=vision_geometry(model), position_rows=3)
    blank = with_blanks(collator([]), frozenset({"images"}), collator)
    assert vision_kinds(blank) == {"images"}
    _, grads = run(model, blank)
    assert all(not grad.any() for grad in grads.values())


def test_a_model_whose_tower_is_unknown_is_left_alone():
    collator = Collator()
    batch = collator([text(5, 0)])
    assert with_blanks(batch, BOTH, collator) is batch
