"""Configurations of tiny models, one for each form in which models take images.

As in `tiny_models`, sizes differ from each other wherever they can.
"""

import copy
from typing import Any

import transformers
from transformers import PreTrainedConfig

from helpers.tiny_models import _COUNTS, _SIZES, _SLIDING, _TEXT, PATCH

_TOWER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": PATCH,
}
_IMAGE_TOKEN: dict[str, Any] = {"image_token_index": 3}
_QFORMER: dict[str, Any] = {
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "encoder_hidden_size": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
    "vocab_size": 160,
    "dropout": 0.0,
    "max_position_embeddings": 512,
}
_LLAMA: dict[str, Any] = dict(model_type="llama", vocab_size=160, pad_token_id=0, **_TEXT)
_CLIP: dict[str, Any] = dict(model_type="clip_vision_model", image_size=4 * PATCH, **_TOWER)
_SIGLIP: dict[str, Any] = dict(model_type="siglip_vision_model", image_size=4 * PATCH, vision_use_head=False, **_TOWER)
_IDEFICS_TOWER: dict[str, Any] = dict(_TOWER, image_size=4 * PATCH)
# one family of each form in which images are taken: configuration, and its parts
_IMAGE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("LlavaConfig", dict(text_config=_LLAMA, vision_config=_CLIP, **_IMAGE_TOKEN)),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": dict(**_TEXT, **_SLIDING, vocab_size=160),
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": 3,
            "boi_token_index": 4,
            "eoi_token_index": 5,
        },
    ),
    "paligemma": (
        "PaliGemmaConfig",
        {
            "text_config": dict(model_type="gemma", vocab_size=160, **_TEXT),
            "vision_config": dict(_SIGLIP, projection_dim=32),
            "projection_dim": 32,
            "image_token_index": 3,
        },
    ),
    "idefics": (
        "IdeficsConfig",
        dict(
            **_TEXT,
            vocab_size=160,
            cross_layer_interval=1,
            qk_layer_norms=False,
            vision_config={
                "embed_dim": 24,
                "intermediate_size": 40,
                "image_size": 32,
                "patch_size": PATCH,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
        ),
    ),
    "idefics3": (
        "Idefics3Config",
        {
            "text_config": _LLAMA,
            "vision_config": _IDEFICS_TOWER,
            "scale_factor": 2,
            "image_token_id": 3,
            "pad_token_id": 0,
        },
    ),
    "llava_next": (
        "LlavaNextConfig",
        dict(
            text_config=_LLAMA,
            vision_config=_CLIP,
            image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
            **_IMAGE_TOKEN,
        ),
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": dict(_LLAMA, model_type="mistral"),
            "spatial_merge_size": 2,
            "image_token_index": 3,
            "vision_config": dict(_TOWER, model_type="pixtral", head_dim=12, image_size=256),
        },
    ),
    "lfm2_vl": (
        "Lfm2VlConfig",
        {
            "text_config": dict(
                model_type="lfm2", vocab_size=160, **_SIZES, **_COUNTS, layer_types=["conv", "full_attention"]
            ),
            "vision_config": dict(_TOWER, model_type="siglip2_vision_model", num_patches=16, vision_use_head=False),
            "image_token_id": 3,
            "projector_hidden_size": 44,
            "downsample_factor": 2,
        },
    ),
    "blip2": (
        "Blip2Config",
        dict(
            vision_config=dict(_TOWER, image_size=32),
            qformer_config=_QFORMER,
            text_config=_OPT,
            num_query_tokens=5,
            **_IMAGE_TOKEN,
        ),
    ),
    "instructblip": (
        "InstructBlipConfig",
        dict(
            vision_config=dict(_TOWER, image_size=32),
            qformer_config=_QFORMER,
            text_config=_OPT,
            num_query_tokens=5,
            **_IMAGE_TOKEN,
        ),
    ),
    "blip": (
        "BlipConfig",
        {
            "vision_config": dict(_TOWER, image_size=32),
            "text_config": dict(
                _COUNTS, **_SIZES, vocab_size=160, encoder_hidden_size=24, bos_token_id=1, sep_token_id=2
            ),
        },
    ),
    "git": (
        "GitConfig",
        {
            "vision_config": dict(_TOWER, image_size=32),
            "vocab_size": 160,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "mllama": (
        "MllamaConfig",
        dict(
            text_config=dict(**_TEXT, vocab_size=160, cross_attention_layers=[1], pad_token_id=0),
            vision_config={
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 32,
                "patch_size": PATCH,
                "max_num_tiles": 4,
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 72,
            },
            **_IMAGE_TOKEN,
        ),
    ),
    "llama4": (
        "Llama4Config",
        dict(
            text_config=dict(
                **_TEXT,
                intermediate_size_mlp=56,
                vocab_size=160,
                num_local_experts=4,
                num_experts_per_tok=1,
                attention_chunk_size=16,
                interleave_moe_layer_step=2,
                no_rope_layers=[1, 0],
            ),
            vision_config={
                "hidden_size": 24,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": PATCH,
                "vision_output_dim": 28,
                "projector_input_dim": 28,
                "projector_output_dim": 28,
                "pixel_shuffle_ratio": 0.5,
                "attention_dropout": 0.0,
            },
            **_IMAGE_TOKEN,
        ),
    ),
    "internvl": (
        "InternVLConfig",
        {
            "text_config": _LLAMA,
            "image_token_id": 3,
            "downsample_ratio": 0.5,
            "vision_config": dict(_TOWER, image_size=[32, 32], patch_size=[PATCH, PATCH]),
        },
    ),
    "gemma4": (
        "Gemma4Config",
        {
            "text_config": dict(
                **_TEXT, **_SLIDING, vocab_size=160, hidden_size_per_layer_input=0, num_kv_shared_layers=0
            ),
            "vision_config": dict(_TOWER, num_key_value_heads=2, head_dim=12, pooling_kernel_size=3),
            "audio_config": None,
            "image_token_id": 3,
            "boi_token_id": 4,
            "eoi_token_id": 5,
            "video_token_id": 6,
            "audio_token_id": 7,
        },
    ),
    "fuyu": (
        "FuyuConfig",
        {
            "text_config": dict(_LLAMA, model_type="persimmon"),
            "image_token_id": 3,
            "vocab_size": 160,
            "hidden_size": 32,
            "patch_size": PATCH,
            "image_size": 32,
        },
    ),
    "pix2struct": (
        "Pix2StructConfig",
        {
            "text_config": {
                "vocab_size": 160,
                "hidden_size": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_heads": 4,
                "dropout_rate": 0.0,
            },
            "vision_config": dict(
                _TOWER,
                hidden_size=32,
                patch_embed_hidden_size=3 * PATCH**2,
                d_ff=40,
                d_kv=12,
                dropout_rate=0.0,
                attention_dropout=0.0,
            ),
        },
    ),
    "vision_encoder_decoder": (
        "VisionEncoderDecoderConfig",
        {
            "encoder": dict(_TOWER, model_type="vit", image_size=32),
            "decoder": {
                "model_type": "bert",
                "vocab_size": 160,
                "hidden_size": 24,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "is_decoder": True,
                "add_cross_attention": True,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
        },
    ),
    "granite_docling": (
        "GraniteDoclingConfig",
        {
            "text_config": dict(**_TEXT, vocab_size=160, pad_token_id=0),
            "vision_config": dict(
                _TOWER, image_size=8 * PATCH, out_hidden_size=32, scale_factor=4, deepstack_visual_indexes=[0]
            ),
            "density_router_hidden_size": 20,
            "pad_token_id": 0,
            "image_token_id": 3,
        },
    ),
    "minicpm_ocr": (
        "MiniCPMOcrConfig",
        {
            "text_config": _LLAMA,
            "vision_config": dict(_TOWER, image_size=8 * PATCH),
            "insert_layer_id": 0,
            "image_token_id": 3,
            "video_token_id": 4,
        },
    ),
}
IMAGE_FAMILIES = tuple(f for f, (name, _) in _IMAGE_FAMILIES.items() if hasattr(transformers, name))


def tiny_image_config(family: str) -> PreTrainedConfig:
    """Build a fresh configuration of a family that takes images in a form of its own."""
    name, parts = _IMAGE_FAMILIES[family]
    return getattr(transformers, name)(**copy.deepcopy(parts))
