"""Facts of a trace together: its steps measured, their collectives, what they needed, and its device's rates.

A collective ends on all ranks at about the same time, and on the last rank that comes it takes as long as the transfer.
So the shortest of the ranks' durations is the transfer, and what a rank's own takes beyond it is waiting. A device's
rates are those that the trace tells, that the user states, or that the table of devices has. Model and workload that
the user states become the facts that Headway writes into its own traces, checked against what ran.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headway.count import CostModel, FlopCount, Workload, drivers
from headway.count.step_facts import components_of, flops_on_padding, step_facts
from headway.devices import named_peak
from headway.devices.lookup import peak_elsewhere
from headway.devices.names import named_devices
from headway.devices.table import Device
from headway.errors import ConfigError, UnknownDeviceError, UsageError
from headway.explain.breakdown import products_of
from headway.explain.budget import SCHEMA_VERSION, DeviceRates, NeededWork
from headway.explain.events import NONE, Trace
from headway.explain.kernels import Work
from headway.explain.measurement import MATMUL, MeasuredStep, MeasuredTrace, measure
from headway.report import format_duration, format_flops, format_rate, format_share
from headway.words import Argument

ALL = "all components"  # the one component, if a trace's modules have no paths
_MODULE = "module:"
# A fused loss runs no head, and a batch may leave an expert out: so much may be missing and the model is the trace's.
_MOST_MISSING, _MOST_LAYERS_MISSING = 0.5, 0.05
# Peaks hold for the clock that the datasheet names, which some cards exceed by a little.
_ABOVE_PEAK = 1.05
# Loss functions and losses of routers run a few products that no ledger has.
_MOST_UNTOLD = 1.25


@dataclass(frozen=True, slots=True)
class StatedWork:
    """Work of every step of a trace on this rank, as the user states it."""

    name: str  # name of the model, as the user gave it
    cost_model: CostModel  # cost model, with what is frozen or adapted
    workload: Workload  # workload of one step
    recompute: str = "none"  # activation checkpointing, as `CostModel.count` takes it
    forward_only: bool = False  # whether the steps have no backward

    def count(self) -> FlopCount:
        """FLOPs of a step."""
        return self.cost_model.count(self.workload, recompute=self.recompute, forward_only=self.forward_only)


def with_stated_work(measured: MeasuredTrace, work: StatedWork, rates: DeviceRates) -> tuple[MeasuredTrace, str]:
    """Write the user's facts into a trace, in place of its own.

    Returns:
        The trace, and a sentence on where its numbers come from.

    Raises:
        ConfigError: its modules are not the model's, or there is no peak.
        WorkloadError: the model cannot compute the workload.
    """
    trace, cost_model, workload = measured.trace, work.cost_model, work.workload
    if rates.peak_flops_per_s is None:
        raise ConfigError(
            f"{trace.path}: what {work.name} needed has no time without the device's peak, and {rates.why_no_peak} "
            f"Name the device with {Argument('device')} (`headway devices` lists them), or state its dense rate "
            f"[FLOP/s], such as {Argument('device', example='312e12')}."
        )
    # The ledger is counted under the modules' paths; a trace without paths gets one component for all of it.
    count = work.count()
    paths = {name.removeprefix(_MODULE) for name in trace.names if name.startswith(_MODULE)}
    if paths:
        _check_paths(paths, work, str(trace.path))
    else:  # one component of all
        count = replace(count, rows=tuple(replace(row, name=ALL) for row in count.rows))
    # The same facts that Headway writes into its own traces; each step has the same work.
    facts_of_step = step_facts(
        count, workload, flops_on_padding(cost_model, workload, work.recompute, forward_only=work.forward_only)
    )
    headway: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "peak_flops_per_s": rates.peak_flops_per_s,
        "ceiling_flops_per_s": rates.ceiling_flops_per_s,
        "profiler_overhead_s": None,
        "components": components_of(cost_model) if paths else {"": ALL},
        "steps": {str(step.window.step): facts_of_step for step in measured.steps},
    }
    # Say where the numbers come from, and which of the trace's own they replace.
    note = f"work is that of {work.name}, {format_flops(count.total)} in each step"
    note += f", as {Argument('model')} and {Argument('segments')} say"
    if trace.headway is not None and isinstance(written := trace.headway.get("cost_model"), dict):
        note += f", and not that of {written.get('name')}, which the trace names"
    if not paths:
        note += "; the trace has no modules by path (module:PATH), so its products are not told apart by component"
    return replace(measured, trace=replace(trace, headway=headway)), f"{note}."


def check_rates(measured: MeasuredTrace, steps: Sequence[MeasuredStep], work: StatedWork, rates: DeviceRates) -> None:
    """Refuse a model and workload that the device cannot have computed in the time that the trace shows.

    Raises:
        ConfigError: in one of the steps, matmul-class kernels would have run above the device's peak.
    """
    count = work.count()
    flops = count.total + count.recompute
    for step in steps:
        # a kernel that nothing explains may have been a product
        ns = sum(owned.ns for owned in step.owned if owned.line in (MATMUL, "unexplained"))
        at_most = (rates.peak_flops_per_s or 0) * ns / 1e9
        if flops > at_most * _ABOVE_PEAK:
            rate = f"{format_rate(flops / ns * 1e9)} in them" if ns else "which no device can"
            raise ConfigError(
                f"{measured.trace.path} is no trace of {work.name} with this workload: a step of it needs "
                f"{format_flops(flops)}, but matmul-class kernels ran for {ns / 1e6:,.2f} ms of step "
                f"{step.window.step}. That would be {rate}, above the peak of "
                f"{format_rate(rates.peak_flops_per_s or 0)}. Give {Argument('model')} the model that was "
                f"profiled, {Argument('segments')} what one rank computed in one step, {Argument('device')} what it "
                f"ran on; {Argument('step', example='N')} shows another step."
            )


def note_on_products(measured: MeasuredTrace, steps: Sequence[MeasuredStep], work: StatedWork) -> str | None:
    """Say so if more products ran in a step than the model and workload account for; None if not, or without shapes.

    Products of single matrices are compared with all that the ledger counts but attention, which may run as batches of
    products, and more of them than its mask allows.
    """
    count = work.count()
    counted = sum(row.total + row.recompute for row in count.rows if "pairs" not in row.driver)
    counted += flops_on_padding(work.cost_model, work.workload, work.recompute) or 0
    for step in steps:
        calls = products_of(measured, step)[1]
        ran = sum(product.flops * number for product, number in calls.items() if product and product.batch == 1)
        if ran > _MOST_UNTOLD * counted:
            return (
                f"matrix products of {format_flops(ran)} ran in step {step.window.step}, and {work.name} with this "
                f"workload has {format_flops(counted)} of them: {Argument('model')} or {Argument('segments')} leaves a "
                "part of the step out."
            )
    return None


def _check_paths(paths: set[str], work: StatedWork, source: str) -> None:
    # A path that differs from one of ours in a number alone: a model of the same family with other layers.
    ours = {path for row in work.cost_model.rows for path in _around(row.module)}
    alike = {_folded(path) for path in ours}
    way_out = f"Give {Argument('model')} the model that was profiled: a shipped name, or its config.json."
    more = next((path for path in sorted(paths) if path not in ours and _folded(path) in alike), None)
    if more is not None:
        raise ConfigError(
            f"{source} is no trace of {work.name}: it runs the module {more}, and {work.name} has none of that "
            f"number. {way_out}"
        )
    # The innermost paths that ran: a compiled block has no modules within, so it stands for all that it holds.
    units = paths - {outer for path in paths for outer in _around(path)[1:]}
    theirs = {_folded(path) for path in paths}
    missing: dict[str, int] = {}
    total = 0
    # Sum up the FLOPs of modules that neither ran under their path nor lie in a unit that did.
    for row in work.cost_model.rows:
        flops = row.forward * drivers.parse_driver(row.driver)(work.workload)
        total += flops
        holders = [path for path in _around(row.module) if path in paths]
        if row.module not in paths and not (holders and holders[0] in units):
            missing[row.module] = missing.get(row.module, 0) + flops
    # Layers missing though others of their kind ran are fewer layers; anything else that is missing is another model.
    layers = {path: flops for path, flops in missing.items() if _folded(path) in theirs}
    if sum(layers.values()) > _MOST_LAYERS_MISSING * total:
        raise ConfigError(
            f"{source} is no trace of {work.name}, or of a part of it alone: {work.name} runs {next(iter(layers))}, "
            f"and the trace has no module of that number. {way_out}"
        )
    if sum(missing.values()) > _MOST_MISSING * total:
        raise ConfigError(
            f"{source} is no trace of {work.name}: it has modules such as {min(paths - ours or paths)}, and none of "
            f"{next(iter(missing))} and others, in which {format_share(sum(missing.values()) / total)} of the model's "
            f"FLOPs lie. {way_out} Its paths must be those of named_modules()."
        )


def _around(module: str) -> list[str]:
    paths = []
    while module:
        paths.append(module)
        module = module.rpartition(".")[0]
    return paths


def _folded(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


_FLOATS = {"bf16", "fp16", "fp32", "fp8"}
# Words for precisions in names of kernels; tf32 first, since its operands are fp32.
_IN_NAMES = {"tf32": "tf32", "bf16": "bf16|bfloat16", "fp8": "e4m3|fp8", "fp16": "fp16|f16|half|hgemm|s884|s1688"}


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """A measured trace, with the facts that the trace or the user gives of its work and its device."""

    measured: MeasuredTrace  # the trace
    budget: NeededWork | None  # needed work of its steps; None where nobody tells
    rates: DeviceRates  # rates of its device
    notes: list[str]  # remarks on all this, as sentences
    # collectives of each step, by its number, and by what they say of themselves, in order
    collectives: dict[int, dict[str, list[int]]]


def gather_facts(trace: Trace, work: StatedWork | None, device: str | None, *, as_one_step: bool) -> TraceFacts:
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
            "the matmul-class line is not split into needed work at peak, ceiling loss, recomputation, padding and "
            "losses by component: that needs the steps' workloads and the device's peak, which Headway writes into its "
            f"own traces. Of others, {Argument('model')} and {Argument('segments')} tell them."
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
            return replace(unknown, why_no_peak=why)
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
