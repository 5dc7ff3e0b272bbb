"""Tools that choose a formula by the type of the model: the terms in which their formulas differ, and a table of each.

A tool's table names a formula for every model type that it knows, as its own dispatch does. So a term that one of its
formulas has, such as a window, is billed for the types of that formula and for no others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from headway.conventions.architecture import Architecture, Vision
from headway.conventions.convention import Number, Step
from headway.errors import NotExpressibleError
from headway.plugins import hooks_of_all


@dataclass(frozen=True, slots=True)
class Formula:
    """One formula of a language model. The plain one is of gated MLPs, heads as configured, and full attention."""

    short_heads: bool = False  # heads of hidden / heads features, whatever the configuration says
    wide_keys: bool = False  # key-value heads as many as query heads, whatever the configuration says
    value_heads: bool = False  # a pair costs its query-key and its value features, not the former twice
    matrices: int = 3  # number of matrices of a dense MLP
    four_wide: bool = False  # a dense MLP is four times as wide as the model, whatever the configuration says
    norms: bool = False  # norms of queries and keys billed as matrices
    # layers with experts: none, every one, those of the configuration, or half of them, each expert as wide as an MLP
    experts: Literal["none", "every", "configured", "half"] = "none"
    router: bool = True  # whether routers are billed
    shared: Literal["none", "all", "one"] = "none"  # shared experts billed
    shared_gate: bool = False  # the one feature that gates them too
    # keys of a windowed layer: all, min(s, W) of each query, or the pairs that the mask allows
    windows: Literal["ignored", "cut", "exact"] = "ignored"
    # FLOPs that a token costs in one layer of the delta rule, per element of a head's state; 0 for a formula without it
    state: int = 0
    square_state: bool = False  # the state is taken as value size squared
    gated: bool = False  # queries come with a gate as wide as they are
    tower: bool = False  # whether the vision tower is billed
    whole_packs: bool = False  # a pack is one sequence, whose square is billed, whatever samples it holds


Formulas: TypeAlias = Mapping[str, Formula | str]
"""A tool's table: model type -> its formula, or why its function has no number for the type."""


def chosen(model: Architecture, formulas: Formulas, tool: str) -> Formula:
    """Choose a model's formula as a tool does.

    Raises:
        NotExpressibleError: the tool does not list the type, its function fails on it, or its formula is not kept here.
    """
    formula = formulas.get(model.model_type) or formulas_of_families(tool).get(model.model_type)
    if formula is None:
        raise NotExpressibleError(f"{tool} does not list the model type {model.model_type!r}: it prints 0")
    if isinstance(formula, str):
        raise NotExpressibleError(f"{tool}'s formula for the model type {model.model_type!r} {formula}")
    return formula


@cache
def formulas_of_families(tool: str) -> Formulas:
    """The rows of a tool's table that are of installed families."""
    return {kind: row for tables in hooks_of_all("formulas") for kind, row in tables.get(tool, {}).items()}


def squares(step: Step, formula: Formula) -> Number:
    """Sum the squares of the sequences that a formula takes a step for: samples, or packs as one."""
    return step.pack_square_sum if formula.whole_packs else step.square_sum


def weights(model: Architecture, formula: Formula, tokens: int) -> dict[str, Number]:
    """Bill the layers' matrices, 6 FLOPs per element and token: projections, MLPs and experts."""
    half = model.layers // 2 if model.num_experts else 0
    moe_layers = {"none": 0, "every": model.layers, "configured": model.moe_layers, "half": half}[formula.experts]
    width = 4 * model.hidden if formula.four_wide else model.ffn
    dense = (model.layers - moe_layers) * formula.matrices * model.hidden * width
    delta = model.delta if formula.state else None
    attending = model.layers - (delta.layers if delta else 0)
    linear = attending * _projections(model, formula) + dense
    recurrence = 0
    if delta is not None:
        wide, narrow = delta.weights
        linear += delta.layers * (model.hidden * wide + narrow)
        sizes = delta.value_heads * delta.value_dim * (delta.value_dim if formula.square_state else delta.key_dim)
        recurrence = formula.state * tokens * delta.layers * sizes
    if formula.norms:
        linear += model.layers * (model.hidden + model.kv_heads * _head_dim(model, formula))
    experts = 6 * tokens * moe_layers * _experts(model, formula)
    return {"linear": 6 * tokens * linear, "experts": experts, "recurrence": recurrence}


def attention(model: Architecture, formula: Formula, pairs: Number, *, rate: int) -> Number:
    """Bill scores and values of all layers' pairs together, `rate` FLOPs per head, feature and pair."""
    head_dim = _head_dim(model, formula)
    both = model.qk_dim + model.v_dim if formula.value_heads else 2 * head_dim
    return rate * model.heads * both * pairs


def pairs(model: Architecture, formula: Formula, lengths: list[int]) -> int:
    """Sum a formula's query-key pairs over layers and segments, without halving them for the causal mask."""
    squares = sum(s * s for s in lengths)
    if formula.windows == "ignored":
        return (model.layers - (model.delta.layers if model.delta else 0)) * squares
    total = 0
    for window in model.windows:
        if window is None:
            total += squares
        elif formula.windows == "cut":
            total += sum(s * min(s, window) for s in lengths)
        else:
            heads = [min(s, window) for s in lengths]
            total += sum(m * (m + 1) // 2 + (s - m) * window for s, m in zip(lengths, heads, strict=True))
    return total


def pictures(step: Step) -> list[int]:
    """Patches of each frame, which these tools take for one attention sequence of the tower."""
    return [h * w for t, h, w in step.workload.grids.tolist() for _ in range(t)]


def tower_weights(tower: Vision, *, gated: bool) -> int:
    """Matrix elements that these tools bill for every patch, the mergers' too; without the patch embedding."""
    merged = tower.hidden * tower.merge**2
    block = tower.hidden * (4 * tower.hidden + (3 if gated else 2) * tower.ffn)
    return tower.depth * block + tower.num_mergers * merged * (merged + tower.out)


def table(model: Architecture, tokens: int) -> int:
    """FLOPs of the head, 6 per element and token; of the embedding too, where it is billed as a second head."""
    return 6 * tokens * model.vocab * model.hidden


def _head_dim(model: Architecture, formula: Formula) -> int:
    return model.hidden // model.heads if formula.short_heads else model.qk_dim


def _projections(model: Architecture, formula: Formula) -> int:
    """Matrix elements of one layer's attention projections."""
    if model.mla is not None and not formula.short_heads:
        return model.attention_weights
    keys = model.heads if formula.wide_keys else model.kv_heads
    queries = (3 if formula.gated else 2) * model.heads
    return model.hidden * _head_dim(model, formula) * (queries + 2 * keys)


def _experts(model: Architecture, formula: Formula) -> int:
    """Matrix elements that a token meets in one layer of experts."""
    expert_ffn = model.ffn if formula.experts == "half" else model.expert_ffn
    shared = {"none": 0, "all": model.shared_ffn, "one": expert_ffn}[formula.shared]
    routers = model.num_experts if formula.router else 0
    routers += formula.shared_gate
    return model.hidden * (formula.matrices * (model.top_k * expert_ffn + shared) + routers)
