"""Exact FLOPs of a training step: a workload times a cost model.

`Workload` says what a step was asked to compute, `CostModel` what each of a model's operations costs per unit of that
work, `FlopCount` is their product in exact integers; `Generation` says what answering prompts computes.
`load_cost_model` takes a cost model that ships with the package;
`headway.tracing` reads one off a real model. Nothing here needs torch.
"""

from headway.count.cost_model import CostModel
from headway.count.flop_count import FlopCount, FlopRow
from headway.count.generation import Generation
from headway.count.models import load_cost_model, shipped_models
from headway.count.rows import ParamCount
from headway.count.workload import Workload

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
