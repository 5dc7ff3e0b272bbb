"""Ledgers of models that take images, form by form, against PyTorch's counter, published figures and hand counts."""

import inspect

import pytest
import torch
import transformers

from headway.count import Workload
from headway.errors import TraceError, WorkloadError
from headway.tracing import trace
from headway.tracing.build import model_class, twin_of_config
from headway.tracing.inputs.model_inputs import Inputs
from headway.tracing.verify import verify
from helpers.cases import some
from helpers.counter import expected_step, real_step
from helpers.models import IMAGE_FAMILIES, tiny_config, tiny_model


def real(family):
    return tiny_model(family, dtype=torch.float32)


def differences(model, run):
    """Run a real step on the images of one run, and list the modules where ledger and counter differ unexplained."""
    lines, unseen = verify(model, Inputs(model).workloads()[run])
    assert unseen == set()
    assert sum(line.ledger[0] for line in lines) > 0
    return [line for line in lines if line.explanation is None]


OFTEN = {"gemma3", "idefics3", "internvl", "llava", "llava_next", "mistral3", "paligemma"}
FROZEN = ["blip", "gemma3", "instructblip", "lfm2_vl", "llava", "mistral3"]


@pytest.mark.parametrize("family", some(sorted(set(IMAGE_FAMILIES) - {"mllama"}), OFTEN.__contains__))
def test_every_form_of_images_counts_what_pytorch_dispatches(family):
    assert differences(real(family), 2) == []


@pytest.mark.parametrize("family", some(FROZEN, "gemma3".__eq__))
def test_a_frozen_tower_counts_what_pytorch_dispatches(family):
    model = real(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision" not in name)
    assert differences(model, 1) == []


# transformers 5.17 calls its own layers by an old name
@pytest.mark.filterwarnings("ignore:.hidden_state. is deprecated:FutureWarning")
def test_a_layer_whose_result_nobody_reads_runs_forward_alone():
    rows = [row for row in trace(real("llava")).rows if row.component.startswith("vision.")]
    last = max(row.block for row in rows)
    assert all(row.forward and not row.gradients for row in rows if row.block == last)
    assert all(row.gradients for row in rows if row.block != last)


def test_mllamas_padding_patches_are_hidden_from_each_other_alone():
    # 4 tiles of 4 x 4 patches and a class token, padded to a multiple of 8: 4 x 24 positions, 4 x 7 of them padding;
    # the model's mask is the outer product of what is padding, so it hides 28 x 28 of the 96 x 96 scores of an image
    found = differences(real("mllama"), 1)
    assert {line.module.rpartition("transformer")[0] for line in found} == {
        "model.vision_model.",
        "model.vision_model.global_",
    }
    per_score, images = 2 * 2 * 2 * 12, 2  # two products of 2 heads x 12
    for line in found:
        assert line.ledger == (images * (96**2 - 28**2) * per_score, 2 * images * (96**2 - 28**2) * per_score)
        assert line.counted == (images * 96**2 * per_score, 2 * images * 96**2 * per_score)


@pytest.mark.parametrize(
    ("config", "grid", "positions"),
    [
        # LLaVA-1.5: 24 x 24 patches of a picture of 336 x 336 (Liu et al. 2023, section 3.3)
        (transformers.LlavaConfig(), (1, 24, 24), 576),
        # LLaVA-NeXT: 2 x 2 tiles and the whole are 5 x 576, and each of the 48 rows of the tiles ends with a newline
        (transformers.LlavaNextConfig(), (5, 24, 24), 5 * 576 + 48),
        # Pixtral and Mistral Small 3.1: 2 x 2 patches merge into one
        (transformers.Mistral3Config(), (1, 36, 24), 216),
        # InternVL: 32 x 32 patches, of which squares of 2 x 2 are shuffled into channels
        (transformers.InternVLConfig(), (1, 32, 32), 256),
    ],
    ids=["llava", "llava_next", "mistral3", "internvl"],
)
def test_a_model_is_asked_how_many_positions_its_images_take(config, grid, positions):
    part = Inputs(twin_of_config(config)).parts[0]
    assert part.positions_of(grid) == positions


@pytest.mark.parametrize(
    ("width", "layers", "patch", "size", "gflops"),
    [
        pytest.param(768, 12, 32, 224, 8.82, id="ViT-B-32"),
        pytest.param(768, 12, 16, 224, 35.13, id="ViT-B-16", marks=pytest.mark.slow),
        pytest.param(1024, 24, 14, 224, 162.03, id="ViT-L-14", marks=pytest.mark.slow),
        pytest.param(1024, 24, 14, 336, 381.92, id="ViT-L-14-336"),
    ],
)
def test_clip_towers_cost_what_open_clip_publishes(width, layers, patch, size, gflops):
    # image GFLOPs of mlfoundations/open_clip, docs/model_profile.csv: 2 FLOPs a multiply-add
    config = transformers.CLIPVisionConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        patch_size=patch, image_size=size,
    )  # fmt: skip
    assert gflops_of(transformers.CLIPVisionModel, config, size // patch) == pytest.approx(gflops, abs=0.01)


def test_siglip_costs_what_open_clip_publishes():
    # ViT-SO400M-14-SigLIP-384 in the same table, its attention pooling included
    config = transformers.SiglipVisionConfig(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, patch_size=14,
        image_size=384,
    )  # fmt: skip
    assert gflops_of(transformers.SiglipVisionModel, config, 27) == pytest.approx(670.35, abs=0.01)


def gflops_of(kind, config, edge):
    with torch.device("meta"):
        model = kind(config)
    return trace(model).count(Workload(images=[(1, edge, edge)])).forward / 1e9


TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}


@pytest.mark.parametrize(
    "model",
    [
        transformers.ViTModel(transformers.ViTConfig(image_size=32, hidden_dropout_prob=0.0, **TOWER)),
        transformers.Dinov2Model(transformers.Dinov2Config(image_size=32, mlp_ratio=2, **TOWER)),
        transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(num_patches=16, **TOWER)),
        transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "vocab_size": 160, "eos_token_id": 2, "bos_token_id": 1},
                vision_config={**TOWER, "image_size": 32}, projection_dim=20,
            )
        ),
    ],
    ids=["ViT", "DINOv2", "SigLIP-2", "CLIP"],
)  # fmt: skip
def test_vision_models_alone_count_what_pytorch_dispatches(model):
    assert differences(model, 2) == []


def test_a_tower_of_one_size_refuses_another():
    cost = trace(real("llava"))
    assert {row.driver for row in cost.rows} == {"tokens", "pairs:causal", "frames:4:4"}
    one = cost.count(Workload([100], images=[(1, 4, 4)]))
    two = cost.count(Workload([100], images=[(1, 4, 4)] * 2))
    none = cost.count(Workload([100]))
    assert two.forward - one.forward == one.forward - none.forward > 0
    with pytest.raises(WorkloadError, match="resized to 4 x 4 patches each"):
        cost.count(Workload([100], images=[(1, 4, 6)]))


def test_one_image_with_each_text():
    cost = trace(real("paligemma"))
    text = cost.count(Workload([100, 100])).forward
    assert cost.count(Workload([100, 100], images=[(1, 4, 4)] * 2)).forward > text
    with pytest.raises(WorkloadError, match="2 images in 1 segments"):
        cost.count(Workload([100], images=[(1, 4, 4)] * 2))
    with pytest.raises(WorkloadError, match="Give 1x4x4 patches"):
        cost.count(Workload([100], images=[(1, 8, 8)]))


def test_pictures_that_see_each_other_in_causal_text_add_half_their_square():
    # 4 tokens an image: the 4 x 3 / 2 later ones that a causal mask would hide, in each layer, whatever its window
    rows = [row for row in trace(real("gemma3")).rows if row.component == "language.attention"]
    pairs = {(row.module[-11:-10], row.driver): row.forward for row in rows}
    for layer, text in (("0", "pairs:sliding:16"), ("1", "pairs:causal")):
        assert pairs[layer, "frames:4:4"] == 6 * pairs[layer, text]


@pytest.mark.skipif(
    "pixel_values" not in inspect.signature(transformers.VideoLlavaForConditionalGeneration.forward).parameters,
    reason="transformers 5.17 names Video-LLaVA's images otherwise, and its ledger says that their tower never ran",
)
def test_images_and_videos_have_towers_of_their_own():
    config = transformers.VideoLlavaConfig(
        text_config=tiny_config("llava").text_config.to_dict(),
        vision_config=tiny_config("llava").vision_config.to_dict(),
        image_token_index=3, video_token_index=4,
    )  # fmt: skip
    model = model_class(config)._from_config(config, dtype=torch.float32)
    assert differences(model, 2) == []
    driver_of = {row.module.split(".")[1]: row.driver for row in trace(model).rows if "tower" in row.module}
    assert driver_of == {"image_tower": "image_frames:4:4", "video_tower": "video_frames:4:4"}


# transformers 5.17 calls its own layers by an old name
@pytest.mark.filterwarnings("ignore:.hidden_state. is deprecated:FutureWarning")
def test_text_that_reads_pictures_keeps_its_layers():
    cost = trace(real("mllama"))
    named = {row.module.rpartition(".")[2]: row.component for row in cost.rows if "cross_attn" in row.module}
    assert named == {
        "cross_attn": "language.attention",
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "language.projections"),
    }
    assert {row.component for row in cost.rows if "projector" in row.module} == {"vision.merger"}
    assert cost.count(Workload([50])).forward < cost.count(Workload([50], images=[(4, 4, 4)], sources=[4])).forward


def test_images_without_a_token_are_refused_by_name():
    config = tiny_config("blip2")
    config.image_token_index = None
    with pytest.raises(TraceError, match=r"which token stands for an image. Set its image_token_id"):
        trace(config)


@pytest.mark.slow
def test_images_in_an_encoders_source_count_what_pytorch_dispatches():
    text = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    tower = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
             "image_size": 64, "patch_size": 16, "vision_use_head": False}  # fmt: skip
    encoder = {"text_config": text, "vision_config": tower, "mm_tokens_per_image": 4}
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=150, eoi_token_index=151)
    torch.manual_seed(0)
    model = model_class(config)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    assert {row.driver for row in trace(model).rows if row.op == "attention"} == {
        "source_pairs:local:3:4", "source_pairs:full", "pairs:sliding:8", "pairs:causal", "pairs:cross", "frames:4:4"
    }  # fmt: skip
    assert differences(model.train(), 1) == []


def test_a_page_after_its_words_counts_what_pytorch_dispatches():
    config = transformers.UdopConfig(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                                     image_size=64, max_2d_position_embeddings=32)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.UdopForConditionalGeneration._from_config(config, dtype=torch.float32)
    cost = trace(model)
    work = Workload([23], images=[(1, 4, 4)], sources=[37 + 16])  # words, and places of patches
    arguments = Inputs(model).arguments(work, torch.device("cpu"))
    assert arguments["input_ids"].shape == (1, 37)
    forward, backward = real_step(model.train(), arguments)
    assert (forward, backward) == expected_step(cost, work, {"pairs:causal": 23**2})
    assert forward["encoder.embed_patches.proj"] == 16 * 2 * 3 * 16**2 * 32
