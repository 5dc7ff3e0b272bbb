"""Predictions of runs before they start. Begin with `predictor.py`: a `Predictor` makes a `Prediction` of a recipe.

* `Prediction` (`prediction.py`): memory by part and moment, packs, time by line, and the totals of a whole run.
* `Predictor`: a model as a recipe trains it, and the devices that it runs on.
* `Way` (`fitting.py`): settings, or a number of devices, that make a run fit.

`recipe.py` reads a recipe, `saved.py` its model, `lengths.py` its samples, of which `packs.py` plans packs. Bytes of
`weights.py` and `activations.py` meet in `backward.py` and add up in `memory.py`. Rates of `speeds.py` and what
`exchanges.py` lists add up to the lines of `step_time.py`. `scale.py` and `offers.py` predict many sizes, `tune/`
searches, `suggest.py` writes the configuration of `headway init`.

`solve` takes what is known of step time, tokens/s, MFU, chips, hours and cost by name, and gives all that follows.
"""

from headway.predict.solve import QUANTITIES, Quantity, Solution, solve

__all__ = ["QUANTITIES", "Quantity", "Solution", "solve"]
