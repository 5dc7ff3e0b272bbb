"""Plain modules for tests of the trace, and what PyTorch's formulas say of a real step of theirs."""

from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward}


class Dispatched(TorchDispatchMode):
    """FLOPs of every product that runs, by PyTorch's own formulas."""

    def __init__(self):
        super().__init__()
        self.flops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in PRODUCTS:
            self.flops.append(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        return out


def dispatched(model: nn.Module, *args, **kwargs) -> tuple[int, int]:
    """Run a real step and return the FLOPs of its forward and of its backward."""
    forward, backward = Dispatched(), Dispatched()
    fused, *_ = torch.backends.mkldnn.set_flags(_enabled=False)  # fused recurrent kernels hide their products
    try:
        with forward:
            out = model(*args, **kwargs)
        while isinstance(out, tuple):
            out = out[0]
        out = getattr(out, "data", out) if isinstance(out, nn.utils.rnn.PackedSequence) else out
        with backward:
            out.sum().backward()
    finally:
        torch.backends.mkldnn.set_flags(_enabled=fused)
        model.zero_grad(set_to_none=True)
    return sum(forward.flops), sum(backward.flops)


def products(model: nn.Module, *args, **kwargs) -> Counter:
    """Run a real step's forward and return its products' FLOPs, one entry an operation."""
    forward = Dispatched()
    with forward:
        model(*args, **kwargs)
    return Counter(forward.flops)
