"""Find a device's peak: an explicit override, a figure of the table by exact name, or a ceiling measured on a CPU."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headway.devices.ceilings import measure_ceiling
from headway.devices.names import OVERRIDE_VARIABLE, ReportedDevice, ambiguous, matches, named_devices, report, way_out
from headway.devices.table import DTYPES, Device, Peak, all_devices
from headway.errors import UnknownDeviceError, UsageError
from headway.report.quantity import parse_number
from headway.words import Argument

if TYPE_CHECKING:
    import torch

_DTYPE_NAMES: Mapping[str, str] = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "fp8",
    "torch.float8_e5m2": "fp8",
    "torch.float8_e4m3fnuz": "fp8",
    "torch.float8_e5m2fnuz": "fp8",
    "torch.float4_e2m1fn_x2": "fp4",
    "torch.int8": "int8",
}
_TORCH_TYPES = ("cpu", "cuda", "hpu", "meta", "mps", "xla", "xpu")
_SLOWEST_FLOPS_PER_S = 1e6  # a number below it, such as 4060, was meant as a name


def peak_for(device: "torch.device | str", dtype: "torch.dtype | str") -> Peak:
    """Find the peak of a device for the arithmetic of a training step.

    On CUDA, torch.float32 means TF32 when PyTorch is allowed to use it for matrix products
    (`torch.set_float32_matmul_precision`) and the device has it, and ordinary fp32 otherwise. On the CPU the peak is a
    ceiling measured by a matmul benchmark, once per process, dtype and thread count, unless the user's table names it.

    Args:
        device: the device that runs the step, a torch.device or its name such as "cuda:0".
        dtype: dtype of the step's matrix products: a torch.dtype or its name such as "bfloat16", or "bf16", "fp16",
            "tf32", "fp32", "fp8", "fp4", "int8".

    Returns:
        The peak with its source.

    Raises:
        UnknownDeviceError: an accelerator that is not in the table or only a part of one, or a dtype without a figure.
        UsageError: the override variable does not hold a positive number, or `device` is no device of PyTorch.
        ConfigError: the user's table cannot be read.
    """
    import torch

    try:
        device = torch.device(device)
    except RuntimeError as error:  # torch lists its types of devices, and not what to call with another name
        raise UsageError(
            f"{device!r} is no device of this process, such as 'cuda' or 'cpu'. To look up a peak by name, call "
            f"headway.devices.named_peak({str(device)!r}, 'bf16')."
        ) from error
    if isinstance(dtype, str) and f"torch.{dtype}" in _DTYPE_NAMES:
        dtype = getattr(torch, dtype)
    dtype_name = dtype if isinstance(dtype, str) else dtype_label(dtype, device)
    reported = report(device)
    override = os.environ.get(OVERRIDE_VARIABLE)
    if override is not None:
        return Peak(reported.name, _parse_override(override), dtype_name, f"{OVERRIDE_VARIABLE}={override}", "override")
    if device.type == "cpu" and not _stated_by_the_user(reported):
        return measure_ceiling(dtype_name)
    devices = matches(reported)
    if not isinstance(dtype, str) and dtype_name == "tf32" and "tf32" not in devices[0].peak_flops_per_s:
        dtype_name = "fp32"  # PyTorch may use TF32, but the device has none
    return _common_peak(devices, reported.name, dtype_name)


def device_at(device: "torch.device | str") -> Device:
    """Find the table's entry of the device at hand, for its memory and bandwidth.

    Args:
        device: a torch.device or its string, such as "cuda:0".

    Raises:
        UnknownDeviceError: not in the table, a part of a card only, or a name of several that nothing tells apart.
    """
    import torch

    reported = report(torch.device(device))
    devices = matches(reported)
    if len(devices) > 1:
        raise ambiguous(reported.name, devices)
    return devices[0]


def datasheet_peak(name: str, dtype_name: str) -> Peak:
    """Look a device's dense peak up by the exact name that its driver reports; needs no torch.

    Args:
        name: what `torch.cuda.get_device_name()`, `jax.Device.device_kind` or the like prints.
        dtype_name: "bf16", "fp16", "tf32", "fp32", "fp8", "fp4" or "int8".

    Raises:
        UnknownDeviceError: the name is not in the table, stands for devices with different peaks, or has no figure for
            the dtype.

    >>> datasheet_peak("NVIDIA H100 PCIe", "bf16").flops_per_s
    756000000000000.0
    """
    return _common_peak(matches(ReportedDevice(name)), name, dtype_name)


def peak_elsewhere(name: str, dtype_name: str) -> Peak:
    """Find the peak of a device that is not at hand, by its driver's name for it; needs no torch.

    Args:
        name: the exact name.
        dtype_name: as for `datasheet_peak`.

    Returns:
        What the override variable says, and else the figure of the table.

    Raises:
        UnknownDeviceError: as for `datasheet_peak`.
        UsageError: the override variable does not hold a positive number.
    """
    override = os.environ.get(OVERRIDE_VARIABLE)
    if override is not None:
        return Peak(name, _parse_override(override), dtype_name, f"{OVERRIDE_VARIABLE}={override}", "override")
    return datasheet_peak(name, dtype_name)


def named_peak(name: str, dtype_name: str = "bf16") -> Peak:
    """Look a device's peak up by what a person calls it; needs no torch.

    Args:
        name: the exact name, the key of its table ("h100-sxm") or an alias ("H100"), any case; or FLOP/s of one device
            as a number, such as "989.4e12".
        dtype_name: as for `datasheet_peak`.

    Raises:
        UnknownDeviceError: none of these, a name of devices with different peaks, or no figure for the dtype.
        UsageError: a number that is no rate.

    >>> named_peak("H200").name
    'NVIDIA H200'
    """
    try:
        devices = named_devices(name)
    except UnknownDeviceError:
        if not (name[:1].isdigit() or name[:1] in "+-."):
            raise
        return Peak(name, _stated_rate(name), dtype_name, f"{Argument('device')} {name}", "override")
    return _common_peak(devices, devices[0].title, dtype_name)


def weighted_peak(flops: Mapping[str, float], device: "torch.device | str") -> Peak:
    """Find the peak of a step whose matrix products run in several dtypes.

    It is the rate at which the device could do this mixture at best: all FLOPs over the time that each dtype's share
    takes at its own peak.

    Args:
        flops: FLOPs of the step by dtype name, such as {"fp8": 3e15, "bf16": 1e15}.
        device: a torch.device or its string ("cuda:0"), as for `peak_for`; or a name, as for `named_peak`.

    Returns:
        The peak; its dtype is "fp8+bf16".

    Raises:
        UsageError: no FLOPs, or a count below zero.
        UnknownDeviceError: the device, or one of the dtypes on it, is not known.

    Source: the harmonic mean of rates, weighted by work.

    >>> weighted_peak({"fp8": 3e15, "bf16": 1e15}, "B200").flops_per_s / 1e12  # 4 / (3 / 4500 + 1 / 2250)
    3600.0
    """
    total = sum(flops.values())
    if not (total > 0 and math.isfinite(total) and all(count >= 0 for count in flops.values())):
        raise UsageError(
            f"{dict(flops)} holds no FLOPs to weight a peak with. Give the FLOPs of a step by dtype. No count may be "
            'negative, and one must be above zero, such as {"fp8": 3e15, "bf16": 1e15}.'
        )
    is_name = isinstance(device, str) and device.partition(":")[0] not in _TORCH_TYPES
    used = {dtype: count for dtype, count in flops.items() if count}
    peaks = [named_peak(str(device), dtype) if is_name else peak_for(device, dtype) for dtype in used]
    if len(peaks) == 1:
        return peaks[0]
    pairs = list(zip(used.values(), peaks, strict=True))
    seconds = sum(count / peak.flops_per_s for count, peak in pairs)
    parts = [f"{count / total:.1%} at {peak.flops_per_s / 1e12:g} TFLOP/s in {peak.dtype}" for count, peak in pairs]
    source = f"weighted by FLOPs: {', '.join(parts)}; {peaks[0].source}"
    return Peak(peaks[0].name, total / seconds, "+".join(used), source, peaks[0].kind)


def dtype_label(dtype: "torch.dtype", device: "torch.device") -> str:
    """Name the arithmetic that a dtype means on a device: "bf16", "fp16", "tf32", "fp32", "fp8", "fp4" or "int8".

    Raises:
        UnknownDeviceError: no peak is kept for this dtype.
    """
    import torch

    label = _DTYPE_NAMES.get(str(dtype))
    if label is None:
        raise UnknownDeviceError(f"Headway has no peak for {dtype}. Known dtypes are {', '.join(_DTYPE_NAMES)}.")
    if label == "fp32" and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return label


def _stated_by_the_user(reported: ReportedDevice) -> bool:
    return any(reported.name in device.names and not device.is_shipped for device in all_devices())


def _common_peak(devices: Sequence[Device], name: str, dtype_name: str) -> Peak:
    """Take the peak that all devices share; devices of one name may differ in their memory alone."""
    peaks = [_peak(device, name, dtype_name) for device in devices]
    if len({peak.flops_per_s for peak in peaks}) > 1:
        raise ambiguous(name, devices)
    return peaks[0]


def _peak(device: Device, name: str, dtype_name: str) -> Peak:
    rates = device.peak_flops_per_s
    dtype_name = _DTYPE_NAMES.get(f"torch.{dtype_name}", dtype_name)
    if dtype_name not in rates:
        spelling = "" if dtype_name in DTYPES else f" Dtypes are called {', '.join(DTYPES)}."
        raise UnknownDeviceError(
            f"{name} has no dense {dtype_name} figure. Its datasheet gives {', '.join(rates)}.{spelling} Compute in "
            f"one of these dtypes, or state the peak yourself: {way_out(f'of one device in {dtype_name}')}."
        )
    source = f"{device.source}, read {device.read_on}"
    if device.is_shipped:
        return Peak(name, rates[dtype_name], dtype_name, source)
    return Peak(name, rates[dtype_name], dtype_name, f"{source}, from {device.origin}", "override")


def _stated_rate(text: str) -> float:
    value = _number(text)
    if not (math.isfinite(value) and value > 0):
        raise UsageError(
            Argument("device"),
            f" {text!r} is not a positive number of FLOP/s. Give the dense rate of one device, for example ",
            Argument("device", example="989.4e12"),
            ", or a device's name, such as H100.",
            value=text,
        )
    if value < _SLOWEST_FLOPS_PER_S:
        raise UsageError(
            Argument("device", text),
            f" is not a known device (`headway devices` lists them). As a rate, {value:g} FLOP/s would be slower "
            "than any computer. State the rate of one device in FLOP/s, for example ",
            Argument("device", example="989.4e12"),
            ".",
        )
    return value


def _parse_override(text: str) -> float:
    value = _number(text)
    if not (math.isfinite(value) and value > 0):
        raise UsageError(
            f"{OVERRIDE_VARIABLE}={text!r} is not a positive number of FLOP/s. Give the dense rate of one device in "
            f"the step's dtype, for example {OVERRIDE_VARIABLE}=989.4e12, or unset it."
        )
    return value


def _number(text: str) -> float:
    number = parse_number(text, "FLOP/s")
    return math.nan if number is None else float(number)
