"""The search for settings: which packing length, accumulation, recomputation and sharing trains fastest.

`Space` says what is tried, `Search` plans memory, packs and time of each, `measure` runs the
best and corrects the rest.
"""

from headway.train.tune.measure import Trial, corrected, measure
from headway.train.tune.recipe import recipe_text
from headway.train.tune.search import Candidate, Found, Search, Timed, distinct, front
from headway.train.tune.space import Space, parse_step_tokens

__all__ = [
    "Candidate",
    "Found",
    "Search",
    "Space",
    "Timed",
    "Trial",
    "corrected",
    "distinct",
    "front",
    "measure",
    "parse_step_tokens",
    "recipe_text",
]
