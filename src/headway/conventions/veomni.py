"""VeOmni: real tokens, the full square of each segment, Qwen's vision towers, and less for frozen weights."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headway.conventions import listed
from headway.conventions.architecture import Architecture, Vision
from headway.conventions.convention import Parts, Step
from headway.conventions.listed import Formula, Formulas
from headway.conventions.verl import DELTA, DELTA_MIXTURE
from headway.count.adapters import is_adapter
from headway.count.cost_model import CostModel
from headway.count.rows import Parameter
from headway.errors import NotExpressibleError

_SHORT, _MIXTURE = Formula(short_heads=True), Formula(experts="every")
VEOMNI: Formulas = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"), Formula()),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe"), _MIXTURE),
    **dict.fromkeys(("llama", "seed_oss"), _SHORT),
    "deepseek_v3": Formula(experts="configured", shared="all"),
    "gpt_oss": Formula(experts="every", windows="exact"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), DELTA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), DELTA_MIXTURE),
    "deepseek_v4": "is not kept here",
}
# until 31 July 2026 the gate of shared experts was left out
_VEOMNI_2026_07: Formulas = {
    kind: replace(formula, shared_gate=False) if isinstance(formula, Formula) else formula
    for kind, formula in VEOMNI.items()
}
_OLD_TOWERS = frozenset({"qwen2_vl", "qwen2_5_vl"})  # VeOmni does not bill their patch embedding
_TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TOWER_TARGETS = ("qkv", "proj", "linear_fc1", "linear_fc2")
# modules that its LoRA rule knows by name, by model type; it prints 0 for adapters on any other
_TARGETS = {
    "qwen2": _TEXT_TARGETS,
    "qwen3": _TEXT_TARGETS,
    "qwen3_moe": _TEXT_TARGETS,
    "qwen2_vl": (*_TEXT_TARGETS, "qkv", "proj", "fc1", "fc2", "mlp.0", "mlp.2"),
    "qwen2_5_vl": (*_TEXT_TARGETS, "qkv", "proj", "mlp.0", "mlp.2"),
    "qwen3_vl": (*_TEXT_TARGETS, *_TOWER_TARGETS),
    "qwen3_vl_moe": (*_TEXT_TARGETS, *_TOWER_TARGETS),
}


@dataclass(frozen=True, slots=True)
class _Setup:
    """FLOPs per weight and pair, which depend on the parameters that are trained."""

    language: int = 6  # FLOPs per weight of the language model and token: 6, or 4 below adapters
    tower: int = 6  # FLOPs per weight of the vision tower and patch
    embed: int = 6  # FLOPs per weight of the patch embedding
    tower_pairs: int = 12  # FLOPs per feature and query-key pair of the tower
    adapters: int = 0  # weights of the language model's adapters
    tower_adapters: int = 0  # weights of the tower's adapters


def veomni(model: Architecture, step: Step) -> Parts:
    """Bill real tokens and the full square of each segment, and the vision tower; gpt-oss's windows exactly.

    Windows of other models are billed in full, and Llama's and Seed-OSS's heads at hidden / heads. Head once, embedding
    free. The vision tower's mergers are billed per patch instead of per merged token, four times too often for a 2 x 2
    merge; a windowed block, Qwen2.5-VL's, for whole windows.

    A tower without a trained weight is billed its forward alone (its `freeze_vit`). With adapters, weights of the
    language model cost 4 FLOPs instead of 6, wherever the first adapter is, adapters 6, and the tower its forward
    alone, or 4 and 6 where it has adapters too; attention of the language model is billed in full. Other frozen weights
    are taken as trained, which is what it does.

    Source: ByteDance-Seed/VeOmni, veomni/utils/count_flops.py, VeomniFlopsCounter, and veomni/lora/config.py (commit
    6efdf221, 7 Aug 2026, and unchanged in d9774494, 21 Aug 2026; the windows by fcb1c57e, pull request 1024, of 7 Aug;
    the version of commit 6f45f07 billed the embedding too and took hidden / heads for the head size of dense Qwen).
    """
    return _price(model, step, listed.chosen(model, VEOMNI, "VeOmni"), _setup(model), in_pixels=False)


def veomni_2026_07(model: Architecture, step: Step) -> Parts:
    """Bill as `veomni`, but all weights as trained, and Qwen2.5-VL's windows in pixels: 196 times too many keys.

    Source: ByteDance-Seed/VeOmni, veomni/utils/count_flops.py, VeomniFlopsCounter (commit 29e65e1c, 30 July 2026).
    """
    formula = listed.chosen(model, _VEOMNI_2026_07, "VeOmni")
    if formula.state and listed.pictures(step):
        raise NotExpressibleError(
            "VeOmni reads deepstack_visual_indexes of the tower, which Qwen3.5's does not have: it fails"
        )
    return _price(model, step, formula, _Setup(), in_pixels=True)


def _price(model: Architecture, step: Step, formula: Formula, setup: _Setup, *, in_pixels: bool) -> Parts:
    tokens = step.workload.tokens
    pairs = listed.pairs(model, formula, step.workload.segments.tolist())
    weights = dict(listed.weights(model, formula, tokens))
    for name in ("linear", "experts"):
        weights[name] = weights[name] // 6 * setup.language
    tower = model.vision
    return {
        **weights,
        "linear": weights["linear"] + 6 * tokens * setup.adapters,
        "head": setup.language * tokens * model.vocab * model.hidden,
        "attention": listed.attention(model, formula, pairs, rate=6),
        "vision": _tower(model, tower, listed.pictures(step), setup, in_pixels=in_pixels) if tower else 0,
    }


def _tower(model: Architecture, tower: Vision, sizes: list[int], setup: _Setup, *, in_pixels: bool) -> int:
    """Bill Qwen's towers; a windowed block, Qwen2.5-VL's, at the square of its window per patch."""
    patches, squares = sum(sizes), sum(n * n for n in sizes)
    embed = 0 if model.model_type in _OLD_TOWERS else tower.hidden * tower.patch_inputs
    weights = listed.tower_weights(tower, gated=tower.gated)
    side = tower.window_pixels
    if not in_pixels:  # whole merged tokens to a side
        side = side // tower.merge // tower.patch_size * tower.merge
    windowed = (tower.depth - tower.num_full) * patches * side**2
    per_patch = setup.embed * embed + setup.tower * weights + 6 * setup.tower_adapters
    return patches * per_patch + setup.tower_pairs * tower.hidden * (tower.num_full * squares + windowed)


def _setup(model: Architecture) -> _Setup:
    """Read the facts of VeOmni's rule off a ledger: whether the tower trains, and the adapters."""
    cost_model = model.cost_model
    if cost_model is None:
        return _Setup()
    tower = [p for p in cost_model.parameters if p.component.startswith("vision.")]
    trains = any(p.trainable for p in tower)
    adapters = [p for p in cost_model.parameters if is_adapter(p.name) and p.trainable]
    if not adapters:
        return _Setup() if trains or not tower else _Setup(tower=2, embed=2, tower_pairs=4)
    _check_targets(model, cost_model, adapters)
    of_tower = sum(p.numel for p in adapters if p.component.startswith("vision."))
    of_language = sum(p.numel for p in adapters) - of_tower
    if not trains:
        return _Setup(language=4, tower=2, embed=2, tower_pairs=4, adapters=of_language)
    return _Setup(language=4, tower=4, embed=2, adapters=of_language, tower_adapters=of_tower)


def _check_targets(model: Architecture, cost_model: CostModel, adapters: Iterable[Parameter]) -> None:
    """Refuse adapters on modules that its rule has no name for, or on some layers only, which it cannot be told."""
    if model.delta:
        raise NotExpressibleError(f"VeOmni's LoRA rule for the model type {model.model_type!r} is not kept here")
    targets = _TARGETS.get(model.model_type)
    if targets is None:
        raise NotExpressibleError(f"VeOmni has no LoRA rule for the model type {model.model_type!r}: it prints 0")
    hosts = {p.name.partition(".lora_")[0] for p in adapters}
    names = {host: next((name for name in targets if host.endswith(f".{name}")), None) for host in hosts}
    if unknown := sorted({host.rpartition(".")[2] for host, name in names.items() if name is None}):
        raise NotExpressibleError(
            f"VeOmni's LoRA rule does not know adapters on {', '.join(unknown)}: it prints 0. Known on "
            f"{model.model_type} are {', '.join(targets)}"
        )
    wanted = set(names.values())
    alike = {row.module for row in cost_model.rows if row.op == "linear" and not is_adapter(row.module)}
    for module in sorted(alike - hosts):
        if any(module.endswith(f".{name}") for name in wanted):
            raise NotExpressibleError(
                f"VeOmni's LoRA rule bills adapters in every module of a name, but {module} has none here"
            )
