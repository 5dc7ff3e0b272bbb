"""The most that a device can do: dense peaks by exact name with their sources, and ceilings measured on the device.

`peak_for(device, dtype)` is the one to call. An unknown accelerator is an error, never a guess.
"""

from typing import TYPE_CHECKING

from headway.exports import exported

if TYPE_CHECKING:
    from headway.devices.ceilings import Ceiling, copy_ceiling, matmul_ceiling
    from headway.devices.lookup import datasheet_peak, device_at, named_peak, peak_for, weighted_peak
    from headway.devices.names import known_devices, named_device
    from headway.devices.table import Device, Peak

_HOMES = {
    "headway.devices.ceilings": ("Ceiling", "copy_ceiling", "matmul_ceiling"),
    "headway.devices.lookup": ("datasheet_peak", "device_at", "named_peak", "peak_for", "weighted_peak"),
    "headway.devices.names": ("known_devices", "named_device"),
    "headway.devices.table": ("Device", "Peak"),
}

__all__ = [
    "Ceiling",
    "Device",
    "Peak",
    "copy_ceiling",
    "datasheet_peak",
    "device_at",
    "known_devices",
    "matmul_ceiling",
    "named_device",
    "named_peak",
    "peak_for",
    "weighted_peak",
]

__getattr__ = exported(__name__, _HOMES)
