"""What PyTorch's formulas say of a real step of a plain module, for tests of the trace."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.count import CostModel, Workload
from headway.tracing.inputs.model_inputs import backward_from
from helpers.pytorch_counter import Products


def dispatched(model: nn.Module, *args, **kwargs) -> tuple[int, int]:
    """Run a real step; returns the FLOPs of its forward and of its backward.

    Fused recurrent kernels, which hide their products, are off; attention multiplies whole squares of scores.
    """
    forward, backward = Products(), Products()
    fused, *_ = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        with sdpa_kernel(SDPBackend.MATH), forward:
            out = model(*args, **kwargs)
        with backward:
            backward_from(out)
    finally:
        torch.backends.mkldnn.set_flags(_enabled=fused)
        model.zero_grad(set_to_none=True)
    return sum(flops for _, flops in forward.seen), sum(flops for _, flops in backward.seen)


def counted(cost: CostModel, workload: Workload | None = None) -> tuple[int, int]:
    """Count a workload's forward and backward; one call of an example where none is given."""
    count = cost.count(Workload([1]) if workload is None else workload)
    return count.forward, count.dgrad + count.wgrad
