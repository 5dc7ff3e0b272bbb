"""MaxText: three times the forward's products at batch x max_target_length."""

from collections.abc import Callable

from headway.conventions.architecture import Architecture
from headway.conventions.convention import Number, Parts, Step

# decoder blocks whose attention has a term of its own, by the model types that they train; all others are full squares
_WINDOWED = frozenset({"gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gpt_oss"})
_CHUNKED = frozenset({"llama4", "llama4_text"})


def maxtext(model: Architecture, step: Step) -> Parts:
    """Bill every position of every row, and half the square of the row in each layer.

    Windowed layers of Gemma 2, 3 and 4 and of gpt-oss are S W - W^2 / 2, chunked ones of Llama 4 half the squares of
    their chunks; windows of all other models are billed in full. Billed: attention and MLP matrices, active and shared
    experts with their router, the head once. Not billed: the embedding, packing (segments), the diagonal, vision towers
    other than Gemma-3's and Llama-4's.

    Source: AI-Hypercomputer/maxtext, src/maxtext/utils/maxtext_utils.py, calculate_tflops_training_per_device (commit
    e591f30cb, 22 Aug 2026); the causal half by pull request 1988 (July 2025), windows as now since 6288c2333 (11 Apr
    2026).
    """
    return _price(model, step, lambda window: step.seq_len * window - window * window / 2)


def maxtext_2026_03(model: Architecture, step: Step) -> Parts:
    """Bill as `maxtext`, but windowed layers as S W / 2.

    Source: AI-Hypercomputer/maxtext, src/maxtext/utils/maxtext_utils.py (commit 6288c2333^, until 11 Apr 2026); chunks
    since 43f5406c4 (28 July 2025), gpt-oss since 11609a942 (3 Sept 2025).
    """
    return _price(model, step, lambda window: step.seq_len * window / 2)


def maxtext_2025(model: Architecture, step: Step) -> Parts:
    """Bill the full square of every row in every layer, chunked or not; windows of Gemma 2 alone as S W.

    Otherwise as `maxtext`.

    Source: AI-Hypercomputer/maxtext, MaxText/maxtext_utils.py, calculate_tflops_training_per_device, before pull
    request 1988 (a4c01726e, 22 July 2025).
    """
    squares: Number = model.layers * step.seq_len**2
    if model.model_type == "gemma2":
        squares = sum(step.seq_len * min(step.seq_len, window or step.seq_len) for window in model.windows)
    return {**_linear(model, step), "attention": _attention(model, step) * squares}


def _price(model: Architecture, step: Step, windowed: Callable[[int], Number]) -> Parts:
    """Bill each layer's keys: half a row's, or the keys of its window or chunks where its block has such a term."""
    length, kind = step.seq_len, model.model_type
    keys: Number = 0
    for window, chunk in zip(model.windows, model.chunks, strict=True):
        if window is not None and window < length and kind in _WINDOWED:
            keys += windowed(window)
        else:
            keys += sum(part * part for part in _chunks(length, chunk if kind in _CHUNKED else None)) / 2
    return {**_linear(model, step), "attention": _attention(model, step) * keys}


def _chunks(length: int, chunk: int | None) -> list[int]:
    size = min(chunk or length, length)
    return [size] * (length // size) + [length % size]


def _attention(model: Architecture, step: Step) -> int:
    """FLOPs per pair of one layer over all rows, forward and backward."""
    return 6 * step.num_rows * model.heads * (model.qk_dim + model.v_dim)


def _linear(model: Architecture, step: Step) -> dict[str, Number]:
    positions, hidden = step.row_slots, model.hidden
    expert = model.mlp_matrices * (model.top_k * model.expert_ffn + model.shared_ffn) + model.num_experts
    dense = model.layers * model.attention_weights + model.dense_layers * model.mlp_matrices * hidden * model.ffn
    return {
        "linear": 6 * positions * dense,
        "experts": 6 * positions * model.moe_layers * hidden * expert,
        "head": 6 * positions * hidden * model.vocab,
    }
