"""Find the devices of the table by a name: by exactly what a driver reports, or by what a person calls one.

`report` asks the driver of the device at hand.
"""

import difflib
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from headway.devices.table import FILE_VARIABLE, Device, all_devices
from headway.errors import UnknownDeviceError

if TYPE_CHECKING:
    import torch

OVERRIDE_VARIABLE = "HEADWAY_PEAK_FLOPS"

# A slice of an NVIDIA card, as its name ends: "MIG 1g.10gb" or "MIG 1c.3g.40gb".
_MIG = re.compile(r"\bMIG (\d+c\.)?\d+g\.")

# The number of a model with the letter before it, which tells a misspelt name from another card's.
_MODEL = re.compile(r"[a-z]?\d+")
_BETWEEN = re.compile(r"[ _-]+")

# Vendors print 80 GB for 80 * 2**30 bytes (7 % more than 80 * 10**9), and drivers keep some back (2 % of GDDR6 with
# ECC). The sizes of one name lie further apart: 96 and 144, 10 and 12.
_LEAST_MEMORY, _MOST_MEMORY = 0.93, 1.12


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


def matches(reported: ReportedDevice) -> list[Device]:
    """Find the devices of the table that a driver's report fits: one, unless it leaves a shared name open.

    The name must be equal, never merely alike, and what the driver says of multiprocessors and memory must agree.

    Raises:
        UnknownDeviceError: no such name, or only a part of a card.

    >>> [device.key for device in matches(ReportedDevice("NVIDIA H20", memory_bytes=150_754_820_096))]
    ['h20-141gb']
    """
    if _MIG.search(reported.name):
        raise UnknownDeviceError(
            f"{reported.name!r} is a slice of a card (a multi-instance GPU), so the peak of the whole card would be "
            f"wrong. State the peak of the slice: {way_out('of the slice')}."
        )
    devices = [device for device in all_devices() if reported.name in device.names]
    if not devices:
        raise unknown_device(reported.name)
    fitting = [device for device in devices if _agrees(device, reported)]
    if not fitting:
        choices = " or ".join(f"{device.key} with {properties(device)}" for device in devices)
        raise UnknownDeviceError(
            f"{reported.name!r} reports {properties(reported)}, but the known device of that name is {choices}. A "
            "partition, a virtual GPU or another card has another peak. State that peak: "
            f"{way_out('of this device')}."
        )
    return fitting


def named_devices(name: str) -> list[Device]:
    """Find every device that a person may mean: more than one only for a name that several cards report.

    Args:
        name: the exact name, the key of its table ("h100-sxm") or an alias ("H100"), any case.

    Raises:
        UnknownDeviceError: none has that name.
    """
    devices = [device for device in all_devices() if name.lower() in {text.lower() for text in device.spoken_names()}]
    if not devices:
        raise unknown_device(name, typed=True)
    return [device for device in devices if not device.is_shipped] or devices


def named_device(name: str) -> Device:
    """Find a device by what a person calls it.

    Raises:
        UnknownDeviceError: none has that name, or several.

    >>> named_device("4090").title
    'NVIDIA GeForce RTX 4090'
    """
    devices = named_devices(name)
    if len(devices) > 1:
        raise ambiguous(name, devices)
    return devices[0]


def known_devices() -> list[str]:
    """List the names that have a peak, as drivers report them."""
    return sorted({name for device in all_devices() for name in device.names})


def properties(device: Device | ReportedDevice) -> str:
    """List the properties that tell cards of one name apart."""
    parts = [f"{device.num_sms} multiprocessors"] if device.num_sms else []
    parts += [f"{device.memory_bytes / 1e9:.4g} GB"] if device.memory_bytes else []
    return " and ".join(parts) or "no properties"


def unknown_device(name: str, *, typed: bool = False) -> UnknownDeviceError:
    """Error for a name that no device has, with similar names and the way out.

    Args:
        name: of no device.
        typed: whether a person typed the name, whose number may have a digit too many or too few.
    """
    spoken = {text.lower(): text for device in all_devices() for text in (*device.aliases, *device.names)}
    alike = [text for text in spoken if _model(text) == _model(name.lower())]  # P100 is neither B100 nor P10
    nearest = [spoken[text] for text in difflib.get_close_matches(name.lower(), alike, n=3, cutoff=0.6)]
    parts = [text for text in spoken if len(name) > 1 and name.lower() in text]  # "rtx 40" is no misspelling
    nearest = nearest or [spoken[text] for text in sorted(parts, key=len)[:3]]
    number = _model(name.lower()) if typed and not nearest else None
    if number is not None:
        numbers = {text: _model(text) or "" for text in spoken}
        near = [
            text for text, other in numbers.items() if other and (number.startswith(other) or other.startswith(number))
        ]
        nearest = [spoken[text] for text in difflib.get_close_matches(name.lower(), near, n=3, cutoff=0.6)]
    hint = f" Did you mean {', '.join(nearest)}? Devices with similar names may have other peaks." if nearest else ""
    called = [d.names[0] for d in all_devices() if name.lower() in {alias.lower() for alias in d.aliases}]
    if called:  # good enough from a person, not from a driver
        hint = f" This is a common name of {' or '.join(called)}, but Headway needs the name that a driver reports."
    return UnknownDeviceError(
        f"The peak of {name!r} is not known, and a guess would make every MFU wrong.{hint} `headway devices` lists "
        f"the known ones. Add the device, or state its peak: {way_out('of one device in the dtype of the step')}."
    )


def _model(name: str) -> str | None:
    """Find the first number of a name in lower case, with the letter before it.

    >>> _model("nvidia l40s-48q"), _model("h 100"), _model("radeon graphics")
    ('l40', 'h100', None)
    """
    match = _MODEL.search(_BETWEEN.sub("", name))
    return match.group() if match else None


def ambiguous(name: str, devices: Sequence[Device]) -> UnknownDeviceError:
    """Say that several devices have a name, and how they differ."""
    choices = " or ".join(f"{device.key} ({properties(device)})" for device in devices)
    return UnknownDeviceError(
        f"{name!r} is the name of {len(devices)} different devices, which differ only in their properties: "
        f"{choices}. Name your device by its key."
    )


def way_out(whose: str) -> str:
    """Say how a peak is stated by hand."""
    return f"{OVERRIDE_VARIABLE}=<dense FLOP/s {whose}>, or a table in ~/.config/headway/peaks.toml or ${FILE_VARIABLE}"


def _agrees(device: Device, reported: ReportedDevice) -> bool:
    """Say whether nothing that the driver reports speaks against a device of that name."""
    if device.num_sms and reported.num_sms and device.num_sms != reported.num_sms:
        return False
    if not device.memory_bytes or not reported.memory_bytes:
        return True
    return _LEAST_MEMORY < reported.memory_bytes / device.memory_bytes < _MOST_MEMORY
