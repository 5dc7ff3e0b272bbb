"""What a device can do at best: dense datasheet peaks by exact name, and a measured ceiling for the CPU.

`peak_for(device, dtype)` is the one to call. An unknown accelerator is an error, never a guess.
"""

from headway.devices.lookup import Peak, datasheet_peak, known_devices, named_peak, peak_for

__all__ = ["Peak", "datasheet_peak", "known_devices", "named_peak", "peak_for"]
