"""Conventions that read the cost model's own rows: useful work, executed work, and PyTorch's own count."""

from dataclasses import replace
from typing import Any

from headway.conventions.architecture import Architecture
from headway.conventions.convention import PARTS, Number, Parts, Step
from headway.count import drivers
from headway.count.cost_model import CostModel
from headway.count.masks import full_pairs
from headway.count.modalities import media_towers
from headway.count.rows import Row
from headway.count.workload import Workload
from headway.errors import NotExpressibleError

_FLASH_BACKWARD = 2.5  # products of a flash kernel's backward over those of its forward: 5 matmuls against 2


def part_of(component: str) -> str:
    """Name the part of a bill that a component belongs to.

    >>> part_of("language.router"), part_of("vision.attention"), part_of("language.mlp")
    ('experts', 'vision', 'linear')
    """
    tower, _, part = component.partition(".")
    if tower in media_towers() and tower in PARTS:
        return tower
    return {"router": "experts"}.get(part, part if part in PARTS else "linear")


def useful(model: Architecture, step: Step) -> Parts:
    """Bill real tokens and allowed pairs, forward, dgrad and wgrad as autograd needs them (`docs/counting.md`).

    Not billed: padding, embedding look-ups, norms, recomputation.

    Source: `useful/1`, headway.count.cost_model.
    """
    parts = dict.fromkeys(PARTS, 0)
    for row in _cost_model(model).count(step.workload).rows:
        parts[part_of(row.name)] += row.total
    return parts


def useful_full_head(model: Architecture, step: Step) -> Parts:
    """Bill useful work with the head on every real token, also where the engine leaves out those without a label.

    Source: the head of PaLM's MFU, Chowdhery et al. 2022, appendix B: all parameters on every token.
    """
    return useful(model, replace(step, workload=step.workload.with_full_head()))


def hardware(model: Architecture, step: Step) -> Parts:
    """Bill the executed work: every slot, padding too, and the forward that checkpointing runs again.

    Attention is billed for the allowed pairs: a variable-length kernel skips padding. Not billed: a flash kernel's own
    recomputation of scores.

    Source: HFU of PaLM, Chowdhery et al. 2022, appendix B.
    """
    workload = step.workload
    padded = workload
    if workload.slots:
        source_tokens = [workload.sources.sum()] if workload.sources.size else ()
        media: dict[str, Any] = dict(workload.media)
        padded = Workload([workload.slots], sources=source_tokens, **media).with_counts(logits=workload.logits)
    real = _cost_model(model).count(workload, recompute=step.recompute)
    executed = {(row.name, row.driver): row for row in _cost_model(model).count(padded, recompute=step.recompute).rows}
    parts = dict.fromkeys(PARTS, 0)
    for row in real.rows:
        billed = executed[row.name, row.driver] if row.driver in ("tokens", "understood") else row
        parts[part_of(row.name)] += billed.total
        parts["recompute"] += billed.recompute
    return parts


def flop_counter(model: Architecture, step: Step) -> Parts:
    """Bill the work that FlopCounterMode sees in a step on CUDA with PyTorch's own flash kernels.

    Attention is the full square of each segment, backward 2.5 times forward (its five products); dense products on
    every slot; grouped expert products, recurrences (Triton kernels) and the flash-attn package are not seen at all.

    Source: pytorch/pytorch, torch/utils/flop_counter.py, sdpa_flop_count and sdpa_backward_flop_count, 2.13.
    """
    cost_model = _cost_model(model)
    workload = step.workload
    squares = full_pairs(workload.segments)
    parts: dict[str, Number] = dict.fromkeys(PARTS, 0)
    for row in cost_model.rows:
        if row.op in ("experts", "recurrence"):
            continue
        units = _units(row, workload, squares)
        backward: Number = sum(gradient.flops for gradient in row.gradients if gradient.runs(cost_model.trained))
        if row.op == "attention" and backward:
            backward = int(_FLASH_BACKWARD * row.forward)
        parts[part_of(row.component)] += units * (row.forward + backward)
    return parts


def _units(row: Row, workload: Workload, squares: int) -> int:
    if row.driver == "tokens":
        is_head = row.component == "language.head"
        return workload.logits if is_head and workload.logits is not None else workload.slots
    if row.op == "attention" and drivers.tower(row.driver) == "language":
        return squares
    return drivers.parse_driver(row.driver)(workload)


def _cost_model(model: Architecture) -> CostModel:
    if model.cost_model is None:
        raise NotExpressibleError(f"{model.name} was read from a configuration alone; this rule needs its cost model")
    return model.cost_model
