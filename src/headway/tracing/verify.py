"""Hold a ledger against PyTorch's own counter, on a real step of a real model, module by module.

The step runs with eager attention and eager experts, whose products PyTorch's formulas see singly. Some differences
are then expected, and `differences` says which. What runs inside a recurrence is told apart from the rest of its
module, which must agree.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn

from headway.count.cost_model import CostModel
from headway.count.workload import Workload
from headway.tracing import trace
from headway.tracing.build import configs, run_every_layer
from headway.tracing.counted_step import RECURRENCE, CountedStep
from headway.tracing.differences import Billed, explain
from headway.tracing.inputs.model_inputs import backward_from, call, inputs_for
from headway.tracing.stand_ins import watched


@dataclass(frozen=True)
class Line:
    """One module's FLOPs in one step, by the ledger and by PyTorch."""

    module: str  # path
    op: str  # kind of operation, by the ledger
    ledger: tuple[int, int]  # forward and backward FLOPs by the ledger
    counted: tuple[int, int]  # forward and backward FLOPs that PyTorch's formulas give for what was dispatched
    explanation: str | None  # why the two differ; "" where they are equal, None where nothing explains it


def verify(model: nn.Module, workload: Workload, *, inputs: Any = None) -> tuple[list[Line], set[str]]:
    """Run one real step of a model under PyTorch's formulas and compare it with the model's ledger.

    Args:
        model: a real model with weights, on any device; its attention and experts are run eagerly, and its gradients
            are left as they were.
        workload: one segment, with the grids that lie in it.
        inputs: as for `trace`.

    Returns:
        A line per module that either side bills, in the ledger's order, and the operations that PyTorch cannot see.

    Raises:
        TraceError: the model has no complete ledger.
    """
    cost = trace(model, inputs=inputs)
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
            backward_from(call(model, arguments))
    finally:
        for config, (attention, experts) in zip(eager, before, strict=True):
            config._attn_implementation, config._experts_implementation = attention, experts
        for holder, name, value in drops:
            setattr(holder, name, value)
        for parameter, grad in zip(model.parameters(), held, strict=True):
            parameter.grad = grad
    counted.gather({row.module for row in cost.rows if row.op == "experts"})
    return _compare(cost, counted, workload, model), counted.unseen


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
