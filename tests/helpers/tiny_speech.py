"""Configurations of tiny models that hear: one for each way in which clips reach a text.

As in `tiny_models`, sizes differ from each other wherever they can.
"""

import copy
from typing import Any

import transformers
from transformers import PreTrainedConfig

from helpers.tiny_images import _LLAMA, _QFORMER
from helpers.tiny_models import _TEXT, PATCH

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
        {"audio_config": _WHISPER, "text_config": dict(_LLAMA, model_type="qwen2"), "audio_token_index": 3},
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
                _TEXT,
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
            "text_config": _LLAMA,
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
                _TEXT,
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


def tiny_speech_config(family: str) -> PreTrainedConfig:
    """Build a fresh configuration of a family that hears."""
    name, parts = _SPEECH_FAMILIES[family]
    return getattr(transformers, name)(**copy.deepcopy(parts))


def tiny_speech_model(family: str) -> transformers.PreTrainedModel:
    """Build a real model of a family that hears, with random weights."""
    name, _ = _SPEECH_FAMILIES[family]
    kind = getattr(transformers, name.replace("Config", "ForConditionalGeneration"))
    return kind(tiny_speech_config(family))
