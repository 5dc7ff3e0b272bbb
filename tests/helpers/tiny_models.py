"""Configurations of tiny models, one per family, that the tests of counting and of training share.

The sizes differ from each other wherever they can, so that a test cannot pass by mistaking one for another.
"""

import functools
from typing import Any

import transformers
from transformers import PreTrainedConfig

from headway.count import CostModel
from headway.tracing import trace

SPECIAL_TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
PATCH = 8  # pixels along a patch's side in every tiny vision tower

_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
_COUNTS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_TEXT: dict[str, Any] = dict(**_SIZES, **_COUNTS, head_dim=8, max_position_embeddings=512)
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
_SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_MLA: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
_DEEPSEEK: dict[str, Any] = dict(
    **_SIZES, **_MLA, **_EXPERTS, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
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
_QWEN2_5_VISION: dict[str, Any] = dict(**_VISION, window_size=32, fullatt_block_indexes=[1])

_TEXT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "initializer_range": 0.2,
    }),
    "llama": ("LlamaConfig", _TEXT),
    "mistral_sliding": ("MistralConfig", dict(**_TEXT, sliding_window=16)),
    "mixtral": ("MixtralConfig", dict(**_TEXT, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": ("Qwen2Config", dict(**_SIZES, **_COUNTS, max_position_embeddings=512)),
    "qwen3": ("Qwen3Config", _TEXT),
    "qwen3_tied": ("Qwen3Config", dict(**_TEXT, tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(**_TEXT, **_EXPERTS, num_experts=4)),
    "gemma2_softcap": ("Gemma2Config", dict(**_TEXT, **_SLIDING, attn_logit_softcapping=2.0)),
    "gemma3_sliding": ("Gemma3TextConfig", dict(**_TEXT, **_SLIDING)),
    "gpt_oss_sinks": ("GptOssConfig", dict(**_TEXT, **_SLIDING, num_local_experts=4, num_experts_per_tok=2)),
    "deepseek_v2": ("DeepseekV2Config", dict(**_DEEPSEEK, q_lora_rank=None)),
    "deepseek_v3": ("DeepseekV3Config", dict(**_DEEPSEEK, q_lora_rank=16, n_group=2, topk_group=1)),
}  # fmt: skip
_MOE_TEXT: dict[str, Any] = dict(**_TEXT, **_EXPERTS, num_experts=4)
_QWEN2_VISION: dict[str, Any] = {
    "depth": 3, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": PATCH,
    "initializer_range": 0.2,
}  # fmt: skip
_VISION_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VLConfig", dict(**_SIZES, **_COUNTS, rope_parameters=_MROPE), _QWEN2_5_VISION),
    "qwen3_vl": ("Qwen3VLConfig", dict(**_TEXT, rope_parameters=dict(**_MROPE, mrope_interleaved=True)), _QWEN3_VISION),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig", dict(**_MOE_TEXT, rope_parameters=dict(**_MROPE, mrope_interleaved=True)), _QWEN3_VISION
    ),
}  # fmt: skip

_KINDS: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_HYBRID: dict[str, Any] = dict(**_TEXT, **_KINDS)
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
_DELTA_MOE: dict[str, Any] = dict(
    **_HYBRID, **_DELTA, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=16
)  # fmt: skip
_KDA: dict[str, Any] = dict(
    **_SIZES, **_MLA, **_KINDS, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, linear_head_dim=12,
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
    "qwen3_5": ("Qwen3_5TextConfig", dict(**_HYBRID, **_DELTA)),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _DELTA_MOE),
    "olmo_hybrid": ("OlmoHybridConfig", dict(
        **_SIZES, **_COUNTS, **_KINDS, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=12, max_position_embeddings=512,
    )),
    "kimi_linear": ("KimiLinearConfig", _KDA),
    "bailing_hybrid": ("BailingHybridConfig", dict(**_KDA, num_nextn_predict_layers=0)),
    "minimax": ("MiniMaxConfig", dict(**_HYBRID, num_local_experts=4, num_experts_per_tok=2, block_size=16)),
    "mamba": ("MambaConfig", _MAMBA),
    "falcon_mamba": ("FalconMambaConfig", _MAMBA),
    "jamba": ("JambaConfig", dict(
        **_SIZES, **_COUNTS, num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=6, mamba_dt_rank=4,
        max_position_embeddings=512,
    )),
    "zamba": ("ZambaConfig", dict(
        **_SIZES, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, attention_hidden_size=64,
        attention_head_dim=16, n_mamba_heads=2, mamba_d_state=6, mamba_dt_rank=4, attn_layer_period=3,
        attn_layer_offset=2, max_position_embeddings=512,
    )),
    "mamba2": ("Mamba2Config", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 2,
        "chunk_size": 16,
    }),
    "bamba": ("BambaConfig", dict(
        **_SIZES, **_COUNTS, **_MAMBA2, attn_layer_indices=[1], max_position_embeddings=512
    )),
    "falcon_h1": ("FalconH1Config", dict(**_TEXT, **_MAMBA2, mamba_d_ssm=64)),
    "granitemoehybrid": ("GraniteMoeHybridConfig", dict(
        **_SIZES, **_COUNTS, **_KINDS, **_MAMBA2, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=16, max_position_embeddings=512,
    )),
    "nemotron_h": ("NemotronHConfig", dict(
        **_SIZES, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, ssm_state_size=6, mamba_num_heads=4, mamba_head_dim=16, n_groups=2,
        chunk_size=16, n_routed_experts=4, moe_intermediate_size=16, moe_shared_expert_intermediate_size=16,
        max_position_embeddings=512,
    )),
    "zamba2": ("Zamba2Config", dict(
        **_SIZES, num_hidden_layers=3, layers_block_type=["mamba", "mamba", "hybrid"], num_attention_heads=4,
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
        **_SIZES, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, lru_width=32,
        attention_window_size=512,
    )),
}  # fmt: skip

# families that only the laws of packing build
_MORE_VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLConfig", dict(**_SIZES, **_COUNTS, rope_parameters=_MROPE), _QWEN2_VISION),
}
_CONVOLVING: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", dict(
        **_SIZES, **_COUNTS, layer_types=["conv", "full_attention"], max_position_embeddings=512
    )),
}  # fmt: skip
_RECURRENT_VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5_vl": (
        "Qwen3_5Config",
        dict(**_HYBRID, **_DELTA, rope_parameters=dict(**_MROPE, mrope_interleaved=True)),
        dict(**_VISION, num_position_embeddings=36),
    ),
}

# transformers 5.17 has no Bailing
RECURRENT_FAMILIES = tuple(f for f, (name, _) in _RECURRENT_FAMILIES.items() if hasattr(transformers, name))
RECURRENT_FAMILIES += tuple(_RECURRENT_VISION)
TEXT_FAMILIES = tuple(_TEXT_FAMILIES)
VISION_FAMILIES = tuple(_VISION_FAMILIES)
FAMILIES = TEXT_FAMILIES + VISION_FAMILIES


def tiny_config(family: str, vocabulary: int = 160, special_tokens: dict[str, int] | None = None) -> PreTrainedConfig:
    """Build a fresh configuration of a family."""
    text_alone = _TEXT_FAMILIES | _RECURRENT_FAMILIES | _CONVOLVING
    if family in text_alone:
        name, options = text_alone[family]
        return getattr(transformers, name)(
            vocab_size=vocabulary, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options
        )
    name, text, vision = (_VISION_FAMILIES | _RECURRENT_VISION | _MORE_VISION)[family]
    tokens = SPECIAL_TOKENS if special_tokens is None else special_tokens
    return getattr(transformers, name)(
        text_config=dict(text, vocab_size=vocabulary), vision_config=dict(vision), **tokens
    )


@functools.cache
def tiny_ledger(family: str) -> CostModel:
    """Trace a family once for all tests of a process."""
    return trace(tiny_config(family))
