"""Arithmetic of a run before it starts: time and cost, memory, what to recompute, the mesh of processes.

`solve` takes what is known of step time, tokens/s, MFU, chips, hours and cost by name, and gives all that follows.
"""

from headway.predict.solve import QUANTITIES, Quantity, Solution, solve

__all__ = ["QUANTITIES", "Quantity", "Solution", "solve"]
