"""MaxText: three times the forward's products at batch x max_target_length."""

from headway.conventions.architecture import Architecture
from headway.conventions.convention import Number, Parts, Step


def maxtext(model: Architecture, step: Step) -> Parts:
    """Bill every position of every row, attention halved for the causal mask, windows as S W - W^2 / 2.

    Chunked layers are half the squares of their chunks. Billed: attention and MLP matrices, active and shared experts
    with their router, the head once. Not billed: the embedding, packing (segments), the diagonal, vision towers other
    than Gemma-3's and Llama-4's.

    Source: AI-Hypercomputer/maxtext, src/maxtext/utils/maxtext_utils.py, calculate_tflops_training_per_device (commit
    e591f30cb, 22 Aug 2026); the causal half by pull request 1988 (July 2025), windows by 2009, chunks by 2030.
    """
    length = step.seq_len
    keys: Number = 0
    for window, chunk in zip(model.windows, model.chunks, strict=True):
        if window is not None and window < length:
            keys += length * window - window * window / 2
        else:
            keys += sum(part * part for part in _chunked(length, chunk)) / 2
    return {**_linear(model, step), "attention": _attention(model, step) * keys}


def maxtext_2025(model: Architecture, step: Step) -> Parts:
    """Bill the full square of every row in every layer, windows or not; otherwise as `maxtext`.

    Source: AI-Hypercomputer/maxtext, MaxText/maxtext_utils.py, calculate_tflops_training_per_device, before pull
    request 1988 (July 2025).
    """
    return {**_linear(model, step), "attention": _attention(model, step) * model.layers * step.seq_len**2}


def _chunked(length: int, chunk: int | None) -> list[int]:
    """Cut a row into the chunks that attention stays in [tokens]."""
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
