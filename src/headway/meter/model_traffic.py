"""Read off a model and its optimizer the bytes that each parameter makes one rank move: dtypes, shards, state.

Bytes of optimizer state per parameter: read off the state that is there, or off a first step on shapes.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.count import CostModel
from headway.errors import UsageError
from headway.meter.clock import sharded_groups
from headway.meter.memory_traffic import (
    ForwardTraffic,
    ParameterBytes,
    Traffic,
    elements_met,
    forward_traffic_of,
    of_towers,
    weights_read,
)
from headway.tracing import trace, unwrap
from headway.tracing.activations import saved_activations
from headway.tracing.phantom import phantom
from headway.tracing.quantised import represented_shapes
from headway.tracing.unwrap import is_sharded, local


@dataclass(frozen=True, slots=True)
class _RankParameter:
    """One parameter as a rank holds it."""

    parameter: torch.Tensor  # tensor that the optimizer updates; one rank's shard where it is sharded
    dtype: torch.dtype  # dtype in which forward sees the parameter
    sharded: bool  # whether it is gathered for forward and backward
    numel: int  # numbers that it holds, or stands for where it is bytes

    @property
    def itemsize(self) -> float:
        """Bytes of a number as forward reads it."""
        return self.dtype.itemsize * self.parameter.numel() / max(1, self.numel)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole parameter as forward sees it."""
        return self.parameter.numel() * self.dtype.itemsize

    @property
    def local_bytes(self) -> int:
        """Bytes of the tensor that this rank updates."""
        return local(self.parameter).nbytes


def traffic_of(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    cost_model: CostModel | None = None,
    recompute: str = "none",
    autocast: torch.dtype | None = None,
    compiled: bool | None = None,
    inputs: Any = None,
    results: Any = None,
) -> Traffic:
    """Find the bytes that one rank must move for a model: weights, gradients, optimizer state and saved activations.

    Args:
        model: as it is trained: wrapped by DDP, sharded by `fully_shard`, compiled, with frozen parts or adapters.
        optimizer: what updates it, or several; without, no update is counted. Its state is read as it is after a
            first step; of PyTorch's own optimizers it is known before.
        cost_model: the model's ledger; traced when None.
        recompute: activation checkpointing, as for `CostModel.count`.
        autocast: dtype of `torch.autocast` around forward.
        compiled: whether `torch.compile` or fused kernels run it, which save less than the plain operations do; seen
            on the modules when None.
        inputs: as for `trace`.
        results: as for `trace`.

    Raises:
        TraceError: the model cannot be traced.
        UsageError: the ledger is of another model, or ranks hold parts of one product (tensor parallelism).
    """
    # parameters as this rank holds them, against those of the ledger
    plain = unwrap.unwrapped(model)
    cost = trace(model, inputs=inputs, results=results) if cost_model is None else cost_model
    parameters = _parameters_of_rank(plain)
    if [h.numel for h in parameters] != [p.numel for p in cost.parameters]:
        raise UsageError(
            f"the cost model {cost.name} has other parameters than the {type(plain).__name__} at hand: trace the model "
            "as it is trained, adapters included, or leave cost_model out."
        )
    # activations in the dtypes that forward sees
    saved = saved_activations(
        plain,
        inputs=inputs,
        dtypes={id(p): h.dtype for p, h in zip(plain.parameters(), parameters, strict=True)},
        autocast=autocast,
        products_only=_is_compiled(model) if compiled is None else compiled,
        results=results,
    )
    always, towers = _parts(cost, parameters, recompute, autocast, saved.reached, _updated(optimizer))
    return Traffic(always, towers, saved.rows, saved.left_out)


def forward_traffic(model: nn.Module, cost_model: CostModel) -> ForwardTraffic | None:
    """Find the bytes that a forward without a backward moves on one rank, generation with a cache included.

    Args:
        model: as it runs, wrapped and sharded.
        cost_model: its ledger.

    Returns:
        Bytes by part; None where ranks hold parts of one product, or the ledger is of another model.
    """
    try:
        parameters = _parameters_of_rank(unwrap.unwrapped(model))
    except UsageError:
        return None
    if [h.numel for h in parameters] != [p.numel for p in cost_model.parameters]:
        return None
    # keys and values have the type of most weights
    floats = [h for h in parameters if h.dtype.is_floating_point]
    itemsize = max((h.parameter.numel(), h.dtype.itemsize) for h in floats)[1] if floats else 0
    return forward_traffic_of(cost_model, [h.itemsize for h in parameters], itemsize)


def _parts(
    cost: CostModel,
    parameters: Sequence[_RankParameter],
    recompute: str,
    autocast: torch.dtype | None,
    reached: int,
    state: dict[int, int],
) -> list[ParameterBytes]:
    """Add up bytes by part: parameters that every micro-batch uses, and parameters that only images or sound use."""
    trained = sum(1 << i for i, h in enumerate(parameters) if h.parameter.requires_grad)
    # bits of the parameters that products read, by phase
    phases = weights_read(cost, trained, recompute)
    gated = of_towers(cost, phases)
    cast = autocast.itemsize if autocast else sys.maxsize
    pairs = zip(parameters, cost.parameters, strict=True)
    sizes = [round(elements_met(p) * min(h.itemsize, cast)) for h, p in pairs]
    parts = []
    # Parameters that every micro-batch uses, then those that need pictures or sound.
    for group in (~gated, gated):
        forward, dgrad, recomputed = (sum(n for i, n in enumerate(sizes) if (bits & group) >> i & 1) for bits in phases)
        with_gradient = [h for i, h in enumerate(parameters) if (reached & group) >> i & 1]
        updated = [h for h in with_gradient if id(h.parameter) in state]
        parts.append(
            ParameterBytes(
                forward,
                dgrad,
                recomputed,
                gradients=sum(h.whole_bytes if h.sharded else 2 * h.local_bytes for h in with_gradient),
                gradients_of_step=sum(h.local_bytes if h.sharded else -h.local_bytes for h in with_gradient),
                gradients_of_update=sum(h.local_bytes for h in updated),
                update=2 * sum(h.local_bytes + state[id(h.parameter)] for h in updated),
            )
        )
    return parts


def _parameters_of_rank(model: nn.Module) -> list[_RankParameter]:
    """List a model's parameters as this rank holds them, tied ones once."""
    gathered: dict[int, Any] = {}
    for module in model.modules():
        for group in sharded_groups(module):
            for shard in group.fsdp_params:
                for parameter in (shard.sharded_param, getattr(shard, "_unsharded_param", None)):
                    gathered[id(parameter)] = shard
    stands_for = {
        f"{path}.{name}": math.prod(shape)
        for path, module in model.named_modules()
        for name, shape in represented_shapes(module).items()
    }
    parameters = []
    for name, parameter in model.named_parameters():
        numel = stands_for.get(name, parameter.numel())
        shard = gathered.get(id(parameter))
        if shard is None and not is_sharded(parameter):
            parameters.append(_RankParameter(parameter, parameter.dtype, sharded=False, numel=numel))
        elif shard is not None and not shard.is_dtensor:
            sharded = shard.sharded_param
            dtype = shard.mp_policy.param_dtype if sharded.is_floating_point() else None
            parameters.append(_RankParameter(sharded, dtype or sharded.dtype, sharded=True, numel=numel))
        else:
            raise UsageError(
                f"{name} is split over ranks that share one product (tensor or expert parallelism): which activations "
                "and weights each of them moves is not known here. MBU is counted on one rank, under DDP and under "
                "fully_shard."
            )
    return parameters


def _updated(optimizers: Any) -> dict[int, int]:
    """Map each parameter's id to the bytes of its optimizer state on this rank."""
    if optimizers is None:
        return {}
    bytes_of: dict[int, int] = {}
    for optimizer in [optimizers] if hasattr(optimizers, "param_groups") else optimizers:
        bytes_of |= state_bytes(optimizer)
    return bytes_of


def _is_compiled(model: nn.Module) -> bool:
    return any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in model.modules())


# Optimizers whose step needs a closure, or gradients of single rows.
_UNSEEN = (torch.optim.LBFGS, torch.optim.SparseAdam)
# Settings of how a step runs, which change nothing about the state; on shapes each must run plainly.
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
    bytes_of = {}
    for group in own.param_groups:
        for parameter in group["params"]:
            state, device = own.state.get(parameter), local(parameter).device
            if not state and type(own).__module__.startswith("torch.optim") and not isinstance(own, _UNSEEN):
                # Shapes live on the CPU.
                state, device = _after_a_step(own, group, local(parameter)), torch.device("cpu")
            bytes_of[id(parameter)] = _bytes(state or {}, device)
    return bytes_of


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
