"""Numbers of other tools, explained: one step in every convention, and logs recomputed in `useful`.

`compare` bills a step in each convention; `read_log` reads a tool's log, `audit` finds which rule and peak explain its
numbers, restates them and attributes the difference factor by factor; `own` restates Headway's own records.
"""

from headway.audit.compare import ComparisonRow, Factor, compare, factors
from headway.audit.logs import read_log
from headway.audit.restate import Audit, audit, own
from headway.audit.rows import Log, LogRow

__all__ = ["Audit", "ComparisonRow", "Factor", "Log", "LogRow", "audit", "compare", "factors", "own", "read_log"]
