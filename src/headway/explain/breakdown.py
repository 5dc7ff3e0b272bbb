"""The time of a step by component, module, kernel or pass of attention, and by part of the step.

A pass of the whole model computes one pack, so a kernel of attention belongs to the pack of the pass that launched it.
Backward has the pass of the forward that it differentiates, by the sequence number, and recomputation that of the
backward around it. The trace says what each layer's mask lets each pack attend to, in FLOPs.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from headway.errors import ConfigError
from headway.explain.attribution import Phase
from headway.explain.budget import NO_COMPONENT, NeededWork
from headway.explain.events import Kind, Trace
from headway.explain.explanation import StepWaterfall
from headway.explain.kernels import Work, is_attention
from headway.explain.measurement import MeasuredStep, MeasuredTrace
from headway.explain.owners import Owners
from headway.words import Argument

By = Literal["component", "module", "kernel", "attention"]
OUTSIDE = "(outside of modules)"
NO_KERNEL = "(no kernel runs)"
NO_ATTENTION = "(no attention)"
_FORWARD = "phase:forward"
_PARTS = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTED)  # phases in the order of a trace's `packs`


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """Time of one component, module, kernel, or attention of one pack in one layer in a step."""

    name: str  # component, module, kernel, or pack and layer
    ns: int  # time in which its kernels ran and nothing more important did [ns]
    by_phase: dict[Phase, int]  # the same by part of the step [ns]; they add up to `ns`
    matmul_ns: int = 0  # the part of it that matmul-class kernels took [ns]
    # FLOPs that it ran by the cost model, what was run again included; by part of the step where it is attention. None
    # where they are not known, or not of rows of this kind
    flops: int | None = None
    flops_by_phase: dict[Phase, int] = field(default_factory=dict)

    @property
    def flops_per_s(self) -> float | None:
        """Rate at which its matmul-class kernels ran; None without such kernels, or if their FLOPs are unknown."""
        return self.flops / self.matmul_ns * 1e9 if self.flops and self.matmul_ns else None

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return {
            "name": self.name,
            "ns": self.ns,
            "by_phase": {phase.value: ns for phase, ns in self.by_phase.items()},
            "matmul_ns": self.matmul_ns,
            "flops": self.flops,
            "flops_by_phase": {phase.value: flops for phase, flops in self.flops_by_phase.items()},
            "flops_per_s": self.flops_per_s,
        }


class PackLayer(NamedTuple):
    """Attention of one pack in one layer."""

    module: str  # path of the module that attends
    pack: int | None  # number of the pack in its step, from 1; None where the trace does not tell them apart

    def __str__(self) -> str:
        return f"{self.module}, pack {'unknown' if self.pack is None else self.pack}"


class StepAttention:
    """Attention of one step, by pack and layer.

    Attributes:
        flops: FLOPs of the pairs that the masks allow, by the cost model: forward, backward, and what is run again.

    Args:
        measured: the trace.
        step: number of the step.
        budget: what Headway wrote into the trace.

    Raises:
        ConfigError: the trace does not say what each pack of the step attends to.
    """

    def __init__(self, measured: MeasuredTrace, step: int, budget: NeededWork) -> None:
        packs = budget.packs(step)
        if packs is None:
            raise ConfigError(
                Argument("by", "attention"),
                f": {measured.trace.path} does not say what each pack of step {step} attends to. Profile "
                "again with this Headway, whose traces do.",
            )
        self._measured = measured
        self.flops: Mapping[PackLayer, Mapping[Phase, int]] = _flops(packs)
        self._attending = {module for module, _ in self.flops}
        passes = _passes(measured.trace, step)
        self._pack_of = {at: number for number, at in enumerate(passes, start=1)} if len(passes) == len(packs) else {}
        self._attends_in: dict[str, str | None] = {}

    def of(self, event: int) -> PackLayer | None:
        """The pack and layer that an event attends for; None if it is no matmul-class event of attention."""
        attribution = self._measured.attribution
        if attribution.work[event] is not Work.MATMUL:
            return None
        module: str | None = attribution.module[event]
        if module not in self._attending:
            names, events = self._measured.trace.names, self._measured.events
            name = attribution.operator[event] or names[events.name[event]]
            module = self._within(attribution.module[event]) if is_attention(name) else None
        return None if module is None else PackLayer(module, self._pack_of.get(attribution.passes[event]))

    def _within(self, unit: str) -> str | None:
        """The one module that attends in a compiled block."""
        if unit not in self._attends_in:
            inside = [module for module in self._attending if module.startswith(f"{unit}.")]
            self._attends_in[unit] = inside[0] if len(inside) == 1 else None
        return self._attends_in[unit]


def break_down(waterfall: StepWaterfall, by: By) -> list[BreakdownRow]:
    """Divide a step; the rows and the time without a kernel add up to it exactly.

    Args:
        waterfall: the step.
        by: component (of the cost model, or an activity around it), module (its path), kernel (its name; on a CPU the
            operator's), or attention (matmul-class kernels of each pack in each layer that attends).

    Returns:
        The dearest first; last the time in which no kernel ran, before it that of other kernels than attention's.

    Raises:
        ConfigError: there is no trace, or it does not say what is needed: to which component a module belongs, or what
            each pack attends to.
    """
    if waterfall.measured is None:
        raise ConfigError(Argument("by", by), f": records tell nothing of {by}s; a profile does (run.profile).")
    measured, step = waterfall.measured
    attribution = measured.attribution
    if by == "module":
        rows = _rows(measured, step, lambda event: attribution.module[event] or OUTSIDE)
    elif by == "kernel":
        rows = _rows(measured, step, lambda event: measured.trace.names[measured.events.name[event]])
    else:
        budget = _budget(measured, by)
        if by == "component":
            owners = Owners(attribution, budget)
            flops = owners.flops_run(step.window.step)
            rows = [replace(row, flops=flops.get(row.name)) for row in _rows(measured, step, owners.of)]
        else:
            rows = _attention(measured, step, StepAttention(measured, step.window.step, budget))
    rows.sort(key=lambda row: (row.name == NO_ATTENTION, -row.ns, row.name))
    idle_ns = waterfall.duration_ns - sum(row.ns for row in rows)
    return [*rows, BreakdownRow(NO_KERNEL, idle_ns, {})]


def attributed_share(rows: Sequence[BreakdownRow]) -> float:
    """Share of the time in which something ran that goes to a component or a named activity; 1.0 where nothing ran.

    Args:
        rows: of `break_down` by component.
    """
    ran_ns = sum(row.ns for row in rows if row.name != NO_KERNEL)
    unknown_ns = sum(row.ns for row in rows if row.name == NO_COMPONENT)
    return 1.0 - unknown_ns / ran_ns if ran_ns else 1.0


def kind_of_module(path: str) -> str:
    """Leave the numbers out of a module's path, which layers of one kind differ in.

    >>> kind_of_module("model.layers.27.mlp")
    'model.layers.*.mlp'
    """
    return re.sub(r"(?<=[._])\d+(?=\.|$)", "*", path)


def breakdown_record(waterfall: StepWaterfall, by: By) -> dict[str, Any]:
    """A step's breakdown, JSON-ready; see `break_down`."""
    rows = break_down(waterfall, by)
    attributed = {"attributed": attributed_share(rows)} if by == "component" else {}
    return {"key": by, **attributed, "rows": [row.to_dict() for row in rows]}


def _budget(measured: MeasuredTrace, by: By) -> NeededWork:
    trace = measured.trace
    if trace.headway is None:
        raise ConfigError(
            Argument("by", by),
            f": {trace.path} does not say which component a module belongs to. Traces that Headway writes do; ",
            Argument("by", "module"),
            " shows the modules themselves.",
        )
    return NeededWork(trace.headway, str(trace.path))


def _rows(measured: MeasuredTrace, step: MeasuredStep, name_of: Callable[[int], str]) -> list[BreakdownRow]:
    attribution = measured.attribution
    spent: dict[str, Counter[Phase]] = defaultdict(Counter)
    matmul_ns: Counter[str] = Counter()
    for owned in step.owned:
        name = name_of(owned.event)
        spent[name][attribution.phase[owned.event]] += owned.ns
        matmul_ns[name] += owned.ns if attribution.work[owned.event] is Work.MATMUL else 0
    return [BreakdownRow(name, sum(phases.values()), dict(phases), matmul_ns[name]) for name, phases in spent.items()]


def _attention(measured: MeasuredTrace, step: MeasuredStep, attention: StepAttention) -> list[BreakdownRow]:
    """A row for each pack and layer with attention, even if none of its kernels was found, and one of the rest."""
    rows = {row.name: row for row in _rows(measured, step, lambda event: str(attention.of(event) or NO_ATTENTION))}
    for layer, by_phase in attention.flops.items():
        row = rows.get(str(layer), BreakdownRow(str(layer), 0, {}))
        rows[row.name] = replace(row, flops=sum(by_phase.values()), flops_by_phase=dict(by_phase))
    return [*rows.values()]


def _flops(packs: Sequence[Mapping[str, Sequence[int]]]) -> dict[PackLayer, dict[Phase, int]]:
    return {
        PackLayer(module, number): {phase: n for phase, n in zip(_PARTS, flops, strict=True) if n}
        for number, pack in enumerate(packs, start=1)
        for module, flops in pack.items()
    }


def _passes(trace: Trace, step: int) -> list[int]:
    """The annotations of a step's passes of the whole model, in order: indices of host events."""
    within = [(start, end) for number, start, end in trace.steps if number == step]
    host = trace.host
    forward = {index for index, name in enumerate(trace.names) if name == _FORWARD}
    passes = np.flatnonzero((host.kind == Kind.ANNOTATION) & np.isin(host.name, list(forward)))
    passes = passes[np.argsort(host.start_ns[passes], kind="stable")]
    return [i for i in passes.tolist() if any(start <= host.start_ns[i] < end for start, end in within)]
