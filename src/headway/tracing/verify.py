"""Hold a ledger against PyTorch's own counter, on a real step of a real model, module by module.

The step runs with eager attention and eager experts, whose products PyTorch's formulas see singly. Some differences
are then expected, and `differences` says which. What runs inside a recurrence is told apart from the rest of its
module, which must agree.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from headway.count.cost_model import CostModel
from headway.count.workload import Workload
from headway.tracing import trace
from headway.tracing.build import configs, run_every_layer
from headway.tracing.counted_step import RECURRENCE, CountedStep
from headway.tracing.differences import Billed, explain
from headway.tracing.inputs.model_inputs import call, inputs_for
from headway.tracing.results import Results
from headway.tracing.stand_ins import watched


@dataclass(frozen=True)
class Line:
    """One module's FLOPs in one step, by the ledger and by PyTorch."""

    module: str  # path
    op: str  # kind of operation, by the ledger
    ledger: tuple[int, int]  # forward and backward FLOPs by the ledger
    counted: tuple[int, int]  # forward and backward FLOPs that PyTorch's formulas give for what was dispatched
    explanation: str | None  # why the two differ; "" where they are equal, None where nothing explains it


def verify(
    model: nn.Module, workload: Workload, *, inputs: Any = None, results: Results = None
) -> tuple[list[Line], set[str]]:
    """Run one real step of a model under PyTorch's formulas and compare it with the model's ledger.

    Args:
        model: a real model with weights, on any device; its attention and experts are run eagerly, and its gradients
            are left as they were.
        workload: one segment, with the grids that lie in it.
        inputs: as for `trace`.
        results: as for `trace`.

    Returns:
        A line per module that either side bills, in the ledger's order, and the operations that PyTorch cannot see.

    Raises:
        TraceError: the model has no complete ledger.
    """
    cost = trace(model, inputs=inputs, results=results)
    eager = configs(model)
    before = [(c._attn_implementation, c._experts_implementation) for c in eager]
    for config in eager:
        config._attn_implementation = config._experts_implementation = "eager"
    drops = run_every_layer(model)
    held = [parameter.grad for parameter in model.parameters()]
    counted = CountedStep(model)
    try:
        arguments = inputs_for(model, inputs).arguments(workload, next(model.parameters()).device)
        with counted, watched(model, counted.recurrence):
            _real_backward(call(model, arguments), results)
    finally:
        for config, (attention, experts) in zip(eager, before, strict=True):
            config._attn_implementation, config._experts_implementation = attention, experts
        for holder, name, value in drops:
            setattr(holder, name, value)
        for parameter, grad in zip(model.parameters(), held, strict=True):
            parameter.grad = grad
    counted.gather({row.module for row in cost.rows if row.op == "experts"})
    return _compare(cost, counted, workload, model), counted.unseen


def _real_backward(output: Any, results: Results) -> None:
    """Run the real step's backward, as a training loop would.

    From what is found apart from what `trace` starts from, so that both cannot share a mistake: in the real output, by
    the way in which PyTorch itself opens containers, and by what really requires a gradient.
    """
    if results is None and hasattr(output, "trained"):
        results = output.trained
    loss = _item(output, "loss")
    if callable(results):
        output = results(output)
    elif results is not None:
        output = [_item(output, name) for name in ([results] if isinstance(results, str) else results)]
    elif isinstance(loss, torch.Tensor) and loss.requires_grad:
        output = loss
    starts = [leaf for leaf in _leaves(output, {}) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if starts:
        sum(start.abs().sum() for start in starts).backward()  # type: ignore[union-attr]  # a tensor, as there are some


def _leaves(output: Any, opened: dict[int, Any]) -> Iterator[Any]:
    """List the leaves of PyTorch's own containers, and those of the objects among them, such as dataclasses."""
    for leaf in tree_leaves(output):
        yield leaf
        if id(leaf) not in opened and hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | nn.Module):
            opened[id(leaf)] = leaf
            yield from _leaves(vars(leaf), opened)


def _item(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def _compare(cost: CostModel, counted: CountedStep, workload: Workload, model: nn.Module) -> list[Line]:
    rows: defaultdict[str, list[Any]] = defaultdict(list)
    for row in cost.rows:
        rows[row.module + RECURRENCE if row.op == "recurrence" else row.module].append(row)
    lines = []
    for module in dict.fromkeys([*rows, *counted.forward, *counted.outer, *counted.backward]):
        billed = Billed(module, tuple(rows[module]), cost.trained, workload)
        theirs = (counted.forward[module] + counted.outer[module], counted.backward[module])
        op = rows[module][0].op if rows[module] else "-"
        lines.append(Line(module, op, billed.flops, theirs, explain(billed, counted, model)))
    return lines
