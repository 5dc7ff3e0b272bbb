"""Change a stored cost model as training changes its model: add low-rank adapters, or bill gradients of its inputs."""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.count.cost_model import ALWAYS, CostModel, Gradient, Parameter, Row
from headway.errors import CostModelError, UsageError, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Sequence


def targets_of(model: CostModel, targets: Sequence[str] | None) -> set[str]:
    """Find the linear modules that adapters go on; all but the head when `targets` is None.

    Raises:
        UsageError: a target matches no linear module.
    """
    linear = {row.module: row for row in model.rows if row.features is not None}
    if targets is None:
        return {module for module, row in linear.items() if not row.component.endswith(".head")}
    chosen: set[str] = set()
    for target in targets:
        hits = {m for m in linear if m.rpartition(".")[2] == target or fnmatch.fnmatchcase(m, target)}
        if not hits:
            names = ", ".join(sorted({m.rpartition(".")[2] for m in linear}))
            raise UsageError(f"--lora target {target!r} matches no linear module of {model.name}; it has {names}.")
        chosen |= hits
    return chosen


def with_adapters(model: CostModel, rank: int, modules: set[str]) -> CostModel:
    """Add the rows of LoRA adapters; whatever a host weight feeds, its adapters feed too."""
    index = {p.name: i for i, p in enumerate(model.parameters)}
    parameters = [replace(p, trainable=False) for p in model.parameters]
    hosts: dict[str, tuple[int, int, int]] = {}  # module -> bits of its weight, of A and of B
    for module in dict.fromkeys(row.module for row in model.rows if row.module in modules):
        weight = index.get(f"{module}.weight")
        row = next(r for r in model.rows if r.module == module)
        if weight is None or row.features is None:
            raise CostModelError(f"{module} has no weight of its own that an adapter could follow.")
        fan_in, fan_out = row.features
        component = model.parameters[weight].component
        for letter, numel in (("A", fan_in * rank), ("B", fan_out * rank)):
            parameters.append(Parameter(f"{module}.lora_{letter}.weight", numel, numel, component))
        hosts[module] = (1 << weight, 1 << (len(parameters) - 2), 1 << (len(parameters) - 1))

    def extend(needs: int) -> int:
        for weight, a, b in hosts.values():
            if needs & weight:
                needs |= a | b
        return needs

    # B saves what A made, so checkpointing a block runs all of it again up to its last A
    last = {row.block: i for i, row in enumerate(model.rows) if row.module in hosts and row.block}
    rows: list[Row] = []
    for i, row in enumerate(model.rows):
        again = row.recomputed or i <= last.get(row.block, -1)
        gradients = tuple(replace(g, needs=extend(g.needs)) if g.phase == "dgrad" else g for g in row.gradients)
        rows.append(replace(row, gradients=gradients, recomputed=again))
        if row.module not in hosts or row.features is None:
            continue
        fan_in, fan_out = row.features
        _, a, b = hosts[row.module]
        calls, rest = divmod(row.forward, 2 * fan_in * fan_out)
        if rest:
            raise CostModelError(f"{row.module} does not cost a whole number of passes per unit of {row.driver}.")
        upstream = 0
        for g in gradients:
            upstream |= g.needs if g.phase == "dgrad" else 0
        down, up = 2 * fan_in * rank * calls, 2 * rank * fan_out * calls
        grads_a = (Gradient("wgrad", down, a), *([Gradient("dgrad", down, upstream)] if upstream else []))
        grads_b = (Gradient("wgrad", up, b), Gradient("dgrad", up, a | upstream))
        beside = replace(row, module=f"{row.module}.lora_A", forward=down, gradients=grads_a, features=None)
        rows.append(replace(beside, recomputed=again))
        rows.append(replace(beside, module=f"{row.module}.lora_B", forward=up, gradients=grads_b))
    return replace(model, rows=tuple(rows), parameters=tuple(parameters))


def reaching(model: CostModel, inputs: tuple[str, ...]) -> CostModel:
    """Bill the gradients on the way to inputs that require one; see `CostModel.with_input_gradients`."""
    traced = set(filter(None, model.source.get("input_gradients", "").split(", ")))
    missing = [name for name in inputs if name not in traced]
    if not missing:
        return model
    embeddings = [i for i, p in enumerate(model.parameters) if p.name == model.source.get("embeddings")]
    is_known = embeddings and "source" not in model.towers
    if unknown := [name for name in missing if name != "inputs_embeds" or not is_known]:
        raise WorkloadError(
            f"{', '.join(unknown)} requires a gradient, and what that costs is not known of {model.name}. Trace it "
            "with such inputs: trace(model, inputs=...) with arguments that require a gradient; or detach() them if "
            "nothing in front of the model is trained."
        )
    below = 1 << embeddings[0]  # what the embeddings flow into, `inputs_embeds` flows into

    def reached(gradient: Gradient) -> Gradient:
        flows = gradient.phase == "dgrad" and gradient.runs(below)
        return replace(gradient, needs=ALWAYS) if flows else gradient

    rows = tuple(replace(row, gradients=tuple(map(reached, row.gradients))) for row in model.rows)
    return replace(model, rows=rows, source=model.source | {"input_gradients": ", ".join(sorted(traced | {*inputs}))})
