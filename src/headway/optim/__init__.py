"""The optimizer: frozen parts, parameter groups, AdamW and Muon, learning rates, and averaged weights.

`groups.py` what learns, and who shares settings; `optimizer.py` a step of all of it, by the rules of
`headway.count.updating`, and its learning rate; `adamw.py` and `muon.py` the update of a rule; `parts.py` weights and
moments as they are held and as they are worked on; `ema.py` the average of the weights.
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
from headway.optim.optimizer import Optimizer, learning_rate, make_optimizer, set_learning_rate, take_step

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
