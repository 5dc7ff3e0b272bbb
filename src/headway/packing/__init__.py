"""The plan over lengths: which samples make a pack, which packs a step, and which rank gets which.

`Items` (what), `Order` (in which order), `Budget` (how much) -> `Plan.steps()` -> `deal` to ranks. `OnlinePacker` packs
streams that have no index. Numpy only: neither torch nor transformers is loaded.
"""

from headway.packing.budget import Budget, Size, over_budget, segment_costs
from headway.packing.items import Items, Overlong, OverlongCounts
from headway.packing.measure import PlanReport, measure
from headway.packing.online import OnlinePacker
from headway.packing.order import Order, Stage, StageSource
from headway.packing.plan import Plan, PlannedStep
from headway.packing.steps import deal
from headway.packing.strategies import STRATEGIES, Strategy

__all__ = [
    "STRATEGIES",
    "Budget",
    "Items",
    "OnlinePacker",
    "Order",
    "Overlong",
    "OverlongCounts",
    "Plan",
    "PlanReport",
    "PlannedStep",
    "Size",
    "Stage",
    "StageSource",
    "Strategy",
    "deal",
    "measure",
    "over_budget",
    "segment_costs",
]
