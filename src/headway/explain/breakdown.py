"""The time of a step by component, module, kernel or pass of attention, and by part of the step.

A pass of the whole model computes one pack, so a kernel of attention belongs to the pack of the pass that launched it.
Backward has the pass of the forward that it differentiates, by the sequence number, and recomputation that of the
backward around it. The trace says what each layer's mask lets each pack attend to, in FLOPs.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from headway.errors import ConfigError
from headway.explain.attribution import Attribution, Chore, Phase
from headway.explain.budget import NO_COMPONENT, OTHER, NeededWork, tower_of
from headway.explain.events import NONE, Kind, Product, Trace
from headway.explain.explanation import StepWaterfall
from headway.explain.kernels import Work, is_attention
from headway.explain.measurement import MATMUL, MeasuredStep, MeasuredTrace
from headway.words import Argument

# In brackets, as they are no components.
_OF_PHASE = {
    Phase.DATA_WAIT: "(waiting for data)",
    Phase.OPTIMIZER: "(optimizer)",
    Phase.LOGGING: "(logging)",
    Phase.CHECKPOINT: "(checkpoint)",
    Phase.EVALUATION: "(evaluation)",
    Phase.COMPILE: "(compiling)",
}
_OF_WORK = {Work.COMMUNICATION: "(communication)", Work.COPY: "(copies)"}
_ATTENTION, _PRODUCTS, _WHOLE = "attention", "products", " (compiled)"


class Owners:
    """Names of the owners of events' time: a component of the model, or a named activity around it.

    A component takes all events of its modules, forward, backward and recomputed, whatever their class. What a block
    computes between the modules that FLOPs are counted of, such as norms and residual sums, is `TOWER.other`. A
    compiled block has no modules within. Where a fused operator attends in each of a tower's compiled blocks, their
    kernels are told apart by their work: `TOWER.attention`, `TOWER.products` of all other components, and `TOWER.other`
    of what computes no product. Elsewhere all components of these blocks are one: `TOWER (compiled)`.
    """

    def __init__(self, attribution: Attribution, budget: NeededWork) -> None:
        self._attribution, self._budget = attribution, budget
        self._compiled = _compiled_units(attribution, budget)
        self._unit_of = _units_of_components(attribution, self._compiled)
        self._names: dict[tuple[str, str, bool], str] = {}

    def of(self, event: int) -> str:
        """Name the owner of an event; `NO_COMPONENT` if it is unknown."""
        attribution = self._attribution
        activity = _OF_PHASE.get(attribution.phase[event]) or _OF_WORK.get(attribution.work[event])
        if activity is not None:
            return activity
        if attribution.chore[event] is not Chore.NONE:
            return f"({attribution.chore[event].value})"
        module = attribution.module[event]
        key = module, self._work_in(module, event), attribution.passes[event] != NONE
        if key not in self._names:
            self._names[key] = self._owner_of_module(*key)
        return self._names[key]

    def of_component(self, component: str) -> str:
        """Name the owner of a component's time: itself, or the compiled blocks that it is part of."""
        return self._unit_of.get(component, component)

    def matmul_ns(self, step: MeasuredStep) -> Counter[str]:
        """Time of the matmul-class events of a step by owner [ns]."""
        took: Counter[str] = Counter()
        for owned in step.owned:
            if owned.line == MATMUL:
                took[self.of(owned.event)] += owned.ns
        return took

    def flops_run(self, step: int) -> dict[str, int]:
        """FLOPs that ran in a step by owner, recomputation by activation checkpointing included."""
        ran: dict[str, int] = {}
        for component, flops in self._budget.flops_run(step).items():
            owner = self.of_component(component)
            ran[owner] = ran.get(owner, 0) + flops
        return ran

    def _work_in(self, module: str, event: int) -> str:
        """Name the part of a compiled block that an event is of; "" outside of one."""
        if module not in self._compiled:
            return ""
        if self._attribution.work[event] is not Work.MATMUL:
            return OTHER
        return _ATTENTION if is_attention(self._attribution.operator[event]) else _PRODUCTS

    def _owner_of_module(self, module: str, work: str, is_in_a_pass: bool) -> str:
        if module in self._compiled:
            components = sorted(self._compiled[module])
            of_work = [name for name in components if (_part(name) == _ATTENTION) == (work == _ATTENTION)]
            unit = self.of_component((of_work or components)[0])
            return f"{tower_of(components)}.{OTHER}" if work == OTHER and not unit.endswith(_WHOLE) else unit
        if not module and not is_in_a_pass and not self._budget.is_undivided:
            return NO_COMPONENT  # work of the whole model, or what backward makes of it
        return self.of_component(self._budget.component_of(module))


def _units_of_components(attribution: Attribution, compiled: Mapping[str, frozenset[str]]) -> dict[str, str]:
    attending = {
        module
        for module, work, operator in zip(attribution.module, attribution.work, attribution.operator, strict=True)
        if module in compiled and work is Work.MATMUL and is_attention(operator)
    }
    within: dict[str, set[str]] = {}
    undivided: set[str] = set()  # towers in whose blocks no kernel of attention is seen, as where it is written out
    for module, components in compiled.items():
        tower = tower_of(components)
        within.setdefault(tower, set()).update(components)
        if module not in attending and f"{tower}.{_ATTENTION}" in components:
            undivided.add(tower)
    units: dict[str, str] = {}
    for tower, of_tower in within.items():
        attention = f"{tower}.{_ATTENTION}"
        if tower in undivided or attention not in of_tower:
            units |= dict.fromkeys(of_tower, f"{tower}{_WHOLE}")
            continue
        others = of_tower - {attention}
        units |= dict.fromkeys(others, f"{tower}.{_PRODUCTS}" if len(others) > 1 else next(iter(others)))
    return units


def _part(component: str) -> str:
    return component.rpartition(".")[2]


def _compiled_units(attribution: Attribution, budget: NeededWork) -> dict[str, frozenset[str]]:
    """The components in each module that runs as one compiled unit, by its path, where they are several."""
    paths = {module for module in attribution.module if module}
    holders = {""} if paths else set()  # modules that hold named modules, and so are no units
    for module in paths:
        parts = module.split(".")
        holders.update(".".join(parts[:i]) for i in range(1, len(parts)))
    compiled = {m for m, is_compiled in zip(attribution.module, attribution.is_compiled, strict=True) if is_compiled}
    units = {module: budget.components_in(module) for module in compiled - holders}
    return {module: components for module, components in units.items() if len(components) > 1}


OTHERS = "convolutions, attention, sizes not recorded"


@dataclass(frozen=True, slots=True)
class GemmRow:
    """All products of a step that have one size."""

    product: Product | None  # the sizes; None of what is no product, or has none recorded
    ns: int  # time in which their kernels ran [ns]
    calls: int  # number of calls; 0 where there is no product
    flops_per_s: float | None  # FLOPs of all of them / time [FLOP/s]; None where there is no product
    of_ceiling: float | None  # the same / the best rate that the device reaches; None where that is not known

    @property
    def name(self) -> str:
        """The sizes as `MxNxK`, of batches as `B*MxNxK`."""
        if self.product is None:
            return OTHERS
        batch, m, n, k, _ = self.product
        return f"{m}x{n}x{k}" if batch == 1 else f"{batch}*{m}x{n}x{k}"

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return {
            "name": self.name,
            "ns": self.ns,
            "shape": None if self.product is None else list(self.product[:4]),
            "dtype": None if self.product is None else self.product.dtype,
            "calls": self.calls,
            "flops": 0 if self.product is None else self.product.flops * self.calls,
            "flops_per_s": self.flops_per_s,
            "of_ceiling": self.of_ceiling,
        }


def products_of(measured: MeasuredTrace, step: MeasuredStep) -> tuple[Counter[Product | None], Counter[Product | None]]:
    """Find the matrix products that ran in a step.

    Returns:
        Time [ns] of each size, under None that of matmul-class kernels that are no product or have no sizes; and calls
        of each size.
    """
    spent: Counter[Product | None] = Counter()
    calls: Counter[Product | None] = Counter()
    for call in product_calls(measured, step):
        spent[call.product] += call.ns
        calls[call.product] += call.product is not None
    return spent, calls


class ProductCall(NamedTuple):
    """A call of a matrix product; of matmul-class kernels that are no product or have no sizes, all time together."""

    product: Product | None  # sizes of the product
    ns: int  # time of its kernels [ns]
    event: int  # one of its events; NONE of those without sizes


def product_calls(measured: MeasuredTrace, step: MeasuredStep) -> list[ProductCall]:
    """Find the calls of matrix products in a step; their times add up to its matmul-class time."""
    trace, host = measured.trace, measured.trace.host
    unknown_ns = 0
    of_operator: Counter[int] = Counter()
    products: dict[int, tuple[Product, int]] = {}  # the product and an event of each operator
    for owned in (owned for owned in step.owned if owned.line == MATMUL):
        operator, operands = measured.operator_of(owned.event), measured.operands_of(owned.event)
        product = None if operands is None else operands.product(trace.names[host.name[operator]])
        if product is None:
            unknown_ns += owned.ns
        else:
            products[operator] = product, owned.event
            of_operator[operator] += owned.ns
    calls = [ProductCall(None, unknown_ns, NONE)] if unknown_ns else []
    called = NONE
    # An operator stands before the operators of its thread that it calls: aten::linear is the aten::addmm within.
    for operator in sorted(products, reverse=True):
        calls_it = called != NONE and host.track[called] == host.track[operator]
        if calls_it and host.end_ns[called] <= host.end_ns[operator]:
            inner = calls.pop()
            calls.append(inner._replace(ns=inner.ns + of_operator[operator]))
        else:
            calls.append(ProductCall(products[operator][0], of_operator[operator], products[operator][1]))
        called = operator
    return calls


def gemms_of(waterfall: StepWaterfall) -> list[GemmRow]:
    """Divide the matmul-class time of a step among products by size; the rows add up to it exactly.

    Returns:
        The dearest first; last what is no product of two matrices, or has no sizes.

    Raises:
        ConfigError: there is no trace, or it has no shapes.
    """
    if waterfall.measured is None:
        raise ConfigError(Argument("by", "gemm"), ": records tell nothing of products; a profile does (run.profile).")
    measured, step = waterfall.measured
    if not measured.trace.operands:
        raise ConfigError(
            Argument("by", "gemm"),
            f": {measured.trace.path} has no shapes of operators. Profile with record_shapes=True, as Headway does; ",
            Argument("by", "kernel"),
            " shows the kernels by name.",
        )
    best = waterfall.rates.best_flops_per_s if waterfall.rates is not None else None
    spent, calls = products_of(measured, step)
    rows = []
    for product, ns in spent.items():
        rate = None if product is None else product.flops * calls[product] / ns * 1e9
        share = None if rate is None or not best else rate / best
        rows.append(GemmRow(product, ns, calls[product], rate, share))
    return sorted(rows, key=lambda row: (row.product is None, -row.ns, row.name))


def gemms_record(waterfall: StepWaterfall) -> dict[str, Any]:
    """A step's products, JSON-ready; see `gemms_of`."""
    return {"key": "gemm", "rows": [row.to_dict() for row in gemms_of(waterfall)]}


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
        return {**asdict(self), "flops_per_s": self.flops_per_s}


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
    """Share of the time in which something ran that goes to a component or a named activity; 1.0 where nothing ran."""
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
