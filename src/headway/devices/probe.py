"""The driver's report on the device at hand: its name, and the properties that tell cards of one name apart."""

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ReportedDevice:
    """A device as its driver reports it."""

    name: str  # the device's name, such as "NVIDIA GH200 480GB"
    # streaming multiprocessors, compute units or GPU cores; None where the driver does not say
    num_sms: int | None = None
    # the device's own memory [byte]; None where it shares the host's, or the driver does not say
    memory_bytes: int | None = None


def report(device: "torch.device") -> ReportedDevice:
    """Ask the driver for a device's name and size; starts the device's runtime."""
    import torch

    if device.type == "cpu":
        return ReportedDevice(cpu_name())
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return ReportedDevice(
            torch.cuda.get_device_name(device), properties.multi_processor_count, properties.total_memory
        )
    if device.type == "xpu":
        xpu = torch.xpu.get_device_properties(device)
        return ReportedDevice(xpu.name, xpu.max_compute_units, xpu.total_memory)
    if device.type == "mps":
        return ReportedDevice(torch.backends.mps.get_name(), torch.backends.mps.get_core_count())
    module = getattr(torch, device.type, None)  # torch.hpu, for example, which Intel Gaudi's plug-in adds
    if module is None or not hasattr(module, "get_device_name"):
        return ReportedDevice(str(device))
    return ReportedDevice(module.get_device_name(device))


@cache
def cpu_name() -> str:
    """Name this machine's processor, e.g. "AMD EPYC"."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"
