"""Megatron-Bridge and Megatron-LM: three times the forward's products, attention halved for the causal mask."""

from dataclasses import replace
from typing import TypeAlias

from headway.conventions.architecture import Architecture, Vision
from headway.conventions.convention import Number, Parts, Step

Windows: TypeAlias = tuple[int | None, ...]  # window of each layer [tokens]; None for a layer without

# model types whose bridge sets a window: with the layers that have it, or without, so that every layer is billed as
# windowed (src/megatron/bridge/models: gemma/gemma2_bridge.py, gemma3_bridge.py, gpt_oss/gpt_oss_bridge.py, ...)
_WINDOWED = frozenset({"gpt_oss", "mistral", "gemma4", "gemma4_text", "exaone4_5", "exaone_moe"})
_ALL_WINDOWED = frozenset({"gemma2", "gemma3", "gemma3_text"})
_VOCAB_MULTIPLE = 128  # make_vocab_size_divisible_by's default, at a tensor-parallel size of 1


def megatron_bridge(model: Architecture, step: Step) -> Parts:
    """Bill every slot of the tensors, half the sum of squared segment lengths, and the tower frame by frame.

    Billed: attention and MLP matrices, active and shared experts, the head over the vocabulary padded to a multiple of
    128, multi-token-prediction layers with a head each, the vision tower with all its mergers and the square of each
    frame's patches. Windowed layers see min(t, window) keys over the *pack*, and on Gemma 2 and 3 all layers are taken
    as windowed; windows of model types whose bridge sets none, and chunks, are billed in full. Not billed: the
    embedding, routers, patch embedding, the diagonal.

    Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/utils/flop_utils.py (commit 067f987df, 22 Aug
    2026); frames and DeepStack mergers since 46d7e9f4f (pull request 5285, 10 Aug 2026).
    """
    windows, vision = _bridge_windows(model), _vision_by_frame(model, step)
    return _price(model, step, step.workload.slots, step.square_sum, windows, vision)


def megatron_bridge_2026_05(model: Architecture, step: Step) -> Parts:
    """Bill as `megatron-bridge`, but all patches of a row as one picture, and one merger.

    Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/utils/flop_utils.py (commit 8c4b4c544, 10 Aug
    2026), with the lengths of packed samples by pull request 3839 (15 June 2026, taken back twice, to stay since
    d12548a3c of 30 June); patches since f872c1501 (14 May 2026); until 46d7e9f4f, 10 Aug 2026.
    """
    windows, vision = _bridge_windows(model), _vision_by_row(model, step)
    return _price(model, step, step.workload.slots, step.square_sum, windows, vision)


def megatron_bridge_2025(model: Architecture, step: Step) -> Parts:
    """Bill rows x the configured sequence length, and half its square per row, whatever the rows hold.

    Windows and vision towers are in no term of it, and only a gate of SiLU is a third matrix of an MLP: Gemma's and
    gpt-oss's are billed as two. Otherwise as `megatron-bridge`.

    Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/utils/flop_utils.py (commit a5b3b5a4c, 26 Feb
    2026); windows since eaddead3f (31 March 2026), vision towers since f872c1501 (14 May 2026), all gates since
    baa0259bd (28 May 2026).
    """
    text = model.config.get("text_config") or model.config
    activation = text.get("hidden_act") or text.get("hidden_activation") or "silu"
    swiglu = activation in ("silu", "swish") and model.model_type != "gpt_oss"  # the bridge of gpt_oss sets a GELU
    return megatron_lm_2026_05(replace(model, gated=model.gated and swiglu), step)


def megatron_lm(model: Architecture, step: Step) -> Parts:
    """Bill the real tokens of packs and half the sum of their squared lengths, padding left out; no windows.

    That is what it does with packs (THD, `--sft` or `--sequence-packing`); rows that are not packed are billed as
    `megatron-lm-2026-05` does, to this day. Otherwise as `megatron-bridge`; windows, chunks and vision towers are in no
    term of it.

    Source: NVIDIA/Megatron-LM, megatron/training/training.py, num_floating_point_operations (commit d98e8a64dd, 22 Aug
    2026); packs since 5e4fc931ba (pull request 4103, 21 May 2026).
    """
    return _price(model, step, step.workload.tokens, step.square_sum, _no_windows(model), 0)


def megatron_lm_2026_05(model: Architecture, step: Step) -> Parts:
    """Bill rows x the configured sequence length, and half its square per row, whatever the rows hold; no windows.

    Source: NVIDIA/Megatron-LM, megatron/training/training.py, num_floating_point_operations (commit 9a7cd17fdc, 21 May
    2026), since 8873b55d6a (6 March 2025).
    """
    squares = step.num_rows * step.seq_len**2
    return _price(model, step, step.row_slots, squares, _no_windows(model), 0)


def _no_windows(model: Architecture) -> Windows:
    return (None,) * model.layers


def _bridge_windows(model: Architecture) -> Windows:
    """Window of each layer that the bridge of a model's type sets, as its formula understands it."""
    if model.model_type in _ALL_WINDOWED:
        return (max((window for window in model.windows if window), default=None),) * model.layers
    return model.windows if model.model_type in _WINDOWED else _no_windows(model)


def _price(model: Architecture, step: Step, tokens: int, square_sum: int, windows: Windows, vision: Number) -> Parts:
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
        "attention": _attention(model, tokens, square_sum, windows, tokens / step.num_rows if step.num_rows else 0),
        "vision": vision,
    }


def _padded(vocab: int) -> int:
    return -(-vocab // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def _attention(model: Architecture, tokens: int, square_sum: int, windows: Windows, length: float) -> Number:
    """Bill scores and values: half a square per full layer, the exact causal context of the row per windowed one."""
    features = model.heads * (model.qk_dim + model.v_dim)
    half = 3 * features * square_sum
    total: Number = half * model.mtp_layers
    for window in windows:
        if window is None or window >= length:
            total += half
        else:
            total += 6 * features * tokens * (window - window * (window - 1) / (2 * length))
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
