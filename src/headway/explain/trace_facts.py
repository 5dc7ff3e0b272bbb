"""Facts of a trace together: its steps measured, their collectives, what they needed, and its device's rates.

A collective ends on all ranks at about the same time, and on the last rank that comes it takes as long as the transfer.
So the shortest of the ranks' durations is the transfer, and what a rank's own takes beyond it is waiting. A device's
rates are those that the trace tells, that the user states, or that the table of devices has.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from headway.devices.lookup import named_peak, peak_elsewhere
from headway.devices.names import named_devices
from headway.devices.table import Device
from headway.errors import UnknownDeviceError, UsageError
from headway.explain.budget import DeviceRates, NeededWork
from headway.explain.events import NONE, UNKNOWN_DEVICE, Trace
from headway.explain.kernels import Work
from headway.explain.measurement import MATMUL, MeasuredStep, MeasuredTrace, measure
from headway.report import format_duration, format_rate
from headway.words import Argument

if TYPE_CHECKING:
    from headway.explain.stated_work import StatedWork

_FLOATS = {"bf16", "fp16", "fp32", "fp8"}
# Words for precisions in names of kernels; tf32 first, since its operands are fp32.
_IN_NAMES = {"tf32": "tf32", "bf16": "bf16|bfloat16", "fp8": "e4m3|fp8", "fp16": "fp16|f16|half|hgemm|s884|s1688"}


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """A measured trace, with the facts that the trace or the user gives of its work and its device."""

    measured: MeasuredTrace  # the trace
    budget: NeededWork | None  # useful work of its steps; None where nobody tells
    rates: DeviceRates  # rates of its device
    notes: list[str]  # remarks on all this, as sentences
    # collectives of each step, by its number, and by what they say of themselves, in order
    collectives: dict[int, dict[str, list[int]]]


def gather_facts(trace: Trace, work: "StatedWork | None", device: str | None, *, as_one_step: bool) -> TraceFacts:
    """Measure a trace, and gather the facts that the trace and the user give of its work and device.

    Args:
        trace: the trace.
        work: model and workload, where the user gives them.
        device: its name or dense peak [FLOP/s], where the user gives it.
        as_one_step: take the trace as one step.

    Raises:
        ConfigError: nothing runs in the trace's steps, what Headway wrote into it cannot be read, or it is not of the
            model given.
        UsageError: the user's device is not known.
    """
    measured = measure(trace, as_one_step=as_one_step)
    notes = [*measured.notes]
    rates = _rates(measured, device)
    if work is not None:
        from headway.explain.stated_work import with_stated_work

        measured, note = with_stated_work(measured, work, rates)
        notes.append(note)
    elif trace.headway is not None and rates.peak_source:
        stated = {**trace.headway, "peak_flops_per_s": rates.peak_flops_per_s}
        measured = replace(measured, trace=replace(trace, headway=stated))
    written = measured.trace.headway
    budget = None if written is None else NeededWork(written, str(trace.path))
    if rates.peak_source and budget is not None:
        notes.append(f"{rates.peak_source}.")
    notes += _notes_of_budget(budget)
    return TraceFacts(measured, budget, rates, notes, _collectives(measured))


def _notes_of_budget(budget: NeededWork | None) -> list[str]:
    if budget is None:
        return [
            "the matmul-class line is one, because the trace does not say what was computed. "
            f"{Argument('model')} and {Argument('segments')} split the line into useful work and losses."
        ]
    notes = []
    if budget.profiler_overhead_s > 0:
        notes.append(
            f"{format_duration(budget.profiler_overhead_s)} of each step is the profiler's, as Headway measured."
        )
    if budget.peak_flops_per_s is None:
        notes.append(
            "the matmul-class line is not split: the trace does not tell the device's peak. Name the device, or state "
            f"its dense rate [FLOP/s]: {Argument('device')}."
        )
    elif budget.ceiling_flops_per_s is None:
        notes.append(
            "the device's ceiling was not measured, so it is taken as the peak (`headway ceiling` measures it)."
        )
    return notes


def _rates(measured: MeasuredTrace, device: str | None) -> DeviceRates:
    """Find the rates of the device that a trace ran on, or that the user names or states [FLOP/s].

    Raises:
        UsageError: the user's device is not known, or has no peak for the products' dtype.
        ConfigError: what Headway wrote into the trace cannot be read.
    """
    trace = measured.trace
    # Rates that Headway wrote into the trace come first, unless the user names a device.
    written = None if trace.headway is None else NeededWork(trace.headway, str(trace.path))
    recorded_bandwidth = written.bytes_per_s if written is not None else None
    hardware = _hardware_name(trace.device_name)
    bytes_per_s = recorded_bandwidth or _bandwidth(device) or _bandwidth(trace.device_name)
    ceiling = written.ceiling_flops_per_s if written is not None else None
    if device is None and written is not None and written.peak_flops_per_s is not None:
        return DeviceRates(written.peak_flops_per_s, ceiling, bytes_per_s)
    # A peak is of one precision: that of the products which took most of the time.
    dtype = _dtype_of_products(measured)
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
        peak = named_peak(device, dtype) if device is not None else peak_elsewhere(hardware, dtype)
    except UnknownDeviceError as error:
        if device is None:
            why = f"no peak in {dtype} is known of {trace.device_name!r}, on which it ran."
            is_named = trace.device_name != UNKNOWN_DEVICE
            return replace(unknown, why_no_peak=why if is_named else "the trace does not name its device.")
        rate = Argument("device", example="312e12")
        more = (" Here ", Argument("device"), " takes the rate itself as well, such as ", rate, ".")
        raise error.as_kind(UsageError, *more) from error
    source = f"{peak.name} in {dtype}" if peak.kind == "datasheet" else peak.source
    source = f"peak: {format_rate(peak.flops_per_s)}, {source}"
    return DeviceRates(peak.flops_per_s, ceiling, bytes_per_s, source)


def _dtype_of_products(measured: MeasuredTrace) -> str | None:
    """Name the precision in which most of the time of products was spent; None if it is unknown."""
    spent: Counter[str] = Counter()
    for owned in (owned for step in measured.steps for owned in step.owned if owned.line == MATMUL):
        in_name = _dtype_in(measured.trace.names[measured.events.name[owned.event]])
        operands = measured.operands_of(owned.event)
        dtype = operands.dtype if operands is not None else None
        if dtype == "fp32" and in_name == "tf32":
            dtype = in_name
        precision = dtype if dtype in _FLOATS or dtype == "tf32" else in_name
        if precision is not None:
            spent[precision] += owned.ns
    return max(spent, key=spent.__getitem__, default=None)


@cache
def _dtype_in(kernel: str) -> str | None:
    """Precision that the name of a kernel says; None if none."""
    return next((dtype for dtype, words in _IN_NAMES.items() if re.search(words, kernel, re.IGNORECASE)), None)


def _is_rate(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _hardware_name(name: str) -> str:
    """Name a device without the additions of a cloud's driver: a virtual function (SR-IOV) has the card to itself.

    >>> _hardware_name("AMD Instinct MI300X VF")
    'AMD Instinct MI300X'
    """
    return name.removesuffix(" VF")


def rate_of_hardware(name: str | None, rate: Callable[[Device], float | None]) -> float | None:
    """A rate of all devices that a trace, or a user, calls so; None if none is known, or if they differ."""
    try:
        devices = named_devices(_hardware_name(name)) if name is not None and not _is_rate(name) else []
    except UnknownDeviceError:
        return None
    rates = {rate(device) for device in devices}
    return rates.pop() if len(rates) == 1 else None


def _bandwidth(name: str | None) -> float | None:
    return rate_of_hardware(name, lambda device: device.memory_bytes_per_s)


def _collectives(measured: MeasuredTrace) -> dict[int, dict[str, list[int]]]:
    events, names = measured.events, measured.trace.names
    collectives = np.array(
        [i for i, work in enumerate(measured.attribution.work) if work is Work.COMMUNICATION], dtype=int
    )
    starts = events.start_ns[collectives]
    by_step: dict[int, dict[str, list[int]]] = {}
    for step in measured.steps:
        there = by_step.setdefault(step.window.step, {})
        for i in collectives[(starts >= step.window.start_ns) & (starts < step.window.end_ns)].tolist():
            group = int(events.group[i])
            there.setdefault(names[group if group != NONE else int(events.name[i])], []).append(i)
    return by_step


def waiting_in(own: TraceFacts, step: MeasuredStep, others: Sequence[TraceFacts]) -> list[int] | None:
    """Compute how long a rank waits for each other rank in a step's exposed communication [ns].

    A collective takes the shortest time on the rank that came last, and for that rank the others wait. None where no
    other rank has the same collectives.
    """
    number = step.window.step
    transfer: dict[int, int] = {}
    last: dict[int, int] = {}  # by collective, place in `others` of the rank that came last
    for place, other in enumerate(others):
        there = other.collectives.get(number, {})
        for name, events in own.collectives[number].items():
            if len(there.get(name, ())) == len(events):  # else one trace lacks some, and which is not known
                for event, event_there in zip(events, there[name], strict=True):
                    took = other.measured.duration_of(event_there)
                    shortest = transfer.setdefault(event, own.measured.duration_of(event))
                    if took < shortest:
                        transfer[event], last[event] = took, place
    if not transfer:
        return None
    waits = [0] * len(others)
    for owned in step.owned:
        if owned.line == "communication" and owned.event in last:
            waits[last[owned.event]] += min(owned.ns, own.measured.duration_of(owned.event) - transfer[owned.event])
    return waits
