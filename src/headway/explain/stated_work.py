"""Model and workload of a trace as the user states them: the facts that Headway writes into its own traces.

They are checked against what ran: modules by their paths, matmul-class kernels by the device's peak, and products by
their sizes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.count import CostModel, FlopCount, Workload, drivers
from headway.count.step_facts import components_of, flops_on_padding, step_facts
from headway.errors import ConfigError
from headway.explain.breakdown import products_of
from headway.explain.budget import SCHEMA_VERSION, DeviceRates
from headway.explain.measurement import MATMUL, MeasuredStep, MeasuredTrace
from headway.report import format_flops, format_rate, format_share
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
