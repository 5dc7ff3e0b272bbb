"""Choice of the kernel that attends within segments on CUDA: PyTorch's, FlashAttention-3, cuDNN's, or a package's.

Tensor letters as in `attention`. PyTorch's variable-length attention is FlashAttention-2, unless its own switch puts
FlashAttention-3's kernels behind the same operators: then everything above them, compiled blocks too, stays as it is.
cuDNN's kernel is in `ragged`. Two packages are called directly: `flash_attn_interface` (FlashAttention-3, for Hopper)
and `flash_attn` (FlashAttention-2).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from headway.errors import ConfigError
from headway.models.attention import ragged
from headway.models.attention.ragged import CudaKernel, varlen_attention
from headway.models.attention.segments import with_equal_heads

FA3, FA2 = PACKAGES = ("flash_attn_interface", "flash_attn")
_HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class _Faster:
    """A kernel that is faster than PyTorch's FlashAttention-2 where it runs.

    Attributes:
        title: its name for people.
        package: that it needs.
        source: of the package.
        majors: of the compute capabilities that it is for.
        devices: those, for people.
        make_ready: puts it in place; returns why that failed, as a part of a sentence, or None.
        kernel: which then attends.
    """

    title: str
    package: str
    source: str
    majors: tuple[int, ...]
    devices: str
    make_ready: Callable[[torch.device], str | None]
    kernel: CudaKernel

    def put_in(self, device: torch.device) -> str | None:
        """Attend with it from now on; returns why that is not possible here, as a part of a sentence, or None."""
        major, minor = torch.cuda.get_device_capability(device)
        if major not in self.majors:
            return f"it needs a device of compute capability {self.devices}, but {device} has {major}.{minor}"
        if find_spec(self.package) is None:
            return f"its package {self.package} is not installed ({self.source})"
        why_not = self.make_ready(device)
        if why_not is None:
            _chosen[0] = self.kernel
        return why_not


def _switch_to_fa3(_device: torch.device) -> str | None:
    """Switch PyTorch to FlashAttention-3; returns why that failed, as a part of a sentence, or None."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # kernels are replaced on purpose
            activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:  # built for another PyTorch, or without a backward
        return f"PyTorch {torch.__version__} cannot use the installed {FA3}: {error}"
    return None


FASTER = {
    "fa3": _Faster(
        "FlashAttention-3",
        FA3,
        "it is built from the hopper folder of the flash-attention sources",
        (9,),
        "9.x (H100, H200)",
        _switch_to_fa3,
        varlen_attention,
    ),
    "cudnn": _Faster(
        "cuDNN's ragged attention",
        ragged.PACKAGE,
        "pip install nvidia-cudnn-frontend",
        (9,),
        "9.x (H100, H200)",
        ragged.make_ready,
        ragged.cudnn_attention,
    ),
}
"""By their values of `speed.attention`; auto takes the first that runs."""

_chosen: list[CudaKernel] = [varlen_attention]


def cuda_kernel() -> CudaKernel:
    """The kernel that attention on CUDA runs in this process."""
    return _chosen[0]


def choose_kernel(name: str, device: torch.device) -> tuple[str, ...]:
    """Choose the kernel of attention on CUDA for this process.

    Args:
        name: "torch" for PyTorch's FlashAttention-2, "fa3" for FlashAttention-3 through PyTorch's switch, "cudnn" for
            cuDNN's, "flash-attn" for a package's own function, "auto" for the first of "fa3" and "cudnn" that runs
            and "torch" elsewhere.
        device: where the model runs.

    Returns:
        Which it is, as a line for the start of the run; none on a CPU, which attends segment by segment.

    Raises:
        ConfigError: a kernel was asked for by name that this device or installation does not have.
    """
    if device.type != "cuda" and name not in ("auto", "torch"):
        raise ConfigError(
            f"speed.attention is {name!r}, which runs on CUDA only, but the run is on {device}. Set "
            "speed.attention=auto to attend segment by segment on a CPU."
        )
    _chosen[0] = varlen_attention
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()  # ends the choice of an earlier run in this process
    if device.type != "cuda":
        return ()
    if name == "flash-attn":
        return (_use_package(),)
    missing = []
    for kind, kernel in FASTER.items():
        if name not in (kind, "auto"):
            continue
        why_not = kernel.put_in(device)
        if why_not is None:
            return (f"Attention on CUDA: {kernel.title} ({kernel.package})",)
        if name == kind:
            raise ConfigError(
                f"speed.attention is {name!r} ({kernel.title}), but {why_not}. Set speed.attention=auto to use "
                "PyTorch's own variable-length flash kernel instead."
            )
        missing.append(f"; {kernel.title} is not used, because {why_not}")
    return (f"Attention on CUDA: PyTorch's variable-length FlashAttention-2{''.join(missing)}",)


def _use_package() -> str:
    installed = [package for package in PACKAGES if find_spec(package) is not None]
    if not installed:
        raise ConfigError(
            f"speed.attention is 'flash-attn', but neither {FA3} (FlashAttention-3) nor {FA2} is installed. Install "
            "one with `pip install flash-attn --no-build-isolation`, or set speed.attention=auto to use PyTorch's "
            "own variable-length flash kernel."
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
