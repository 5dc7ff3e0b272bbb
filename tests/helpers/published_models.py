"""Configurations of models that do not ship, with the sizes that their makers' repositories give."""

LLAMA4_SCOUT = {
    "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "vocab_size": 202048, "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    "attention_chunk_size": 8192, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
GEMMA2_9B = {
    "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
    "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
MINITRON_4B = {
    "model_type": "nemotron", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 24,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9216, "vocab_size": 256000,
    "hidden_act": "relu2", "tie_word_embeddings": False,
}  # fmt: skip
QWEN2_VL_7B = {
    "model_type": "qwen2_vl", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "hidden_act": "silu",
    "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28, "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "quick_gelu",
    },
}  # fmt: skip
LLAMA_3_1_405B = {
    "model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "intermediate_size": 53248, "vocab_size": 128256, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
OLMOE_1B_7B = {
    "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 1024, "vocab_size": 50304, "num_experts": 64,
    "num_experts_per_tok": 8, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
PHI_3_5_MOE = {
    "model_type": "phimoe", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 6400, "vocab_size": 32064, "num_local_experts": 16,
    "num_experts_per_tok": 2, "hidden_act": "silu", "attention_bias": True, "lm_head_bias": True,
    "tie_word_embeddings": False,
}  # fmt: skip
KIMI_K2 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
    "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "vocab_size": 163840, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip

# those of docs/published-figures.md
UNSHIPPED = {
    "gemma-2-9b": GEMMA2_9B,
    "kimi-k2": KIMI_K2,
    "llama-3.1-405b": LLAMA_3_1_405B,
    "llama-4-scout (text)": LLAMA4_SCOUT,
    "olmoe-1b-7b": OLMOE_1B_7B,
    "phi-3.5-moe": PHI_3_5_MOE,
}
