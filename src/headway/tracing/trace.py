"""`trace`: read a model's cost rows off its own forward and backward, run once on tensors without data."""

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn

from headway.count.cost_model import CostModel
from headway.count.rows import ALWAYS, Gradient, Parameter, Row
from headway.count.workload import Workload
from headway.errors import HeadwayError, TraceError
from headway.tracing import build, classify
from headway.tracing.arguments import asking, in_dtype
from headway.tracing.classify import wraps_a_layer
from headway.tracing.fit import DriverFit, candidates, fit, strided_drivers
from headway.tracing.inputs.denoiser import Denoiser
from headway.tracing.inputs.model_inputs import ExampleInputs, alternate_forwards, call, inputs_for, without_arguments
from headway.tracing.operation import Operation
from headway.tracing.quantised import note_on_quantised
from headway.tracing.record import Recorder
from headway.tracing.repeats import are_alike, check_loops, merge_experts, merge_repeats
from headway.tracing.results import Results, start_backward
from headway.tracing.stand_ins import recording

_MOST_CHARACTERS = 300  # most characters of an error's own text
_MOST_TRACED = 8  # cost models that a process keeps; one has some megabytes
_TRACED: dict[tuple[type, str], CostModel] = {}  # by a configuration's class and JSON, oldest first


def trace(model_or_config: Any, *, inputs: Any = None, results: Results = None, name: str | None = None) -> CostModel:
    """Read the cost model of a module, or of the transformers model that a configuration describes.

    The model runs forward and backward on shapes alone: seconds and a few hundred megabytes at any size. Which
    parameters a real model trains (`requires_grad`) is kept; `CostModel.freeze` and `lora` change it later.

    Args:
        model_or_config: an `nn.Module`, or a transformers configuration.
        inputs: not needed where forward takes `input_ids` and what transformers' towers take. Otherwise a function that
            makes the forward's arguments (a dictionary, or a tuple) from a `Workload`, so that each row finds the
            driver that it grows with; or one example of arguments, whose cost is then billed per segment. Its floats
            need no true values. Those that require a gradient have it billed, whatever of the model is trained.
        results: from what backward starts: names of the output's fields or keys, or a function that picks tensors out
            of it. When None, the loss if the output holds one that depends on parameters, else every float in it.
        name: of the cost model; the class's name when None.

    Raises:
        TraceError: an operation, mask or driver cannot be explained; the message names the module and the operation.
            Whatever else the model or `inputs` raise is its cause.

    Source: DESIGN section 2; what is counted is in docs/counting.md.

    >>> from torch import nn, zeros
    >>> perceptron = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> cost = trace(perceptron, inputs=lambda workload: (zeros(1, workload.tokens, 8),))
    >>> [(row.module, row.driver, row.forward) for row in cost.rows]
    [('0', 'tokens', 512), ('2', 'tokens', 512)]
    """
    try:
        with _random_states_kept():
            return _traced(model_or_config, inputs, results, name)
    except TraceError as error:
        is_model = isinstance(model_or_config, nn.Module)
        adapted = [path for path, m in model_or_config.named_modules() if wraps_a_layer(m)] if is_model else []
        if not adapted:
            raise
        with suppress(TraceError), _random_states_kept():  # a second failure has another cause than the adapters
            cost = _traced(model_or_config, inputs, results, name, adapters=False)
            missing = (
                f"the adapters of {adapted[0]} and {len(adapted) - 1} more layers, of which only the base "
                f"counts: {error}"
            )
            warnings.warn(f"The ledger of {cost.name} leaves out {missing}", RuntimeWarning, stacklevel=2)
            return replace(cost, unknown=(*cost.unknown, missing))
        raise
    except HeadwayError as error:  # raised by a user's function, or within the model
        raise TraceError(str(error)) from error
    except Exception as error:  # foreign code may raise anything: its module and operation are named where it ran
        raise failed_on_shapes(error, model_or_config) from error


def trace_config(config: Any) -> CostModel:
    """Trace the model of a transformers configuration; an equal configuration is traced once in a process.

    Raises:
        TraceError: as `trace`.
    """
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _TRACED:
        while len(_TRACED) >= _MOST_TRACED:
            del _TRACED[next(iter(_TRACED))]
        _TRACED[key] = trace(config)
    return _TRACED[key]


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Leave the random numbers of a loop as they were: its model draws some as it is traced, for dropout of layers."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that loops use
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 - as above


def _traced(
    model_or_config: Any, inputs: Any, results: Results, name: str | None, *, adapters: bool = True
) -> CostModel:
    # the model on shapes alone; every parameter is trained for now, so that each row shows all of its gradients
    is_model = isinstance(model_or_config, nn.Module)
    model = build.twin_of_model(model_or_config) if is_model else build.twin_of_config(model_or_config)
    for layer in [] if adapters else filter(wraps_a_layer, model.modules()):
        layer.forward = partial(_base_alone, layer)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    for parameter in model.parameters():  # products of weights of 8 bits have no gradient
        parameter.requires_grad_(parameter.dtype.itemsize > 1)
    parameters = build.prepare_twin(model)
    model_inputs = inputs_for(model, inputs)

    # every operation with the driver that its cost grows with
    runs, workloads, mask_drivers = _watch(model, model_inputs, results)
    names = [*model_inputs.drivers]
    if len(runs) > 1:  # one example shows no growth: it is billed by what its form of input says, segments
        names += mask_drivers
    explained = _explain(model, model_inputs, results, runs, workloads, names)
    operations, fitted = [op for op, _ in explained], [f for _, f in explained]

    # components of operations and parameters, and how much of each parameter one token uses
    only = "denoiser" if isinstance(model_inputs, Denoiser) else ""
    if isinstance(model_inputs, ExampleInputs) and not model_inputs.is_text:
        only = "other"
    components = classify.components(model, operations, fitted, only=only)
    shares = classify.expert_shares(operations, fitted)
    unvisited = classify.unvisited_experts(model, shares)
    homes = classify.parameter_components(operations, components, parameters)
    shapes = [tuple(p.shape) for _, p in model.named_parameters()]
    in_use = classify.stacks_in_use(operations, fitted, shapes)
    if text_alone := getattr(model_inputs, "text_alone", None):  # a token meets one of several copies of the language
        apart = _run(model, text_alone(), backward=False).met_nothing
        in_use |= {i: 0 for i, home in enumerate(homes) if apart >> i & 1 and home.startswith("language.")}

    # source of the ledger, and parts of the model that the ledger leaves out
    source = _source(model, parameters) | model_inputs.notes
    if is_model and (note := note_on_quantised(model_or_config)):
        source["quantised"] = note
    if differentiated := {name for name, _ in asking(model, model_inputs.arguments(workloads[0]))}:
        source["input_gradients"] = ", ".join(sorted(differentiated))
    idle = classify.idle_modules(model, operations, parameters, runs[0].parameters_read)
    if idle:
        idle, notes = _elsewhere(model, model_inputs, workloads[0], runs[0], parameters, idle)
        source |= notes
    name = name or type(model).__name__
    selected = [
        f"the work on rows that {path or type(model).__name__} selects by comparing floats"
        for path in runs[0].selecting
    ]
    for missing in selected:
        note = f"The ledger of {name} leaves out {missing}, because its size depends on the data"
        warnings.warn(note, RuntimeWarning, stacklevel=3)
    beyond = 1 << len(parameters)  # source bit of inputs that ask for a gradient
    return CostModel(
        name,
        tuple(_row(model, op, f, part, beyond) for (op, f), part in zip(explained, components, strict=True)),
        tuple(
            Parameter(p, math.prod(s), classify.active(p, s, shares, unvisited, in_use.get(i)), home, p in trainable)
            for i, (p, s, home) in enumerate(zip(parameters, shapes, homes, strict=True))
        ),
        source,
        (*(f"{path} (it never ran)" for path in idle), *selected),
    )


def _watch(model: nn.Module, model_inputs: Any, results: Results) -> tuple[list[Recorder], list[Workload], list[str]]:
    """Run a model on workloads that tell its drivers apart.

    Returns:
        What it ran on each; the workloads; and drivers of masks that its settings may mean.
    """
    workloads = model_inputs.workloads()
    runs = [_run(model, model_inputs.arguments(workloads[0]), backward=True, results=results)]
    first = runs[0].operations
    unnamed = any(op.by_hand or op.masked for op in first)
    windows, blocks = build.window_lengths(model, unnamed)
    windows += [int(op.driver.rpartition(":")[2]) for op in first if op.driver.startswith("pairs:sliding")]
    longest = max(windows, default=0)
    if unnamed and not build.configs(model):
        longest = _longest_that_runs(model, model_inputs, longest)
    workloads = model_inputs.workloads(longest)
    for workload in workloads[1:]:
        runs.append(_run(model, model_inputs.arguments(workload), backward=False))
        if not are_alike(runs):  # a loop over the data: its repeats are told apart by their gradients
            runs[1:] = [
                _run(model, model_inputs.arguments(other), backward=True, results=results) for other in workloads[1:]
            ]
            break
    sliding = [f"pairs:sliding:{window}" for window in dict.fromkeys(windows) if window > 0]
    return runs, workloads, sliding + [f"pairs:compressed:{size}" for size in blocks]


def _elsewhere(
    model: nn.Module, model_inputs: Any, workload: Workload, first: Recorder, parameters: Sequence[str], idle: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Look for idle modules in alternate forward passes.

    Returns:
        Modules that stay unexplained; and notes for the ledger's source: `without` names arguments whose own modules
        are left out of it, `unused` modules that no argument reaches: a decoder of images, say.
    """
    operations, parameters_read, tried, without = [*first.operations], first.parameters_read, [], []
    for names, arguments in alternate_forwards(model, model_inputs, workload):
        run = _run(model, arguments, backward=False)
        operations, parameters_read = operations + run.operations, parameters_read | run.parameters_read
        tried += names
        idle, before = classify.idle_modules(model, operations, parameters, parameters_read), idle
        without += names if idle != before else []
    notes = {"without": ", ".join(without)} if without else {}
    if idle and build.configs(model) and not without_arguments(model_inputs, workload, tried):
        return [], notes | {"unused": ", ".join(idle)}
    return idle, notes


def _longest_that_runs(model: nn.Module, model_inputs: Any, longest: int) -> int:
    """Halve a window until the model runs on longer segments; none can exceed its table of positions, or its mask."""
    while longest:
        try:
            _run(model, model_inputs.arguments(model_inputs.workloads(longest)[-1]), backward=False)
        except TraceError as error:
            if error.__cause__ is None:  # an operation that no length makes readable
                raise
            longest //= 2
        else:
            break
    return longest


def _explain(
    model: nn.Module,
    model_inputs: Any,
    results: Results,
    runs: list[Recorder],
    workloads: Sequence[Workload],
    names: Sequence[str],
) -> list[tuple[Operation, DriverFit]]:
    check_loops(runs, [workload.tokens for workload in workloads])
    operations = [run.operations for run in runs] if are_alike(runs) else merge_repeats(runs)
    strided = strided_drivers(operations, workloads, model_inputs.strided) if model_inputs.strided else ()
    driver_units = candidates(workloads, [*names, *strided])
    grows = all(len({op.forward_flops for op in ops}) > 1 for ops in zip(*operations, strict=True))
    doubled = [0] * len(operations[0])
    if len(runs) > 1 and not grows and hasattr(model_inputs, "doubled"):
        doubled = _doubled(model, model_inputs, results, runs, workloads[0], operations[0])
    repeats = zip(zip(*operations, strict=True), doubled, strict=True)
    return [(ops[0], f) for ops, flops in repeats for f in fit(ops, workloads, driver_units, flops)]


def _doubled(
    model: nn.Module,
    model_inputs: Any,
    results: Results,
    runs: Sequence[Recorder],
    workload: Workload,
    operations: Sequence[Operation],
) -> list[int]:
    """Count each operation's FLOPs in a pass over two segments: work on activations doubles, that on weights does not.

    Args:
        model: a phantom twin.
        model_inputs: of which two segments can be made.
        results: as for `trace`.
        runs: on one segment each.
        workload: of the first.
        operations: of the first, repeats merged where runs are not alike.

    Returns:
        FLOPs; zeros where two segments cannot be made, or do more together than each alone.
    """
    backward = any(op.backward_flops for op in runs[-1].operations)
    try:
        second = _run(model, model_inputs.doubled(workload), backward=backward, results=results)
        ran = second.operations if are_alike(runs) else merge_repeats([runs[0], second])[-1]
    except Exception:  # noqa: BLE001  # a user's function, or a tower, may make inputs of one segment only
        ran = []
    costs = [(op.module, op.kind, op.forward_flops) for op in operations]
    doubled = [(op.module, op.kind, op.forward_flops) for op in ran]
    is_apart = len(ran) == len(operations) and all(
        b[:2] == a[:2] and b[2] in (a[2], 2 * a[2]) for a, b in zip(costs, doubled, strict=True)
    )
    return [flops for *_, flops in doubled] if is_apart else [0] * len(operations)


def _run(model: nn.Module, arguments: Any, *, backward: bool, results: Results = None) -> Recorder:
    modules = list(model.modules())
    arguments = in_dtype(arguments, build.common_dtype(model))
    recorder = Recorder(model, classify.finder_of_blocks(classify.checkpointable_blocks(model)))
    recorder.beyond = 1 << sum(1 for _ in model.parameters())
    for _, tensor in asking(model, arguments):
        tensor.sources = recorder.beyond  # like one more parameter, which is always trained

    # any error of the model's own code is named by the module and the operation in which it was raised
    try:
        with recording(model, recorder), torch.set_grad_enabled(backward):
            output = call(model, arguments)
            if backward:
                start_backward(output, model, results)
                recorder.check_backward()
                model.zero_grad(set_to_none=True)
    except HeadwayError:
        raise
    except Exception as error:
        raise failed_on_shapes(error, model, recorder) from error
    # a model that exchanges its modules cannot be traced again on another workload
    if any(new is not old for new, old in zip_longest(model.modules(), modules)):
        raise TraceError(
            f"{type(model).__name__} swaps its own modules by the length of its input, so its cost depends on "
            "earlier inputs. Fix its attention type in its configuration."
        )
    merge_experts(model, recorder)
    return recorder


def _base_alone(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the layer inside an adapter, whose parameters then ask for the gradients that the adapter would."""
    out = layer.get_base_layer()(*args, **kwargs)
    own = dict(layer.named_parameters())
    for name, parameter in own.items():
        out = out if "base_layer" in name else out + parameter.sum() * 0
    return out


def _row(model: nn.Module, op: Operation, fitted: DriverFit, component: str, beyond: int) -> Row:
    gradients = []
    for phase, flops, sources in op.products if op.backward_flops else ():
        scaled = fitted.scale * flops
        if scaled.denominator != 1:
            raise TraceError(
                f"the backward of {op.kind} in module {op.module or '(the model)'} is not a whole number of FLOPs."
            )
        if sources:
            needs = ALWAYS if sources & beyond else sources
            gradients.append(Gradient(phase, int(scaled), needs))  # type: ignore[arg-type]  # dgrad or wgrad
    module = model.get_submodule(op.module)
    linear = op.kind == "matmul" and len(op.weight) == 2 and classify.is_linear(module)
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
        int(cached) if (cached := fitted.scale * op.cached).denominator == 1 else 0,
    )


def _source(model: Any, parameters: Sequence[str]) -> dict[str, str]:
    source = {"class": type(model).__name__, "torch": torch.__version__.partition("+")[0]}
    if hasattr(getattr(model, "config", None), "model_type"):
        import transformers

        source |= {"model_type": model.config.model_type, "transformers": transformers.__version__}
        with suppress(AttributeError, NotImplementedError):  # some models do not say where their tokens enter
            weight = model.get_input_embeddings().weight
            source["embeddings"] = parameters[weight.sources.bit_length() - 1]
    return source


def _unlike_widths(model: Any) -> str | None:
    """Say which tower's features are not as wide as the tokens whose places they take; None where widths agree."""
    config = getattr(model, "config", model)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    width = getattr(text, "hidden_size", None)
    for name in getattr(config, "sub_configs", ()):
        features = getattr(getattr(config, name, None), "out_hidden_size", None)
        if isinstance(features, int) and isinstance(width, int) and features != width:
            return (
                f"{name}.out_hidden_size is {features:,}, and hidden_size of the text is {width:,}. Features replace "
                "tokens, so both widths must be equal. Change one of the two in config.json."
            )
    return None


def failed_on_shapes(error: Exception, model: Any, recorder: Recorder | None = None) -> TraceError:
    """Describe an error that was raised while a model was traced.

    Args:
        error: what was raised.
        model: which was traced, or its configuration.
        recorder: of the run that failed; None where no module ran yet.
    """
    place, operation = type(model).__name__, ""
    if recorder is not None and recorder.failure is not None and recorder.failure[0] is error:
        _, path, operation = recorder.failure
        place = f"module {path or '(the model)'} ({type(model.get_submodule(path)).__name__})"
    text = " ".join(str(error).split())
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
    if "match" in text and (widths := _unlike_widths(model)) is not None:
        return TraceError(f"{type(model).__name__} cannot run: {widths}")
    happened = f"fails in {operation}" if operation else "raises an error"
    return TraceError(
        f"{place} {happened} when it runs on shapes alone: {type(error).__name__}: "
        f"{text.rstrip('.') or 'no reason'}. If the model runs on such inputs outside a trace, replace this "
        "operation for the trace, or give the right inputs with trace(model, inputs=...). Then pass that cost model "
        "to the meter (cost_model=)."
    )
