"""The start of a model's backward: its loss, or every float that it returns, or the results that the caller names."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headway.errors import TraceError
from headway.tracing.phantom import Phantom

# names of an output's fields or keys, or a function that picks tensors out of the output; None for what training
# would start from by itself
Results = str | Sequence[str] | Callable[[Any], Any] | None


def start_backward(output: Any, model: nn.Module, results: Results = None) -> None:
    """Run backward on shapes from training's starting point; a forward without gradients has no backward.

    Raises:
        TraceError: as `trained_results`.
    """
    tensors = trained_results(output, model, results)
    if not any(isinstance(tensor, Phantom) for tensor in tensors):
        raise TraceError(
            "the model's forward computes on real tensors during the trace, because a patched method calls the "
            "original model. Trace the model before it is patched, and pass that cost model."
        )
    starts = [tensor for tensor in tensors if tensor.requires_grad]
    if starts:
        torch.autograd.backward(starts, [torch.ones_like(tensor) for tensor in starts])


def trained_results(output: Any, model: nn.Module, results: Results = None) -> list[torch.Tensor]:
    """Find the floats that training differentiates.

    These are the results that the caller names. Else the loss, if the output has one that depends on parameters; and
    else every float in the output. Intermediate results beside the logits, such as hidden states, add nothing: their
    gradients flow through operations that the logits' gradients pass as well.

    Args:
        output: of a forward on shapes.
        model: whose parameters are numbered.
        results: as for `trace`.

    Raises:
        TraceError: there are no floats; a result that the caller names is not there; or the loss leaves matrices
            without a gradient that other results depend on, so that it may be a part of what is trained (the
            commitment loss of a codec, a language model's loss beside a value head).
    """
    if results is not None:
        return _floats_or_error(_chosen(output, results))
    if fields := getattr(output, "trained", ()):  # an architecture of Headway's own names what its losses are made of
        return _floats_or_error([output[name] for name in fields])
    tensors = _floats_or_error(output)
    loss = _field(output, "loss")
    losses = [t for t in floats_in(loss) if t.requires_grad]
    if not losses:
        return tensors
    missed = reached(tensors) & ~reached(losses)
    names = [name for i, (name, p) in enumerate(model.named_parameters()) if missed >> i & 1 and p.dim() > 1]
    if names:
        raise TraceError(
            f"the loss that {type(output).__name__} holds does not depend on {names[0]}, but other results of the "
            'model do. If training starts from the loss alone, set results="loss". Otherwise name all trained '
            'results, as in results=("loss", "logits").'
        )
    return losses


def floats_in(output: Any) -> list[torch.Tensor]:
    """List the floats in an output, each once: in dictionaries, sequences, dataclasses and other plain objects."""
    return list(_walk(output, {}))


def _floats_or_error(output: Any) -> list[torch.Tensor]:
    tensors = floats_in(output)
    if not tensors:
        raise TraceError(
            f"the model returns {type(output).__name__} without a tensor of floats to start backward from."
        )
    return tensors


def _walk(value: Any, visited: dict[int, Any]) -> Iterator[torch.Tensor]:
    if value is None or isinstance(value, str | bytes | int | float | type | nn.Module) or id(value) in visited:
        return
    visited[id(value)] = value  # held: its id stays its own
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _walk(part, visited)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from _walk(part, visited)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name, None), visited)
    elif not callable(value):  # a distribution, a cache: what it holds
        for part in [*getattr(value, "__dict__", {}).values()]:
            yield from _walk(part, visited)


def _field(output: Any, name: str) -> Any:
    """Return a field or key of an output; None where it has none."""
    if isinstance(output, Mapping):
        return output.get(name)
    return getattr(output, name, None) if not isinstance(output, torch.Tensor) else None


def _chosen(output: Any, results: Any) -> list[Any]:
    if callable(results):
        return [results(output)]
    names = [results] if isinstance(results, str) else [*results]
    values = [_field(output, name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not floats_in(value):
            fields = [*output] if isinstance(output, Mapping) else [*getattr(output, "__dict__", {})]
            raise TraceError(
                f"results={results!r}: the model returns {type(output).__name__} without floats named {name}. "
                f"It holds {', '.join(map(str, fields)) or 'no names; give a function of the output'}."
            )
    return values


def reached(tensors: Sequence[torch.Tensor]) -> int:
    """Collect the source bits of the parameters that the gradients of some tensors reach."""
    bits = 0
    for tensor in tensors:
        if isinstance(tensor, Phantom) and tensor.requires_grad:
            bits |= tensor.sources
    return bits
