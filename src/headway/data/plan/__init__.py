"""The plan over lengths: which samples make a pack, which packs a step, and which rank gets which.

`Items` (what), `Order` (in which order), `Budget` (how much) -> `Plan.steps()` -> `deal` to ranks. `OnlinePacker` packs
streams that have no index. Numpy only: neither torch nor transformers is loaded.
"""

from headway.data.plan.budget import Budget, Size, over_budget
from headway.data.plan.items import Items, Overlong, OverlongCounts
from headway.data.plan.measure import PlanReport, measure
from headway.data.plan.online import OnlinePacker
from headway.data.plan.order import Order, Play, Stage
from headway.data.plan.plan import Plan, PlannedStep
from headway.data.plan.steps import deal
from headway.data.plan.strategies import STRATEGIES, Strategy

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
    "Play",
    "Size",
    "Stage",
    "Strategy",
    "deal",
    "measure",
    "over_budget",
]
