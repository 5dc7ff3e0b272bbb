"""What a real step of a plain module dispatches, and what its ledger counts, for tests of the trace."""

from torch import nn

from headway.count import CostModel, Workload
from helpers.eager_counter import counted_eagerly


def dispatched(model: nn.Module, *args, **kwargs) -> tuple[int, int]:
    """Run a real step; returns the FLOPs of its forward and of its backward."""
    return counted_eagerly(model, kwargs or args)


def counted(cost: CostModel, workload: Workload | None = None) -> tuple[int, int]:
    """Count a workload's forward and backward; one call of an example where none is given."""
    count = cost.count(Workload([1]) if workload is None else workload)
    return count.forward, count.dgrad + count.wgrad
