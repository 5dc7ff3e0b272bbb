"""The arithmetic of time: step time, tokens/s, MFU, chips, hours and cost, each from a sufficient set of the others.

`solve` takes what is known by name and gives everything that follows; the single identities are functions beside it.
"""

from headway.plan.identities import mfu_of_rate, mfu_of_step, optimal_step_s, training_cost, training_time_s
from headway.plan.solve import QUANTITIES, Plan, Quantity, solve

__all__ = [
    "QUANTITIES",
    "Plan",
    "Quantity",
    "mfu_of_rate",
    "mfu_of_step",
    "optimal_step_s",
    "solve",
    "training_cost",
    "training_time_s",
]
