"""More families of `vlm_folders`: models whose images Headway reads by rules that other families have brought."""

from typing import Any

import transformers

from helpers.tiny_images import _CLIP, _COUNTS, _LLAMA, _SIGLIP, _SIZES, _TEXT, _TOWER, tiny_image_config
from helpers.tiny_models import _DEEPSEEK, _DELTA, _HYBRID, _MROPE, _QWEN2_5_VISION, PATCH
from helpers.vlm_family import QWEN_SIZES, SIDE, SQUARE, Family

_GLM_SPECIAL = (
    *("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
_GLM_IDS: dict[str, int] = {
    "image_token_id": 3,
    "image_start_token_id": 4,
    "image_end_token_id": 5,
    "video_token_id": 6,
    "video_start_token_id": 7,
    "video_end_token_id": 8,
}
_GLM_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": PATCH,
    "image_size": SIDE,
}
_GLM_TEXT: dict[str, Any] = dict(
    _SIZES,
    **_COUNTS,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0,
    },
    max_position_embeddings=512,
    vocab_size=160,
)
_QWEN_SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_IDS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_MINICPM_NAMED = {
    "image_token": "<image_pad>",
    "video_token": "<video_pad>",
    **{
        f"{part}_{end}_token": f"<{'/' * (end == 'end')}{part}>"
        for part in ("image", "slice")
        for end in ("start", "end")
    },
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def _glm(kind: str, processor: str, model: str, text: dict[str, Any], **options: Any) -> Family:
    return Family(
        _GLM_SPECIAL,
        processor,
        (model, f"{processor.removesuffix('Processor')}ImageProcessorPil", QWEN_SIZES),
        placeholder="<|begin_of_image|><|image|><|end_of_image|>",
        config=lambda: getattr(transformers, kind)(
            text_config=dict(_GLM_TEXT, **text), vision_config=dict(_GLM_VISION, **options), **_GLM_IDS
        ),
    )


MORE_FAMILIES: dict[str, Family] = {
    "glm4v_moe": _glm(
        "Glm4vMoeConfig",
        "Glm4vProcessor",
        "glm4v",
        {"head_dim": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 4},
    ),
    "glm46v": _glm(
        "Glm46VConfig", "Glm46VProcessor", "glm46v", {"model_type": "glm4v_text"}, model_type="glm4v_vision"
    ),
    "glm_ocr": _glm("GlmOcrConfig", "Glm46VProcessor", "glm46v", {"head_dim": 8, "num_nextn_predict_layers": 0}),
    "exaone4_5": Family(
        _QWEN_SPECIAL,
        "Exaone4_5_Processor",
        ("qwen2_vl", "Qwen2VLImageProcessorPil", QWEN_SIZES),
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        config=lambda: transformers.Exaone4_5_Config(
            text_config=dict(
                _TEXT,
                model_type="exaone4",
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"],
                vocab_size=160,
            ),
            vision_config=dict(_QWEN2_5_VISION, num_key_value_heads=1),
            **_QWEN_IDS,
        ),
    ),
    "paddleocr_vl": Family(
        ("<|IMAGE_PLACEHOLDER|>", "<|video_pad|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
        "PaddleOCRVLProcessor",
        ("paddleocr_vl", "PaddleOCRVLImageProcessorPil", {**QWEN_SIZES, "temporal_patch_size": 1}),
        placeholder="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        config=lambda: transformers.PaddleOCRVLConfig(
            text_config=dict(_TEXT, rope_parameters=_MROPE, vocab_size=160),
            vision_config=dict(_TOWER, image_size=SIDE),
            **_QWEN_IDS,
        ),
    ),
    "kimi_k25": Family(
        ("<|media_pad|>", "<|kimi_k25_video_placeholder|>", "<|media_begin|>", "<|media_end|>"),
        "Kimi_K25Processor",
        (
            "kimi_k25",
            "Kimi_K25ImageProcessor",
            {"patch_size": PATCH, "max_patches": 64, "size": {"max_height": 8, "max_width": 8}},
        ),
        placeholder="<|media_begin|><|media_pad|><|media_end|>",
        named={"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
        config=lambda: transformers.Kimi_K25Config(
            text_config=dict(
                _DEEPSEEK, model_type="deepseek_v3", q_lora_rank=16, n_group=2, topk_group=1, vocab_size=160
            ),
            vision_config={
                **{name: size for name, size in _TOWER.items() if name != "image_size"},
                "pos_emb_height": 8,
                "pos_emb_width": 8,
            },
            projection_hidden_size=24,
            **_QWEN_IDS,
        ),
        needs=("torchvision",),
    ),
    "minicpmv4_6": Family(
        tuple(_MINICPM_NAMED.values()),
        "MiniCPMV4_6Processor",
        (
            "minicpmv4_6",
            "MiniCPMV4_6ImageProcessorPil",
            {
                "patch_size": PATCH,
                "scale_resolution": 8 * PATCH,
                "max_slice_nums": 4,
                "use_image_id": False,
                "slice_mode": True,
                "downsample_mode": "16x",
            },
        ),
        placeholder="<image_pad>",
        named=_MINICPM_NAMED,
        config=lambda: transformers.MiniCPMV4_6Config(
            text_config=dict(_HYBRID, **_DELTA, model_type="qwen3_5_text", vocab_size=160),
            vision_config=dict(_TOWER, image_size=8 * PATCH, insert_layer_id=0),
            insert_layer_id=0,
            image_size=8 * PATCH,
            image_token_id=3,
            video_token_id=4,
        ),
    ),
    "deepseek_vl": Family(
        ("<image_placeholder>",),
        "DeepseekVLProcessor",
        ("deepseek_vl", "DeepseekVLImageProcessorPil", {"size": SQUARE}),
        placeholder="<image_placeholder>",
        options={"num_image_tokens": 16},
        named={"image_token": "<image_placeholder>"},
        config=lambda: transformers.DeepseekVLConfig(
            text_config=dict(_LLAMA), vision_config=dict(_SIGLIP), image_token_id=3
        ),
    ),
    "janus": Family(
        ("<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
        "JanusProcessor",
        ("janus", "JanusImageProcessorPil", {"size": SQUARE}),
        placeholder="<image_placeholder>",
        options={"num_image_tokens": 16},
        named={
            "image_token": "<image_placeholder>",
            "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>",
        },
        config=lambda: transformers.JanusConfig(
            text_config=dict(_LLAMA),
            vision_config={
                **{name: size for name, size in _TOWER.items() if name != "intermediate_size"},
                "image_size": SIDE,
                "mlp_ratio": 2.0,
                "projection_dim": 32,
                "num_image_tokens": 16,
            },
            vq_config={
                "embed_dim": 4,
                "num_embeddings": 20,
                "latent_channels": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "num_patches": 4,
                "projection_dim": 32,
                "image_token_embed_dim": 32,
            },
            image_token_id=3,
        ),
    ),
    "vipllava": Family(
        ("<image>",),
        "LlavaProcessor",
        ("clip", "CLIPImageProcessorPil", {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}),
        options={"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        config=lambda: transformers.VipLlavaConfig(
            text_config=dict(_LLAMA), vision_config=dict(_CLIP), image_token_index=3, vision_feature_layer=[-1, -2]
        ),
    ),
    "cohere2_vision": Family(
        ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
        "Cohere2VisionProcessor",
        ("cohere2_vision", "Cohere2VisionImageProcessor", {"size": SQUARE, "max_patches": 4, "patch_size": 2}),
        placeholder="<|IMG_PATCH|>",
        named={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        config=lambda: transformers.Cohere2VisionConfig(
            text_config=dict(
                _TEXT,
                model_type="cohere2",
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"],
                vocab_size=160,
                pad_token_id=0,
            ),
            vision_config=dict(_SIGLIP),
            alignment_intermediate_size=36,
            image_token_id=3,
        ),
        needs=("torchvision",),
    ),
    "lfm2_vl": Family(
        (
            *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_row_{i}_col_{j}|>" for i in range(1, 5) for j in range(1, 5)),
        ),
        "Lfm2VlProcessor",
        (
            "lfm2_vl",
            "Lfm2VlImageProcessor",
            {
                "encoder_patch_size": PATCH,
                "tile_size": 8 * PATCH,
                "size": {"height": 8 * PATCH, "width": 8 * PATCH},
                "min_image_tokens": 4,
                "max_image_tokens": 16,
                "max_tiles": 4,
            },
        ),
        config=lambda: tiny_image_config("lfm2_vl"),
        needs=("torchvision",),
    ),
    "lighton_ocr": Family(
        ("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
        "LightOnOcrProcessor",
        ("pixtral", "PixtralImageProcessorPil", {"size": {"longest_edge": 2 * SIDE}, "patch_size": 2 * PATCH}),
        placeholder="<|image_pad|>",
        options={"patch_size": PATCH, "spatial_merge_size": 2},
        named={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        config=lambda: transformers.LightOnOcrConfig(
            text_config=dict(_TEXT, model_type="qwen3", vocab_size=160),
            vision_config=dict(_TOWER, model_type="pixtral", head_dim=12, image_size=256),
            image_token_id=3,
        ),
        needs=("torchvision",),
    ),
}
