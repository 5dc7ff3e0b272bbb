"""What the folders of vision-language and speech families are made of: tokens, processor, template, configuration.

The special tokens get the first ids, in the order of the family's row, which the configurations count on.
"""

from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PreTrainedConfig

from helpers.models import (
    CLIP,
    COUNTS,
    DEEPSEEK,
    DELTA,
    HYBRID,
    LLAMA,
    MROPE,
    PATCH,
    QWEN2_5_VISION,
    SIGLIP,
    SIZES,
    TEXT,
    TOWER,
    tiny_config,
)

SIDE = 4 * PATCH  # of the square that towers of a fixed size read [pixels]
SQUARE = {"height": SIDE, "width": SIDE}
TILES = ((1, 1), (1, 2), (2, 1), (2, 2))
QWEN_SIZES = {
    "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": 64 * (2 * PATCH) ** 2},
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
}


@dataclass(frozen=True)
class Family:
    """What a family's folder is made of.

    Attributes:
        special: its special tokens, from id 3 on; a pad, a begin and an end token come before.
        processor: the class of its processor.
        image: module (below transformers.models) and class of its image processor, and its settings.
        options: the processor's own.
        named: special tokens that the tokenizer has as attributes.
        placeholder: what the template writes for an image.
        audio: likewise for a sound.
        config: its configuration.
        sound: the class of its feature extractor, where its processor has one.
        needs: packages without which transformers has no such processor.
    """

    special: tuple[str, ...]
    processor: str
    image: tuple[str, str, dict[str, Any]] | None
    placeholder: str = "<image>"
    options: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    audio: str = ""
    config: Any = None
    sound: str = "WhisperFeatureExtractor"
    needs: tuple[str, ...] = ()


def _llava_onevision() -> PreTrainedConfig:
    return transformers.LlavaOnevisionConfig(
        text_config=dict(LLAMA),
        vision_config=dict(SIGLIP),
        image_token_index=3,
        video_token_index=4,
        image_grid_pinpoints=[[SIDE * h, SIDE * w] for h, w in TILES],
        vision_aspect_ratio="anyres_max_4",
    )


def _llava_next() -> PreTrainedConfig:
    config = tiny_config("llava_next")
    config.image_grid_pinpoints = [[SIDE * h, SIDE * w] for h, w in TILES]
    return config


def _smolvlm() -> PreTrainedConfig:
    return transformers.SmolVLMConfig(
        text_config=dict(LLAMA),
        vision_config=dict(TOWER, image_size=SIDE),
        scale_factor=2,
        image_token_id=3,
        pad_token_id=0,
    )


def _paligemma2() -> PreTrainedConfig:
    config = tiny_config("paligemma")
    text = dict(SIZES, **COUNTS, head_dim=8, max_position_embeddings=512, sliding_window=16, vocab_size=160)
    return transformers.PaliGemmaConfig(
        text_config=dict(text, model_type="gemma2"),
        vision_config=config.vision_config.to_dict(),
        projection_dim=32,
        image_token_index=3,
    )


def _ovis2() -> PreTrainedConfig:
    return transformers.Ovis2Config(
        text_config=dict(SIZES, **COUNTS, model_type="qwen2", max_position_embeddings=512, vocab_size=160),
        vision_config=dict(TOWER, image_size=SIDE, hidden_stride=2, vocab_size=20, num_visual_indicator_tokens=5),
        image_token_id=3,
        visual_indicator_token_ids=[4, 5, 6, 7, 8],
        hidden_size=32,
        vocab_size=160,
    )


def _aya_vision() -> PreTrainedConfig:
    return transformers.AyaVisionConfig(
        text_config=dict(LLAMA),
        vision_config=dict(SIGLIP),
        downsample_factor=2,
        adapter_hidden_size=36,
        image_token_index=3,
    )


def _omni() -> PreTrainedConfig:
    config = tiny_config("qwen2_5_omni_thinker")
    config.audio_start_token_id, config.audio_end_token_id = 6, 7
    config.vision_start_token_id, config.vision_end_token_id = 8, 9
    return config


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
    SIZES,
    **COUNTS,
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


_CLIP_SIZE = {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}
_CLIP_IMAGES = ("clip", "CLIPImageProcessorPil", _CLIP_SIZE)
_ANYRES = {"size": SQUARE, "image_grid_pinpoints": [[SIDE * h, SIDE * w] for h, w in TILES]}
_IDEFICS_IMAGES = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
_IDEFICS_SPECIAL = (
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
)
_PIXTRAL_IMAGES = ("pixtral", "PixtralImageProcessorPil", {"size": {"longest_edge": 2 * SIDE}, "patch_size": PATCH})
_PIXTRAL_SPECIAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_TILED = {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
_OMNI_NAMED = {f"{kind}_{end}_token": f"<|{kind}_{end}|>" for kind in ("audio", "vision") for end in ("bos", "eos")}
FAMILIES: dict[str, Family] = {
    "llava": Family(
        ("<image>",),
        "LlavaProcessor",
        _CLIP_IMAGES,
        options={"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        config=lambda: tiny_config("llava"),
    ),
    "llava_next": Family(
        ("<image>",),
        "LlavaNextProcessor",
        (
            "llava_next",
            "LlavaNextImageProcessorPil",
            {**_ANYRES, "size": {"shortest_edge": SIDE}, "crop_size": SQUARE},
        ),
        options={"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        config=_llava_next,
    ),
    "llava_onevision": Family(
        ("<image>", "<video>"),
        "LlavaOnevisionProcessor",
        ("llava_onevision", "LlavaOnevisionImageProcessorPil", _ANYRES),
        options={
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
        config=_llava_onevision,
    ),
    "gemma3": Family(
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        "Gemma3Processor",
        ("gemma3", "Gemma3ImageProcessorPil", {"size": SQUARE}),
        placeholder="<start_of_image>",
        options={"image_seq_length": 4},
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        config=lambda: tiny_config("gemma3"),
    ),
    "paligemma2": Family(
        ("<image>",),
        "PaliGemmaProcessor",
        ("siglip", "SiglipImageProcessorPil", {"size": SQUARE, "image_seq_length": 16}),
        named={"image_token": "<image>"},
        config=_paligemma2,
    ),
    "idefics3": Family(
        _IDEFICS_SPECIAL,
        "Idefics3Processor",
        ("idefics3", "Idefics3ImageProcessorPil", _IDEFICS_IMAGES),
        options={"image_seq_len": 4},
        config=lambda: tiny_config("idefics3"),
    ),
    "smolvlm": Family(
        _IDEFICS_SPECIAL,
        "SmolVLMProcessor",
        ("smolvlm", "SmolVLMImageProcessorPil", _IDEFICS_IMAGES),
        options={"image_seq_len": 4},
        config=_smolvlm,
        needs=("num2words",),
    ),
    "internvl": Family(
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        "InternVLProcessor",
        ("got_ocr2", "GotOcr2ImageProcessorPil", _TILED),
        placeholder="<IMG_CONTEXT>",
        options={"image_seq_length": 4},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        config=lambda: tiny_config("internvl"),
    ),
    "aya_vision": Family(
        ("<|IMG_PATCH|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"),
        "AyaVisionProcessor",
        ("got_ocr2", "GotOcr2ImageProcessorPil", _TILED),
        options={"patch_size": PATCH, "img_size": SIDE, "downsample_factor": 2},
        config=_aya_vision,
    ),
    "pixtral": Family(
        _PIXTRAL_SPECIAL,
        "PixtralProcessor",
        _PIXTRAL_IMAGES,
        placeholder="[IMG]",
        options={"patch_size": PATCH, "spatial_merge_size": 1},
        config=lambda: transformers.LlavaConfig(
            text_config=dict(LLAMA, model_type="mistral"),
            vision_config=dict(TOWER, model_type="pixtral", head_dim=12, image_size=256),
            image_token_index=3,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        needs=("torchvision",),
    ),
    "mistral3": Family(
        _PIXTRAL_SPECIAL,
        "PixtralProcessor",
        _PIXTRAL_IMAGES,
        placeholder="[IMG]",
        options={"patch_size": PATCH, "spatial_merge_size": 2},
        config=lambda: tiny_config("mistral3"),
        needs=("torchvision",),
    ),
}
FAMILIES |= {
    "qwen2_audio": Family(
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        "Qwen2AudioProcessor",
        None,
        audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
        config=lambda: tiny_config("qwen2_audio"),
    ),
    "glm4v": _glm("Glm4vConfig", "Glm4vProcessor", "glm4v", {}),
    "ovis2": Family(
        ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<image>"),
        "Ovis2Processor",
        ("ovis2", "Ovis2ImageProcessorPil", {"size": SQUARE, "crop_to_patches": True, "max_patches": 3}),
        options={"image_seq_length": 4},
        config=_ovis2,
    ),
    "gemma4": Family(
        ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        "Gemma4Processor",
        ("gemma4", "Gemma4ImageProcessorPil", {"patch_size": PATCH, "max_soft_tokens": 70, "pooling_kernel_size": 3}),
        placeholder="<|image|>",
        named={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        config=lambda: tiny_config("gemma4"),
        sound="Gemma4AudioFeatureExtractor",
    ),
    "llama4": Family(
        ("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        "Llama4Processor",
        ("llama4", "Llama4ImageProcessor", {"size": SQUARE, "max_patches": 4}),
        placeholder="<|image|>",
        options={"patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
        config=lambda: tiny_config("llama4"),
        needs=("torchvision",),
    ),
    "qwen2_5_omni_thinker": Family(
        ("<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>", *_OMNI_NAMED.values()),
        "Qwen2_5OmniProcessor",
        ("qwen2_vl", "Qwen2VLImageProcessorPil", {**QWEN_SIZES}),
        placeholder="<|vision_bos|><|IMAGE|><|vision_eos|>",
        named={"audio_token": "<|AUDIO|>", "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", **_OMNI_NAMED},
        audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
        config=_omni,
    ),
}
FAMILIES |= {  # their images are read by rules that families above have brought
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
                TEXT,
                model_type="exaone4",
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"],
                vocab_size=160,
            ),
            vision_config=dict(QWEN2_5_VISION, num_key_value_heads=1),
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
            text_config=dict(TEXT, rope_parameters=MROPE, vocab_size=160),
            vision_config=dict(TOWER, image_size=SIDE),
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
                DEEPSEEK, model_type="deepseek_v3", q_lora_rank=16, n_group=2, topk_group=1, vocab_size=160
            ),
            vision_config={
                **{name: size for name, size in TOWER.items() if name != "image_size"},
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
            text_config=dict(HYBRID, **DELTA, model_type="qwen3_5_text", vocab_size=160),
            vision_config=dict(TOWER, image_size=8 * PATCH, insert_layer_id=0),
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
            text_config=dict(LLAMA), vision_config=dict(SIGLIP), image_token_id=3
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
            text_config=dict(LLAMA),
            vision_config={
                **{name: size for name, size in TOWER.items() if name != "intermediate_size"},
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
    "qianfan_ocr": Family(
        ("<IMG_CONTEXT>", "<img>", "</img>", "<image>"),
        "QianfanOCRProcessor",
        ("got_ocr2", "GotOcr2ImageProcessorPil", _TILED),
        placeholder="<image>",
        options={"image_seq_length": 4},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "image_placeholder_token": "<image>",
        },
        config=lambda: transformers.QianfanOCRConfig(
            text_config=dict(TEXT, model_type="qwen3"),
            vision_config=dict(TOWER, image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH], drop_path_rate=0.0),
            image_token_id=3,
            image_seq_length=4,
        ),
    ),
    "granite4_vision": Family(
        ("<image>",),
        "Granite4VisionProcessor",
        (
            "llava_next",
            "LlavaNextImageProcessorPil",
            {**_CLIP_SIZE, "image_grid_pinpoints": _ANYRES["image_grid_pinpoints"]},
        ),
        options={"patch_size": PATCH, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"},
        config=lambda: transformers.Granite4VisionConfig(
            text_config=dict(LLAMA, model_type="granite4_vision_text"),
            vision_config=dict(SIGLIP, hidden_size=64),
            image_token_index=3,
            image_grid_pinpoints=_ANYRES["image_grid_pinpoints"],
            vision_feature_select_strategy="full",
            downsample_rate="1/2",
            deepstack_layer_map=[[-1, 0]],
            spatial_target_layers=[0, 0, 1, 1],
            qformer_config={
                "model_type": "blip_2_qformer",
                "num_hidden_layers": 1,
                "intermediate_size": 64,
                "cross_attention_frequency": 1,
                "use_qformer_text_input": False,
                "attention_probs_dropout_prob": 0.0,
                "hidden_dropout_prob": 0.0,
            },
        ),
    ),
    "vipllava": Family(
        ("<image>",),
        "LlavaProcessor",
        ("clip", "CLIPImageProcessorPil", {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}),
        options={"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        config=lambda: transformers.VipLlavaConfig(
            text_config=dict(LLAMA), vision_config=dict(CLIP), image_token_index=3, vision_feature_layer=[-1, -2]
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
                TEXT,
                model_type="cohere2",
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"],
                vocab_size=160,
                pad_token_id=0,
            ),
            vision_config=dict(SIGLIP),
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
        config=lambda: tiny_config("lfm2_vl"),
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
            text_config=dict(TEXT, model_type="qwen3", vocab_size=160),
            vision_config=dict(TOWER, model_type="pixtral", head_dim=12, image_size=256),
            image_token_id=3,
        ),
        needs=("torchvision",),
    ),
}
