"""Megatron-Bridge (and Megatron-LM): three times the forward's products, attention halved for the causal mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.count.conventions.architecture import Architecture
    from headway.count.conventions.convention import Number, Parts, Step

_VOCAB_MULTIPLE = 128  # make_vocab_size_divisible_by's default, at a tensor-parallel size of 1


def megatron_bridge(model: Architecture, step: Step) -> Parts:
    """Bill every slot of the tensors, and half the sum of squared segment lengths.

    Billed: attention and MLP matrices, active and shared experts, the head over the vocabulary padded to a multiple of
    128, multi-token-prediction layers with a head each, the vision tower. Windowed layers see min(t, window) keys over
    the *pack*. Not billed: the embedding, routers, patch embedding, DeepStack mergers, the diagonal.

    Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/utils/flop_utils.py (commit 0494433, 2026), with
    the variable-length fix of pull request 3839, May 2026.
    """
    return _price(model, step, step.workload.slots, step.square_sum)


def megatron_bridge_2025(model: Architecture, step: Step) -> Parts:
    """Bill rows x the configured sequence length, and half its square per row, whatever the rows hold.

    Otherwise as `megatron-bridge`. Megatron-LM's own formula is this one.

    Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/utils/flop_utils.py (commit a5b3b5a, 2025).
    """
    return _price(model, step, step.row_slots, step.num_rows * step.seq_len**2)


def _price(model: Architecture, step: Step, tokens: int, square_sum: int) -> Parts:
    hidden, mtp = model.hidden, model.mtp_layers
    layers = model.layers + mtp
    moe_layers = model.moe_layers + (mtp if model.num_experts else 0)
    dense = (layers - moe_layers) * model.mlp_matrices * hidden * model.ffn
    experts = moe_layers * model.mlp_matrices * hidden * (model.top_k * model.expert_ffn + model.shared_ffn)
    linear = layers * model.attention_weights + dense + mtp * (2 * hidden**2 + 3 * hidden)
    if model.mla is not None:  # the norms of the low-rank projections are billed as one more row of their ranks
        linear += layers * (model.mla.kv_rank + (model.mla.q_rank or 0))
    vocab = -(-model.vocab // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    return {
        "linear": 6 * tokens * linear,
        "experts": 6 * tokens * experts,
        "head": 6 * tokens * hidden * vocab * (1 + mtp),
        "attention": _attention(model, step, tokens, square_sum),
        "vision": _vision(model, step),
    }


def _attention(model: Architecture, step: Step, tokens: int, square_sum: int) -> Number:
    """Bill scores and values: half a square per full layer, the exact causal context of the row per windowed one."""
    half = 3 * model.heads * (model.qk_dim + model.v_dim) * square_sum
    total: Number = half * model.mtp_layers
    for window in model.windows:
        if window is None or window >= step.seq_len:
            total += half
        else:
            context = window - window * (window - 1) / (2 * step.seq_len)
            total += 6 * model.heads * (model.qk_dim + model.v_dim) * tokens * context
    return total


def _vision(model: Architecture, step: Step) -> Number:
    """Bill the tower for rows that share the patches evenly: its attention spans all patches of a row.

    One image per row is right; several images, or frames of a video, are billed as one picture.
    """
    tower, patches = model.vision, step.workload.patches
    if tower is None or not patches:
        return 0
    rows = max(step.num_rows, 1)
    per_row = patches / rows
    block = 8 * tower.hidden**2 + 4 * tower.hidden * per_row + 4 * tower.hidden * tower.ffn
    merged = tower.hidden * tower.merge**2
    tokens = per_row // tower.merge**2
    return 3 * rows * (tower.depth * per_row * block + tokens * (2 * merged**2 + 2 * merged * tower.out))
