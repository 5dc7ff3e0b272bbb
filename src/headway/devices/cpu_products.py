"""Float32 matrix products on CPUs for which PyTorch's own library lacks the kernels.

PyTorch hands float32 products to Intel's MKL, which on AMD's processors takes kernels of 256 bits whatever these have.
oneDNN, which every build of PyTorch for x86 holds as well, takes those of AVX-512: on an AMD EPYC (Zen 5) it reached
220 GFLOP/s a core where MKL reached 105, for the shapes of a small language model (PyTorch 2.13, November 2026).

All of it is here. Whoever multiplies by hand calls `linear`, `product` and `add_product_over_rows`, which are PyTorch's
own elsewhere; a model's layers are changed by `use_fast_products`; and `LIBRARY` names what multiplies.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from headway.devices.names import cpu_name


def _prefers_onednn() -> bool:
    """Tell whether oneDNN multiplies faster here than the library that PyTorch takes: AMD's processors with AVX-512."""
    backends: Any = torch.backends  # torch leaves them untyped
    return (
        backends.mkldnn.is_available()
        and backends.mkl.is_available()
        and backends.cpu.get_cpu_capability() == "AVX512"
        and cpu_name().startswith("AMD")
    )


_PLAIN = (torch.Tensor, nn.Parameter)
_ONEDNN_IS_FASTER = _prefers_onednn()  # a constant, which the compiler need not look into
LIBRARY = "oneDNN" if _ONEDNN_IS_FASTER else None
"""Library that multiplies in float32 on this CPU, where it is not PyTorch's own choice."""


def _takes_onednn(*factors: torch.Tensor) -> bool:
    """Tell whether a product of these tensors goes to oneDNN: float32 on such a CPU, without autocast to another."""
    return (
        _ONEDNN_IS_FASTER
        and all(type(x) in _PLAIN and x.device.type == "cpu" and x.dtype == torch.float32 for x in factors)
        and not torch.is_autocast_enabled("cpu")
        # whoever counts a model's operations or runs it on shapes is to see PyTorch's own
        and (torch.compiler.is_compiling() or not is_in_torch_dispatch_mode())
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `F.linear` by the faster library; without a gradient where that is oneDNN.

    Args:
        x: rows, shape (M, K).
        weight: shape (N, K).
        bias: shape (N,).
    """
    if not _takes_onednn(x, weight):
        return F.linear(x, weight, bias)
    multiply: Any = torch.ops.headway.onednn_linear if torch.compiler.is_compiling() else _onednn_linear
    result: torch.Tensor = multiply(x, weight, bias)
    return result


def product(a_MK: torch.Tensor, b_KN: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply two matrices as `linear` does; PyTorch's own library writes to `out`."""
    return linear(a_MK, b_KN.T) if _takes_onednn(a_MK, b_KN) else torch.mm(a_MK, b_KN, out=out)


def add_product_over_rows(total_MN: torch.Tensor, a_TM: torch.Tensor, b_TN: torch.Tensor) -> None:
    """Add `a^T b` to a matrix, as the gradient of a weight is added up."""
    if _takes_onednn(a_TM, b_TN):
        total_MN.add_(_product_over_rows(a_TM, b_TN))
    else:
        total_MN.addmm_(a_TM.T, b_TN)


def use_fast_products(model: nn.Module, but: nn.Module | None = None) -> None:
    """Let plain linear layers multiply by oneDNN where it is the faster library of this CPU.

    Args:
        model: changed in place; its parameters keep their names.
        but: a layer that stays, such as the output layer, whose loss multiplies itself.
    """
    if _ONEDNN_IS_FASTER:
        for module in model.modules():
            if type(module) is nn.Linear and module is not but:
                module.__class__ = _OneDnnLinear


def _product_over_rows(a_TM: torch.Tensor, b_TN: torch.Tensor) -> torch.Tensor:
    """Multiply `a^T b`; oneDNN is faster where the result is wider than high."""
    if a_TM.shape[1] > b_TN.shape[1] and _takes_onednn(a_TM, b_TN):
        return product(b_TN.T, a_TM).T
    return product(a_TM.T, b_TN)


class _OneDnnLinear(nn.Linear):
    """Multiplies by oneDNN what it takes, forward and backward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the name that torch gives it
        if not _takes_onednn(input, self.weight):
            return super().forward(input)
        multiply: Any = _OneDnnProduct.apply  # torch leaves it untyped
        rows_TO: torch.Tensor = multiply(input.flatten(0, -2), self.weight, self.bias)
        return rows_TO.view(*input.shape[:-1], self.weight.shape[0])  # a size of -1 would say nothing for no rows


class _OneDnnProduct(torch.autograd.Function):
    """A linear layer's rows, and the gradients of what it multiplies."""

    @staticmethod
    def forward(ctx: Any, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return linear(x_TI, weight_OI, bias_O)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(grad_TO, weight_OI) if needs_x else None,
            _product_over_rows(grad_TO, x_TI) if needs_weight else None,
            grad_TO.sum(0) if needs_bias else None,
        )


def _onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not (x.numel() and weight.numel()):  # oneDNN refuses empty tensors; sizes are numbers here
        return F.linear(x, weight, bias)
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


# For the compiler, which would copy factors that are not contiguous before oneDNN's own operation.
torch.library.define("headway::onednn_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("headway::onednn_linear", "CPU", _onednn_linear)
torch.library.register_fake("headway::onednn_linear", lambda x, weight, _bias: x.new_empty(x.shape[0], weight.shape[0]))
