"""Choice of the kernel that attends within segments on CUDA: PyTorch's, another in its place, or a package's function.

Tensor letters as in `attention`. PyTorch's variable-length attention is FlashAttention-2, unless its own switch puts
other kernels behind the same operators: then everything above them, compiled blocks too, stays as it is. Behind it can
be FlashAttention-3, FlashAttention-4 and cuDNN's attention over ragged batches, each where its package is installed.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from headway.errors import ConfigError
from headway.models.attention.segments import with_equal_heads
from headway.models.attention.varlen import varlen_attention

FA3, FA2 = PACKAGES = ("flash_attn_interface", "flash_attn")
_HEAD_MULTIPLE = 8
_FA2_NOTE = "Attention on CUDA: PyTorch's variable-length FlashAttention-2"


@dataclass(frozen=True)
class _Switched:
    """Kernels that PyTorch's switch puts behind its variable-length attention.

    Attributes:
        implementation: the switch's name of them.
        title: theirs.
        package: module whose import makes them known, or that they are in.
        majors: of the compute capabilities that they are for.
        devices: those devices, for people.
        source: where the package comes from, in brackets behind its name.
        registers: whether importing the package is what makes the switch know them.
    """

    implementation: str
    title: str
    package: str
    majors: tuple[int, ...]
    devices: str
    source: str
    registers: bool = False


SWITCHED = {
    "fa3": _Switched(
        "FA3",
        "FlashAttention-3",
        FA3,
        (9,),
        "9.x (H100, H200)",
        "it is built from the hopper folder of the flash-attention sources",
    ),
    "cudnn": _Switched(
        "CUDNN",
        "cuDNN's ragged attention",
        "cudnn",
        (9, 10),
        "9.x or 10.x (H100, H200, B200)",
        "pip install nvidia-cudnn-frontend",
        registers=True,
    ),
}
"""By the values of `speed.attention`, the fastest first."""


class CudaKernel(Protocol):
    """Attention within segments on CUDA; arguments as in `segments.segment_attention`, and the longest segment."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cu_seqlens_N: torch.Tensor,
        max_seqlen: int,
        causal: bool,
        window: int | None,
        scale: float,
        sinks_H: torch.Tensor | None,
        /,
    ) -> torch.Tensor:
        """Attended values, shape (T, H, Dv)."""
        ...


_chosen: list[CudaKernel] = [varlen_attention]


def cuda_kernel() -> CudaKernel:
    """The kernel that attention on CUDA runs in this process."""
    return _chosen[0]


def choose_kernel(name: str, device: torch.device) -> tuple[str, ...]:
    """Choose the kernel of attention on CUDA for this process.

    Args:
        name: "torch" for PyTorch's FlashAttention-2, "fa3" for FlashAttention-3 or "cudnn" for cuDNN through PyTorch's
            switch, "flash-attn" for a package's own function, "auto" for "fa3" where it runs and "torch" elsewhere.
        device: where the model runs.

    Returns:
        Which it is, as a line for the start of the run; none on a CPU, which attends segment by segment.

    Raises:
        ConfigError: a kernel was asked for by name that this device or installation does not have.
    """
    if device.type != "cuda" and name not in ("auto", "torch"):
        raise ConfigError(
            f"speed.attention is {name!r}, which runs on CUDA only, and the run is on {device}. Set "
            "speed.attention=auto, which attends segment by segment on a CPU."
        )
    _chosen[0] = varlen_attention
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()  # of an earlier run in this process
    if device.type != "cuda":
        return ()
    if name == "flash-attn":
        return (_use_package(),)
    if name == "torch":
        return (_FA2_NOTE,)
    wanted = SWITCHED["fa3" if name == "auto" else name]
    missing = _missing(wanted, device) or _switch_to(wanted)
    if missing is None:
        return (f"Attention on CUDA: {wanted.title} ({wanted.package}) behind PyTorch's variable-length attention",)
    if name != "auto":
        raise ConfigError(
            f"speed.attention is {name!r} ({wanted.title}), but {missing}. Set speed.attention=auto, which takes "
            f"PyTorch's own variable-length flash kernel where there is no {wanted.title}."
        )
    return (f"{_FA2_NOTE}; {wanted.title} is not used, as {missing}",)


def _missing(wanted: _Switched, device: torch.device) -> str | None:
    """Say what kernels lack here, as a part of a sentence; None where they run."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in wanted.majors:
        return f"it needs a device of compute capability {wanted.devices}, and {device} has {major}.{minor}"
    if find_spec(wanted.package) is None:
        return f"its package {wanted.package} is not installed ({wanted.source})"
    return None


def _switch_to(wanted: _Switched) -> str | None:
    """Put kernels behind PyTorch's operators; returns why that failed, as a part of a sentence, or None."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # it replaces kernels: as asked
            if wanted.registers:
                import_module(f"{wanted.package}.torch")
            activate_flash_attention_impl(wanted.implementation)
    except (ImportError, RuntimeError, ValueError) as error:  # built for another PyTorch, or without a backward
        return f"PyTorch {torch.__version__} cannot use the installed {wanted.package}: {error}"
    return None


def _use_package() -> str:
    installed = [package for package in PACKAGES if find_spec(package) is not None]
    if not installed:
        raise ConfigError(
            f"speed.attention is 'flash-attn', but neither {FA3} (FlashAttention-3) nor {FA2} is installed. Install "
            "one with `pip install flash-attn --no-build-isolation`, or set speed.attention=auto, which takes "
            "PyTorch's own variable-length flash kernel."
        )
    _chosen[0] = flash_kernel(import_module(installed[0]).flash_attn_varlen_func)
    return f"Attention on CUDA: flash_attn_varlen_func of {installed[0]}"


def flash_kernel(attend: Callable[..., Any]) -> CudaKernel:
    """A function of the flash-attn packages as a kernel of this library.

    Args:
        attend: `flash_attn_varlen_func` of either package.
    """

    def kernel(*tensors_and_settings: Any) -> torch.Tensor:
        *qkv, cu_seqlens_N, max_seqlen, causal, window, scale, sinks_H = tensors_and_settings
        if sinks_H is not None:
            raise ConfigError("flash-attn has no attention sinks, which this model uses; set speed.attention=torch.")
        value_size = qkv[-1].shape[-1]
        q, k, v = with_equal_heads(*qkv, multiple=_HEAD_MULTIPLE)  # the packages pad neither heads nor values
        cu = cu_seqlens_N.to(torch.int32)
        # (left, right): how many keys before and after its own a query sees; -1 is without limit
        reach = (window - 1, 0) if causal and window is not None else (-1, -1)
        out = attend(
            q, k, v, cu, cu, max_seqlen, max_seqlen, softmax_scale=scale, causal=causal, window_size=reach
        )  # fmt: skip
        out_THD: torch.Tensor = out[0] if isinstance(out, tuple) else out  # FlashAttention-3 once gave its sums too
        return out_THD.narrow(-1, 0, value_size)

    return kernel
