"""Float32 matrix products on CPUs for which PyTorch's own library lacks the kernels.

PyTorch hands float32 products to Intel's MKL, which on AMD's processors takes kernels of 256 bits whatever these have.
oneDNN, which every build of PyTorch for x86 holds as well, takes those of AVX-512: on an AMD EPYC (Zen 5) it reached
220 GFLOP/s a core where MKL reached 105, for the shapes of a small language model (PyTorch 2.13, November 2026).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from headway.devices.probe import cpu_name


def prefers_onednn() -> bool:
    """Whether oneDNN multiplies faster here than the library that PyTorch takes: AMD's processors with AVX-512."""
    backends: Any = torch.backends  # torch leaves them untyped
    return (
        backends.mkldnn.is_available()
        and backends.mkl.is_available()
        and backends.cpu.get_cpu_capability() == "AVX512"
        and cpu_name().startswith("AMD")
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)
ONEDNN_IS_FASTER = prefers_onednn()  # a constant, which the compiler need not look into


def takes_onednn(*factors: torch.Tensor) -> bool:
    """Whether a product of these tensors goes to oneDNN: float32 on such a CPU, and no autocast to another type."""
    return (
        ONEDNN_IS_FASTER
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
    if not takes_onednn(x, weight):
        return F.linear(x, weight, bias)
    multiply: Any = torch.ops.headway.onednn_linear if torch.compiler.is_compiling() else _onednn_linear
    result: torch.Tensor = multiply(x, weight, bias)
    return result


def product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices as `linear` does."""
    return linear(a_MK, b_KN.T) if takes_onednn(a_MK, b_KN) else a_MK @ b_KN


def product_over_rows(a_TM: torch.Tensor, b_TN: torch.Tensor) -> torch.Tensor:
    """Multiply `a^T b`, as the gradient of a weight does; oneDNN is faster where the result is wider than high."""
    if a_TM.shape[1] > b_TN.shape[1] and takes_onednn(a_TM, b_TN):
        return product(b_TN.T, a_TM).T
    return product(a_TM.T, b_TN)


def _onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not (x.numel() and weight.numel()):  # which oneDNN refuses; looked at here, where sizes are numbers
        return F.linear(x, weight, bias)
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


# For the compiler, which would copy factors that are not contiguous before oneDNN's own operation.
torch.library.define("headway::onednn_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("headway::onednn_linear", "CPU", _onednn_linear)
torch.library.register_fake("headway::onednn_linear", lambda x, weight, _bias: x.new_empty(x.shape[0], weight.shape[0]))
