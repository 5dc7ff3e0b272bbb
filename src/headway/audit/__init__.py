"""What other tools print, and what it means: one step in every convention, and logs restated in `useful`.

`compare` bills a step in each convention; `read_log` reads a tool's log, `audit` finds which rule and peak explain its
numbers and restates them.
"""

from headway.audit.compare import Compared, compare

__all__ = ["Compared", "compare"]
