"""`track`: the FLOPs of a block of anyone's loop against the clock, as a context manager or around a function."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from headway.compat.mfu_tracker.blocks import ListedBlock, StatedBlock, TrackedBlock, WatchedBlock, ledger_of
from headway.compat.mfu_tracker.flops import ProfiledFlops
from headway.compat.mfu_tracker.gpu_spec import (
    GPUSpec,
    as_spec,
    check_devices,
    check_number,
    default_device,
    get_gpu_spec,
)
from headway.compat.mfu_tracker.results import Clock, UtilizationResult
from headway.count import CostModel
from headway.errors import UsageError
from headway.meter import Meter

P = ParamSpec("P")
R = TypeVar("R")

_PAGE_DTYPE = "fp16"  # what mfu-tracker takes where none is given
_PLAIN_BACKWARD = 2  # over the forward, without recomputation


class track:  # noqa: N801 - it is called as a function is, like contextlib's closing
    """Measure what a block of a loop, or each call of a function, makes of the hardware.

    What is tracked says where the FLOPs come from:

    * a model, or a profile of one (`profile_flops`): the forwards of the model that run in the block, with the batches
      that they are really given, and their backwards if those run in it too;
    * a `CostModel`, or a `Meter`: the batches that the block is told of, as `batch=` or by `result.count(batch)`. A
      block is then a step of the meter;
    * a number: it is taken as the FLOPs of the block.

    Nothing waits for the device before a number of the result is read. An exception passes through; the result of that
    block has no numbers.

    Args:
        flop_count: one of the above.
        param_bytes: bytes of the weights, read once a pass; those of a tracked model's parameters when None.
        hfu_flop_count: FLOPs with recomputation, stated; read off the model's checkpointing when None.
        num_tokens: tokens of the block, stated; those of the batches when None.
        dtype: dtype of the matrix products, "bf16", "fp16", "fp32", "tf32", "fp8", "fp4" or "int8". That of autocast,
            or else of the weights, when None; "fp16" for a number and a cost model.
        num_gpus: devices that share the FLOPs of the block. What a profile or a model counts is this process's, so
            it is 1 under DDP and FSDP.
        device: that runs the block; the model's, or the accelerator at hand, when None.
        spec: what one device can do, a `GPUSpec` or mfu-tracker's; looked up when None.
        batch: a `Workload`, or a forward's arguments by name, to count instead of watching forwards.
        recompute: activation checkpointing, as for `CostModel.count`; read off the model when None.
        backward_factor: the backward with its recomputation over the forward, stated by hand for HFU alone; 2 means no
            recomputation. It never enters MFU.

    Raises:
        UsageError: a number below zero, a model on several devices, or options that contradict what is tracked.
        UnknownDeviceError: no peak is known for the device or the dtype.

    >>> with track(model, dtype="bf16") as result:                     # doctest: +SKIP
    ...     model(**batch).loss.backward()
    >>> result.mfu                                                     # doctest: +SKIP
    0.41
    >>> step = track(model)(step)       # each call is a block; step.last is the newest result    # doctest: +SKIP
    """

    def __init__(
        self,
        flop_count: int | float | nn.Module | CostModel | Meter,
        param_bytes: float | None = None,
        *,
        hfu_flop_count: int | float | None = None,
        num_tokens: int | None = None,
        dtype: str | torch.dtype | None = None,
        num_gpus: int = 1,
        device: torch.device | str | None = None,
        spec: GPUSpec | None = None,
        batch: Any = None,
        recompute: str | None = None,
        backward_factor: float | None = None,
    ) -> None:
        stated = {"param_bytes": param_bytes, "hfu_flop_count": hfu_flop_count, "num_tokens": num_tokens}
        for name, value in stated.items():
            if value is not None:
                check_number(value, name, name.partition("_")[2])
        check_devices(num_gpus)
        if check_backward_factor(backward_factor) is not None and recompute is not None:
            raise UsageError("backward_factor and recompute both say what is recomputed: give one of them.")
        needs_model = {"batch": batch, "recompute": recompute, "backward_factor": backward_factor}
        self._source = _source(
            flop_count, recompute, [name for name, value in needs_model.items() if value is not None]
        )
        own = self._source
        if own.spec is not None and (num_gpus != 1 or any(x is not None for x in (dtype, spec, device))):
            raise UsageError("a Meter has its own peak: leave dtype, spec, device and num_gpus out.")
        self._device = torch.device(device) if device is not None else own.device or default_device()
        self._spec = as_spec(spec) if spec is not None else own.spec or get_gpu_spec(self._device)
        self._dtype = dtype if dtype is not None else own.dtype
        if isinstance(self._dtype, str):
            self._spec.peak(self._dtype)  # an unknown one is an error before the block runs, not after
        self._batch = batch
        self._open: list[UtilizationResult] = []
        counts_hfu = isinstance(hfu_flop_count, ProfiledFlops) and own.counts_recompute
        self._options: dict[str, Any] = {
            "num_gpus": num_gpus,
            "param_bytes": own.param_bytes if param_bytes is None else lambda: param_bytes,
            "num_tokens": num_tokens,
            "hfu_flops": None if counts_hfu else hfu_flop_count,
            "backward_factor": backward_factor,
        }

    def __enter__(self) -> UtilizationResult:
        block = self._source.make_block()
        block.__enter__()
        if self._batch is not None and isinstance(block, ListedBlock):
            block.count(self._batch, forward_only=not torch.is_grad_enabled())
        result = UtilizationResult(block, Clock(self._device), self._spec, self._dtype, **self._options)
        self._open.append(result)
        return result

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self._open.pop().end(kind)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Track each call of a function; the newest result is its attribute `last`."""

        @functools.wraps(function)
        def tracked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self as tracked.last:  # type: ignore[attr-defined]  # a function's attribute
                return function(*args, **kwargs)

        return tracked


def check_backward_factor(*given: float | None) -> float | None:
    """Check a backward factor that may be given under several names.

    Returns:
        The one that is given, or None.

    Raises:
        UsageError: it is below 2, or given more than once.
    """
    factors = [factor for factor in given if factor is not None]
    if len(factors) > 1:
        raise UsageError("backward_factor and hfu_backward_factor are the same: give one of them.")
    if factors and not _PLAIN_BACKWARD <= factors[0] < math.inf:
        raise UsageError(
            f"backward_factor={factors[0]!r} must be at least 2: a backward costs twice a forward, and recomputation "
            "comes on top. Leave it out, and recomputation is read off the model."
        )
    return factors[0] if factors else None


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the FLOPs of a block come from, and what goes with it."""

    make_block: Callable[[], TrackedBlock]
    dtype: str | torch.dtype
    device: torch.device | None = None
    param_bytes: Callable[[], float] | None = None
    spec: GPUSpec | None = None
    counts_recompute: bool = True


def _source(tracked: Any, recompute: str | None, given: Sequence[str]) -> _Source:
    if isinstance(tracked, nn.Module):
        tracked = ProfiledFlops(0, (ledger_of(tracked),))
    if isinstance(tracked, ProfiledFlops):
        return _of_ledgers(tracked, recompute, counts_batches="batch" in given)
    if isinstance(tracked, Meter):
        if recompute is not None:
            raise UsageError("a Meter has its own recomputation: leave recompute out.")
        peak = tracked.peak
        spec = GPUSpec(peak.name, tracked.device, {peak.dtype: peak.flops_per_s})
        make = partial(ListedBlock, tracked.cost_model, tracked.recompute, tracked)
        return _Source(make, peak.dtype, tracked.device, spec=spec)
    if isinstance(tracked, CostModel):
        return _Source(partial(ListedBlock, tracked, recompute or "none"), _PAGE_DTYPE)
    if not isinstance(tracked, int | float):
        raise UsageError(
            f"track() got {type(tracked).__name__}: give a model, a profile of one, a CostModel, a Meter, or a number "
            "of FLOPs."
        )
    check_number(tracked, "flop_count", "FLOPs")
    if given:
        raise UsageError(
            f"track() got a bare number of FLOPs, for which {' and '.join(given)} cannot take effect: track a model, a "
            "profile of one, or a cost model."
        )
    return _Source(partial(StatedBlock, tracked), _PAGE_DTYPE, counts_recompute=False)


def _of_ledgers(profile: ProfiledFlops, recompute: str | None, *, counts_batches: bool) -> _Source:
    ledgers, first = profile.ledgers, profile.ledgers[0]
    make: Callable[[], TrackedBlock] = partial(WatchedBlock, ledgers, profile.added, recompute)
    if counts_batches:
        if len(ledgers) > 1 or not first.takes_tokens or profile.added:
            raise UsageError(
                "batch= says what one model that takes input_ids computes, and nothing else: leave it out, and the "
                "forwards in the block are counted."
            )
        again = recompute if recompute is not None else first.setup.read().recompute()
        make = partial(ListedBlock, first.cost_model(), again)
    return _Source(
        make, first.dtype or _PAGE_DTYPE, first.device, lambda: sum(ledger.param_bytes for ledger in ledgers)
    )
