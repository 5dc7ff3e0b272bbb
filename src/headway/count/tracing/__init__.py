"""Read a model's cost rows off its own forward and backward, run once on tensors without data.

`phantom` holds those tensors, `record`, `attention` and `recurrences` what is dispatched, `build` the model's phantom
twin, `inputs` what it is run on, `fit` finds each operation's driver, `classify` names its component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.count.cost_model import CostModel, Gradient, Parameter, Row
from headway.count.tracing import build, classify
from headway.count.tracing.attention import Seams
from headway.count.tracing.fit import Fitted, candidates, fit
from headway.count.tracing.inputs import backward_from, call, inputs_for
from headway.count.tracing.record import Recorder
from headway.count.tracing.replacing import stand_ins
from headway.errors import TraceError

if TYPE_CHECKING:
    from headway.count.tracing.operation import Operation

__all__ = ["trace"]


def trace(model_or_config: Any, *, inputs: Any = None, name: str | None = None) -> CostModel:
    """Read the cost model of a module, or of the transformers model that a configuration describes.

    The model runs forward and backward on shapes alone: seconds and a few hundred megabytes at any size. Which
    parameters a real model trains (`requires_grad`) is kept; `CostModel.freeze` and `lora` change it later.

    Args:
        model_or_config: an `nn.Module`, or a transformers configuration.
        inputs: not needed where forward takes `input_ids` and what transformers' towers take. Otherwise a function that
            makes the forward's arguments (a dictionary, or a tuple) from a `Workload`, so that each row finds the
            driver that it grows with; or one example of arguments, whose cost is then billed per segment. Its floats
            need no true values.
        name: of the cost model; the class's name when None.

    Raises:
        TraceError: an operation, mask or driver cannot be explained; the message names the module and the operation.

    Source: DESIGN section 2; what is counted is in docs/counting.md.

    >>> from torch import nn, zeros
    >>> perceptron = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> cost = trace(perceptron, inputs=lambda workload: (zeros(1, workload.tokens, 8),))
    >>> [(row.module, row.driver, row.forward) for row in cost.rows]
    [('0', 'tokens', 512), ('2', 'tokens', 512)]
    """
    is_model = isinstance(model_or_config, nn.Module)
    model = build.twin_of_model(model_or_config) if is_model else build.twin_of_config(model_or_config)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    parameters = build.number_parameters(model)
    build.use_seams(model)
    model.train().requires_grad_(True)
    made = inputs_for(model, inputs)

    workloads = made.workloads()
    runs = [_run(model, made.arguments(workloads[0]), backward=True)]
    windows = build.window_lengths(model, any(op.by_hand for op in runs[0]))
    windows += [int(op.driver.rpartition(":")[2]) for op in runs[0] if op.driver.startswith("pairs:sliding")]
    workloads = made.workloads(max(windows, default=0))
    runs += [_run(model, made.arguments(workload), backward=False) for workload in workloads[1:]]
    _check_alike(runs)

    known = candidates(workloads, made.drivers)
    explained = [(op, f) for i, op in enumerate(runs[0]) for f in fit([run[i] for run in runs], workloads, known)]
    operations, fitted = [op for op, _ in explained], [f for _, f in explained]
    names = classify.components(model, operations, fitted)
    shares = classify.expert_shares(operations, fitted)
    homes = classify.parameter_components(operations, names, parameters)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    return CostModel(
        name or type(model).__name__,
        tuple(_row(model, op, f, n) for op, f, n in zip(operations, fitted, names, strict=True)),
        tuple(
            Parameter(p, _numel(shapes[p]), classify.active(p, shapes[p], shares), home, p in trainable)
            for p, home in zip(parameters, homes, strict=True)
        ),
        _source(model),
        tuple(f"{path} (it never ran)" for path in classify.idle_modules(model, operations, parameters)),
    )


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _run(model: nn.Module, arguments: Any, *, backward: bool) -> list[Operation]:
    """Run a model once and return its operations."""
    blocks = classify.checkpointable_blocks(model)

    def block_of(path: str) -> str:
        while path and path not in blocks:
            path = path.rpartition(".")[0]
        return path

    with (
        Recorder(model, block_of) as recorder,
        Seams(recorder),
        stand_ins(model, recorder),
        torch.set_grad_enabled(backward),
    ):
        output = call(model, arguments)
        if backward:
            backward_from(output)
            recorder.check_backward()
            model.zero_grad(set_to_none=True)
    return recorder.operations


def _check_alike(runs: list[list[Operation]]) -> None:
    """Refuse a model whose operations change with the workload; rows could not be told apart."""
    for other in runs[1:]:
        if len(other) != len(runs[0]):
            raise TraceError(
                f"the model runs {len(runs[0])} counted operations on one workload and {len(other)} on another: "
                "it loops over the data, and its cost per token is not fixed."
            )
        for a, b in zip(runs[0], other, strict=True):
            if (a.module, a.kind) != (b.module, b.kind):
                raise TraceError(
                    f"module {a.module} runs {a.kind} on one workload where {b.module} runs {b.kind} on another."
                )


def _row(model: nn.Module, op: Operation, fitted: Fitted, component: str) -> Row:
    gradients = []
    for phase, flops, sources in op.products if op.backward_flops else ():
        scaled = fitted.scale * flops
        if scaled.denominator != 1:
            raise TraceError(f"the backward of {op.kind} in module {op.module} is not a whole number of FLOPs.")
        if sources:
            gradients.append(Gradient(phase, int(scaled), sources))  # type: ignore[arg-type]  # dgrad or wgrad
    module = model.get_submodule(op.module)
    linear = op.kind == "matmul" and len(op.weight) == 2 and _is_linear(module)
    return Row(
        op.module,
        "linear" if linear else op.kind,
        component,
        fitted.driver,
        fitted.forward,
        tuple(gradients),
        op.block,
        bool(op.block) and op.saves_after,
        (op.weight[0], op.weight[1]) if linear else None,
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _source(model: Any) -> dict[str, str]:
    source = {"class": type(model).__name__, "torch": torch.__version__.partition("+")[0]}
    if hasattr(getattr(model, "config", None), "model_type"):
        import transformers

        source |= {"model_type": model.config.model_type, "transformers": transformers.__version__}
    return source
