"""An independent count of a real eager step, for tests of the trace: products and convolutions as they are dispatched.

Nothing of `headway.tracing` is used here. A product of [m, k] and [k, n] is 2 m k n FLOPs; a convolution 2 FLOPs for
each weight and position (output positions, input ones when transposed), and as many for each gradient that its backward
is asked for, which holds for grouped ones too. Attention runs by its math backend, whose products are seen singly, so
that pairs which a mask forbids are counted too. An outer product (k = 1) in which nothing requires a gradient, as
rotary angles are made, is elementwise work written as a product, and left out.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# products: which arguments are multiplied
PRODUCTS = {
    aten.mm: (0, 1), aten.bmm: (0, 1), aten.mv: (0, 1), aten.dot: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2),
    aten.addmv: (1, 2),
}  # fmt: skip


class EagerCounter(TorchDispatchMode):
    """Adds up FLOPs while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in PRODUCTS:
            left, right = (args[place] for place in PRODUCTS[packet])
            is_outer = left.shape[-1] == 1 and not left.requires_grad and not right.requires_grad
            is_backward = torch._C._current_autograd_node() is not None
            rows = left.numel()  # m x k, for each of a batch
            self.flops += 0 if is_outer and not is_backward else 2 * rows * (right.shape[-1] if right.dim() > 1 else 1)
        elif packet is aten.convolution:
            self.flops += _convolved(args[0], args[1], out, transposed=args[6])
        elif packet is aten.convolution_backward:
            self.flops += _convolved(args[1], args[2], args[0], transposed=args[7]) * sum(args[10][:2])
        return out


def _convolved(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, transposed: bool) -> int:
    positions = x if transposed else y
    return 2 * weight.numel() * positions.shape[0] * math.prod(positions.shape[2:])


def counted_eagerly(model: nn.Module, arguments: Any) -> tuple[int, int]:
    """Run a real step: forward, and backward from the loss or from all that is returned.

    Args:
        model: a real one; its gradients are cleared.
        arguments: of its forward: a dictionary by name, or a tuple by position.

    Returns:
        FLOPs of forward and of backward.
    """
    forward, backward = EagerCounter(), EagerCounter()
    fused, *_ = torch.backends.mkldnn.set_flags(_enabled=False)  # fused recurrent kernels hide their products
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), forward:
            out = model(**arguments) if isinstance(arguments, dict) else model(*arguments)
        starts = [*differentiated(out)]
        if starts:
            with backward:
                torch.autograd.backward(starts, [torch.ones_like(t) for t in starts])
    finally:
        torch.backends.mkldnn.set_flags(_enabled=fused)
        torch.backends.mha.set_fastpath_enabled(fast)
        model.zero_grad(set_to_none=True)
    return forward.flops, backward.flops


def differentiated(output: Any) -> Iterator[torch.Tensor]:
    """Find what training starts from in a real output: the loss if there is one, else all that requires a gradient."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        yield loss
        return
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf):
            yield from differentiated({**vars(leaf)})
        elif isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            yield leaf
