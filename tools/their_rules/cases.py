"""Models and steps that the rules are compared on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from headway.conventions import Architecture, Step, architecture
from headway.count import Workload, load_cost_model
from headway.count.models import presets, shipped_models

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headway.count.cost_model import CostModel

# Published configurations that no ledger ships for, cut to a few layers so that they are traced at once; what a rule
# reads (widths, heads, windows, experts, prediction layers, towers) is as published.
EXTRA: Mapping[str, dict[str, Any]] = {
    "apertus-8b": {
        "model_type": "apertus", "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 21504, "vocab_size": 131072, "hidden_act": "xielu",
        "tie_word_embeddings": False,
    },
    "command-r7b": {
        "model_type": "cohere2", "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 256000,
        "sliding_window": 4096, "hidden_act": "silu",
    },
    "exaone-4-32b": {
        "model_type": "exaone4", "hidden_size": 5120, "num_hidden_layers": 4, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 27392, "vocab_size": 102400,
        "sliding_window": 4096, "sliding_window_pattern": 4, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
        "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1, "vocab_size": 151552, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 20,
        "num_key_value_heads": 20, "intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "vocab_size": 154880, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "gpt-oss-window-96": {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 5, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 96, "vocab_size": 201088, "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "llama-4-scout": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 4, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "attention_chunk_size": 3000, "vocab_size": 202048, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "minimax-m2": {
        "model_type": "minimax_m2", "hidden_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 48,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536, "num_local_experts": 256,
        "num_experts_per_tok": 8, "vocab_size": 200064, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "minitron-4b": {
        "model_type": "nemotron", "hidden_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9216, "vocab_size": 256000,
        "hidden_act": "relu2", "tie_word_embeddings": False,
    },
    "mistral-nemo": {  # heads that do not fill the width
        "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 131072,
        "sliding_window": None, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "moonlight-16b": {
        "model_type": "deepseek_v3", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_group": 1, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840, "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "olmo-3-7b": {
        "model_type": "olmo3", "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 100278, "sliding_window": 4096,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "opt-1.3b": {
        "model_type": "opt", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "ffn_dim": 8192,
        "vocab_size": 50272, "word_embed_proj_dim": 2048,
    },
    "phi-3-mini": {
        "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064, "sliding_window": 2047,
        "hidden_act": "silu", "pad_token_id": 32000, "tie_word_embeddings": False,
    },
    "pythia-6.9b": {
        "model_type": "gpt_neox", "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32,
        "intermediate_size": 16384, "vocab_size": 50432, "hidden_act": "gelu", "tie_word_embeddings": False,
    },
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60,
        "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1,
        "use_sliding_window": False, "sliding_window": 32768, "vocab_size": 151936, "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "qwen2-vl-7b": {
        "model_type": "qwen2_vl", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen2_vl_text", "hidden_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 28,
            "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "model_type": "qwen2_vl", "depth": 4, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16,
            "mlp_ratio": 4, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
            "hidden_act": "quick_gelu",
        },
    },
    "qwen2.5-windowed": {  # Qwen2 with the windows that its configuration allows
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "use_sliding_window": True,
        "sliding_window": 2048, "max_window_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "qwen3-next-80b": {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, "moe_intermediate_size": 512,
        "num_experts": 512, "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "vocab_size": 151936, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "qwen3.5-vl-9b": {
        "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12288, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1, "vocab_size": 248320, "hidden_act": "silu",
        },
        "vision_config": {
            "depth": 4, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "patch_size": 16,
            "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "out_hidden_size": 4096,
            "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh",
        },
    },
    "qwen3.5-vl-35b-a3b": {
        "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512, "num_experts": 256,
            "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "vocab_size": 248320, "hidden_act": "silu",
        },
        "vision_config": {
            "depth": 4, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "patch_size": 16,
            "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "out_hidden_size": 2048,
            "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh",
        },
    },
    "starcoder2-3b": {
        "model_type": "starcoder2", "hidden_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 24,
        "num_key_value_heads": 2, "intermediate_size": 12288, "vocab_size": 49152, "sliding_window": 4096,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "seed-oss-36b": {
        "model_type": "seed_oss", "hidden_size": 5120, "num_hidden_layers": 4, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 27648, "vocab_size": 155136,
        "hidden_act": "silu", "tie_word_embeddings": False,
    },
}  # fmt: skip
WITHOUT_GATE = frozenset(
    {"apertus", "gpt2", "gpt_neox", "nemotron", "opt", "starcoder2"}
)  # model types whose MLP has two matrices

TEXT: Mapping[str, Step] = {
    "row": Step(Workload([4096]), 4096),
    "rows": Step(Workload([8192] * 3), 8192),
    "pack": Step(Workload([6000, 1500, 692]), 8192),
    "padded packs": Step(Workload([3000, 500], slots=8192), 4096),
}
# answers of reinforcement learning: what a policy's update computes, prompts and answers together
ANSWERS: Mapping[str, Step] = {
    "a group": Step(Workload([312, 540, 768, 233, 1201, 899, 415, 660]), 8192),
    "a long answer": Step(Workload([*[450] * 15, 16640]), 16640),
    "short answers": Step(Workload([1, 2, 3, 5, 8, 13]), 1024),
    "equal answers": Step(Workload([1024] * 64), 1024),
    "many answers": Step(Workload([64 + (137 * i * i + 61 * i) % 2048 for i in range(256)]), 4096),
    "padded answers": Step(Workload([700, 120, 1500], slots=3 * 2048), 2048),
}
PICTURES: Mapping[str, Step] = {
    "image": Step(Workload([3200], [(1, 64, 64)]), 3200),
    "images in a pack": Step(Workload([1000, 1600, 600], [(1, 36, 52), (1, 64, 64)]), 3200),
    "video": Step(Workload([3200], videos=[(8, 32, 48)]), 3200),
}


@dataclass(frozen=True)
class Case:
    """One model and one step."""

    model: str  # a shipped name, or one of `EXTRA`
    step_name: str  # of `TEXT`, `ANSWERS` or `PICTURES`

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration, as of a config.json."""
        return dict(EXTRA.get(self.model) or presets()[self.model])

    @property
    def step(self) -> Step:
        """The step."""
        return {**TEXT, **ANSWERS, **PICTURES}[self.step_name]

    @property
    def numbers(self) -> Architecture:
        """What Headway reads off the configuration and the ledger."""
        return architecture(self.config, self.model, ledger(self.model))


@cache
def ledger(model: str) -> CostModel:
    """The cost model of a case: shipped, or traced."""
    if model not in EXTRA:
        return load_cost_model(model)
    from headway.tracing import trace

    return trace(hf_config(model))


@cache
def hf_config(model: str) -> Any:
    """The configuration as an object of transformers, as the tools are given it."""
    import transformers

    config = dict(EXTRA.get(model) or presets()[model])
    return transformers.AutoConfig.for_model(config.pop("model_type"), **config)


def cases(*, answers: bool = False) -> list[Case]:
    """Every model on every step of text, on those of reinforcement learning if asked, and with a tower on pictures."""
    models = [*(name for name in shipped_models() if name != "bagel-7b-mot"), *EXTRA]
    rows = [Case(model, step) for model in models for step in (*TEXT, *(ANSWERS if answers else ()))]
    return rows + [Case(model, step) for model in models if "-vl-" in model for step in PICTURES]
