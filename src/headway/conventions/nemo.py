"""NeMo Automodel and NeMo RL: a formula for each class of configuration, half a square, and no routers."""

from dataclasses import replace

from headway.conventions import listed
from headway.conventions.architecture import Architecture
from headway.conventions.convention import Number, Parts, Step
from headway.conventions.listed import Formula, Formulas
from headway.errors import NotExpressibleError

_NESTED_SIZES_NOTE = (
    "reads sizes at the top of the configuration, where transformers keeps them in text_config: it prints no MFU"
)
_NOT_KEPT = "is not kept here"
_GPT3 = Formula(short_heads=True, wide_keys=True, matrices=2, four_wide=True)
_QWEN3 = Formula()
_QWEN3_MIXTURE = Formula(experts="every", router=False)
_ONE_SHARED = Formula(experts="configured", router=False, shared="one", value_heads=True)
_LATENT = Formula(experts="configured", router=False, shared="all", value_heads=True)
_DELTA = Formula(gated=True, state=24, square_state=True)
_GPT_OSS = Formula(experts="every", router=False)
_GPT_OSS_WINDOW = 128  # window of every second layer, whatever the configuration says [tokens]
# formula for each class of configuration without its own: two matrices an MLP, experts in every other layer
_FALLBACK = Formula(short_heads=True, matrices=2, experts="half", router=False)
_AUTOMODEL: Formulas = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gpt_neox", "gptj"), _GPT3),
    "llama": Formula(short_heads=True),
    "mixtral": Formula(short_heads=True, experts="every", router=False),
    "nemotron": Formula(short_heads=True, matrices=2),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_vl", "glm4"), _QWEN3),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe"), _QWEN3_MIXTURE),
    "deepseek_v3": _ONE_SHARED,
    "gpt_oss": _GPT_OSS,
    "glm4_moe": Formula(experts="configured", router=False, shared="all"),
    "minimax_m2": _QWEN3_MIXTURE,
    "qwen3_5": _DELTA,
    **dict.fromkeys(("qwen3_5_moe", "qwen3_next"), replace(_DELTA, experts="every", router=False, shared="all")),
    **dict.fromkeys(("glm4_moe_lite", "kimi_k2"), _LATENT),
    **dict.fromkeys(
        ("bert", "roberta", "albert", "electra", "t5", "mt5", "nemotron_h", "glm_moe_dsa", "mistral3", "kimi_k25",
         "step3p5", "longcat_flash"), _NOT_KEPT,
    ),
}  # fmt: skip
_RL: Formulas = {
    "llama": Formula(short_heads=True),
    "qwen2": Formula(short_heads=True, wide_keys=True),
    # NeMo RL takes `intermediate_size` and one expert for a mixture too
    **dict.fromkeys(("qwen3", "qwen3_moe"), Formula()),
    "deepseek_v3": replace(_ONE_SHARED, experts="every"),
}


def automodel(model: Architecture, step: Step) -> Parts:
    """Bill every position of every row, half the square of the row, the head once; no routers, no vision tower.

    GPT-2's kind is billed with MLPs four times as wide as the model, Llama, Mixtral and Nemotron with heads of hidden /
    heads, gpt-oss with exact pairs and windows of 128, DeepSeek-V3 with one shared expert. Every other class of
    configuration is billed two matrices an MLP, and where it has experts half its layers with top-k of the MLP's width.
    Prediction layers are in GLM-4.7-Flash's, Kimi's and Qwen3.5's alone. What a tensor holds is billed whole, packs
    included.

    Source: NVIDIA-NeMo/Automodel, nemo_automodel/components/utils/flops_utils.py, get_flops_formula_for_hf_config, and
    nemo_automodel/_transformers/mfu.py, AutoMFU (commit 36044ad3d, 22 Aug 2026).
    """
    formula = _of_automodel(model)
    if formula is _FALLBACK:  # Llama 4 has another width beside it, of its dense layers
        model = replace(model, ffn=int(model.config["intermediate_size"]))
    tokens, length = step.row_slots, step.seq_len
    predicting = _prediction_layers(model, formula)  # each is one more layer that attends, a head and a projection
    model = replace(model, layers=model.layers + predicting, moe_layers=model.moe_layers + predicting)
    pairs: Number = listed.pairs(model, formula, [length]) / 2
    if formula is _GPT_OSS:
        pairs = sum(_exact(length, _GPT_OSS_WINDOW if layer % 2 else None) for layer in range(model.layers))
    parts = dict(listed.weights(model, formula, tokens))
    parts["linear"] += 12 * tokens * model.hidden**2 * predicting
    parts["attention"] = listed.attention(model, formula, step.num_rows * pairs, rate=6)
    parts["head"] = listed.table(model, tokens) * (1 + predicting)
    return parts


def rl(model: Architecture, step: Step) -> Parts:
    """Bill the real tokens of each sample and half its square, the head once.

    Llama's heads are taken as hidden / heads, Qwen2's keys and values as wide as its queries, Qwen3's mixtures as one
    MLP of `intermediate_size`, and every layer of DeepSeek-V3 as one with experts. Other types have no number.

    Source: NVIDIA-NeMo/RL, nemo_rl/utils/flops_tracker.py, FLOPTracker, and nemo_rl/utils/flops_formulas.py (commit
    7ea279abf, 22 Aug 2026).
    """
    formula = _RL.get(model.model_type)
    if not isinstance(formula, Formula):
        raise NotExpressibleError(f"NeMo RL has no formula for the model type {model.model_type!r}: it prints no FLOPS")
    pairs = listed.pairs(model, formula, step.workload.segments.tolist())
    parts = dict(listed.weights(model, formula, step.workload.tokens))
    attention = listed.attention(model, formula, pairs, rate=3)
    return {**parts, "head": listed.table(model, step.workload.tokens), "attention": attention}


def _of_automodel(model: Architecture) -> Formula:
    """Choose a formula as its list of classes does; the fallback is for classes that have sizes at their top."""
    if model.model_type == "deepseek_v3" and model.config.get("moe_layer_freq") == 1:
        return replace(_ONE_SHARED, experts="every")  # NeMo AutoModel looks at no dense layers then
    # transformers nests the sizes of a model with a tower, wherever its config.json has them
    is_nested = "text_config" in model.config or "vision_config" in model.config
    if model.model_type not in _AUTOMODEL and (is_nested or not model.config.get("intermediate_size")):
        why = _NESTED_SIZES_NOTE if is_nested else "reads intermediate_size, which is not there: no MFU"
        raise NotExpressibleError(f"NeMo Automodel's formula for the model type {model.model_type!r} {why}")
    return listed.chosen(model, {model.model_type: _FALLBACK, **_AUTOMODEL}, "NeMo Automodel")


def _prediction_layers(model: Architecture, formula: Formula) -> int:
    """Layers of multi-token prediction, in the formulas that ask for them."""
    if formula.state:
        return int((model.config.get("text_config") or model.config).get("mtp_num_hidden_layers") or 0)
    return model.mtp_layers if formula is _LATENT else 0


def _exact(length: int, window: int | None) -> int:
    """Query-key pairs of one row; its formula does not ask whether the row is as long as the window."""
    if window is None:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
