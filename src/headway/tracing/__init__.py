"""Read a cost model off a real model: its forward and backward run once, on tensors that have shapes but no data.

`trace` does it. `phantom` holds those tensors, `build` the model's twin made of them, `inputs` the arguments of its
forward; `record` keeps every operation that is dispatched, with attention from `seams`; `fit` finds what each
operation's cost is proportional to, and `classify` names its component. `verify` holds the result against PyTorch's
counter. Nothing here knows a model family by name, but for `families`.
"""

from headway.tracing.trace import trace, trace_config

__all__ = ["trace", "trace_config"]
