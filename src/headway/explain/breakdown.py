"""The time of a step by component, module or kernel, and in which part of the step it was spent."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from headway.errors import ConfigError
from headway.explain.attribute import Phase
from headway.explain.budget import NeededWork
from headway.explain.waterfall import StepWaterfall

By = Literal["component", "module", "kernel"]
OUTSIDE = "(outside of modules)"
NO_KERNEL = "(no kernel runs)"


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """What one component, module or kernel took of a step.

    Attributes:
        name: which.
        ns: time in which its kernels ran and nothing more important did [ns].
        by_phase: the same by part of the step [ns]; they add up to `ns`.
    """

    name: str
    ns: int
    by_phase: dict[Phase, int]

    def as_record(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"name": self.name, "ns": self.ns, "by_phase": {phase.value: ns for phase, ns in self.by_phase.items()}}


def break_down(waterfall: StepWaterfall, by: By) -> list[BreakdownRow]:
    """Divide a step among components, modules or kernels; they and the time without a kernel add up to it exactly.

    Args:
        waterfall: the step.
        by: component (of the cost model), module (its path), or kernel (its name; on a CPU the operator's).

    Returns:
        The dearest first; last the time in which no kernel ran.

    Raises:
        ConfigError: components are asked for, and the trace does not say to which one a module belongs.
    """
    measured, step = waterfall.measured
    trace, attribution = measured.trace, measured.attribution
    budget = None
    if by == "component":
        if trace.headway is None:
            raise ConfigError(
                f"--by component: {trace.path} does not say which component a module belongs to. Traces that Headway "
                "writes do; --by module shows the modules themselves."
            )
        budget = NeededWork(trace.headway, str(trace.path))
    spent: dict[str, Counter[Phase]] = defaultdict(Counter)
    for owned in step.owned:
        if budget is not None:
            name = budget.component_of(attribution.module[owned.event])
        elif by == "module":
            name = attribution.module[owned.event] or OUTSIDE
        else:
            name = trace.names[measured.events.name[owned.event]]
        spent[name][attribution.phase[owned.event]] += owned.ns
    shares = [BreakdownRow(name, sum(phases.values()), dict(phases)) for name, phases in spent.items()]
    shares.sort(key=lambda share: (-share.ns, share.name))
    idle_ns = waterfall.duration_ns - sum(share.ns for share in shares)
    return [*shares, BreakdownRow(NO_KERNEL, idle_ns, {})]
