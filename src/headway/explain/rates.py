"""Rates of a trace's device: as the trace says, as the user says, or as the table of devices has it."""

import re
from collections import Counter
from dataclasses import dataclass, replace

from headway.devices import named_peak
from headway.devices.lookup import peak_elsewhere
from headway.devices.names import named_devices
from headway.errors import UnknownDeviceError, UsageError
from headway.explain.budget import NeededWork
from headway.explain.measure import MATMUL, MeasuredTrace
from headway.report import format_rate

_FLOATS = {"bf16", "fp16", "fp32", "fp8"}
# What names of kernels say of their precision; tf32 first, since its operands are fp32.
_IN_NAMES = {"tf32": "tf32", "bf16": "bf16|bfloat16", "fp8": "e4m3|fp8", "fp16": "fp16|f16|half|hgemm|s884|s1688"}


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates that a device can reach.

    Attributes:
        peak_flops_per_s: of the products' dtype, dense [FLOP/s]; None where it is not known.
        ceiling_flops_per_s: the best that was measured [FLOP/s]; None where nothing was.
        bytes_per_s: of its memory [B/s]; None where it is not known.
        peak_source: where the peak stands; "" without one, or where the trace says it itself.
        why_no_peak: a sentence, where there is none.
    """

    peak_flops_per_s: float | None = None
    ceiling_flops_per_s: float | None = None
    bytes_per_s: float | None = None
    peak_source: str = ""
    why_no_peak: str = ""

    @property
    def best_flops_per_s(self) -> float | None:
        """The ceiling, or the peak where none was measured [FLOP/s]."""
        return self.ceiling_flops_per_s or self.peak_flops_per_s


def rates_of(measured: MeasuredTrace, device: str | None) -> DeviceRates:
    """Find the rates of the device that a trace ran on.

    Args:
        measured: the trace.
        device: its name or dense peak [FLOP/s], where the user gives it.

    Raises:
        UsageError: the user's device is not known, or has no peak for the products' dtype.
        ConfigError: what Headway wrote into the trace cannot be read.
    """
    trace = measured.trace
    # Rates that Headway wrote into the trace come first, unless the user names a device.
    written = None if trace.headway is None else NeededWork(trace.headway, str(trace.path))
    recorded_bandwidth = written.bytes_per_s if written is not None else None
    bytes_per_s = recorded_bandwidth or _bandwidth(device) or _bandwidth(trace.device_name)
    ceiling = written.ceiling_flops_per_s if written is not None else None
    if device is None and written is not None and written.peak_flops_per_s is not None:
        return DeviceRates(written.peak_flops_per_s, ceiling, bytes_per_s)
    # A peak is of one precision: that of the products which took most of the time.
    dtype = products_dtype(measured)
    unknown = DeviceRates(None, ceiling, bytes_per_s)
    try:
        if device is not None and _is_rate(device):
            peak = named_peak(device)
            return DeviceRates(
                peak.flops_per_s, ceiling, bytes_per_s, f"peak: {format_rate(peak.flops_per_s)}, as stated"
            )
        if dtype is None:
            if device is not None:
                named_devices(device)  # refuses what is no device
            return replace(unknown, why_no_peak="the trace does not say in which precision its products ran.")
        peak = named_peak(device, dtype) if device is not None else peak_elsewhere(trace.device_name, dtype)
    except UnknownDeviceError as error:
        if device is None:
            why = f"no peak in {dtype} is known of {trace.device_name!r}, on which it ran."
            return replace(unknown, why_no_peak=why)
        raise UsageError(f"{error} Here --device takes the rate itself as well, such as --device 312e12.") from error
    source = f"{peak.name} in {dtype}" if peak.kind == "datasheet" else peak.source
    source = f"peak: {format_rate(peak.flops_per_s)}, {source}"
    return DeviceRates(peak.flops_per_s, ceiling, bytes_per_s, source)


def products_dtype(measured: MeasuredTrace) -> str | None:
    """Name the precision in which most of the time of products was spent; None where nothing tells it."""
    spent: Counter[str] = Counter()
    for owned in (owned for step in measured.steps for owned in step.owned if owned.line == MATMUL):
        name = measured.trace.names[measured.events.name[owned.event]]
        in_name = next((dtype for dtype, words in _IN_NAMES.items() if re.search(words, name, re.IGNORECASE)), None)
        operands = measured.operands_of(owned.event)
        dtype = operands.dtype if operands is not None else None
        if dtype == "fp32" and in_name == "tf32":
            dtype = in_name
        precision = dtype if dtype in _FLOATS or dtype == "tf32" else in_name
        if precision is not None:
            spent[precision] += owned.ns
    return max(spent, key=spent.__getitem__, default=None)


def _is_rate(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _bandwidth(name: str | None) -> float | None:
    """Bytes per second of all devices of that name, if they have but one."""
    try:
        devices = named_devices(name) if name is not None and not _is_rate(name) else []
    except UnknownDeviceError:
        return None
    rates = {device.memory_bytes_per_s for device in devices}
    return rates.pop() if len(rates) == 1 else None
