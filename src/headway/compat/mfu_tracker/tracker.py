"""`track`: the FLOPs of a block of a loop against the clock."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from headway.compat.mfu_tracker.flops import Forward, ProfiledFlops, WatchedModel, open_blocks, param_bytes, watch
from headway.compat.mfu_tracker.gpu import get_gpu_spec
from headway.count import FlopCount, FlopRow, Workload
from headway.devices import Peak
from headway.devices.lookup import dtype_label
from headway.errors import UsageError
from headway.meter import clock
from headway.meter.utilisation import Utilisation

_CPU = torch.device("cpu")  # where "fp32" means "fp32"; `GPUSpec.peak_tflops` knows where it means TF32
_MBU_MESSAGE = (
    "result.mbu is a floor: the weights alone, read once in each forward and each backward of the block. For the MBU "
    "of steps, with gradients, optimizer and activations, use headway.Meter(model, optimizer=optimizer)."
)


class Numbers(NamedTuple):
    """Numbers of a block. Fractions, never percent; NaN where a number is not known."""

    mfu: float  # useful FLOPs / (time x peak of all devices)
    hfu: float  # with what activation checkpointing runs again
    mbu: float  # bytes of the weights, once in each forward and each backward, / (time x memory bandwidth): a floor
    elapsed_sec: float  # [s], the device's own time on CUDA
    achieved_tflops: float  # useful [TFLOP/s]
    achieved_tbs: float  # of weights [TB/s]
    tokens_per_sec: float  # real tokens, none of padding
    flops: int  # useful FLOPs
    flop_count: FlopCount  # by component and phase


@dataclass(eq=False)
class UtilizationResult:
    """Numbers of a block that `track` made, whose arguments it has: those of `Numbers`, once the block has ended."""

    gpu_spec: Any
    device: torch.device
    tracked: float
    param_bytes: float | None
    hfu_flop_count: float | None
    num_tokens: int | None
    dtype: str | None
    num_gpus: int

    def __post_init__(self) -> None:
        tracked = self.tracked
        self.models: tuple[WatchedModel, ...] = tracked.watched if isinstance(tracked, ProfiledFlops) else ()
        self.forwards: list[Forward] = []
        self._marks = [self._mark()]
        self._state = "has not ended"
        open_blocks.append(self)

    def end(self, *, failed: bool) -> None:
        """Stop the block's clock, and keep how its models are set up now."""
        self._marks.append(self._mark())
        open_blocks.remove(self)
        self._passes = [(forward, forward.has_backward) for forward in self.forwards]
        self._setups = {model: model.setup() for model in self.models}
        self._state = "was left by an exception" if failed else ""

    def _mark(self) -> clock.Mark:
        if self.device.type not in ("cpu", "cuda"):  # without events, the device is waited for
            torch.accelerator.synchronize(self.device)
        return clock.mark(self.device)

    def __getattr__(self, name: str) -> Any:
        if name not in Numbers._fields:
            raise AttributeError(f"a UtilizationResult has no {name!r}; it has {', '.join(Numbers._fields)}")
        if self._state:
            raise UsageError(f"the tracked block {self._state}: its numbers can be read once it has ended well.")
        if name == "mbu":
            warnings.warn(_MBU_MESSAGE, stacklevel=2)
        if "_numbers" not in self.__dict__:
            self._numbers = self._measure()
        return getattr(self._numbers, name)

    def _measure(self) -> Numbers:
        """Wait for the device, and count the forwards and backwards that ran."""
        began, ended = self._marks
        ended.wait()
        counts = [f.count(*self._setups[f.watched], with_backward=backward) for f, backward in self._passes]
        flops = sum((count for count, _ in counts), FlopCount())
        if not self.models:
            flops = FlopCount((FlopRow("stated", "blocks", round(self.tracked)),), "stated")
        elif not counts:
            names = ", ".join(type(watched.model).__name__ for watched in self.models)
            raise UsageError(
                f"no forward of {names} ran in the block, so its FLOPs are not known. If torch.compile had compiled "
                "the model before it was profiled or tracked, pass what torch.compile returned; of CUDA graphs pass a "
                "plain number of FLOPs, int(flops)."
            )
        workload = Workload.total([workload for _, workload in counts])
        tokens = workload.tokens if self.num_tokens is None else self.num_tokens
        dtype = self.dtype or self._dtype_of_products()
        peak = Peak(self.gpu_spec.name, 1e12 * float(self.gpu_spec.peak_tflops(dtype)), dtype, "spec", "override")
        wall_s = ended.seconds_since(began)
        use = Utilisation(flops, wall_s, 0.0, tokens, workload.slots, peak, self.num_gpus)
        for message in use.warnings[:1]:
            warnings.warn(message, stacklevel=4)

        # HFU of a bare number is known only from another; the weights are read once in each forward and each backward
        hfu_flops = self.hfu_flop_count if self.hfu_flop_count is not None else math.nan
        weight_bytes = self.param_bytes
        if weight_bytes is None:
            weight_bytes = sum(param_bytes(watched.model) for watched in self.models) or math.nan
        num_passes = sum(1 + backward for _, backward in self._passes) or 1
        tbs = weight_bytes * num_passes / wall_s / 1e12
        return Numbers(
            mfu=use.mfu,
            hfu=use.hfu if self.models else hfu_flops / wall_s / use.peak_flops_per_s,
            mbu=tbs / self.gpu_spec.peak_memory_bandwidth_tbs / self.num_gpus if math.isfinite(tbs) else math.nan,
            elapsed_sec=wall_s,
            achieved_tflops=use.flops_per_s / 1e12,
            achieved_tbs=tbs,
            tokens_per_sec=use.tokens_per_s if tokens else math.nan,
            flops=flops.total,
            flop_count=flops,
        )

    def _dtype_of_products(self) -> str:
        if not self._passes:
            return "fp16"  # which mfu-tracker takes where none is given
        forward = self._passes[0][0]
        weights = (p.dtype for p in forward.watched.model.parameters() if p.is_floating_point())
        return dtype_label(forward.autocast_dtype or next(weights, torch.float16), _CPU)


@contextmanager
def track(
    flop_count: float | nn.Module,
    param_bytes: float | None = None,
    *,
    hfu_flop_count: float | None = None,
    num_tokens: int | None = None,
    dtype: str | None = None,
    num_gpus: int = 1,
    device: torch.device | str | None = None,
    spec: Any = None,
) -> Iterator[UtilizationResult]:
    """Measure what a block of a loop makes of the hardware; nothing waits for the device before a number is read.

    Args:
        flop_count: a model, or a profile of one (`profile_flops`): the forwards of the model that run in the block are
            counted, with the batches that they are really given, and those backwards that begin in it. Or a number,
            taken as the FLOPs of the block.
        param_bytes: bytes of the weights, read once a pass; those of a tracked model's parameters when None.
        hfu_flop_count: FLOPs with recomputation, for a bare number of FLOPs; else they are read off the model.
        num_tokens: tokens of the block, stated; those of the batches when None.
        dtype: dtype of the matrix products, as for `GPUSpec.peak_tflops`. That of autocast, or else of the weights,
            when None; "fp16" for a bare number.
        num_gpus: devices that share the FLOPs of the block. What a profile or a model counts is this process's, so
            it is 1 under DDP and FSDP.
        device: that runs the block; the model's, or the accelerator at hand, when None.
        spec: of one device, from `get_gpu_spec` or mfu-tracker's own, or any object with `name`, `peak_tflops(dtype)`
            and `peak_memory_bandwidth_tbs`.

    Raises:
        UsageError: a number below zero, or a model on several devices.
        UnknownDeviceError: no peak is known for the device or the dtype.

    >>> with track(model, dtype="bf16") as result:                     # doctest: +SKIP
    ...     model(**batch).loss.backward()
    >>> result.mfu                                                     # doctest: +SKIP
    0.41
    """
    stated: dict[str, Any] = {"param_bytes": param_bytes, "hfu_flop_count": hfu_flop_count, "num_tokens": num_tokens}
    if isinstance(flop_count, nn.Module):
        flop_count = ProfiledFlops(0, (watch(flop_count),))
    amounts: dict[str, Any] = {"flop_count": flop_count, "num_gpus": num_gpus, **stated}
    for name, amount in amounts.items():
        least = 1 if name == "num_gpus" else 0
        if amount is not None and not (isinstance(amount, int | float) and least <= amount < math.inf):
            raise UsageError(f"{name}={amount!r} is not possible: give a number of at least {least}.")
    own = flop_count.watched[0].device if isinstance(flop_count, ProfiledFlops) else None
    spec = spec or get_gpu_spec(device or own)
    if dtype is not None:
        spec.peak_tflops(dtype)  # an unknown one is an error before the block runs, not after
    runs_on = torch.device(device or own or getattr(spec, "device", None) or "cpu")
    result = UtilizationResult(spec, runs_on, flop_count, dtype=dtype, num_gpus=num_gpus, **stated)
    ended_well = False
    try:
        yield result
        ended_well = True
    finally:
        result.end(failed=not ended_well)
