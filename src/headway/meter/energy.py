"""Energy that a GPU has drawn, from the board's own counter, and samples of its state and of the processor's."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headway.errors import UsageError
from headway.log.boundary import ErrorBoundary
from headway.meter.tally import WHOLE, Sums
from headway.version import install_command

_ENERGY = "The energy of this rank's device"
_STATE = "The state of this rank's device and processor"
_SAMPLE_EVERY_S = 10.0  # a hundredth of a per cent of the loop, by 1 ms a sample
_LIMITS = {
    0x1: "idle",
    0x2: "set clocks",
    0x4: "power",
    0x8: "hardware",
    0x20: "heat",
    0x40: "heat",
    0x80: "power supply",
}
"""Reasons that hold a GPU's clock below its highest, by NVML's bits.

Source: NVML API reference, nvmlClocksEventReasons: GpuIdle, ApplicationsClocksSetting, SwPowerCap, HwSlowdown,
SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown.
"""


class EnergyMeter:
    """Energy of one NVIDIA GPU since this object was made.

    The board's own counter is read, so nothing runs in between and no load is missed; it covers the whole board, memory
    included, and whatever else runs on it, but not the host. Where there is no such counter (no NVIDIA GPU, no NVML, a
    GPU older than Volta, a MIG slice, which shares its board's counter) the energy is None and `reason` says why.

    Args:
        device_index: the device as this process counts them, CUDA_VISIBLE_DEVICES applied.

    Raises:
        UsageError: the index is negative.

    Source: NVML API reference, nvmlDeviceGetTotalEnergyConsumption: "total energy consumption for this GPU in
    millijoules (mJ) since the driver was last reloaded", for Volta or newer.

    >>> meter = EnergyMeter()       # doctest: +SKIP
    >>> meter.joules()              # doctest: +SKIP
    5231.7
    """

    def __init__(self, device_index: int = 0) -> None:
        if device_index < 0:
            raise UsageError(f"device_index={device_index} is not a device; the first one is 0.")
        self.reason: str | None = None
        self._nvml: Any = None
        self._handle: Any = None
        self._start_mj = 0
        try:
            import pynvml
        except ModuleNotFoundError:
            self.reason = f"nvidia-ml-py is not installed: {install_command('trackers')}"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = _find(pynvml, device_index)
            self._start_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except pynvml.NVMLError as error:
            self.reason = f"NVML has no energy counter for device {device_index}: {error}"
        except _NotFoundError as error:
            self.reason = str(error)

    def joules(self) -> float | None:
        """Energy since this object was made [J]; None from the first unknown reading on."""
        if self.reason is not None:
            return None
        try:
            total_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._nvml.NVMLError as error:
            self.reason = f"NVML stopped answering: {error}"
            return None
        if total_mj < self._start_mj:
            self.reason = "the driver was reloaded, which sets its counter back"
            return None
        return float(total_mj - self._start_mj) / 1000

    def state(self) -> dict[str, int]:
        """Read what the board is doing now: clocks, power, temperature, load, and what holds its clock.

        Returns:
            `sm_mhz` and `most_sm_mhz` [MHz], `power_mw` [mW], `temperature_c` [degrees Celsius], `utilisation_percent`
            [%], and a 1 for each `limit NAME` that holds; without those that NVML does not tell.
        """
        nvml, handle = self._nvml, self._handle
        if handle is None:
            return {}
        readers: dict[str, Callable[[], Any]] = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "most_sm_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_mw": lambda: nvml.nvmlDeviceGetPowerUsage(handle),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        }
        values: dict[str, int] = {}
        for name, reader in readers.items():
            with suppress(nvml.NVMLError, AttributeError):  # AttributeError: an older pynvml has no such call
                values[name] = int(reader())
        with suppress(nvml.NVMLError, AttributeError):
            bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
            values |= {f"limit {name}": 1 for bit, name in _LIMITS.items() if bits & bit}
        return values


def clocks_of(device: Any) -> dict[str, int] | None:
    """Read the clock of a GPU's multiprocessors now, and the highest it may have [MHz]; None if NVML has neither.

    Source: NVML API reference, nvmlDeviceGetClockInfo and nvmlDeviceGetMaxClockInfo.
    """
    state = EnergyMeter(device.index or 0).state() if device is not None and device.type == "cuda" else {}
    clocks = {name: value for name, value in state.items() if name in ("sm_mhz", "most_sm_mhz")}
    return clocks if len(clocks) == 2 else None


class StateSampler:
    """Samples of a rank's device and processor beside its steps, one in ten seconds at the end of a window.

    The processor is read by psutil, where that is installed.

    Args:
        energy: of the rank's device; None without a GPU.
        boundary: around the readings: where one fails, there is no sample.
        clock: the host's monotonic clock [s].
    """

    def __init__(self, energy: "WindowEnergy | None", boundary: ErrorBoundary, clock: Callable[[], float]) -> None:
        self._energy, self._boundary, self._clock = energy, boundary, clock
        self._next_s = clock() + _SAMPLE_EVERY_S  # the first steps compile and warm up
        _processor()  # loads are those since the call before

    def add_to(self, sums: Sums) -> None:
        """Add a sample to a window's sums, if the last one is old enough."""
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + _SAMPLE_EVERY_S
        with self._boundary.guard(_STATE):
            state = (self._energy.state() if self._energy is not None else {}) | _processor()
            sums.update({(WHOLE, f"state {name}"): value for name, value in state.items()})
            sums[WHOLE, "num_states"] += bool(state)


def _processor() -> dict[str, int]:
    """Load of the host's processor since the call before [%], and its clock now [MHz]; empty without psutil."""
    try:
        import psutil
    except ModuleNotFoundError:
        return {}
    frequency = None
    with suppress(OSError, RuntimeError, NotImplementedError):  # a virtual machine tells none
        frequency = psutil.cpu_freq()
    clock = {} if frequency is None else {"processor_mhz": round(frequency.current)}
    return {"processor_percent": round(psutil.cpu_percent()), **clock}


class WindowEnergy:
    """Energy of the steps that a meter counts, read when a window ends and around time away from training.

    The energy of a step that compiles in the middle of a window is included, as nobody knew that it would.

    Args:
        device: a `torch.device` of CUDA.
        boundary: around the readings: where one fails, the energy is not known.
    """

    def __init__(self, device: Any, boundary: ErrorBoundary) -> None:
        self._boundary = boundary
        self._meter: EnergyMeter | None = None
        with boundary.guard(_ENERGY):
            self._meter = EnergyMeter(device.index or 0)
        self._mark_j = 0.0
        self._counted_j: float | None = 0.0
        self._has_counted = False

    def state(self) -> dict[str, int]:
        """Read what the device is doing now, as `EnergyMeter.state`; empty without NVML."""
        return {} if self._meter is None else self._meter.state()

    def leave(self) -> None:
        """Note that training stops for a while."""
        self._mark(counts=True)

    def back(self) -> None:
        """Note that training goes on."""
        self._mark(counts=False)

    def step(self, *, left_out: bool) -> None:
        """Note the end of a step; the first ones of a window are dropped where they are left out."""
        if left_out and not self._has_counted:
            self._mark(counts=False)
        self._has_counted = self._has_counted or not left_out

    def add_to(self, sums: Sums) -> None:
        """Add the energy since the last reading to a window's sums."""
        self._mark(counts=True)
        if self._counted_j is None:
            sums[WHOLE, "num_without_energy"] += 1
            return
        sums[WHOLE, "energy_mj"] += round(self._counted_j * 1000)
        self._counted_j, self._has_counted = 0.0, False

    def _mark(self, *, counts: bool) -> None:
        now_j = None
        with self._boundary.guard(_ENERGY):
            now_j = self._meter.joules() if self._meter is not None else None
        if now_j is None or self._counted_j is None:
            self._counted_j = None
            return
        self._counted_j += (now_j - self._mark_j) * counts
        self._mark_j = now_j


class _NotFoundError(Exception):
    """The device's place among NVML's devices is uncertain."""


def _find(nvml: Any, device_index: int) -> Any:
    """NVML's handle of a device that this process knows by index.

    NVML counts all boards in the order of the bus, CUDA those that are visible and the fastest first, so an index means
    the same board to both only by luck; the UUID always does.
    """
    uuid = _uuid_from_torch(device_index)
    if uuid is not None:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    # without torch: the entry of CUDA_VISIBLE_DEVICES, an index or the beginning of a UUID
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entry = str(device_index)
    if visible is not None:
        entries = [part.strip() for part in visible.split(",")]
        if device_index >= len(entries) or not entries[device_index] or entries[device_index].startswith("-"):
            raise _NotFoundError(f"CUDA_VISIBLE_DEVICES={visible!r} leaves no device {device_index}")
        entry = entries[device_index]
    if entry.startswith("MIG"):
        raise _NotFoundError(
            f"device {device_index} is a MIG slice ({entry}), whose board counts the energy of all slices"
        )
    if entry.isdecimal():
        num_boards = nvml.nvmlDeviceGetCount()
        if num_boards > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            raise _NotFoundError(
                f"which of {num_boards} GPUs is device {device_index} is not known before torch is loaded; import "
                "torch first, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
        return nvml.nvmlDeviceGetHandleByIndex(int(entry))
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    matches = [handle for handle in handles if nvml.nvmlDeviceGetUUID(handle).startswith(entry)]
    if len(matches) != 1:  # CUDA accepts a UUID's beginning if it is one board's alone
        raise _NotFoundError(f"CUDA_VISIBLE_DEVICES={visible!r} names {entry}, which {len(matches)} GPUs begin with")
    return matches[0]


def _uuid_from_torch(device_index: int) -> str | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    if device_index >= torch.cuda.device_count():
        raise _NotFoundError(f"torch sees {torch.cuda.device_count()} devices, so there is no device {device_index}")
    return f"GPU-{torch.cuda.get_device_properties(device_index).uuid}"
