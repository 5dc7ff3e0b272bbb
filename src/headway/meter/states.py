"""Bytes of optimizer state per parameter: read off the state that is there, or off a first step on shapes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.count.tracing.phantom import phantom

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

_UNSEEN = (torch.optim.LBFGS, torch.optim.SparseAdam)  # their step needs a closure, or gradients of single rows
# how a step runs, which changes nothing about what it keeps; on shapes each must run plainly
_PLAIN: dict[str, Any] = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


def state_bytes(optimizer: Optimizer) -> dict[int, int]:
    """Map the id of each parameter that an optimizer updates to the bytes of its state on this rank.

    State is what lies beside the parameter and is not a single number. Where the first step is still to come, one of
    PyTorch's own optimizers is run for one step on shapes, and one with a method `state_bytes_of(parameter)` is asked;
    of others (and of LBFGS and SparseAdam), what is not there yet is not counted.
    """
    own: Any = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's wrapper
    if hasattr(own, "state_bytes_of"):
        return {id(p): own.state_bytes_of(p) for group in own.param_groups for p in group["params"]}
    found = {}
    for group in own.param_groups:
        for parameter in group["params"]:
            state, device = own.state.get(parameter), local(parameter).device
            if not state and type(own).__module__.startswith("torch.optim") and not isinstance(own, _UNSEEN):
                state, device = _after_a_step(own, group, local(parameter)), torch.device("cpu")  # where shapes live
            found[id(parameter)] = _bytes(state or {}, device)
    return found


def is_sharded(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a DTensor."""
    dtensor: Any = sys.modules.get("torch.distributed.tensor")  # where nobody imported it, nothing is sharded
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    held: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]  # a DTensor
    return held


def _after_a_step(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> Mapping[str, Any]:
    """Run one step of an optimizer of the same kind and settings on a parameter without data."""
    twin = nn.Parameter(phantom(parameter))
    twin.grad = phantom(parameter)
    settings = {name: value for name, value in group.items() if name != "params"}
    kind: Any = type(optimizer)
    stepped = kind([{**settings, **{name: value for name, value in _PLAIN.items() if name in group}, "params": [twin]}])
    stepped.step()
    state: Mapping[str, Any] = stepped.state[twin]
    return state


def _bytes(state: Mapping[str, Any], device: torch.device) -> int:
    tensors = (local(value) for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
    return sum(tensor.nbytes for tensor in tensors if tensor.device == device)
