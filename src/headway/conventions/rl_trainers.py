"""slime, miles and prime-rl: bills of the policy's update by their trainers of reinforcement learning.

Scoring is a third of it, where they print a rate of it; generation, a critic, vision and packs' limits are in none.
"""

from collections.abc import Mapping
from typing import Any

from headway.conventions import listed
from headway.conventions.architecture import Architecture
from headway.conventions.convention import Parts, Step
from headway.errors import NotExpressibleError

# Megatron-LM's defaults of latent attention, which its arguments hold for other models too: --kv-lora-rank,
# --qk-head-dim, --qk-pos-emb-head-dim, --v-head-dim (megatron/training/arguments.py, commit d98e8a64dd, 22 Aug 2026)
_KV_RANK, _NOPE, _ROPE, _VALUE = 32, 128, 64, 128


def slime(model: Architecture, step: Step) -> Parts:
    """Bill real tokens, half the square of each sample, three matrices an MLP, the head once; no routers.

    The output projection is billed as wide as the model, whatever its heads. Windows are billed in full.

    Source: THUDM/slime, slime/utils/flops_utils.py, calculate_fwd_flops, times 3 as in slime/observability/
    train_metric_utils.py (commit 624b824a8, 21 Aug 2026); before 55d3e4164 (29 May 2026) as `miles`.
    """
    if model.mla is None:
        queries, keys_values = _plain(model)
        return _bill(model, step, queries + keys_values, 2 * model.qk_dim)
    return _bill(model, step, _latent_projections(model), model.qk_dim + model.v_dim)


def miles(model: Architecture, step: Step) -> Parts:
    """Bill as `slime`, but keys and values of every model by the sizes of latent attention: Megatron's defaults.

    A model without latent attention so has keys and values of rank 32, and a pair costs 192 + 128 features.

    Source: radixark/miles, miles/utils/flops_utils.py, calculate_fwd_flops, with the arguments of its Megatron backend
    (commit 31f1ca961, 21 Aug 2026).
    """
    queries, _ = _plain(model)
    if model.mla is None:
        keys_values = _KV_RANK * (model.hidden + model.heads * (_NOPE + _VALUE)) + model.hidden * _ROPE
        return _bill(model, step, queries + keys_values, _NOPE + _ROPE + _VALUE)
    if model.mla.q_rank is None:  # heads of hidden / heads features, which Megatron sets unless a user does
        model_queries = model.hidden * model.heads * model.qk_dim
        short = model.hidden * model.heads * (model.hidden // model.heads)
        return _bill(model, step, _latent_projections(model) - model_queries + short, model.qk_dim + model.v_dim)
    return _bill(model, step, _latent_projections(model), model.qk_dim + model.v_dim)


def prime_rl(model: Architecture, step: Step) -> Parts:
    """Bill 6 N + 12 layers x hidden x row length for every position of every row, padding too.

    N is projections, three matrices an MLP, active experts with their router, and the head; the row length is that of
    the first step, which its counter keeps. Layers of linear attention
    are taken for layers that attend, heads of attention for hidden / heads features. It reads the configuration as an
    object of transformers: without key-value heads (GPT-2), a rank of queries (DeepSeek-V2-Lite) or a head size
    (Mixtral) it fails, and of Llama 4, whose number of experts has another name, it bills no MLP.

    Source: PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/perf.py, PerfCounter (commit 559b44772, 21 Aug 2026; the
    formula since 839dacce4, 6 Apr 2026, at the latest).
    """
    text = model.config.get("text_config") or model.config
    if missing := _unread_by_prime_rl(model, text):
        raise NotExpressibleError(
            f"prime-rl reads {missing} of the configuration, which {model.name}'s does not have: it fails"
        )
    positions, hidden = step.row_slots, model.hidden
    experts = 3 * model.top_k * model.expert_ffn + model.num_experts
    moe_layers = model.layers - int(text.get("first_k_dense_replace") or 0) if model.num_experts else 0
    mlps = 3 * hidden * model.ffn * (model.layers - moe_layers)
    if model.model_type == "llama4_text":
        moe_layers = mlps = 0
    return {
        "linear": 6 * positions * (model.layers * model.attention_weights + mlps),
        "experts": 6 * positions * moe_layers * hidden * experts,
        "head": listed.table(model, positions),
        "attention": 12 * positions * model.layers * model.heads * (model.hidden // model.heads) * step.seq_len,
    }


def _unread_by_prime_rl(model: Architecture, text: Mapping[str, Any]) -> str:
    """Name the first thing that prime-rl's function asks of a configuration in vain, "" for none."""
    if text.get("num_key_value_heads") is None:
        return "num_key_value_heads"
    if model.mla is not None and model.mla.q_rank is None:
        return "q_lora_rank"
    return "head_dim" if model.model_type == "mixtral" and text.get("head_dim") is None else ""


def _plain(model: Architecture) -> tuple[int, int]:
    """Matrix elements of one layer's projections of queries, and of keys and values."""
    return model.hidden * model.heads * model.qk_dim, 2 * model.hidden * model.kv_heads * model.qk_dim


def _latent_projections(model: Architecture) -> int:
    """Matrix elements of one layer's projections of latent attention, without the output's."""
    return model.attention_weights - model.heads * model.v_dim * model.hidden


def _bill(model: Architecture, step: Step, projections: int, features: int) -> Parts:
    """Bill a step by the matrix elements of one layer's projections, and by the features that a pair multiplies."""
    tokens, hidden = step.workload.tokens, model.hidden
    experts = model.top_k * model.expert_ffn + model.shared_ffn
    return {
        "linear": 6 * tokens * (model.layers * (projections + hidden**2) + model.dense_layers * 3 * hidden * model.ffn),
        "experts": 18 * tokens * model.moe_layers * hidden * experts,
        "head": listed.table(model, tokens),
        "attention": 3 * model.layers * model.heads * features * step.square_sum,
    }
