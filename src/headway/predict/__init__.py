"""Predictions of runs before they start. Begin with `prediction.py`: a `Predictor` makes a `Prediction` of a recipe.

* `Prediction`: memory by part and moment, packs, time by line, and the totals of a whole run.
* `Predictor`: a model and the devices that it runs on.
* `Way` (`fitting.py`): settings, or a number of devices, that make a run fit.

`recipe.py` reads a recipe, `saved.py` what autograd saves, `packs.py` plans packs; `memory.py` and the files that it
imports add up bytes, `step_time.py` and its own seconds; `exchanges.py` lists what devices exchange; `tune/` searches.

`solve` takes what is known of step time, tokens/s, MFU, chips, hours and cost by name, and gives all that follows.
"""

from headway.predict.solve import QUANTITIES, Quantity, Solution, solve

__all__ = ["QUANTITIES", "Quantity", "Solution", "solve"]
