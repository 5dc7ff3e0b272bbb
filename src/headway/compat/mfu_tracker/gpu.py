"""Peaks and memory bandwidths as mfu-tracker's calls ask for them, from Headway's table of devices."""

from dataclasses import dataclass

import torch

from headway.devices import copy_ceiling, device_at, peak_for
from headway.devices.probe import report
from headway.errors import UnknownDeviceError


@dataclass(frozen=True)
class GPUSpec:
    """Peaks and memory bandwidth of one device, from `get_gpu_spec`."""

    name: str
    device: torch.device

    def peak_tflops(self, dtype: str = "fp16") -> float:
        """Find the dense peak of "bf16", "fp16", "fp32", "tf32", "fp8", "fp4" or "int8" [TFLOP/s].

        The products of an "fp32" model run in TF32 where PyTorch is allowed to; the peak is then TF32's.

        Raises:
            UnknownDeviceError: no peak is known.
        """
        return peak_for(self.device, torch.float32 if dtype == "fp32" else dtype).flops_per_s / 1e12

    @property
    def peak_memory_bandwidth_tbs(self) -> float:
        """Memory bandwidth [TB/s]: the datasheet's, or on a CPU that of a copy, measured once.

        Raises:
            UnknownDeviceError: it is not known.
        """
        if self.device.type == "cpu":
            return copy_ceiling(self.device).best.best_per_s / 1e12
        bytes_per_s = device_at(self.device).memory_bytes_per_s
        if bytes_per_s is None:
            raise UnknownDeviceError(
                f"The memory bandwidth of {self.name} is not known, so there is no MBU. State it as memory_gb_per_s in "
                "a table of your own (docs/devices.md), or give spec=, an object that has it."
            )
        return bytes_per_s / 1e12


def get_gpu_spec(device: torch.device | str | None = None) -> GPUSpec:
    """Find what a device can do: datasheets' figures by the exact name that the driver reports, or measured on a CPU.

    Args:
        device: the accelerator at hand when None, or the CPU where there is none.
    """
    device = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    return GPUSpec(report(device).name, device)
