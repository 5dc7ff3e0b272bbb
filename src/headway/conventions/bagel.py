"""Bagel's trainer: one copy of the blocks, head and embedding for every token, squares of samples and of padding."""

from headway.conventions.architecture import Architecture
from headway.conventions.convention import Parts, Step
from headway.conventions.verl import both_heads, linear, listed


def bagel(model: Architecture, step: Step) -> Parts:
    """Bill real tokens and the full square of each sample; what fills a pack up is one more sample to be squared.

    Head and embedding are billed for every token, though the head runs on supervised text alone. Not billed: the tower
    that reads, the autoencoder, the connector and the latents' projections. The filling of several packs is taken as
    equally long in each.

    Source: ByteDance-Seed/Bagel, train/pretrain_unified_navit.py, qwen2_flop_coefficients, and data/dataset_base.py,
    to_tensor (commit 056b5fd, 27 Oct 2025).
    """
    listed(model, frozenset({"bagel"}), "Bagel's trainer")
    squares = step.square_sum + step.filling_square_sum
    head = 6 * step.workload.tokens * model.vocab * model.hidden
    attention = 6 * model.layers * model.heads * both_heads(model) * squares
    return {**linear(model, step, model.qk_dim), "head": head, "embedding": head, "attention": attention}
