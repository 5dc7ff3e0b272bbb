"""verl and its descendants, LMMs-Engine and VeOmni: real tokens, squared segment lengths, a list of model types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.errors import NotExpressibleError

if TYPE_CHECKING:
    from headway.count.conventions.architecture import Architecture, Vision
    from headway.count.conventions.convention import Number, Parts, Step

_LMMS_ENGINE = frozenset({
    "llama", "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3", "qwen3_moe",
    "deepseek_v3", "minicpmv", "minicpmo", "llava_onevision", "bagel",
})  # fmt: skip
_VERL = frozenset({
    "qwen2", "llama", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe",
    "qwen3_5", "qwen3_5_moe", "deepseek_v3", "minicpmv", "minicpmo", "mistral", "gemma3_text", "seed_oss", "apertus",
    "glm4v", "gpt_oss", "mimo", "hy_v3",
})  # fmt: skip
_VERL_VISION = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
_VERL_SHORT_HEADS = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})  # head size taken as hidden / heads
_VERL_UNGATED = frozenset({"apertus"})
_VEOMNI = frozenset({
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "deepseek_v3", "deepseek_v4", "qwen3_moe", "llama", "qwen2",
    "qwen3_next", "qwen3", "seed_oss", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "gpt_oss",
})  # fmt: skip
_VEOMNI_OLD_TOWERS = frozenset({"qwen2_vl", "qwen2_5_vl"})  # whose patch embedding is free
_UNKEPT = frozenset({"deepseek_v4", "hy_v3"})  # formulas of their own, which are not kept here

# tools that choose their formula by model type, and the types they know; they print 0 for all others
LISTED_TYPES = {"LMMs-Engine": _LMMS_ENGINE, "VeOmni": _VEOMNI, "verl": _VERL}


def lmms_engine(model: Architecture, step: Step) -> Parts:
    """Bill real tokens and the full square of each segment; the embedding table as if it were a second head.

    Not billed: vision, on any model. The rule knows a list of model types and is 0 on all others; its MFU is rounded to
    two decimals and its clock leaves the wait for data out.

    Source: EvolvingLMMs-Lab/lmms-engine, src/lmms_engine/models/utils.py, FlopsCounter (commits 0365e8c and 6f19e0e),
    and train/fsdp2/fsdp2_trainer.py.
    """
    _listed(model, _LMMS_ENGINE, "LMMs-Engine")
    attention = 6 * model.layers * model.heads * _both_heads(model) * step.square_sum
    head = 6 * step.workload.tokens * model.vocab * model.hidden
    return {**_linear(model, step, model.qk_dim), "head": head, "embedding": head, "attention": attention}


def veomni(model: Architecture, step: Step) -> Parts:
    """Bill real tokens and the full square of each segment, exactly causal in windowed layers, and the vision tower.

    Head once, embedding free. The vision tower's mergers are billed per patch instead of per merged token, four times
    too often for a 2 x 2 merge; a windowed block, Qwen2.5-VL's, for whole windows. All weights are taken as trained,
    which it does too unless it is told `freeze_vit` or given adapters.

    Source: ByteDance-Seed/VeOmni, veomni/utils/count_flops.py, VeomniFlopsCounter (commit 6efdf221, 7 Aug 2026; the
    windows by fcb1c57e, pull request 1024, of the same day; the version of commit 6f45f07 billed the embedding too and
    took hidden / heads for the head size of dense Qwen).
    """
    return _veomni(model, step, in_pixels=False)


def veomni_2026_07(model: Architecture, step: Step) -> Parts:
    """Bill as `veomni`, but Qwen2.5-VL's windows in pixels instead of patches: 196 times too many keys.

    Source: ByteDance-Seed/VeOmni, veomni/utils/count_flops.py, VeomniFlopsCounter (commit 29e65e1c, 30 July 2026).
    """
    return _veomni(model, step, in_pixels=True)


def _veomni(model: Architecture, step: Step, *, in_pixels: bool) -> Parts:
    _listed(model, _VEOMNI, "VeOmni")
    per_pair = 6 * model.heads * _both_heads(model)
    lengths = step.workload.segments.tolist()
    pairs = 0
    for window in model.windows:
        if window is None:
            pairs += step.square_sum
        else:
            heads = [min(s, window) for s in lengths]
            pairs += sum(m * (m + 1) // 2 + (s - m) * window for s, m in zip(lengths, heads, strict=True))
    head = 6 * step.workload.tokens * model.vocab * model.hidden
    vision = _veomni_tower(model, model.vision, _pictures(step), in_pixels=in_pixels) if model.vision else 0
    return {**_linear(model, step, model.qk_dim), "head": head, "attention": per_pair * pairs, "vision": vision}


def verl(model: Architecture, step: Step) -> Parts:
    """Bill real tokens, half the square of each segment, the embedding as a second head, and Qwen's vision towers.

    Windowed layers of Gemma-3 and gpt-oss see half of s x min(s, window). Dense Qwen-VL types are billed with a head
    size of hidden / heads, which is too small for Qwen3-VL-4B. A type that is not listed is 0.

    Source: verl-project/verl (formerly volcengine/verl), verl/utils/flops_counter.py, ESTIMATE_FUNC (commit 220e90399,
    10 July 2026); the half square by 54582f1f0 (18 Jan 2026), vision by 11764c6b2 and 1119a1e46 (7 and 9 Jan 2026).
    """
    parts = _verl(model, step, square=0.5)
    vision = 0
    if model.vision and model.model_type in _VERL_VISION:
        vision = _verl_tower(model.vision, _pictures(step))
    return {**parts, "vision": vision}


def verl_2025_12(model: Architecture, step: Step) -> Parts:
    """Bill as `verl`, but the full square of each segment, and no vision.

    Source: verl-project/verl, verl/utils/flops_counter.py (up to commit 02cf355, before January 2026).
    """
    return _verl(model, step, square=1)


def _verl(model: Architecture, step: Step, *, square: float) -> dict[str, Number]:
    _listed(model, _VERL, "verl")
    short = model.model_type in _VERL_SHORT_HEADS
    head_dim = model.hidden // model.heads if short else model.qk_dim
    both = 2 * head_dim if short else model.qk_dim + model.v_dim
    lengths = step.workload.segments.tolist()
    pairs = sum(sum(s * min(s, window or s) for s in lengths) for window in model.windows)
    head = 6 * step.workload.tokens * model.vocab * model.hidden
    return {
        **_linear(model, step, head_dim, matrices=2 if model.model_type in _VERL_UNGATED else 3),
        "head": head,
        "embedding": head,
        "attention": int(6 * square) * model.heads * both * pairs,
    }


def _listed(model: Architecture, types: frozenset[str], tool: str) -> None:
    if model.model_type not in types:
        raise NotExpressibleError(f"{tool} does not list the model type {model.model_type!r}: it prints 0")
    if model.model_type in _UNKEPT:
        raise NotExpressibleError(f"{tool}'s formula for the model type {model.model_type!r} is not kept here")


def _both_heads(model: Architecture) -> int:
    """Features per pair: query-key and value size; on latent attention these tools take the former twice."""
    return 2 * model.qk_dim


def _linear(model: Architecture, step: Step, head_dim: int, matrices: int = 3) -> dict[str, Number]:
    tokens, hidden = step.workload.tokens, model.hidden
    if model.mla is not None:
        attention = model.attention_weights
    else:
        attention = hidden * head_dim * 2 * (model.heads + model.kv_heads)
    expert = 3 * (model.top_k * model.expert_ffn + model.shared_ffn) + model.num_experts
    return {
        "linear": 6 * tokens * (model.layers * attention + model.dense_layers * matrices * hidden * model.ffn),
        "experts": 6 * tokens * model.moe_layers * hidden * expert,
    }


def _pictures(step: Step) -> list[int]:
    """Patches of each frame: what these tools take for one attention sequence of the tower."""
    return [h * w for t, h, w in step.workload.grids.tolist() for _ in range(t)]


def _tower_weights(tower: Vision, *, gated: bool, patch_inputs: int, num_mergers: int) -> int:
    """Matrix elements that these tools bill for every patch, the mergers' too."""
    merged = tower.hidden * tower.merge**2
    block = tower.hidden * (4 * tower.hidden + (3 if gated else 2) * tower.ffn)
    return tower.hidden * patch_inputs + tower.depth * block + num_mergers * merged * (merged + tower.out)


def _verl_tower(tower: Vision, pictures: list[int]) -> int:
    """Bill every Qwen tower as Qwen3-VL's: two MLP matrices, full attention in every block."""
    weights = _tower_weights(tower, gated=False, patch_inputs=tower.patch_inputs, num_mergers=tower.num_mergers)
    return 6 * sum(pictures) * weights + 12 * tower.hidden * tower.depth * sum(n * n for n in pictures)


def _veomni_tower(model: Architecture, tower: Vision, pictures: list[int], *, in_pixels: bool) -> int:
    """Bill Qwen's towers; a windowed block, Qwen2.5-VL's, at the square of its window per patch."""
    patches, squares = sum(pictures), sum(n * n for n in pictures)
    inputs = 0 if model.model_type in _VEOMNI_OLD_TOWERS else tower.patch_inputs
    weights = _tower_weights(tower, gated=tower.gated, patch_inputs=inputs, num_mergers=tower.num_mergers)
    side = tower.window_pixels
    if not in_pixels:  # whole merged tokens to a side
        side = side // tower.merge // tower.patch_size * tower.merge
    windowed = (tower.depth - tower.num_full) * patches * side**2
    return 6 * patches * weights + 12 * tower.hidden * (tower.num_full * squares + windowed)
