"""verl and LMMs-Engine, and what they share with VeOmni: real tokens, squared lengths, a list of model types."""

from headway.conventions.architecture import Architecture, Vision
from headway.conventions.convention import Number, Parts, Step
from headway.errors import NotExpressibleError

_LMMS_ENGINE = frozenset({
    "llama", "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3",
    "qwen3_dllm", "qwen3_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "aero_realtime",
    "deepseek_v3", "minicpmv", "minicpmo", "llava_onevision", "llava_onevision2", "bagel",
})  # fmt: skip
_VERL = frozenset({
    "qwen2", "llama", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe",
    "qwen3_5", "qwen3_5_moe", "deepseek_v3", "minicpmv", "minicpmo", "mistral", "gemma3_text", "seed_oss", "apertus",
    "glm4v", "gpt_oss", "mimo", "hy_v3",
})  # fmt: skip
_VERL_VISION = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
_VERL_SHORT_HEADS = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})  # head size taken as hidden / heads
_VERL_UNGATED = frozenset({"apertus"})
VEOMNI = frozenset({
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "deepseek_v3", "deepseek_v4", "qwen3_moe", "llama", "qwen2",
    "qwen3_next", "qwen3", "seed_oss", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "gpt_oss",
})  # fmt: skip
_UNKEPT = frozenset({"deepseek_v4", "hy_v3"})  # formulas of their own, which are not kept here

# tools that choose their formula by model type, and the types they know; they print 0 for all others
LISTED_TYPES = {"LMMs-Engine": _LMMS_ENGINE, "VeOmni": VEOMNI, "verl": _VERL}


def lmms_engine(model: Architecture, step: Step) -> Parts:
    """Bill real tokens and the full square of each segment; the embedding table as if it were a second head.

    Not billed: vision, on any model. Bagel's packs are one row to it, whose square it takes whole (datasets/collator/
    bagel_collator.py). The rule knows a list of model types and is 0 on all others; its MFU is rounded to
    two decimals and its clock leaves the wait for data out.

    Source: EvolvingLMMs-Lab/lmms-engine, src/lmms_engine/models/utils.py, FlopsCounter, and train/fsdp2/
    fsdp2_trainer.py (release 0.1.4, 6 Aug 2026; commits 0365e8c and 6f19e0e had the same rule for 13 types, no Qwen3-VL
    among them).
    """
    listed(model, _LMMS_ENGINE, "LMMs-Engine")
    squares = step.pack_square_sum if model.model_type == "bagel" else step.square_sum
    attention = 6 * model.layers * model.heads * both_heads(model) * squares
    head = 6 * step.workload.tokens * model.vocab * model.hidden
    return {**linear(model, step, model.qk_dim), "head": head, "embedding": head, "attention": attention}


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
        vision = _verl_tower(model.vision, pictures(step))
    return {**parts, "vision": vision}


def verl_2025_12(model: Architecture, step: Step) -> Parts:
    """Bill as `verl`, but the full square of each segment, and no vision.

    Source: verl-project/verl, verl/utils/flops_counter.py (up to commit 02cf355, before January 2026).
    """
    return _verl(model, step, square=1)


def _verl(model: Architecture, step: Step, *, square: float) -> dict[str, Number]:
    listed(model, _VERL, "verl")
    short = model.model_type in _VERL_SHORT_HEADS
    head_dim = model.hidden // model.heads if short else model.qk_dim
    both = 2 * head_dim if short else model.qk_dim + model.v_dim
    lengths = step.workload.segments.tolist()
    pairs = sum(sum(s * min(s, window or s) for s in lengths) for window in model.windows)
    head = 6 * step.workload.tokens * model.vocab * model.hidden
    return {
        **linear(model, step, head_dim, matrices=2 if model.model_type in _VERL_UNGATED else 3),
        "head": head,
        "embedding": head,
        "attention": int(6 * square) * model.heads * both * pairs,
    }


def listed(model: Architecture, types: frozenset[str], tool: str) -> None:
    """Refuse a model type that a tool does not list, or whose formula is not kept here.

    Raises:
        NotExpressibleError: it is one of these.
    """
    if model.model_type not in types:
        raise NotExpressibleError(f"{tool} does not list the model type {model.model_type!r}: it prints 0")
    if model.model_type in _UNKEPT:
        raise NotExpressibleError(f"{tool}'s formula for the model type {model.model_type!r} is not kept here")


def both_heads(model: Architecture) -> int:
    """Features per pair: query-key and value size; on latent attention these tools take the former twice."""
    return 2 * model.qk_dim


def linear(model: Architecture, step: Step, head_dim: int, matrices: int = 3) -> dict[str, int]:
    """Bill the layers' matrices, 6 FLOPs per element and real token: projections and MLPs, experts with routers."""
    tokens, hidden = step.workload.tokens, model.hidden
    if model.mla is not None:
        attention = model.attention_weights
    else:
        attention = hidden * head_dim * 2 * (model.heads + model.kv_heads)
    shared = model.shared_ffn if model.mla is not None else 0  # DeepSeek's alone; Qwen2-MoE's are in no formula
    expert = 3 * (model.top_k * model.expert_ffn + shared) + model.num_experts
    return {
        "linear": 6 * tokens * (model.layers * attention + model.dense_layers * matrices * hidden * model.ffn),
        "experts": 6 * tokens * model.moe_layers * hidden * expert,
    }


def pictures(step: Step) -> list[int]:
    """Patches of each frame: what these tools take for one attention sequence of the tower."""
    return [h * w for t, h, w in step.workload.grids.tolist() for _ in range(t)]


def tower_weights(tower: Vision, *, gated: bool) -> int:
    """Matrix elements that these tools bill for every patch, the mergers' too; without the patch embedding."""
    merged = tower.hidden * tower.merge**2
    block = tower.hidden * (4 * tower.hidden + (3 if gated else 2) * tower.ffn)
    return tower.depth * block + tower.num_mergers * merged * (merged + tower.out)


def _verl_tower(tower: Vision, sizes: list[int]) -> int:
    """Bill every Qwen tower as Qwen3-VL's: two MLP matrices, full attention in every block."""
    weights = tower.hidden * tower.patch_inputs + tower_weights(tower, gated=False)
    return 6 * sum(sizes) * weights + 12 * tower.hidden * tower.depth * sum(n * n for n in sizes)
