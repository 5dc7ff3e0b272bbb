"""Configurations of tiny models, one per family, of text, images and sound, that tests of all rooms share.

The sizes differ from each other wherever they can, so that a test cannot pass by mistaking one for another.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedConfig

from headway.tracing import trace
from headway.tracing.build import model_class

if TYPE_CHECKING:
    from headway.count import CostModel

SPECIAL_TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
PATCH = 8  # pixels along a patch's side in every tiny vision tower

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
COUNTS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT: dict[str, Any] = dict(**SIZES, **COUNTS, head_dim=8, max_position_embeddings=512)
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
_SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_MLA: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
DEEPSEEK: dict[str, Any] = dict(
    **SIZES, **_MLA, **_EXPERTS, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, max_position_embeddings=512,
)  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": PATCH,
    "initializer_range": 0.2,
}
_QWEN3_VISION: dict[str, Any] = dict(**_VISION, deepstack_visual_indexes=[0, 1], num_position_embeddings=36)
# A window of 32 pixels is 2 x 2 merged patches, so larger images are cut into several windows.
QWEN2_5_VISION: dict[str, Any] = dict(**_VISION, window_size=32, fullatt_block_indexes=[1])

_TEXT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "initializer_range": 0.2,
    }),
    "llama": ("LlamaConfig", TEXT),
    "mistral_sliding": ("MistralConfig", dict(**TEXT, sliding_window=16)),
    "mixtral": ("MixtralConfig", dict(**TEXT, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": ("Qwen2Config", dict(**SIZES, **COUNTS, max_position_embeddings=512)),
    "qwen3": ("Qwen3Config", TEXT),
    "qwen3_tied": ("Qwen3Config", dict(**TEXT, tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(**TEXT, **_EXPERTS, num_experts=4)),
    "gemma2_softcap": ("Gemma2Config", dict(**TEXT, **_SLIDING, attn_logit_softcapping=2.0)),
    "gemma3_sliding": ("Gemma3TextConfig", dict(**TEXT, **_SLIDING)),
    "gpt_oss_sinks": ("GptOssConfig", dict(**TEXT, **_SLIDING, num_local_experts=4, num_experts_per_tok=2)),
    "deepseek_v2": ("DeepseekV2Config", dict(**DEEPSEEK, q_lora_rank=None)),
    "deepseek_v3": ("DeepseekV3Config", dict(**DEEPSEEK, q_lora_rank=16, n_group=2, topk_group=1)),
}  # fmt: skip
_MOE_TEXT: dict[str, Any] = dict(**TEXT, **_EXPERTS, num_experts=4)
_QWEN2_VISION: dict[str, Any] = {
    "depth": 3, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": PATCH,
    "initializer_range": 0.2,
}  # fmt: skip
_VISION_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VLConfig", dict(**SIZES, **COUNTS, rope_parameters=MROPE), QWEN2_5_VISION),
    "qwen3_vl": ("Qwen3VLConfig", dict(**TEXT, rope_parameters=dict(**MROPE, mrope_interleaved=True)), _QWEN3_VISION),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig", dict(**_MOE_TEXT, rope_parameters=dict(**MROPE, mrope_interleaved=True)), _QWEN3_VISION
    ),
}  # fmt: skip

_KINDS: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
HYBRID: dict[str, Any] = dict(**TEXT, **_KINDS)
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
_DELTA_MOE: dict[str, Any] = dict(
    **HYBRID, **DELTA, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=16
)  # fmt: skip
_KDA: dict[str, Any] = dict(
    **SIZES, **_MLA, **_KINDS, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, linear_head_dim=12,
    linear_num_heads=4, moe_intermediate_size=16, num_experts=4, num_experts_per_token=2, num_expert_group=2,
    topk_group=1, mlp_layer_types=["dense", "sparse"], model_max_length=512,
)  # fmt: skip
_MAMBA: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 6, "time_step_rank": 4}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
# families with recurrences: at least one layer that has one and, where the family mixes, one that has none
_RECURRENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", _DELTA_MOE),
    "qwen3_5": ("Qwen3_5TextConfig", dict(**HYBRID, **DELTA)),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _DELTA_MOE),
    "olmo_hybrid": ("OlmoHybridConfig", dict(
        **SIZES, **COUNTS, **_KINDS, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=12, max_position_embeddings=512,
    )),
    "kimi_linear": ("KimiLinearConfig", _KDA),
    "bailing_hybrid": ("BailingHybridConfig", dict(**_KDA, num_nextn_predict_layers=0)),
    "minimax": ("MiniMaxConfig", dict(**HYBRID, num_local_experts=4, num_experts_per_tok=2, block_size=16)),
    "mamba": ("MambaConfig", _MAMBA),
    "falcon_mamba": ("FalconMambaConfig", _MAMBA),
    "jamba": ("JambaConfig", dict(
        **SIZES, **COUNTS, num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=6, mamba_dt_rank=4,
        max_position_embeddings=512,
    )),
    "zamba": ("ZambaConfig", dict(
        **SIZES, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, attention_hidden_size=64,
        attention_head_dim=16, n_mamba_heads=2, mamba_d_state=6, mamba_dt_rank=4, attn_layer_period=3,
        attn_layer_offset=2, max_position_embeddings=512,
    )),
    "mamba2": ("Mamba2Config", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 2,
        "chunk_size": 16,
    }),
    "bamba": ("BambaConfig", dict(
        **SIZES, **COUNTS, **_MAMBA2, attn_layer_indices=[1], max_position_embeddings=512
    )),
    "falcon_h1": ("FalconH1Config", dict(**TEXT, **_MAMBA2, mamba_d_ssm=64)),
    "granitemoehybrid": ("GraniteMoeHybridConfig", dict(
        **SIZES, **COUNTS, **_KINDS, **_MAMBA2, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=16, max_position_embeddings=512,
    )),
    "nemotron_h": ("NemotronHConfig", dict(
        **SIZES, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, ssm_state_size=6, mamba_num_heads=4, mamba_head_dim=16, n_groups=2,
        chunk_size=16, n_routed_experts=4, moe_intermediate_size=16, moe_shared_expert_intermediate_size=16,
        max_position_embeddings=512,
    )),
    "zamba2": ("Zamba2Config", dict(
        **SIZES, num_hidden_layers=3, layers_block_type=["mamba", "mamba", "hybrid"], num_attention_heads=4,
        n_mamba_heads=4, mamba_headdim=16, mamba_ngroups=1, mamba_d_state=6, chunk_size=16, max_position_embeddings=512,
    )),
    "xlstm": ("xLSTMConfig", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "qk_dim_factor": 0.5, "v_dim_factor": 1.0,
        "chunk_size": 16,
    }),
    "rwkv": ("RwkvConfig", {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "context_length": 512
    }),
    "recurrent_gemma": ("RecurrentGemmaConfig", dict(
        **SIZES, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, lru_width=32,
        attention_window_size=512,
    )),
}  # fmt: skip

# families that only the laws of packing build
_MORE_VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLConfig", dict(**SIZES, **COUNTS, rope_parameters=MROPE), _QWEN2_VISION),
}
_CONVOLVING: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", dict(
        **SIZES, **COUNTS, layer_types=["conv", "full_attention"], max_position_embeddings=512
    )),
}  # fmt: skip
_RECURRENT_VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5_vl": (
        "Qwen3_5Config",
        dict(**HYBRID, **DELTA, rope_parameters=dict(**MROPE, mrope_interleaved=True)),
        dict(**_VISION, num_position_embeddings=36),
    ),
}

# transformers 5.17 has no Bailing
RECURRENT_FAMILIES = tuple(f for f, (name, _) in _RECURRENT_FAMILIES.items() if hasattr(transformers, name))
RECURRENT_FAMILIES += tuple(_RECURRENT_VISION)
TEXT_FAMILIES = tuple(_TEXT_FAMILIES)
VISION_FAMILIES = tuple(_VISION_FAMILIES)
FAMILIES = TEXT_FAMILIES + VISION_FAMILIES


TOWER: dict[str, Any] = {
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
LLAMA: dict[str, Any] = dict(model_type="llama", vocab_size=160, pad_token_id=0, **TEXT)
CLIP: dict[str, Any] = dict(model_type="clip_vision_model", image_size=4 * PATCH, **TOWER)
SIGLIP: dict[str, Any] = dict(model_type="siglip_vision_model", image_size=4 * PATCH, vision_use_head=False, **TOWER)
_IDEFICS_TOWER: dict[str, Any] = dict(TOWER, image_size=4 * PATCH)
# one family of each form in which images are taken: configuration, and its parts
_IMAGE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("LlavaConfig", dict(text_config=LLAMA, vision_config=CLIP, **_IMAGE_TOKEN)),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": dict(**TEXT, **_SLIDING, vocab_size=160),
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": 3,
            "boi_token_index": 4,
            "eoi_token_index": 5,
        },
    ),
    "paligemma": (
        "PaliGemmaConfig",
        {
            "text_config": dict(model_type="gemma", vocab_size=160, **TEXT),
            "vision_config": dict(SIGLIP, projection_dim=32),
            "projection_dim": 32,
            "image_token_index": 3,
        },
    ),
    "idefics": (
        "IdeficsConfig",
        dict(
            **TEXT,
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
            "text_config": LLAMA,
            "vision_config": _IDEFICS_TOWER,
            "scale_factor": 2,
            "image_token_id": 3,
            "pad_token_id": 0,
        },
    ),
    "llava_next": (
        "LlavaNextConfig",
        dict(
            text_config=LLAMA,
            vision_config=CLIP,
            image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
            **_IMAGE_TOKEN,
        ),
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": dict(LLAMA, model_type="mistral"),
            "spatial_merge_size": 2,
            "image_token_index": 3,
            "vision_config": dict(TOWER, model_type="pixtral", head_dim=12, image_size=256),
        },
    ),
    "lfm2_vl": (
        "Lfm2VlConfig",
        {
            "text_config": dict(
                model_type="lfm2", vocab_size=160, **SIZES, **COUNTS, layer_types=["conv", "full_attention"]
            ),
            "vision_config": dict(TOWER, model_type="siglip2_vision_model", num_patches=16, vision_use_head=False),
            "image_token_id": 3,
            "projector_hidden_size": 44,
            "downsample_factor": 2,
        },
    ),
    "blip2": (
        "Blip2Config",
        dict(
            vision_config=dict(TOWER, image_size=32),
            qformer_config=_QFORMER,
            text_config=_OPT,
            num_query_tokens=5,
            **_IMAGE_TOKEN,
        ),
    ),
    "instructblip": (
        "InstructBlipConfig",
        dict(
            vision_config=dict(TOWER, image_size=32),
            qformer_config=_QFORMER,
            text_config=_OPT,
            num_query_tokens=5,
            **_IMAGE_TOKEN,
        ),
    ),
    "blip": (
        "BlipConfig",
        {
            "vision_config": dict(TOWER, image_size=32),
            "text_config": dict(
                COUNTS, **SIZES, vocab_size=160, encoder_hidden_size=24, bos_token_id=1, sep_token_id=2
            ),
        },
    ),
    "git": (
        "GitConfig",
        {
            "vision_config": dict(TOWER, image_size=32),
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
            text_config=dict(**TEXT, vocab_size=160, cross_attention_layers=[1], pad_token_id=0),
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
                **TEXT,
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
            "text_config": LLAMA,
            "image_token_id": 3,
            "downsample_ratio": 0.5,
            "vision_config": dict(TOWER, image_size=[32, 32], patch_size=[PATCH, PATCH]),
        },
    ),
    "gemma4": (
        "Gemma4Config",
        {
            "text_config": dict(
                **TEXT, **_SLIDING, vocab_size=160, hidden_size_per_layer_input=0, num_kv_shared_layers=0
            ),
            "vision_config": dict(TOWER, num_key_value_heads=2, head_dim=12, pooling_kernel_size=3),
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
            "text_config": dict(LLAMA, model_type="persimmon"),
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
                TOWER,
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
            "encoder": dict(TOWER, model_type="vit", image_size=32),
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
            "text_config": dict(**TEXT, vocab_size=160, pad_token_id=0),
            "vision_config": dict(
                TOWER, image_size=8 * PATCH, out_hidden_size=32, scale_factor=4, deepstack_visual_indexes=[0]
            ),
            "density_router_hidden_size": 20,
            "pad_token_id": 0,
            "image_token_id": 3,
        },
    ),
    "minicpm_ocr": (
        "MiniCPMOcrConfig",
        {
            "text_config": LLAMA,
            "vision_config": dict(TOWER, image_size=8 * PATCH),
            "insert_layer_id": 0,
            "image_token_id": 3,
            "video_token_id": 4,
        },
    ),
}
IMAGE_FAMILIES = tuple(f for f, (name, _) in _IMAGE_FAMILIES.items() if hasattr(transformers, name))


_WHISPER: dict[str, Any] = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 16,
    "max_source_positions": 50,
}
_CONFORMER: dict[str, Any] = {
    "input_dim": 16,
    "num_layers": 2,
    "hidden_dim": 24,
    "feedforward_mult": 2,
    "num_heads": 2,
    "dim_head": 12,
    "output_dim": 20,
    "context_size": 10,
    "max_pos_emb": 16,
    "conv_kernel_size": 5,
    "dropout": 0.0,
}
_SPEECH_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # clips of one length
    "qwen2_audio": (
        "Qwen2AudioConfig",
        {"audio_config": _WHISPER, "text_config": dict(LLAMA, model_type="qwen2"), "audio_token_index": 3},
    ),
    # pieces of 20 frames, each read afresh
    "qwen2_5_omni_thinker": (
        "Qwen2_5OmniThinkerConfig",
        {
            "audio_config": dict(_WHISPER, n_window=10, output_dim=32),
            "vision_config": {
                "depth": 2,
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_heads": 2,
                "patch_size": PATCH,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
                "window_size": 4 * PATCH,
            },
            "text_config": dict(
                TEXT,
                vocab_size=160,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            ),
            "audio_token_index": 3,
            "image_token_index": 4,
            "video_token_index": 5,
        },
    ),
    # attention in blocks of 10, then 3 learnt queries over each 6 positions
    "granite_speech": (
        "GraniteSpeechConfig",
        {
            "text_config": LLAMA,
            "encoder_config": _CONFORMER,
            "projector_config": dict(_QFORMER, model_type="blip_2_qformer"),
            "window_size": 6,
            "downsample_rate": 2,
            "audio_token_index": 3,
            "has_lora_adapter": False,
        },
    ),
    # one feature added to each token, by an encoder that reads 8 frames for it and looks back 100 of its positions
    "voxtral_realtime": (
        "VoxtralRealtimeConfig",
        {
            "audio_config": {
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 12,
                "num_mel_bins": 16,
                "sliding_window": 100,
            },
            "text_config": dict(
                TEXT,
                vocab_size=160,
                head_dim=8,
                pad_token_id=0,
                model_type="voxtral_realtime_text",
                sliding_window=4096,
            ),
        },
    ),
    # clips told apart by the samples of their waveforms, after convolutions over time and frequency; images too
    "dots3_note": (
        "Dots3NoteConfig",
        {
            "audio_config": {
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "feature_size": 16,
                "downsample_hidden_size": 12,
                "adapter_input_size": 24,
                "adapter_out_dim": 32,
            },
            "vision_config": {
                "hidden_size": 24,
                "intermediate_size": 44,
                "moe_intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": PATCH,
                "adapter_in_dim": 24,
                "adapter_out_dim": 32,
                "pyramid_num_routed": [-1, 4],
            },
            "text_config": {
                "vocab_size": 160,
                "hidden_size": 32,
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
                "shared_experts_intermediate_size": 20,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "kv_lora_rank": 12,
                "q_lora_rank": 14,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 10,
                "v_head_dim": 6,
                "head_dim": 8,
                "index_topk": 64,
                "index_head_dim": 16,
                "index_n_heads": 2,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "layer_types": ["indexed_attention", "indexed_attention"],
            },
            "image_token_id": 3,
            "video_token_id": 4,
            "audio_token_id": 5,
        },
    ),
}
SPEECH_FAMILIES = tuple(f for f, (name, _) in _SPEECH_FAMILIES.items() if hasattr(transformers, name))


def tiny_config(family: str, vocabulary: int = 160, special_tokens: dict[str, int] | None = None) -> PreTrainedConfig:
    """Build a fresh configuration of a family.

    Args:
        family: a row of the tables above.
        vocabulary: rows of its embedding, of families without special tokens of their own.
        special_tokens: ids of those that stand for pictures and films, of Qwen's vision families.
    """
    if family in (rows := _IMAGE_FAMILIES | _SPEECH_FAMILIES):
        name, parts = rows[family]
        return getattr(transformers, name)(**copy.deepcopy(parts))
    if family in (rows := _TEXT_FAMILIES | _RECURRENT_FAMILIES | _CONVOLVING):
        name, options = rows[family]
        return getattr(transformers, name)(
            vocab_size=vocabulary, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options
        )
    name, text, vision = (_VISION_FAMILIES | _RECURRENT_VISION | _MORE_VISION)[family]
    tokens = SPECIAL_TOKENS if special_tokens is None else special_tokens
    return getattr(transformers, name)(
        text_config=dict(text, vocab_size=vocabulary), vision_config=dict(vision), **tokens
    )


def tiny_model(family: str, *, seed: int = 0, **options: Any) -> transformers.PreTrainedModel:
    """Build a family's model with random weights, the same for one seed; options as of transformers' classes."""
    torch.manual_seed(seed)
    config = tiny_config(family)
    return model_class(config)._from_config(config, **options)


@functools.cache
def tiny_ledger(family: str) -> CostModel:
    """Trace a family once for all tests of a process."""
    return trace(tiny_config(family))


def vision_tokens(tokenizer: Any) -> dict[str, int]:
    """Look the special tokens of Qwen's vision families up, by the names that their configurations have for them."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}


@functools.cache
def checkpointing_name() -> str:
    """Say what the installed transformers calls activation checkpointing: it changed after 5.17, the oldest one."""
    name = "activation_checkpointing"
    return name if hasattr(transformers.PreTrainedModel, f"{name}_enable") else "gradient_checkpointing"


def enable_checkpointing(
    model: transformers.PreTrainedModel, *, reentrant: bool | None = False
) -> transformers.PreTrainedModel:
    """Switch a model's checkpointing on; with None, of the kind that transformers chooses."""
    getattr(model, f"{checkpointing_name()}_enable")(*(() if reentrant is None else ({"use_reentrant": reentrant},)))
    if reentrant is False:  # transformers asks for the embeddings' gradient, which only reentrant checkpoints need
        for part in model.modules():
            if hasattr(part, "disable_input_require_grads"):
                part.disable_input_require_grads()
    return model
