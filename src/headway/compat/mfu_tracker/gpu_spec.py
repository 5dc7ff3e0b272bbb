"""What one device can do at best, as mfu-tracker's calls ask for it: a peak per dtype and a memory bandwidth."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from headway.devices import Peak, copy_ceiling, device_at, peak_for
from headway.devices.lookup import dtype_label
from headway.devices.names import OVERRIDE_VARIABLE, matches
from headway.devices.probe import report
from headway.devices.table import FILE_VARIABLE
from headway.errors import UnknownDeviceError, UsageError


@dataclass(frozen=True)
class GPUSpec:
    """What one device can do at best; from `get_gpu_spec`, or stated by hand for a device that nothing knows.

    Attributes:
        name: of the device.
        device: where peaks are looked up, or measured on a CPU; None where they are all stated.
        stated_flops_per_s: dense peaks given by hand, by dtype [FLOP/s].
        stated_bytes_per_s: memory bandwidth given by hand [byte/s].

    >>> GPUSpec("my card", stated_flops_per_s={"bf16": 312e12}).peak_tflops("bf16")
    312.0
    """

    name: str
    device: torch.device | None = None
    stated_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    stated_bytes_per_s: float | None = None

    def peak(self, dtype: str | torch.dtype = "fp16") -> Peak:
        """Find the dense peak for a dtype, with its source.

        Args:
            dtype: "bf16", "fp16", "fp32", "tf32", "fp8", "fp4" or "int8", or a torch.dtype. As "fp32" a model's
                matrix products run in TF32 where PyTorch is allowed to and the device has it; the peak is then TF32's.

        Raises:
            UnknownDeviceError: nobody stated a peak for this dtype, and none is known or can be measured.
        """
        label = dtype if isinstance(dtype, str) else dtype_label(dtype, self.device or torch.device("cpu"))
        if label in self.stated_flops_per_s:
            return Peak(self.name, self.stated_flops_per_s[label], label, "stated in a GPUSpec", "override")
        if self.device is None:
            raise UnknownDeviceError(
                f"{self.name} has no peak for {label!r}; stated are {', '.join(self.stated_flops_per_s) or 'none'}. "
                "State it in stated_flops_per_s [FLOP/s], or use get_gpu_spec() on a known device."
            )
        return _peak(self.device, torch.float32 if dtype == "fp32" else dtype, _environment())

    def peak_tflops(self, dtype: str = "fp16") -> float:
        """Find the dense peak for a dtype [TFLOP/s]; raises as `peak` does."""
        return self.peak(dtype).flops_per_s / 1e12

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth [byte/s]: stated, the datasheet's, or on a CPU that of a copy, measured once.

        Raises:
            UnknownDeviceError: it is not known.
        """
        if self.stated_bytes_per_s is not None:
            return self.stated_bytes_per_s
        if self.device is not None and self.device.type == "cpu":
            return copy_ceiling(self.device).best.best_per_s
        rate = device_at(self.device).memory_bytes_per_s if self.device is not None else None
        if rate is None:
            raise UnknownDeviceError(
                f"The memory bandwidth of {self.name} is not known, so there is no MBU. State it: "
                "GPUSpec(..., stated_bytes_per_s=<byte/s>), or memory_gb_per_s in a table (docs/devices.md)."
            )
        return rate

    @property
    def peak_memory_bandwidth_tbs(self) -> float:
        """Memory bandwidth [TB/s]; raises as `bytes_per_s` does."""
        return self.bytes_per_s / 1e12


@dataclass(frozen=True)
class _StatedSpec(GPUSpec):
    """Reads another package's object that has mfu-tracker's `peak_tflops(dtype)` and `peak_memory_bandwidth_tbs`."""

    given: Any = None

    def peak(self, dtype: str | torch.dtype = "fp16") -> Peak:
        label = dtype if isinstance(dtype, str) else dtype_label(dtype, torch.device("cpu"))
        try:
            flops_per_s = 1e12 * float(self.given.peak_tflops(label))
        except (ValueError, KeyError) as error:
            raise UnknownDeviceError(f"{self.name}, given as spec, has no peak for {label!r}: {error}") from error
        return Peak(self.name, flops_per_s, label, f"stated by a {type(self.given).__name__}", "override")

    @property
    def bytes_per_s(self) -> float:
        return 1e12 * float(self.given.peak_memory_bandwidth_tbs)


def as_spec(given: Any) -> GPUSpec:
    """Take a `GPUSpec`, or an object that answers as mfu-tracker's does.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(given, GPUSpec):
        return given
    if not callable(getattr(given, "peak_tflops", None)) or not hasattr(given, "peak_memory_bandwidth_tbs"):
        raise UsageError(
            f"spec={given!r} is no GPUSpec: give get_gpu_spec(), GPUSpec(name, stated_flops_per_s=...) "
            "or an object with peak_tflops(dtype) [TFLOP/s] and peak_memory_bandwidth_tbs [TB/s]."
        )
    return _StatedSpec(str(getattr(given, "name", type(given).__name__)), given=given)


def get_gpu_spec(device: torch.device | str | None = None) -> GPUSpec:
    """Find what a device can do.

    Figures are datasheets' by the exact name that the driver reports, never those of a device that is merely alike. On
    a CPU they are measured when first asked for: a matrix product per dtype, and a copy. HEADWAY_PEAK_FLOPS states the
    peak of a device that is not known.

    Args:
        device: the accelerator at hand when None, or the CPU where there is none.

    Raises:
        UnknownDeviceError: an accelerator that is not in the table, without a peak stated for it.
    """
    device = default_device() if device is None else torch.device(device)
    return _spec(device, _environment())


@cache
def _spec(device: torch.device, _environment: tuple[Any, ...]) -> GPUSpec:
    reported = report(device)
    if device.type != "cpu" and OVERRIDE_VARIABLE not in os.environ:
        matches(reported)
    return GPUSpec(reported.name, device)


@cache
def _peak(device: torch.device, dtype: str | torch.dtype, _environment: tuple[Any, ...]) -> Peak:
    return peak_for(device, dtype)


def _environment() -> tuple[Any, ...]:
    """List what a looked-up peak depends on besides the device."""
    settings = os.environ.get(OVERRIDE_VARIABLE), os.environ.get(FILE_VARIABLE)
    return (*settings, torch.get_float32_matmul_precision(), torch.get_num_threads())


def default_device() -> torch.device:
    """Name the accelerator at hand, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def compute_mfu(
    flop_count: float,
    elapsed_sec: float,
    *,
    dtype: str = "fp16",
    num_gpus: int = 1,
    device: torch.device | str | None = None,
    spec: GPUSpec | None = None,
) -> float:
    """Divide FLOPs by what the devices could have done in that time.

    Args:
        flop_count: FLOPs done. Of a profile this is the number that it prints: the sample's, not a batch's.
        elapsed_sec: the time they took [s].
        dtype: as for `GPUSpec.peak`.
        num_gpus: devices that shared the FLOPs.
        device: as for `get_gpu_spec`.
        spec: of one device, a `GPUSpec` or mfu-tracker's; looked up when None.

    Returns:
        MFU, a fraction.

    Raises:
        UsageError: no time, FLOPs below zero, or no devices.
        UnknownDeviceError: no peak is known.

    >>> compute_mfu(5e12, 2.0, dtype="bf16", spec=GPUSpec("my card", stated_flops_per_s={"bf16": 1e13}))
    0.25
    """
    check_number(flop_count, "flop_count", "FLOPs")
    _check_time(elapsed_sec, num_gpus)
    spec = get_gpu_spec(device) if spec is None else as_spec(spec)
    return flop_count / elapsed_sec / (spec.peak(dtype).flops_per_s * num_gpus)


def compute_mbu(
    param_bytes: float,
    elapsed_sec: float,
    *,
    num_gpus: int = 1,
    device: torch.device | str | None = None,
    spec: GPUSpec | None = None,
) -> float:
    """Divide bytes moved by what the devices' memory could have moved in that time.

    Args:
        param_bytes: bytes moved; of weights, once per pass over them.
        elapsed_sec: the time it took [s].
        num_gpus: devices that shared the bytes.
        device: as for `get_gpu_spec`.
        spec: of one device, a `GPUSpec` or mfu-tracker's; looked up when None.

    Returns:
        MBU, a fraction.

    Raises:
        UsageError: no time, bytes below zero, or no devices.
        UnknownDeviceError: no bandwidth is known.
    """
    check_number(param_bytes, "param_bytes", "bytes")
    _check_time(elapsed_sec, num_gpus)
    spec = get_gpu_spec(device) if spec is None else as_spec(spec)
    return param_bytes / elapsed_sec / (spec.bytes_per_s * num_gpus)


def check_number(value: int | float, name: str, unit: str) -> None:
    """Check that a count is one.

    Raises:
        UsageError: it is below zero, infinite, or no number.
    """
    number: object = value  # whatever it was declared as
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < math.inf:
        raise UsageError(f"{name}={value!r} is not a number of {unit}: give 0 or more.")


def check_devices(num_gpus: int) -> None:
    """Check a number of devices.

    Raises:
        UsageError: it is below 1.
    """
    if num_gpus < 1:
        raise UsageError(f"num_gpus={num_gpus} is not a number of devices; give 1 or more.")


def _check_time(elapsed_sec: float, num_gpus: int) -> None:
    check_devices(num_gpus)
    if not 0 < elapsed_sec < math.inf:
        raise UsageError(f"elapsed_sec={elapsed_sec!r} is not a duration: give seconds, more than 0.")
