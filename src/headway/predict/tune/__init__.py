"""The search for settings: which packing length, accumulation, recomputation and sharing trains fastest.

`Space` says what is tried, `Search` plans memory, packs and time of each, `measure` runs the
best and corrects the rest.
"""

from headway.predict.tune.measure import Trial, corrected, measure
from headway.predict.tune.search import Search, SearchResult, distinct, front, same_step
from headway.predict.tune.space import Space, parse_step_tokens, recipe_text

__all__ = [
    "Search",
    "SearchResult",
    "Space",
    "Trial",
    "corrected",
    "distinct",
    "front",
    "measure",
    "parse_step_tokens",
    "recipe_text",
    "same_step",
]
