"""Change the rows of a cost model as training changes its model: add LoRA adapters, or bill gradients of its inputs."""

import fnmatch
from collections.abc import Sequence
from dataclasses import replace

from headway.count.rows import ALWAYS, Gradient, Parameter, Row
from headway.errors import CostModelError, UsageError
from headway.words import Argument

NEW_ROWS = "new_rows"
"""Name of the rows of new tokens that learn beside a frozen embedding or head, within its module."""


def is_adapter(name: str) -> bool:
    """Say whether a module or parameter is of a LoRA adapter, by the names that peft gives and the counted ones have.

    Rows of new tokens that learn beside frozen ones are too.

    >>> [is_adapter(f"layers.0.q_proj.{name}") for name in ("lora_A", "lora_B.default.weight", "base_layer.weight")]
    [True, True, False]
    """
    return any(part.startswith("lora_") or part == NEW_ROWS for part in name.split("."))


def targets_of(rows: Sequence[Row], targets: Sequence[str] | None, name: str) -> set[str]:
    """Find the linear modules that adapters go on; all but the head when `targets` is None.

    Raises:
        UsageError: a target matches no linear module.
    """
    linear = {row.module: row for row in rows if row.features is not None}
    if targets is None:
        return {module for module, row in linear.items() if not row.component.endswith(".head")}
    chosen: set[str] = set()
    for target in targets:
        hits = {m for m in linear if m.rpartition(".")[2] == target or fnmatch.fnmatchcase(m, target)}
        if not hits:
            names = sorted({m.rpartition(".")[2] for m in linear})
            raise UsageError(
                Argument("targets"),
                f" {target!r} matches no linear module of {name}. The model has {', '.join(names)}.",
                value=target,
                choices=names,
            )
        chosen |= hits
    return chosen


def with_adapters(
    rows: Sequence[Row], parameters: Sequence[Parameter], rank: int, modules: set[str]
) -> tuple[tuple[Row, ...], tuple[Parameter, ...]]:
    """Add the rows and parameters of LoRA adapters; products that need a host's weight need its adapters too.

    Args:
        rows: of the cost model.
        parameters: of the cost model; all but the adapters' come back frozen.
        rank: inner dimension of the adapters.
        modules: linear modules that get one.

    Raises:
        CostModelError: a module has no weight of its own.
    """
    # two parameters for each linear module that gets an adapter, numbered after the model's own
    index = {p.name: i for i, p in enumerate(parameters)}
    extended = [replace(p, trainable=False) for p in parameters]
    hosts: dict[str, tuple[int, int, int]] = {}  # module -> bits of its weight, of A and of B
    for module in dict.fromkeys(row.module for row in rows if row.module in modules):
        weight = index.get(f"{module}.weight")
        row = next(r for r in rows if r.module == module)
        if weight is None or row.features is None:
            raise CostModelError(f"{module} has no weight of its own that an adapter could follow.")
        fan_in, fan_out = row.features
        component = parameters[weight].component
        for letter, numel in (("A", fan_in * rank), ("B", fan_out * rank)):
            extended.append(Parameter(f"{module}.lora_{letter}.weight", numel, numel, component))
        hosts[module] = (1 << weight, 1 << (len(extended) - 2), 1 << (len(extended) - 1))

    # A gradient that needs a host's weight needs its adapters' weights too.
    def extend(needs: int) -> int:
        for weight, a, b in hosts.values():
            if needs & weight:
                needs |= a | b
        return needs

    # B saves what A made, so checkpointing a block runs all of it again up to its last A
    last = {row.block: i for i, row in enumerate(rows) if row.module in hosts and row.block}
    adapted: list[Row] = []
    for i, row in enumerate(rows):
        again = row.recomputed or i <= last.get(row.block, -1)
        gradients = tuple(replace(g, needs=extend(g.needs)) if g.phase == "dgrad" else g for g in row.gradients)
        adapted.append(replace(row, gradients=gradients, recomputed=again))

        # a row for A (W's input to the rank) and one for B (the rank to W's output), as often as the module is called
        if row.module not in hosts or row.features is None:
            continue
        fan_in, fan_out = row.features
        _, a, b = hosts[row.module]
        calls, remainder = divmod(row.forward, 2 * fan_in * fan_out)
        if remainder:
            raise CostModelError(f"{row.module} does not cost a whole number of passes per unit of {row.driver}.")
        # A's input asks for a gradient where W's does; B's input is A's output, which asks for one once A is trained
        upstream = 0
        for g in gradients:
            upstream |= g.needs if g.phase == "dgrad" else 0
        # FLOPs per unit: 2 x in x rank of A, 2 x rank x out of B, and as many for each of their gradients
        down, up = 2 * fan_in * rank * calls, 2 * rank * fan_out * calls
        grads_a = (Gradient("wgrad", down, a), *([Gradient("dgrad", down, upstream)] if upstream else []))
        grads_b = (Gradient("wgrad", up, b), Gradient("dgrad", up, a | upstream))
        adapter = replace(row, module=f"{row.module}.lora_A", forward=down, gradients=grads_a, features=None)
        adapted.append(replace(adapter, recomputed=again))
        adapted.append(replace(adapter, module=f"{row.module}.lora_B", forward=up, gradients=grads_b))
    return tuple(adapted), tuple(extended)


def reaching(rows: Sequence[Row], embedding: int) -> tuple[Row, ...]:
    """Bill the gradients on the way down to `inputs_embeds`, whatever is trained.

    Args:
        rows: of the cost model.
        embedding: number of the parameter that embeds text: what it flows into, `inputs_embeds` flows into.
    """

    def reached(gradient: Gradient) -> Gradient:
        flows = gradient.phase == "dgrad" and gradient.runs(1 << embedding)
        return replace(gradient, needs=ALWAYS) if flows else gradient

    return tuple(replace(row, gradients=tuple(map(reached, row.gradients))) for row in rows)
