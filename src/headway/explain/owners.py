"""Owners of events' time: a component of the model, or a named activity around it.

A component takes all events of its modules, forward, backward and recomputed, whatever their class. What a block
computes between the modules that FLOPs are counted of, such as norms and residual sums, is `TOWER.other`. A compiled
block has no modules within. Where a fused operator attends in each of a tower's compiled blocks, their kernels are told
apart by their work: `TOWER.attention`, `TOWER.products` of all other components, and `TOWER.other` of what computes no
product. Elsewhere all components of these blocks are one: `TOWER (compiled)`.
"""

from collections import Counter
from collections.abc import Mapping

from headway.explain.attribution import Attribution, Chore, Phase
from headway.explain.budget import NO_COMPONENT, OTHER, NeededWork, tower_of
from headway.explain.events import NONE
from headway.explain.kernels import Work, is_attention
from headway.explain.measurement import MATMUL, MeasuredStep

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
    """Names of the owners of events' time.

    Args:
        attribution: of a trace.
        budget: what Headway wrote into it.
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
