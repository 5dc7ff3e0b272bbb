"""Exact FLOPs of a training step: a workload times a cost model.

`Workload` says what a step was asked to compute, `CostModel` what each of a model's operations costs per unit of that
work, `FlopCount` is their product in exact integers. `trace` reads a cost model off a real model; `load_cost_model`
takes one that ships with the package and needs neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

from headway.count.cost_model import CostModel, ParamCount
from headway.count.flop_count import FlopCount, FlopRow
from headway.count.models import load_cost_model, shipped_models
from headway.count.workload import Workload

if TYPE_CHECKING:
    from headway.count.tracing import trace

__all__ = [
    "CostModel",
    "FlopCount",
    "FlopRow",
    "ParamCount",
    "Workload",
    "load_cost_model",
    "shipped_models",
    "trace",
]


def __getattr__(name: str) -> Any:
    """Import `trace`, and torch with it, only when it is asked for."""
    if name == "trace":
        from headway.count.tracing import trace

        return trace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
