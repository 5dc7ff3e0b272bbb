"""Exact FLOPs of a training step: a workload times a cost model.

`Workload` says what a step was asked to compute, `CostModel` what each of a model's operations costs per unit of that
work, `FlopCount` is their product in exact integers; `Generation` says what answering prompts computes.
`load_cost_model` takes a cost model that ships with the package;
`headway.tracing` reads one off a real model. Nothing here needs torch.
"""

from typing import TYPE_CHECKING

from headway.exports import exported

if TYPE_CHECKING:
    from headway.count.cost_model import CostModel
    from headway.count.flop_count import FlopCount, FlopRow
    from headway.count.generation import Generation
    from headway.count.models import load_cost_model, shipped_models
    from headway.count.rows import ParamCount
    from headway.count.workload import Workload

_HOMES = {
    "headway.count.cost_model": ("CostModel",),
    "headway.count.flop_count": ("FlopCount", "FlopRow"),
    "headway.count.generation": ("Generation",),
    "headway.count.models": ("load_cost_model", "shipped_models"),
    "headway.count.rows": ("ParamCount",),
    "headway.count.workload": ("Workload",),
}

__all__ = [
    "CostModel",
    "FlopCount",
    "FlopRow",
    "Generation",
    "ParamCount",
    "Workload",
    "load_cost_model",
    "shipped_models",
]

__getattr__ = exported(__name__, _HOMES)
