"""Pairs of a ledger against the probabilities that are not zero where the real eager model normalises its scores.

A hidden pair's probability is exactly zero in float32, an allowed one's is not: counting them needs none of the code
that reads masks, and no formula for windows, chunks or top-k selections.
"""

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from headway.count import Workload, drivers
from headway.tracing import trace
from headway.tracing.build import configs, model_class
from helpers.cases import some

TOKENS = 67
_TEXT = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_INDEXER = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 8}

# name -> (configuration class, its options, drivers of its attention in the order of layers)
MODELS = {
    "windows and a mask made with the model": (
        "GPTNeoConfig",
        {"vocab_size": 50, "hidden_size": 12, "num_layers": 2, "num_heads": 3, "window_size": 9,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 512},
        ["pairs:causal", "pairs:sliding:9"],
    ),
    "floats added, made with the model": (
        "OpenAIGPTConfig", {"vocab_size": 50, "n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": 512},
        ["pairs:causal"],
    ),
    "distances added": (
        "MptConfig", {"vocab_size": 50, "d_model": 16, "n_layers": 1, "n_heads": 4, "max_seq_len": 512},
        ["pairs:causal"],
    ),
    "no mask at all": (
        "XLNetConfig", {"vocab_size": 50, "d_model": 12, "n_layer": 1, "n_head": 3, "d_inner": 20}, ["pairs:full"],
    ),
    "a learnt bias and a top-k of it": (
        "DogeConfig", dict(_TEXT, keep_window_size=16, num_hidden_layers=1), ["pairs:topk:16"],
    ),
    "an indexer's top-k": (
        "DeepseekV32Config",
        dict(_TEXT, **_LATENT, **_EXPERTS, **_INDEXER, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1,
             n_group=2, topk_group=1, first_k_dense_replace=1),
        ["pairs:topk:16"] * 2,
    ),
    "a window beside compressed keys, all or picked": (
        "DeepseekV4Config",
        dict(_TEXT, **_EXPERTS, **_INDEXER | {"index_topk": 5}, num_hidden_layers=3, num_key_value_heads=1,
             n_routed_experts=4, q_lora_rank=16, o_groups=2, o_lora_rank=8, sliding_window=16,
             layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
             compress_rates={"heavily_compressed_attention": 8, "compressed_sparse_attention": 4}),
        ["pairs:sliding:16", "pairs:sliding:16+pairs:compressed:8", "pairs:sliding:16+pairs:compressed:topk:4:5"],
    ),
    "an indexer's blocks, the query's own among them": (
        "MiniMaxM3VLTextConfig",
        dict(_TEXT, num_local_experts=4, num_experts_per_tok=2, index_block_size=8, index_topk_blocks=3,
             index_n_heads=2, index_head_dim=8, dense_intermediate_size=40, shared_intermediate_size=16,
             layer_types=["minimax_m3_sparse", "full_attention"],
             rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        ["pairs:blocks:8:3", "pairs:causal"],
    ),
    "an indexer's pools, and the tokens that fill none yet": (
        "Glm5NextConfig",
        {"text_config": dict(
            _TEXT, **_EXPERTS, **_INDEXER, index_kpool=4, num_key_value_heads=4, n_routed_experts=4, q_lora_rank=16,
            kv_lora_rank=8, qk_nope_head_dim=8, v_head_dim=12, linear_head_dim=8, linear_num_heads=4, hc_mult=2,
            layer_types=["linear_attention", "indexed_attention"], indexer_types=["full", "full"],
            mlp_layer_types=["dense", "sparse"]),
         "vision_config": {"depth": 1, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 8,
                           "out_hidden_size": 32, "projection_intermediate_size": 20},
         "image_token_id": 3, "video_token_id": 4},
        ["pairs:pools:4:4"],
    ),
    "an indexer that loops over queries, and picks whole blocks": (
        "Qwen4ExpTextConfig",
        {k: v for k, v in dict(
            _TEXT, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=16, hc_lowrank=4, hc_count=2,
            linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
            layer_types=["linear_attention", "indexed_attention"], indexer_n_heads=2, indexer_kv_heads=1,
            indexer_head_dim=8, indexer_budget=16, indexer_compress_ratio=4,
        ).items() if k != "intermediate_size"},
        ["pairs:pools:4:4"],
    ),
    "chunks": (
        "Llama4TextConfig",
        dict(_TEXT, attention_chunk_size=16, num_hidden_layers=4, intermediate_size_mlp=40, num_local_experts=4),
        ["pairs:chunked:16"] * 3 + ["pairs:causal"],
    ),
    "windows by half their size": (
        "ModernBertDecoderConfig", dict(_TEXT, local_attention=32, global_attn_every_n_layers=2),
        ["pairs:causal", "pairs:sliding:16"],
    ),
    "sinks": (
        "GptOssConfig",
        dict(_TEXT, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
             layer_types=["sliding_attention", "full_attention"]),
        ["pairs:sliding:16", "pairs:causal"],
    ),
}  # fmt: skip


class Probabilities(TorchDispatchMode):
    """Collects (shape, number of values that are not zero) of every softmax over pairs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket is torch.ops.aten._softmax and out.dim() == 4 and out.shape[2] == TOKENS:
            self.seen.append((out.shape, int(torch.count_nonzero(out))))
        return out


OFTEN = {"no mask at all", "a learnt bias and a top-k of it", "chunks", "sinks"}
OFTEN |= {"windows and a mask made with the model", "an indexer's blocks, the query's own among them"}


@pytest.mark.parametrize("name", some(MODELS, OFTEN.__contains__))
def test_attention_is_billed_for_the_pairs_whose_probability_is_not_zero(name):
    class_name, options, expected = MODELS[name]
    if "indexed_attention" in str(options) and "indexed_attention" not in ALLOWED_LAYER_TYPES:
        pytest.skip("transformers 5.17 refuses the layers of its own GLM-5-Next")
    torch.manual_seed(0)
    config = getattr(transformers, class_name)(**options)
    model = model_class(config)._from_config(config, dtype=torch.float32)
    cost = trace(config)
    assert cost.unknown == ()
    spoken = [row for row in cost.rows if drivers.tower(row.driver) == "language"]
    attention = [row for row in spoken if row.op == "attention" and "indexer" not in row.module]
    named = {}
    for row in attention:
        named.setdefault(row.module, dict.fromkeys([]))[row.driver] = None
    assert ["+".join(found) for found in named.values()] == expected

    for part in configs(model):
        part._attn_implementation = part._experts_implementation = "eager"
    with torch.no_grad(), Probabilities() as probe:
        model.eval()(input_ids=torch.randint(3, 50, (1, TOKENS)), use_cache=False)
    workload = Workload([TOKENS])
    for ((_, heads, queries, keys), nonzero), found in zip(probe.seen, named.values(), strict=True):
        sinks = heads * queries if class_name in ("GptOssConfig", "DeepseekV4Config") else 0  # one column more
        assert keys >= TOKENS + bool(sinks)
        assert nonzero - sinks == heads * sum(drivers.parse_driver(driver)(workload) for driver in found)


_SCORED = {
    # 2 heads of 8: a product per pair and head, then their weighted sum
    "an indexer's top-k": ("model.layers.0.self_attn.indexer", [("pairs:causal", 2 * 2 * 8), ("pairs:causal", 2 * 2)]),
    # 2 heads of 8 over the means of whole blocks of 4, then their sum, which is no product
    "an indexer that loops over queries, and picks whole blocks": (
        "model.layers.1.self_attn.indexer",
        [("pairs:compressed:4", 2 * 2 * 8)],
    ),
}


@pytest.mark.parametrize("name", _SCORED)
def test_an_indexer_scores_the_keys_that_each_query_may_see(name):
    class_name, options, _ = MODELS[name]
    if "indexed_attention" in str(options) and "indexed_attention" not in ALLOWED_LAYER_TYPES:
        pytest.skip("transformers 5.17 refuses these layers")
    module, scored = _SCORED[name]
    cost = trace(getattr(transformers, class_name)(**options))
    rows = [row for row in cost.rows if row.module == module]
    assert [(row.driver, row.forward) for row in rows] == scored
    assert not any(row.gradients for row in rows)  # what picks gets no gradient
    assert {row.component for row in rows} == {"language.attention"}
