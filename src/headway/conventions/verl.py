"""verl and LMMs-Engine: real tokens, squared lengths, a list of model types, and the embedding as a second head."""

from dataclasses import replace

from headway.conventions import listed
from headway.conventions.architecture import Architecture, Vision
from headway.conventions.convention import Parts, Step
from headway.conventions.listed import Formula, Formulas
from headway.errors import NotExpressibleError

_SIZES_AT_THE_TOP_NOTE = (
    "reads sizes at the top of the configuration, where transformers keeps them in text_config: it fails"
)
_NOT_KEPT = "is not kept here"
_DENSE, _MIXTURE, _LATENT = Formula(), Formula(experts="every"), Formula(experts="configured", shared="all")
_PICTURES = Formula(short_heads=True, tower=True)

DELTA = Formula(gated=True, state=15, tower=True)
DELTA_MIXTURE = replace(DELTA, experts="every", shared="all", shared_gate=True)

LMMS_ENGINE: Formulas = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen2_5_vl", "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3", "qwen3_dllm", "qwen3_vl",
         "aero_realtime", "minicpmv", "minicpmo", "llava_onevision", "llava_onevision2"), _DENSE,
    ),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker"), _MIXTURE
    ),
    "qwen2_vl": _SIZES_AT_THE_TOP_NOTE,
    "deepseek_v3": _LATENT,
}  # fmt: skip
VERL: Formulas = {
    **dict.fromkeys(("qwen2", "llama", "qwen3", "minicpmv", "minicpmo", "mistral", "seed_oss", "mimo"), _DENSE),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _MIXTURE),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _PICTURES),
    "qwen3_vl_moe": Formula(experts="every", tower=True),
    "deepseek_v3": Formula(experts="configured", shared="all", value_heads=True),
    "gemma3_text": Formula(windows="cut"),
    "gpt_oss": Formula(experts="every", windows="cut"),
    "apertus": Formula(matrices=2, norms=True),
    "glm4v": _SIZES_AT_THE_TOP_NOTE,
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA_MIXTURE,
    "hy_v3": _NOT_KEPT,
}
# until January 2026 it took text_config where there is one, and looked its own type up: "qwen3_vl_text" is not listed
_VERL_2025_12: Formulas = {
    **{kind: formula for kind, formula in VERL.items() if kind not in ("qwen3_5", "qwen3_5_moe", "hy_v3", "mimo")
       and not (isinstance(formula, Formula) and formula.tower)},
    "deepseek_v3": _LATENT,
    "gemma3": Formula(windows="cut"),
}  # fmt: skip


def lmms_engine(model: Architecture, step: Step) -> Parts:
    """Bill real tokens and the full square of each segment; the embedding table as if it were a second head.

    Not billed: vision, on any model. The rule knows a list of model types and is 0 on all others; its MFU is rounded to
    two decimals and its clock leaves the wait for data out.

    Source: EvolvingLMMs-Lab/lmms-engine, src/lmms_engine/models/utils.py, FlopsCounter, and train/fsdp2/
    fsdp2_trainer.py (release 0.1.4, 6 Aug 2026; commits 0365e8c and 6f19e0e had the same rule for 13 types, no Qwen3-VL
    among them).
    """
    formula = listed.chosen(model, LMMS_ENGINE, "LMMs-Engine")
    head = listed.table(model, step.workload.tokens)
    attention = listed.attention(model, formula, model.layers * listed.squares(step, formula), rate=6)
    weights = listed.weights(model, formula, step.workload.tokens)
    return {**weights, "head": head, "embedding": head, "attention": attention}


def verl(model: Architecture, step: Step) -> Parts:
    """Bill real tokens, half the square of each segment, the embedding as a second head, and Qwen's vision towers.

    Windowed layers of Gemma-3 and gpt-oss see half of s x min(s, window); those of Mistral and Qwen2 are billed in
    full. Dense Qwen-VL types are billed with a head size of hidden / heads, which is too small for Qwen3-VL-4B; Apertus
    with the norms of queries and keys. A type that is not listed is 0.

    Source: verl-project/verl (formerly volcengine/verl), verl/utils/flops_counter.py, ESTIMATE_FUNC (commit 220e90399,
    10 July 2026, and unchanged in 1dda039b9, 22 Aug 2026); the half square by 54582f1f0 (18 Jan 2026), vision by
    11764c6b2 and 1119a1e46 (7 and 9 Jan 2026).
    """
    formula = listed.chosen(model, VERL, "verl")
    vision = _tower(model, model.vision, listed.pictures(step)) if formula.tower and model.vision else 0
    return {**_language(model, step, formula, rate=3), "vision": vision}


def verl_2025_12(model: Architecture, step: Step) -> Parts:
    """Bill as `verl`, but the full square of each segment; 0 for every model with a vision tower.

    Source: verl-project/verl, verl/utils/flops_counter.py (up to commit 02cf355, before January 2026).
    """
    return _language(model, step, listed.chosen(model, _VERL_2025_12, "verl"), rate=6)


def _language(model: Architecture, step: Step, formula: Formula, *, rate: int) -> Parts:
    lengths = step.workload.segments.tolist()
    head = listed.table(model, step.workload.tokens)
    attention = listed.attention(model, formula, listed.pairs(model, formula, lengths), rate=rate)
    weights = listed.weights(model, formula, step.workload.tokens)
    return {**weights, "head": head, "embedding": head, "attention": attention}


def _tower(model: Architecture, tower: Vision, sizes: list[int]) -> int:
    """Bill every Qwen tower as Qwen3-VL's: two MLP matrices, full attention in every block."""
    if sizes and model.model_type == "qwen2_vl":
        raise NotExpressibleError("verl reads intermediate_size of the tower, which Qwen2-VL's does not have: it fails")
    weights = tower.hidden * tower.patch_inputs + listed.tower_weights(tower, gated=False)
    return 6 * sum(sizes) * weights + 12 * tower.hidden * tower.depth * sum(n * n for n in sizes)
