"""The optimizer: frozen parts, parameter groups, AdamW and Muon, learning rates, and averaged weights.

`schedule.py` the learning rate of a step; `groups.py` what learns, and who shares settings;
`optimizer.py` AdamW and Muon as one optimizer; `muon.py` Muon's matrices across processes; `moments.py` how moments are
held; `one_pass.py` AdamW over bfloat16 by one kernel, `parts.py` over copies; `ema.py` the average of the weights.
"""

from headway.optim.ema import WeightAverage
from headway.optim.groups import (
    adapt,
    freeze,
    learning_with_tokens,
    parameter_groups,
    put_adapters,
    rows_for_new_tokens,
    with_new_rows,
)
from headway.optim.optimizer import Optimizer, make_optimizer, set_learning_rate, take_step
from headway.optim.schedule import learning_rate

__all__ = [
    "Optimizer",
    "WeightAverage",
    "adapt",
    "freeze",
    "learning_rate",
    "learning_with_tokens",
    "make_optimizer",
    "parameter_groups",
    "put_adapters",
    "rows_for_new_tokens",
    "set_learning_rate",
    "take_step",
    "with_new_rows",
]
