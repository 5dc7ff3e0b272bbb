"""Read dispatched operations as products: what multiplies what, how many units of it, and what must be refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headway.count.tracing.operation import Operand, Operation
from headway.count.tracing.phantom import aten

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from headway.count.tracing.record import Recorder

# operations whose kernels multiply matrices in a way that this ledger does not read; a model that dispatches one is
# refused
OPAQUE = {
    "_cdist_forward",
    "_native_multi_head_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_grouped_mm",
    "_scaled_mm",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "_transformer_encoder_layer_fwd",
    "_int_mm",
    "addbmm",
    "addmv",
    "addr",
    "dot",
    "gru",
    "lstm",
    "mkldnn_rnn_layer",
    "mv",
    "rnn_relu",
    "rnn_tanh",
    "vdot",
}


def _product(
    recorder: Recorder, kind: str, units: int, unit_flops: int, left: Operand, right: Operand, weight: tuple[int, ...]
) -> Operation:
    """Describe a product of two operands; the gradient of a weight is wgrad, that of an activation dgrad."""
    left_is_weight = not left.fed and right.fed
    products = (
        ("dgrad" if left.fed else "wgrad", unit_flops, left.sources),
        ("dgrad" if right.fed else "wgrad", unit_flops, right.sources),
    )
    activation = right if left_is_weight else left
    return Operation(
        recorder.module,
        kind,
        units,
        unit_flops,
        products,
        recorder.block_of(recorder.module),
        weight=weight if left.fed != right.fed else (),
        fed=left.fed or right.fed,
        from_input=activation.fed and activation.sources == 0,
    )


def _matmul(recorder: Recorder, left: torch.Tensor, right: torch.Tensor) -> Operation | None:
    """Read left [..., m, k] @ right [..., k, n]; a unit is one row of activations."""
    *batch, m, k = left.shape
    n = right.shape[-1]
    a, b = Operand.of(left), Operand.of(right)
    if k == 1 and not a.sources and not b.sources:
        return None  # an outer product without parameters, such as rotary angles: elementwise work written as a product
    if not a.fed and b.fed:
        return _product(recorder, "matmul", n, 2 * math.prod(batch) * m * k, a, b, (k, m))
    return _product(recorder, "matmul", math.prod(batch) * m, 2 * k * n, a, b, (k, n))


def _convolution(recorder: Recorder, args: tuple[Any, ...], out: Any) -> Operation:
    """Read a convolution; a unit is one output position (input position when transposed)."""
    x, weight, transposed = args[0], args[1], args[6]
    positions = x if transposed else out
    units = positions.shape[0] * math.prod(positions.shape[2:])
    # weight is (out, in / groups, *kernel), or (in, out / groups, *kernel) when transposed: the work per position
    a, b = Operand.of(x), Operand.of(weight)
    return _product(recorder, "convolution", units, 2 * weight.numel(), a, b, tuple(weight.shape))


def _experts(recorder: Recorder, args: tuple[Any, ...], _out: Any) -> Operation:
    """Read rows [s, k] times their expert's matrix from [experts, k, n]; a unit is one row: one token in one expert."""
    rows, weight = args[0], args[1]
    unit_flops = 2 * rows.shape[-1] * weight.shape[-1]
    a, b = Operand.of(rows), Operand.of(weight)
    return _product(recorder, "experts", rows.shape[0], unit_flops, a, b, tuple(weight.shape))


def _mm(recorder: Recorder, args: tuple[Any, ...], _out: Any) -> Operation | None:
    return _matmul(recorder, args[0], args[1])


def _addmm(recorder: Recorder, args: tuple[Any, ...], _out: Any) -> Operation | None:
    return _matmul(recorder, args[1], args[2])


READERS: dict[Any, Callable[[Recorder, tuple[Any, ...], Any], Operation | None]] = {
    aten.mm: _mm,
    aten.bmm: _mm,
    aten.addmm: _addmm,
    aten.baddbmm: _addmm,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution,  # only ever reached in backward
    aten._grouped_mm: _experts,
}


def backward_flops(packet: Any, args: tuple[Any, ...]) -> int:
    """Count what one operation of the backward dispatches."""
    if packet is aten.convolution_backward:
        grad, x, weight, transposed, needed = args[0], args[1], args[2], args[7], args[10]
        positions = x if transposed else grad
        one = 2 * positions.shape[0] * math.prod(positions.shape[2:]) * weight.numel()
        return int(one * (bool(needed[0]) + bool(needed[1])))
    left, right = (args[1], args[2]) if packet in (aten.addmm, aten.baddbmm) else (args[0], args[1])
    return int(2 * left.numel() * right.shape[-1])
