"""Megatron-Bridge (and Megatron-LM): three times the forward's products, attention halved for the causal mask."""

from headway.conventions.architecture import Architecture, Vision
from headway.conventions.convention import Number, Parts, Step
from headway.errors import NotExpressibleError

_VOCAB_MULTIPLE = 128  # make_vocab_size_divisible_by's default, at a tensor-parallel size of 1


def megatron_bridge(model: Architecture, step: Step) -> Parts:
    """Bill every slot of the tensors, half the sum of squared segment lengths, and the tower frame by frame.

    Billed: attention and MLP matrices, active and shared experts, the head over the vocabulary padded to a multiple of
    128, multi-token-prediction layers with a head each, the vision tower with all its mergers and the square of each
    frame's patches. Windowed layers see min(t, window) keys over the *pack*; chunked layers are billed in full. Not
    billed: the embedding, routers, patch embedding, the diagonal.

    Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/utils/flop_utils.py (commit 067f987df, 22 Aug
    2026); frames and DeepStack mergers since 46d7e9f4f (pull request 5285, 10 Aug 2026).
    """
    return _price(model, step, step.workload.slots, step.square_sum, _vision_by_frame(model, step))


def megatron_bridge_2026_05(model: Architecture, step: Step) -> Parts:
    """Bill as `megatron-bridge`, but all patches of a row as one picture, and one merger.

    Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/utils/flop_utils.py (commit 0494433, 2026), with
    the variable-length fix of pull request 3839, May 2026; until 46d7e9f4f, 10 Aug 2026.
    """
    return _price(model, step, step.workload.slots, step.square_sum, _vision_by_row(model, step))


def megatron_bridge_2025(model: Architecture, step: Step) -> Parts:
    """Bill rows x the configured sequence length, and half its square per row, whatever the rows hold.

    Otherwise as `megatron-bridge-2026-05`. Megatron-LM's own formula is this one since 6 March 2025.

    Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/utils/flop_utils.py (commit a5b3b5a, 2025);
    NVIDIA/Megatron-LM, megatron/training/training.py, num_floating_point_operations, since commit 8873b55d6a.
    """
    squares = step.num_rows * step.seq_len**2
    return _price(model, step, step.row_slots, squares, _vision_by_row(model, step))


def megatron_lm_2025_02(model: Architecture, step: Step) -> Parts:
    """Bill rows x the configured sequence length and its full square, and every layer's MLP as an expert layer's.

    Windows, latent attention, multi-token prediction and vision towers are in no term of it.

    Source: NVIDIA/Megatron-LM, megatron/training/training.py, num_floating_point_operations, before commit 8873b55d6a
    (6 March 2025): expansion x layers x hidden^2 x (1 + groups / heads + s / hidden) x query / hidden + ...
    """
    if model.mla is not None:
        raise NotExpressibleError("Megatron-LM before March 2025 had no term for latent attention")
    tokens, hidden = step.row_slots, model.hidden
    width = model.top_k * model.expert_ffn + model.shared_ffn if model.num_experts else model.ffn
    mlps = 6 * tokens * model.layers * model.mlp_matrices * hidden * width
    features = model.heads * (model.qk_dim + model.v_dim)
    return {
        "linear": 6 * tokens * model.layers * model.attention_weights + (0 if model.num_experts else mlps),
        "experts": mlps if model.num_experts else 0,
        "head": 6 * tokens * hidden * _padded(model.vocab),
        "attention": 6 * model.layers * features * step.num_rows * step.seq_len**2,
    }


def _price(model: Architecture, step: Step, tokens: int, square_sum: int, vision: Number) -> Parts:
    hidden, mtp = model.hidden, model.mtp_layers
    layers = model.layers + mtp
    moe_layers = model.moe_layers + (mtp if model.num_experts else 0)
    dense = (layers - moe_layers) * model.mlp_matrices * hidden * model.ffn
    experts = moe_layers * model.mlp_matrices * hidden * (model.top_k * model.expert_ffn + model.shared_ffn)
    linear = layers * model.attention_weights + dense + mtp * (2 * hidden**2 + 3 * hidden)
    if model.mla is not None:  # the norms of the low-rank projections are billed as one more row of their ranks
        linear += layers * (model.mla.kv_rank + (model.mla.q_rank or 0))
    return {
        "linear": 6 * tokens * linear,
        "experts": 6 * tokens * experts,
        "head": 6 * tokens * hidden * _padded(model.vocab) * (1 + mtp),
        "attention": _attention(model, step, tokens, square_sum),
        "vision": vision,
    }


def _padded(vocab: int) -> int:
    return -(-vocab // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


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


def _vision_by_frame(model: Architecture, step: Step) -> Number:
    """Bill the tower with the square of each frame's patches, and every merger."""
    tower = model.vision
    if tower is None:
        return 0
    grids = step.workload.grids.tolist()
    squares = sum(t * (h * w) ** 2 for t, h, w in grids)
    merged = sum(t * h * w // tower.merge**2 for t, h, w in grids)
    return _tower(tower, step.workload.patches, squares, merged * tower.num_mergers)


def _vision_by_row(model: Architecture, step: Step) -> Number:
    """Bill the tower for rows that share the patches evenly: its attention spans all patches of a row.

    One image per row is right; several images, or frames of a video, are billed as one picture.
    """
    if model.vision is None:
        return 0
    rows = max(step.num_rows, 1)
    per_row = step.workload.patches / rows
    return _tower(model.vision, rows * per_row, rows * per_row**2, rows * (per_row // model.vision.merge**2))


def _tower(tower: Vision, patches: Number, squares: Number, merged: Number) -> Number:
    """Bill two MLP matrices a block, and a merger of two for each of `merged` tokens."""
    block = (8 * tower.hidden**2 + 4 * tower.hidden * tower.ffn) * patches + 4 * tower.hidden * squares
    wide = tower.hidden * tower.merge**2
    return 3 * (tower.depth * block + merged * (2 * wide**2 + 2 * wide * tower.out))
