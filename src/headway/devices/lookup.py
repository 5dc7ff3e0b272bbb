"""Find a device's peak: an explicit override, a datasheet number by exact name, or a ceiling measured on this CPU."""

import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from headway.errors import UnknownDeviceError, UsageError

if TYPE_CHECKING:
    import torch

OVERRIDE_VARIABLE = "HEADWAY_PEAK_FLOPS"

_DTYPE_NAMES: Mapping[str, str] = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "fp8",
    "torch.float8_e5m2": "fp8",
    "torch.int8": "int8",
}


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that one device can do, and where the number comes from.

    Attributes:
        name: the device, e.g. "NVIDIA H100 80GB HBM3".
        flops_per_s: dense rate [FLOP/s], never the sparse one.
        dtype: the arithmetic it holds for: "bf16", "fp16", "tf32", "fp32", "fp8", "int8".
        source: datasheet with its date, the benchmark that measured it, or the variable that set it.
        kind: "datasheet"; "ceiling", measured on this very device; or "override", given by the user.
    """

    name: str
    flops_per_s: float
    dtype: str
    source: str
    kind: Literal["datasheet", "ceiling", "override"] = "datasheet"


def peak_for(device: "torch.device | str", dtype: "torch.dtype | str") -> Peak:
    """Find the peak of a device for the arithmetic of a training step.

    On CUDA, torch.float32 means TF32 when PyTorch is allowed to use it for matrix products
    (`torch.set_float32_matmul_precision`), and ordinary fp32 otherwise. On the CPU the peak is a ceiling measured by a
    matmul benchmark, once per process, dtype and thread count.

    Args:
        device: the device that runs the step, a torch.device or its name such as "cuda:0".
        dtype: dtype of the step's matrix products: a torch.dtype, or "bf16", "fp16", "tf32", "fp32", "fp8", "int8".

    Returns:
        The peak with its source.

    Raises:
        UnknownDeviceError: an accelerator that is not in the table, or a dtype it has no figure for.
        UsageError: the override variable does not hold a positive number.
    """
    import torch

    device = torch.device(device)
    dtype_name = str(dtype) if isinstance(dtype, str) else dtype_label(dtype, device)
    name = device_name(device)
    override = os.environ.get(OVERRIDE_VARIABLE)
    if override is not None:
        return Peak(name, _parse_override(override), dtype_name, f"{OVERRIDE_VARIABLE}={override}", "override")
    if device.type == "cuda":
        return datasheet_peak(name, dtype_name)
    if device.type == "cpu":
        from headway.devices.ceiling import measure_ceiling

        return measure_ceiling(dtype_name)
    raise UnknownDeviceError(
        f"No peak is known for a device of type {device.type!r} ({name}). Headway knows CUDA devices by name and "
        f"measures the CPU. State the peak yourself: {OVERRIDE_VARIABLE}=<dense FLOP/s of one device in {dtype_name}>."
    )


def datasheet_peak(name: str, dtype_name: str) -> Peak:
    """Look a device's dense datasheet peak up by its exact name; needs no torch.

    Args:
        name: what `torch.cuda.get_device_name()` prints.
        dtype_name: "bf16", "fp16", "tf32", "fp32", "fp8" or "int8".

    Raises:
        UnknownDeviceError: the name is not in the table, or has no figure for the dtype.

    >>> datasheet_peak("NVIDIA H100 PCIe", "bf16").flops_per_s
    756000000000000.0
    """
    table = _table()
    entry = table.get(name)
    if entry is None:
        nearest = difflib.get_close_matches(name, table, n=3, cutoff=0.5)
        hint = f" Names that look alike are other devices: {', '.join(nearest)}." if nearest else ""
        raise UnknownDeviceError(
            f"The peak of {name!r} is not known, and a guess would make every MFU wrong.{hint} State it yourself: "
            f"{OVERRIDE_VARIABLE}=<dense FLOP/s of one device in {dtype_name}>, for example "
            f"{OVERRIDE_VARIABLE}=989.4e12 for an H100 SXM in bf16. Known: " + ", ".join(known_devices()) + "."
        )
    tflops: Mapping[str, float] = entry["tflops"]
    if dtype_name not in tflops:
        raise UnknownDeviceError(
            f"{name} has no dense {dtype_name} figure; its datasheet gives {', '.join(tflops)}. Compute in one of "
            f"those, or state the rate yourself: {OVERRIDE_VARIABLE}=<dense FLOP/s>."
        )
    source = f"{entry['source']}, read {entry['read_on']}"
    return Peak(name, round(tflops[dtype_name] * 1e12, 0), dtype_name, source)


def named_peak(name: str, dtype_name: str = "bf16") -> Peak:
    """Look a device's datasheet peak up by what a person calls it; needs no torch.

    Args:
        name: the exact name, the key of its table ("h100-sxm") or an alias ("H100"), any case; or FLOP/s of one device
            as a number, such as "989.4e12".
        dtype_name: as for `datasheet_peak`.

    Raises:
        UnknownDeviceError: none of these, or no figure for the dtype.
        UsageError: a number that is not positive.

    >>> named_peak("H200").name
    'NVIDIA H200'
    """
    if name[:1].isdigit() or name[:1] in "+-.":
        try:
            value = float(name)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise UsageError(
                f"--device {name!r} is not a positive number of FLOP/s. Give the dense rate of one device, for example "
                "--device 989.4e12, or a device's name, such as H100."
            )
        return Peak(name, value, dtype_name, f"--device {name}", "override")
    return datasheet_peak(_aliases().get(name.lower(), name), dtype_name)


def known_devices() -> list[str]:
    """List the device names that have a datasheet peak, as `torch.cuda.get_device_name()` prints them."""
    return sorted(_table())


def dtype_label(dtype: "torch.dtype", device: "torch.device") -> str:
    """Name the arithmetic that a dtype means on a device: "bf16", "fp16", "tf32", "fp32", "fp8" or "int8".

    Raises:
        UnknownDeviceError: no peak is kept for this dtype.
    """
    import torch

    label = _DTYPE_NAMES.get(str(dtype))
    if label is None:
        raise UnknownDeviceError(f"No peak is kept for {dtype}; known are {', '.join(_DTYPE_NAMES)}.")
    if label == "fp32" and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return label


def device_name(device: "torch.device") -> str:
    """Name a device: CUDA's own name, or the CPU's model name."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        from headway.devices.ceiling import cpu_name

        return cpu_name()
    return str(device)


@cache
def _table() -> dict[str, dict[str, Any]]:
    """Map every exact device name to its entry of peaks.toml."""
    text = (files("headway.devices") / "peaks.toml").read_text(encoding="utf-8")
    return {name: entry for entry in tomllib.loads(text).values() for name in entry["names"]}


@cache
def _aliases() -> dict[str, str]:
    """Map aliases, table keys and exact names, in lower case, to a device's first exact name."""
    text = (files("headway.devices") / "peaks.toml").read_text(encoding="utf-8")
    return {
        alias.lower(): entry["names"][0]
        for key, entry in tomllib.loads(text).items()
        for alias in (key, *entry.get("aliases", ()), *entry["names"])
    }


def _parse_override(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(
            f"{OVERRIDE_VARIABLE}={text!r} is not a positive number of FLOP/s. Give the dense rate of one device in "
            f"the step's dtype, for example {OVERRIDE_VARIABLE}=989.4e12, or unset it."
        )
    return value
