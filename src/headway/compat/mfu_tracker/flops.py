"""Profiles under mfu-tracker's names: FLOPs of a sample, and of the forwards that a model runs while it is watched."""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from headway.count import CostModel, FlopCount, Workload
from headway.count.masks import causal_pairs, full_pairs
from headway.errors import HeadwayError, WorkloadError
from headway.meter.batches import input_gradients_of, read_or_copy, workload_of
from headway.meter.environment import device_of
from headway.tracing.classify import checkpointing_of
from headway.tracing.shapes import ShapeTraces, without_data
from headway.tracing.unwrap import unwrapped

_ONE_EXAMPLE = Workload([1])  # of a model without tokens, whose trace is of the very shapes that it is given


@dataclass(eq=False, slots=True)
class Forward:
    """One forward of a watched model.

    Attributes:
        watched: the model.
        batch: its workload, or copies of its arguments on their way from the device; of a model without tokens, its
            arguments without the data of floats; the error, where they could not be read.
        input_gradients: names of the arguments that require a gradient.
        autocast_dtype: dtype that autocast had; None without autocast.
        has_backward: whether its backward has begun.
    """

    watched: "WatchedModel"
    batch: Any
    input_gradients: tuple[str, ...]
    autocast_dtype: torch.dtype | None
    has_backward: bool = False

    def count(self, trainable: tuple[bool, ...], recompute: str, *, with_backward: bool) -> tuple[FlopCount, Workload]:
        """Count it, once its arguments have come from the device.

        Args:
            trainable: `requires_grad` of each parameter.
            recompute: as for `CostModel.count`.
            with_backward: count its backward too.

        Raises:
            HeadwayError: it cannot be counted.
        """
        if isinstance(self.batch, HeadwayError):
            raise self.batch
        cost_model = self.watched.cost_model(self.batch)
        parameters = zip(cost_model.parameters, trainable, strict=True)
        cost_model = replace(cost_model, parameters=tuple(replace(p, trainable=flag) for p, flag in parameters))
        workload = workload_of(self.batch, cost_model) if self.watched.takes_tokens else _ONE_EXAMPLE
        count = cost_model.with_input_gradients(self.input_gradients).count(
            workload, recompute=recompute if with_backward else "none", forward_only=not with_backward
        )
        return count, workload if self.watched.takes_tokens else Workload()


class WatchedModel:
    """A model whose forwards are noted down for the blocks that are open.

    The hook stays on the model: one that came and went would be no part of what torch.compile makes of it. Of a model
    that takes `input_ids`, one trace holds for every batch; any other is traced for each shape of its arguments.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device: torch.device = device_of(model) or torch.device("cpu")
        self.takes_tokens = "input_ids" in inspect.signature(unwrapped(model).forward).parameters
        self.traces = ShapeTraces(model)
        model.register_forward_hook(self._after_forward, with_kwargs=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def _after_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        blocks = [block for block in open_blocks if self in block.models]
        if not blocks:
            return
        forward = self.note(args, kwargs)
        for block in blocks:
            block.forwards.append(forward)

        def begin_backward(_gradient: torch.Tensor) -> None:
            forward.has_backward = True

        for tensor in tree_leaves(dict(output) if isinstance(output, Mapping) else output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Forward:
        """Note a forward down without waiting for the device; an error is kept, and raised when it is counted."""
        names = inspect.signature(unwrapped(self.model).forward).parameters
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        gradients = input_gradients_of(arguments) if self.takes_tokens and torch.is_grad_enabled() else ()
        autocast = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else None
        batch: Any = None
        try:
            if self.takes_tokens:
                _refuse_cached_keys(arguments)
                batch = read_or_copy(arguments, self.cost_model(None))
            else:  # traced when it is counted: here a mode of the loop would see it, and the clock runs
                batch = without_data(arguments)
        except HeadwayError as error:  # a loop is not ended by being watched
            batch = error
        return Forward(self, batch, gradients, autocast)

    def cost_model(self, arguments: Any) -> CostModel:
        """Trace the model, once; one without tokens for each shape of its arguments.

        Raises:
            TraceError: an operation cannot be explained.
        """
        return self.traces.of(None if self.takes_tokens else arguments)

    def setup(self) -> tuple[tuple[bool, ...], str]:
        """Read which parameters require a gradient now, and what is checkpointed."""
        inner = unwrapped(self.model)
        return tuple(parameter.requires_grad for parameter in inner.parameters()), checkpointing_of(inner)


class OpenBlock(Protocol):
    """A block under way."""

    models: tuple[WatchedModel, ...]
    forwards: list[Forward]


open_blocks: list[OpenBlock] = []  # the innermost last; backwards come from threads of their own


def watch(model: nn.Module, results: Any = None) -> WatchedModel:
    """Watch a model from now on; one that is watched already keeps its traces."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_hooks.values())
    watched = next((owner for owner in owners if isinstance(owner, WatchedModel)), None) or WatchedModel(model)
    watched.traces.results = results if results is not None else watched.traces.results
    if watched.takes_tokens:
        watched.cost_model(None)  # before a block's time begins
    return watched


class AttentionFlops(int):
    """FLOPs of one call of attention; see `flash_attn_flops`."""


class ProfiledFlops(int):
    """FLOPs of a sample, a number like any other, that remembers which models it was counted from.

    Handed to `track`, the models' forwards in the block are counted instead, so that a sample of another size than the
    batches does no harm. The sum of two profiles stands for both models; `flash_attn_flops` adds nothing, with a
    warning, since a profile has every attention already. Other arithmetic gives a bare number, taken as stated.
    """

    watched: tuple[WatchedModel, ...]

    def __new__(cls, flops: int, watched: tuple[WatchedModel, ...]) -> "ProfiledFlops":
        """Make the number of a sample."""
        self = super().__new__(cls, flops)
        self.watched = watched
        return self

    def __add__(self, other: Any) -> Any:
        if isinstance(other, ProfiledFlops):
            return ProfiledFlops(int(self) + int(other), tuple(dict.fromkeys((*self.watched, *other.watched))))
        if isinstance(other, AttentionFlops):
            message = "the profile has every attention of its model already: flash_attn_flops is not added to it."
            warnings.warn(message, stacklevel=2)
            return self
        return super().__add__(other)

    __radd__ = __add__

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)  # models do not travel with a number


def profile_flops(
    model: nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    with_backward: bool = True,
    results: Any = None,
) -> ProfiledFlops:
    """Count the useful FLOPs of one forward of a model, and of its backward, without running it.

    Exact by the convention `useful/1` (docs/counting.md). From here on the model's forwards can be counted in `track`
    blocks; call this before torch.compile has compiled it, or pass the compiled model.

    Args:
        model: any module; whatever wraps, compiles or shards it is left out of the count.
        args: a sample of the forward's arguments by position.
        kwargs: a sample of those by name.
        with_backward: whether the number includes the backward. A block counts those backwards that run.
        results: from which of its results the model's backward starts, as for `headway.trace`.

    Raises:
        TraceError: an operation of the model cannot be explained.
        WorkloadError: the sample does not say what it asks the model to compute.
        UsageError: the model lies on several devices.

    >>> int(profile_flops(nn.Linear(8, 4), (torch.zeros(2, 8),)))  # 2 * 2 * 8 * 4, and no gradient of the input
    256
    """
    watched = watch(model, results)
    forward = watched.note(args or (), kwargs or {})
    if watched.device.type == "cuda":
        torch.cuda.synchronize(watched.device)  # the copies of the sample have come
    count, _ = forward.count(*watched.setup(), with_backward=with_backward)
    return ProfiledFlops(count.total, (watched,))


def flash_attn_flops(
    batch_size: int,
    seq_len: int,
    num_heads: int,
    head_dim: int,
    *,
    causal: bool = True,
    with_backward: bool = False,
) -> AttentionFlops:
    """Count the FLOPs of one call of attention: scores and values, for the pairs that the mask allows.

    Source: 4 FLOPs per pair, head and element; sum over t of t = s (s + 1) / 2 causal pairs.

    >>> int(flash_attn_flops(batch_size=1, seq_len=3, num_heads=1, head_dim=2))  # 4 * 2 * (1 + 2 + 3)
    48
    """
    pairs = (causal_pairs if causal else full_pairs)([seq_len] * batch_size)
    return AttentionFlops(pairs * 4 * num_heads * head_dim * (3 if with_backward else 1))


def param_bytes(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Count the bytes of a model's parameters; tied ones once, and of a sharded model the whole's.

    >>> param_bytes(nn.Linear(8, 4))
    144
    """
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not trainable_only)


def _refuse_cached_keys(arguments: Mapping[str, Any]) -> None:
    """Refuse a forward that goes on from cached keys and values: its batch does not say how many there are."""
    cache, ids = arguments.get("past_key_values"), arguments.get("input_ids")
    if cache is None or ids is None or not hasattr(cache, "get_seq_length"):
        return
    if cache.get_seq_length() > ids.shape[1]:
        raise WorkloadError(
            "the model was called with past_key_values, as generation does: the keys that it reads are not in the "
            "batch. Leave generation out of the block, or count it with headway.Meter and Workload(..., past=...)."
        )
