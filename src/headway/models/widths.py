"""Gated MLPs computed in a width that tensor cores take.

cuBLAS needs rows of 16 bytes or a multiple of it for its fast kernels, which in bfloat16 is a width that 8 divides.
Qwen2.5-VL's tower has 3,420. Zero rows of the gate and of what it gates give zeros, silu(0) * 0, which zero columns of
the closing projection take: results and gradients stay the same, and so do the parameters, as the zeros are put on in
each forward.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from headway.models.autocast import product_dtype
from headway.models.kernels import PROJECTIONS, gated_mlps

_ROW_BYTES = 16


def align_widths(model: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Have gated MLPs compute in the next width whose rows are multiples of 16 bytes.

    MLPs whose projections are anything but plain linear layers (adapters, float8) are left as they are.

    Args:
        model: changed in place; its parameters stay as they are.
        dtype: of the products.

    Returns:
        What was changed, a line for each width.
    """
    multiple = _ROW_BYTES // dtype.itemsize
    changed: dict[tuple[int, int], int] = {}
    for module in gated_mlps(model):
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


def _more_outputs(layer: nn.Linear, more: int, x: torch.Tensor) -> torch.Tensor:
    dtype = product_dtype(x, layer.weight)
    bias: nn.Parameter | None = layer.bias  # torch's annotation leaves None out
    return F.linear(x, F.pad(layer.weight.to(dtype), (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more)))


def _more_inputs(layer: nn.Linear, more: int, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, F.pad(layer.weight.to(product_dtype(x, layer.weight)), (0, more)), layer.bias)
