"""A forward's arguments as phantoms: shapes in the model's dtype, with the data of possible masks."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from headway.errors import TraceError
from headway.tracing.known_values import tensors
from headway.tracing.phantom import Phantom
from headway.tracing.scores import HIDDEN
from headway.tracing.unwrap import unsharded


def as_phantoms(value: Any) -> Any:
    """Replace the floats among arguments by phantoms that depend on the batch; data that may be a mask stay known.

    What requires a gradient still does.

    Raises:
        TraceError: an argument is a nested tensor, whose sizes no tensor without data can have.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, Phantom):
        return rebuilt(value, as_phantoms)
    if value.is_nested:
        raise TraceError(
            "an argument is a nested tensor, but a trace runs on shapes, and a nested tensor has none. Give a padded "
            "tensor with its mask, or a packed tensor with cumulative boundaries."
        )
    if not (value.is_floating_point() or value.is_complex()):
        return value
    full_tensor = unsharded(value)
    shape = Phantom(full_tensor.detach().to("meta"), fed=True)
    if _may_be_a_mask(full_tensor):
        shape.constant = full_tensor.detach().to("cpu")
    return _leaf(shape, value)


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Give the phantoms among arguments a model's dtype."""
    if not isinstance(value, Phantom):
        return rebuilt(value, lambda part: in_dtype(part, dtype))
    if not value.is_floating_point() or value.dtype == dtype:
        return value
    cast = Phantom(value.meta.to(dtype), fed=value.fed)
    cast.constant = None if value.constant is None else value.constant.to(dtype)
    return _leaf(cast, value)


def phantoms(value: Any) -> Iterator[Phantom]:
    """Iterate over the phantoms among arguments."""
    return (tensor for tensor in tensors(value) if isinstance(tensor, Phantom))


def asking(model: nn.Module, arguments: Any) -> Iterator[tuple[str, Phantom]]:
    """Find the phantoms among a forward's arguments that require a gradient, each with its argument's name."""
    if not isinstance(arguments, dict):
        values = arguments if isinstance(arguments, tuple | list) else (arguments,)
        arguments = inspect.signature(model.forward).bind(*values).arguments
    for name, value in arguments.items():
        yield from ((name, part) for part in phantoms(value) if part.requires_grad)


def on_device(value: Any, device: torch.device) -> Any:
    """Move the tensors among arguments to a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return rebuilt(value, lambda part: on_device(part, device))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the parts of a dictionary, a list, a tuple or a named one; anything else stays."""
    if isinstance(value, dict):
        return {name: change(part) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    return type(value)(map(change, value)) if isinstance(value, tuple | list) else value


def _leaf(shape: Phantom, source: torch.Tensor) -> Phantom:
    """Let a phantom ask for a gradient if its source does; not as a leaf, so that a model may write into it."""
    return shape.requires_grad_().clone() if source.requires_grad else shape  # type: ignore[return-value]  # a phantom's


def _may_be_a_mask(floats: torch.Tensor) -> bool:
    """Say whether floats could be a mask: each is 0 or 1, or some hide by -inf or by large numbers beside 0.

    Zeros alone are no mask: added they hide nothing, and they are what an example holds for want of values.
    """
    if floats.is_meta or floats.is_complex() or not floats.numel():
        return False
    zero, shown, hidden = floats == 0, floats == 1, floats <= HIDDEN
    if bool(shown.any()) and bool((zero | shown).all()):
        return True
    return bool(floats.isneginf().any()) or (bool(hidden.any()) and bool((hidden | zero).all()))
