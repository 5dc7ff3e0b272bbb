"""The calls on mfu-tracker's page, under their names, over Headway's meter, peaks and tracing.

`from mfu_tracker import track` becomes `from headway.compat.mfu_tracker import track`; `docs/measure.md` says where
the numbers differ.
"""

import math
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from headway.count import FlopCount, FlopRow, Workload
from headway.count.masks import causal_pairs, full_pairs
from headway.devices import Peak, copy_ceiling, device_at, peak_for
from headway.devices.lookup import dtype_label
from headway.devices.names import report
from headway.errors import UnknownDeviceError, UsageError
from headway.meter import clock
from headway.meter.batch_share import BatchShare
from headway.meter.batches import input_gradients_of, workload_of
from headway.meter.environment import device_of, ledger_of
from headway.meter.hooks import arguments_by_name
from headway.meter.meter import Meter
from headway.meter.window import Window
from headway.tracing.shapes import ShapeTraces, without_data

__all__ = [
    "GPUSpec",
    "MFUOptimizerWrapper",
    "UtilizationResult",
    "flash_attn_flops",
    "get_gpu_spec",
    "param_bytes",
    "profile_flops",
    "track",
]

BACKWARD_FACTOR_MESSAGE = "a backward factor is not used: recomputation is read off the model, and is in HFU alone."
_NO_PEAK = Peak("unknown", math.nan, "unknown", "unknown", "override")
_meters: weakref.WeakKeyDictionary[nn.Module, dict[Any, Meter]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class GPUSpec:
    """Peaks and memory bandwidth of one device, from `get_gpu_spec`."""

    name: str
    device: torch.device

    def peak_tflops(self, dtype: str = "fp16") -> float:
        """Find the dense peak of a dtype [TFLOP/s]; of "fp32" that of TF32, where PyTorch is allowed to use it."""
        return peak_for(self.device, torch.float32 if dtype == "fp32" else dtype).flops_per_s / 1e12

    @property
    def peak_memory_bandwidth_tbs(self) -> float:
        """Memory bandwidth [TB/s]: the datasheet's, or on a CPU that of a copy, measured once."""
        if self.device.type == "cpu":
            return copy_ceiling(self.device).best.best_per_s / 1e12
        if (bytes_per_s := device_at(self.device).memory_bytes_per_s) is None:
            raise UnknownDeviceError(f"The memory bandwidth of {self.name} is not known: state it (docs/devices.md).")
        return bytes_per_s / 1e12


def get_gpu_spec(device: torch.device | str | None = None) -> GPUSpec:
    """Find what a device can do by its exact name; the accelerator at hand when None, or else the CPU."""
    device = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    return GPUSpec(report(device).name, device)


class _Profile(int):
    """FLOPs, of attention or of a sample of models: then `track` counts the models' forwards in place of it."""

    models: tuple[nn.Module, ...] = ()

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, _Profile):
            return super().__add__(other)
        models = tuple(dict.fromkeys((*self.models, *other.models)))
        if models and not (self.models and other.models):
            warnings.warn("a profile has every attention of its model: flash_attn_flops is not added.", stacklevel=2)
            return self if self.models else other
        both = _Profile(int(self) + int(other))
        both.models = models
        return both

    __radd__ = __add__

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)  # models do not travel with a number


def profile_flops(model: nn.Module, args: Any = None, kwargs: Any = None, *, with_backward: bool = True) -> int:
    """Count the useful FLOPs of one forward of a model, and of its backward, without running it.

    Args:
        model: any module; whatever wraps, compiles or shards it is left out of the count.
        args: a sample of the forward's arguments by position.
        kwargs: a sample of those by name.
        with_backward: whether the number includes the backward. A tracked block counts those backwards that run.

    >>> int(profile_flops(nn.Linear(8, 4), (torch.zeros(2, 8),)))  # 2 * 2 * 8 * 4, and no gradient of the input
    256
    """
    arguments = tree_map_only(torch.Tensor, torch.Tensor.cpu, arguments_by_name(model, args or (), kwargs or {}))
    ledger, workload = ledger_of(model), Workload([1])
    if ledger.rows:
        workload = workload_of(arguments, ledger)
        ledger = ledger.with_input_gradients(input_gradients_of(arguments))
    else:  # a model without tokens, by the shapes that it is given
        ledger = ShapeTraces(model).of(without_data(arguments))
    profile = _Profile(ledger.count(workload, forward_only=not with_backward).total)
    profile.models = (model,)
    return profile


def flash_attn_flops(
    batch_size: int, seq_len: int, num_heads: int, head_dim: int, *, causal: bool = True, with_backward: bool = False
) -> int:
    """Count the FLOPs of one call of attention: 4 for each pair that the mask allows, head and element.

    >>> int(flash_attn_flops(batch_size=1, seq_len=3, num_heads=1, head_dim=2))  # 4 * 2 * (1 + 2 + 3)
    48
    """
    pairs = (causal_pairs if causal else full_pairs)([seq_len] * batch_size)
    return _Profile(pairs * 4 * num_heads * head_dim * (3 if with_backward else 1))


def param_bytes(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Count the bytes of a model's parameters; tied ones once, and of a sharded model the whole's."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not trainable_only)


class UtilizationResult:
    """Numbers of a block, once it has ended: fractions, never percent; NaN where a number is not known.

    `mbu` is a floor: the weights alone, read once in each forward and each backward of the block.
    """

    def _set(self, use: Window, spec: Any, weight_bytes: float) -> None:
        self.mfu, self.hfu, self.elapsed_sec = use.mfu, use.hfu, use.wall_s
        self.achieved_tflops, self.achieved_tbs = use.flops_per_s / 1e12, weight_bytes / use.wall_s / 1e12
        self.tokens_per_sec = use.tokens_per_s if use.tokens else math.nan
        self.flops, self.flop_count, self.mbu = use.flops.total, use.flops, math.nan
        if not math.isnan(weight_bytes):
            self.mbu = self.achieved_tbs / spec.peak_memory_bandwidth_tbs / use.world_size
        for message in use.warnings[:1]:
            warnings.warn(message, stacklevel=5)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(f"{name} is not known: the tracked block has not ended, or was left by an error.")


@contextmanager
def track(
    flop_count: Any,
    param_bytes: float | None = None,
    *,
    hfu_flop_count: float | None = None,
    num_tokens: int | None = None,
    dtype: str | None = None,
    num_gpus: int = 1,
    device: torch.device | str | None = None,
    spec: Any = None,
) -> Iterator[UtilizationResult]:
    """Measure what a block of a loop makes of the hardware. The device is waited for at both of its ends.

    Args:
        flop_count: a model or a profile of one: the forwards that it really runs in the block are counted, with the
            backwards that come to them. A number is taken as the FLOPs of the block.
        param_bytes: bytes of the weights; those of a tracked model's parameters when None.
        hfu_flop_count: FLOPs with recomputation, for a number of FLOPs; else they are read off the model.
        num_tokens: tokens of the block, stated; those of the batches when None.
        dtype: of the matrix products; that of the weights when None, "fp16" for a number of FLOPs.
        num_gpus: devices that share the FLOPs of the block; 1 under DDP and FSDP, where a process counts its own.
        device: that runs the block; the model's, or the accelerator at hand, when None.
        spec: of one device: `name`, `peak_tflops(dtype)` and `peak_memory_bandwidth_tbs`, as of `get_gpu_spec`.
    """
    models = (flop_count,) if isinstance(flop_count, nn.Module) else getattr(flop_count, "models", ())
    stated = {"flop_count": None if models else flop_count, "param_bytes": param_bytes, "num_tokens": num_tokens}
    for name, amount in {**stated, "hfu_flop_count": hfu_flop_count, "num_gpus": num_gpus}.items():
        least = 1 if name == "num_gpus" else 0
        if amount is not None and not (isinstance(amount, int | float) and least <= amount < math.inf):
            raise UsageError(f"{name}={amount!r} is not possible: give a number of at least {least}.")
    device = torch.device(device or (device_of(models[0]) if models else getattr(spec, "device", None)) or "cpu")
    spec = spec or get_gpu_spec(device)
    weights = [p for model in models for p in model.parameters()]
    dtype = dtype or dtype_label(next((p.dtype for p in weights if p.is_floating_point()), torch.float16), device)
    peak = Peak(spec.name, 1e12 * float(spec.peak_tflops(dtype)), dtype, "spec", "override")
    result, begin = UtilizationResult(), clock.Mark(device)
    if not models:
        yield result
        (end := clock.Mark(device)).wait()
        again = 0 if hfu_flop_count is None else round(hfu_flop_count) - round(flop_count)
        count = FlopCount((FlopRow("stated", "blocks", round(flop_count), recompute=again),), "stated")
        readings = {"wall_s": end.seconds_since(begin), "tokens": num_tokens or 0, "world_size": num_gpus}
        use = Window(count, peak, readings)
        result._set(use, spec, math.nan if param_bytes is None else param_bytes)
        result.hfu = math.nan if hfu_flop_count is None else result.hfu
        return
    meter = _meter_of(models)
    meter.back()
    try:
        with nullcontext() if models[0].training else meter.phase("block"):  # an evaluation's block is a phase apart
            yield result
    except BaseException:
        meter.count(Workload())  # the block's forward may have failed before its work was counted
        raise
    finally:
        meter.step()
        meter.leave("idle")  # waits for the device, so that the step's numbers are here
        (window,) = meter.merge([meter.finished()])
    tokens = window.tokens if num_tokens is None else num_tokens
    use = replace(window, peak=peak, readings={**window.readings, "tokens": tokens, "world_size": num_gpus})
    own_bytes = sum(p.numel() * p.element_size() for p in weights) if param_bytes is None else param_bytes
    result._set(use, spec, own_bytes * (2 * window.num_batches or 1))


def _meter_of(models: tuple[nn.Module, ...]) -> Meter:
    """Find or make the meter of models, which is away between blocks; other processes' meters are not asked."""
    meters, others = _meters.setdefault(models[0], {}), models[1:]
    if others not in meters:
        meters[others] = Meter(
            models[0],
            peak=_NO_PEAK,
            others=others,
            watch=True,
            phases=False,
            by_messages=True,
            batch_ranks=BatchShare(),
        )
        meters[others].leave("idle")
    if not meters[others].is_away:
        raise UsageError(f"a block that tracks {type(models[0]).__name__} is open already: close it first.")
    return meters[others]


class MFUOptimizerWrapper(Optimizer):
    """Give an optimizer `track_step`, which measures blocks of its training loop; it stays the optimizer that it was.

    At the entry of a block, gradients that a step has used, or that a gradient scaler skipped, are cleared. Accumulated
    ones stay, which mfu-tracker's wrapper clears as well.
    """

    _is_used = False

    def __new__(
        cls,
        optimizer: Optimizer,
        model: nn.Module,
        sample_batch: Any = None,
        dtype: str | None = "bf16",
        num_gpus: int = 1,
        hfu_backward_factor: float | None = None,
        device: torch.device | str | None = None,
        *,
        backward_factor: float | None = None,
    ) -> "MFUOptimizerWrapper":
        """Make the optimizer one of this class; arguments as of `track`, and a sample of them for `profile`."""
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"{type(optimizer).__name__} is no torch.optim.Optimizer: wrap the optimizer that steps.")
        if hfu_backward_factor is not None or backward_factor is not None:
            warnings.warn(BACKWARD_FACTOR_MESSAGE, stacklevel=2)
        wrapper: Any = optimizer
        if not isinstance(optimizer, cls):
            wrapper.__class__ = type(f"MFU{type(optimizer).__name__}", (cls, type(optimizer)), {})
            wrapper.register_step_post_hook(lambda self, *_: setattr(self, "_is_used", True))
        wrapper._watched, wrapper._sample = model, sample_batch
        wrapper._options = {"dtype": dtype, "num_gpus": num_gpus, "device": device}
        return wrapper  # type: ignore[no-any-return]  # it is one now

    def __init__(self, *_: Any, **__: Any) -> None:
        """Leave the optimizer's state and groups as they are."""

    _watched: nn.Module
    _sample: Any
    _options: dict[str, Any]

    def profile(self) -> int | None:
        """Trace the model; returns the FLOPs of the sample, if there is one."""
        return None if self._sample is None else profile_flops(self._watched, kwargs=self._sample)

    @contextmanager
    def track_step(self, num_tokens: int | None = None) -> Iterator[UtilizationResult]:
        """Measure a block: one micro-batch, or all of an optimizer step; arguments as of `track`."""
        if self._is_used:
            self.zero_grad()
        self._is_used = False
        with track(self._watched, num_tokens=num_tokens, **self._options) as result:
            yield result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Answer a gradient scaler, which asks before it steps or skips: the gradients are used either way."""
        self._is_used = True
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports
