"""Matrix products in the type, the form and the widths that hardware is fast at.

A vision tower whose processor cuts the patches begins with a convolution over inputs just as large as its kernel, so it
has one position and is a linear layer with its weight written in more dimensions. Convolution libraries have no good
algorithm for that: on two cores of a CPU it took 7 % of a step for 2 % of its FLOPs, on an H100 in bfloat16 seconds a
call were reported (sgl-project/sglang-omni#539, huggingface/transformers#45750).

cuBLAS needs rows of 16 bytes or a multiple of it for its fast kernels, which in bfloat16 is a width that 8 divides.
Qwen2.5-VL's tower has 3,420. Zero rows of the gate and of what it gates give zeros, silu(0) * 0, which zero columns of
the closing projection take: results and gradients stay the same, and so do the parameters, as the zeros are put on in
each forward.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Of a gated MLP: gate, what it gates, and back."""
_ROW_BYTES = 16


def product_dtype(x: torch.Tensor, other: torch.Tensor) -> torch.dtype:
    """The type that products compute in: autocast's on the device of `x` where it is on, else that of `other`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else other.dtype


class _PatchConv2d(nn.Conv2d):
    """Multiplies where the input is one position of the kernel, and convolves elsewhere."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the name that torch gives it
        return _project(self, input) if input.shape[2:] == self.kernel_size else super().forward(input)


class _PatchConv3d(nn.Conv3d):
    """As `_PatchConv2d`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the name that torch gives it
        return _project(self, input) if input.shape[2:] == self.kernel_size else super().forward(input)


def _project(conv: nn.Conv2d | nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    rows_PE = F.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)
    return rows_PE.view(*rows_PE.shape, *(1 for _ in conv.kernel_size))


_MULTIPLYING: dict[type[nn.Module], Any] = {nn.Conv2d: _PatchConv2d, nn.Conv3d: _PatchConv3d}


def project_patches(model: nn.Module) -> list[str]:
    """Let convolutions run as matrix products where their input is a single patch; weights keep their shapes.

    Returns:
        Names of the modules that may do so.
    """
    names = []
    for name, module in model.named_modules():
        if type(module) not in _MULTIPLYING:
            continue
        assert isinstance(module, (nn.Conv2d, nn.Conv3d))
        if module.groups == 1 and not any(module.padding) and set(module.dilation) == {1}:
            module.__class__ = _MULTIPLYING[type(module)]
            names.append(name)
    return names


def align_widths(mlps: Iterable[nn.Module], dtype: torch.dtype) -> tuple[str, ...]:
    """Have gated MLPs compute in the next width whose rows are multiples of 16 bytes.

    MLPs whose projections are anything but plain linear layers (adapters, float8) are left as they are.

    Args:
        mlps: as `kernels.gated_mlps` finds them; changed in place, their parameters stay as they are.
        dtype: of the products.

    Returns:
        What was changed, a line for each width.
    """
    multiple = _ROW_BYTES // dtype.itemsize
    changed: dict[tuple[int, int], int] = {}
    for module in mlps:
        gate, up, down = (getattr(module, name) for name in PROJECTIONS)
        more = -down.in_features % multiple
        if more and all(type(layer) is nn.Linear for layer in (gate, up, down)):
            gate.forward = functools.partial(_more_outputs, gate, more)
            up.forward = functools.partial(_more_outputs, up, more)
            down.forward = functools.partial(_more_inputs, down, more)
            widths = (down.in_features, down.in_features + more)
            changed[widths] = changed.get(widths, 0) + 1
    return tuple(
        f"{count} gated MLPs compute {wider:,} channels for {width:,}, of which the rest are zeros: rows of 16 bytes"
        for (width, wider), count in changed.items()
    )


def multiplied_sizes(layer: nn.Module, sizes: tuple[int, int]) -> tuple[int, int]:
    """Features in and out of the product that a linear layer runs: its own, or wider ones as `align_widths` has them.

    Args:
        layer: of a model, whatever stands for it.
        sizes: features in and out of its weight.
    """
    forward = vars(layer).get("forward")
    if isinstance(forward, functools.partial) and forward.func in (_more_outputs, _more_inputs):
        more = forward.args[1]
        return (sizes[0], sizes[1] + more) if forward.func is _more_outputs else (sizes[0] + more, sizes[1])
    return sizes


def _more_outputs(layer: nn.Linear, more: int, x: torch.Tensor) -> torch.Tensor:
    dtype = product_dtype(x, layer.weight)
    bias: nn.Parameter | None = layer.bias  # torch's annotation leaves None out
    return F.linear(x, F.pad(layer.weight.to(dtype), (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more)))


def _more_inputs(layer: nn.Linear, more: int, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, F.pad(layer.weight.to(product_dtype(x, layer.weight)), (0, more)), layer.bias)
