"""What is computed ahead of a vision tower changes neither loss nor gradients, and neither does padding."""

import pytest
import torch
import transformers
from torch.nn import functional as F

from headway.data import EncodedSample, Origin
from headway.data.collate import Collator
from headway.data.media.tensors import MediaTensors
from headway.errors import ConfigError, DataError
from headway.models import load_model, rope_index
from headway.models.vision import vision_geometry
from helpers.models import SPECIAL_TOKENS, VISION_FAMILIES, tiny_config

PATCH_VALUES = 3 * 2 * 8 * 8
FAMILIES = (*VISION_FAMILIES, "qwen2_vl")


def _config(family):
    if family != "qwen2_vl":
        return tiny_config(family)
    text = dict(tiny_config("qwen2_5_vl").text_config.to_dict(), model_type="qwen2_vl_text")
    vision = {"depth": 2, "embed_dim": 24, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **SPECIAL_TOKENS)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    torch.manual_seed(0)
    return load_model(_config(request.param), random_init=True).train()


def sample(model, number, parts, dtype=torch.float32):
    """A sample of parts: a number of text tokens, ("image", grid) or ("video", grid); the text is supervised."""
    drawn = torch.Generator().manual_seed(number)
    ids, types = [], []
    grids = {"image": [], "video": []}
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(10, 160, (part,), generator=drawn).tolist()
            types += [0] * part
            continue
        kind, (t, h, w) = part
        grids[kind].append((t, h, w))
        # Qwen3-VL sets the frames of a video apart by time stamps; a text token stands for each of them here.
        apart = kind == "video" and "qwen3" in model.config.model_type
        for _ in range(t if apart else 1):
            tokens = h * w // 4 * (1 if apart else t)
            ids += [10] + [SPECIAL_TOKENS[f"{kind}_token_id"]] * tokens
            types += [0] + [1 if kind == "image" else 2] * tokens
    ids_S, types_S = torch.tensor(ids), torch.tensor(types, dtype=torch.int32)
    tensors = {kind: torch.tensor(found, dtype=torch.long).reshape(-1, 3) for kind, found in grids.items()}
    positions_R1S, _ = rope_index(model)(
        input_ids=ids_S[None],
        mm_token_type_ids=types_S[None],
        image_grid_thw=tensors["image"] if grids["image"] else None,
        video_grid_thw=tensors["video"] if grids["video"] else None,
        second_per_grid_ts=[1.0] * len(grids["video"]),
    )

    def pixels(kind):
        patches = int(tensors[kind].prod(1).sum())
        bytes_PD = torch.randint(0, 256, (patches, PATCH_VALUES), generator=drawn, dtype=torch.uint8)
        return bytes_PD if dtype == torch.uint8 else bytes_PD / 127.5 - 1.0

    return EncodedSample(
        input_ids_S=ids_S,
        labels_S=torch.where(types_S == 0, ids_S, -100),
        position_ids_RS=positions_R1S[:, 0],
        media={f"{kind}s": MediaTensors(tensors[kind], pixels(kind)) for kind in tensors if len(tensors[kind])},
        token_types_S=types_S,
        origin=Origin("made up", "made up", number, f"line {number}"),
    )


def samples(model, dtype=torch.float32):
    return [
        sample(model, 0, [3, ("image", (1, 4, 6)), 5], dtype),
        sample(model, 1, [7], dtype),
        sample(model, 2, [2, ("image", (1, 10, 8)), 1, ("video", (3, 4, 4)), 4], dtype),
        sample(model, 3, [("image", (1, 2, 2)), 6], dtype),
    ]


def loss_and_gradients(model, batch):
    model.zero_grad()
    logits_TV = model(**batch.model_inputs()).logits[0]
    loss = F.cross_entropy(logits_TV.float(), batch.labels_1T[0], ignore_index=-100, reduction="sum")
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


def test_a_tower_given_everything_ready_made_computes_the_same(model):
    pack = samples(model)
    alone = Collator()(pack)
    ahead = Collator(vision_geometry(model))(pack)
    assert not alone.vision
    assert any(name.startswith("video_") for name in ahead.vision)
    assert_same(loss_and_gradients(model, ahead), loss_and_gradients(model, alone))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_tower_is_known_by_its_class_whatever_a_saved_configuration_calls_it(family):
    """`save_pretrained` of older versions wrote the whole model's type, and transformers 5.17 keeps what it reads."""
    saved = _config(family).to_dict()
    saved["vision_config"]["model_type"] = family
    model = load_model(type(_config(family)).from_dict(saved), device="meta", random_init=True)
    assert vision_geometry(model).window_size == (32 if family == "qwen2_5_vl" else None)


def test_a_tower_given_everything_computes_none_of_it(model, monkeypatch):
    batch = Collator(vision_geometry(model))(samples(model))
    tower_module = __import__(type(model).__module__, fromlist=["_"])
    for name in [name for name in vars(tower_module) if name.startswith("get_vision_")]:
        ours = getattr(tower_module, name)

        def popped_only(grid_thw, *args, kwargs, _ours=ours, **options):
            before = len(kwargs)
            found = _ours(grid_thw, *args, kwargs=kwargs, **options)
            assert len(kwargs) < before, f"{_ours.__name__} was computed"
            return found

        monkeypatch.setattr(tower_module, name, popped_only)
    model(**batch.model_inputs())


def test_padding_changes_nothing_and_is_counted_as_slots_alone(model):
    geometry, pack = vision_geometry(model), samples(model)
    plain = Collator(geometry)(pack)
    padded = Collator(geometry, bucket_tokens=64, bucket_patches=1280)(pack)
    assert padded.slots % 64 == 0
    assert len(padded.media["images"].features) == len(padded.media["videos"].features) == 1280
    assert (padded.tokens, padded.num_supervised) == (plain.tokens, plain.num_supervised)
    assert padded.workload.slots == padded.slots > plain.slots == plain.tokens
    assert padded.workload.patches == plain.workload.patches
    assert padded.workload.segments.tolist() == plain.workload.segments.tolist()
    assert padded.cu_seqlens_N.tolist() == [*plain.cu_seqlens_N.tolist(), padded.slots]
    assert (padded.labels_1T[0, plain.tokens :] == -100).all()
    # What is in the same place gives the same number; products over more rows may add in another order.
    features = [
        model.get_image_features(b.media["images"].features, b.media["images"].sizes, **b.vision).pooler_output
        for b in (plain, padded)
    ]
    for ours, theirs in zip(features[1], features[0], strict=False):
        assert torch.equal(ours, theirs)
    found, expected = loss_and_gradients(model, padded), loss_and_gradients(model, plain)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 2e-5 * max(gradient.norm(), torch.tensor(1.0)), name


def test_a_pack_of_padding_alone_has_no_targets_and_touches_no_gradient(model):
    batch = Collator(vision_geometry(model), position_rows=3)([])
    assert (batch.tokens, batch.slots, batch.num_supervised, batch.num_segments) == (0, 1, 0, 0)
    assert batch.workload.num_packs == 1
    loss, gradients = loss_and_gradients(model, batch)
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


def test_bytes_are_normalised_where_the_model_is(model):
    geometry = vision_geometry(model)
    scale = (torch.full((PATCH_VALUES,), 1 / 127.5), torch.full((PATCH_VALUES,), -1.0))
    of_bytes = Collator(geometry, pixel_scale=scale)(samples(model, torch.uint8))
    of_floats = Collator(geometry)(samples(model))
    assert of_bytes.media["images"].features.dtype == of_bytes.media["videos"].features.dtype == torch.uint8
    for name in ("pixel_values", "pixel_values_videos"):
        torch.testing.assert_close(of_bytes.model_inputs()[name], of_floats.model_inputs()[name], rtol=0, atol=1e-6)


def test_bytes_without_their_scale_are_refused(model):
    with pytest.raises(DataError, match="pass pixel_scale"):
        Collator(vision_geometry(model))(samples(model, torch.uint8))


def test_buckets_that_cannot_be_filled_are_refused(model):
    geometry = vision_geometry(model)
    with pytest.raises(ConfigError, match="multiple of 4"):
        Collator(geometry, bucket_patches=10)
    with pytest.raises(ConfigError, match="no vision tower"):
        Collator(bucket_patches=8)
    with pytest.raises(ConfigError, match="at least 1"):
        Collator(geometry, bucket_tokens=0)


@pytest.mark.parametrize("patches", [4, 1020, 1024, 1028, 8 * 1024, 8 * 1024 + 512])
def test_padding_grids_fill_the_buffer(model, patches):
    grids = vision_geometry(model).padding_grids(patches)
    assert int(grids.prod(1).sum()) == patches
    assert not (grids[:, 1:] % 2).any()


def test_grids_stay_on_the_host_where_the_model_only_lists_them(model):
    geometry, pack = vision_geometry(model), samples(model)
    assert Collator(geometry)(pack).to("meta").media["images"].sizes.device.type == "cpu"
    assert Collator()(pack).to("meta").media["images"].sizes.device.type == "meta"
    assert Collator(geometry)(pack).to("meta").vision["image_cu_seqlens"].device.type == "meta"


def test_a_model_without_such_a_tower_gets_nothing_ready_made():
    assert vision_geometry(load_model(tiny_config("qwen3"), random_init=True)) is None
