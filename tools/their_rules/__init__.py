"""Headway's conventions beside the tools' own functions, run at dated commits.

`python -m tools.their_rules CHECKOUTS` reads the tools' source out of clones that lie in a folder; it fetches nothing.
Only the functions that count are compiled, unchanged; nothing else of a tool runs, and none of its code is kept here.
"""

from tools.their_rules.table import render

__all__ = ["render"]
