"""Attention within segments on CUDA by the flash-attn package, where it is installed and asked for.

Tensor letters as in `attention`. Two packages are known: `flash_attn_interface` (FlashAttention-3, for Hopper) and
`flash_attn` (FlashAttention-2); the first is taken where both are there.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from headway.errors import ConfigError
from headway.models.segments import with_equal_heads
from headway.models.varlen import varlen_attention

PACKAGES = ("flash_attn_interface", "flash_attn")
_HEAD_MULTIPLE = 8

Kernel = Callable[..., torch.Tensor]  # arguments as in `varlen_attention`

_chosen: list[Kernel] = [varlen_attention]


def cuda_kernel() -> Kernel:
    """The kernel that attention on CUDA runs in this process."""
    return _chosen[0]


def choose_kernel(name: str, device: torch.device) -> None:
    """Choose the kernel of attention on CUDA for this process.

    Args:
        name: "torch" for PyTorch's own, "flash-attn" for the package, "auto" for PyTorch's, which needs nothing else.
        device: where the model runs.

    Raises:
        ConfigError: flash-attn was asked for, and the device is not CUDA or the package is not installed.
    """
    if name != "flash-attn":
        _chosen[0] = varlen_attention
        return
    if device.type != "cuda":
        raise ConfigError(
            f"speed.attention is 'flash-attn', which runs on CUDA only, and the run is on {device}. Set "
            "speed.attention=auto, which attends segment by segment on a CPU."
        )
    installed = [package for package in PACKAGES if find_spec(package) is not None]
    if not installed:
        raise ConfigError(
            "speed.attention is 'flash-attn', but neither flash_attn_interface (FlashAttention-3) nor flash_attn is "
            "installed. Install one with `pip install flash-attn --no-build-isolation`, or set speed.attention=auto, "
            "which takes PyTorch's own variable-length flash kernel."
        )
    _chosen[0] = flash_kernel(import_module(installed[0]).flash_attn_varlen_func)


def flash_kernel(attend: Callable[..., Any]) -> Kernel:
    """A function of the flash-attn packages as a kernel of this library.

    Args:
        attend: `flash_attn_varlen_func` of either package.
    """

    def kernel(
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cu_seqlens_N: torch.Tensor,
        max_seqlen: int,
        causal: bool,
        window: int | None,
        scale: float,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        if sinks_H is not None:
            raise ConfigError("flash-attn has no attention sinks, which this model uses; set speed.attention=torch.")
        value_size = v_TKD.shape[-1]
        q, k, v = with_equal_heads(q_THD, k_TKD, v_TKD, multiple=_HEAD_MULTIPLE)
        cu = cu_seqlens_N.to(torch.int32)
        reach = (window - 1, 0) if causal and window is not None else (-1, -1)
        out = attend(
            q, k, v, cu, cu, max_seqlen, max_seqlen, softmax_scale=scale, causal=causal, window_size=reach
        )  # fmt: skip
        out_THD: torch.Tensor = out[0] if isinstance(out, tuple) else out  # FlashAttention-3 once gave its sums too
        return out_THD.narrow(-1, 0, value_size)

    return kernel
