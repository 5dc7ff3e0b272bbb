"""One product that a model ran: how much work it did, what its backward must compute, and how it is read.

Dispatched operations are read as products: what multiplies what, and how many units of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from headway.tracing.phantom import Phantom, aten, is_identity


class Running(Protocol):
    """The place in a model at which an operation runs."""

    @property
    def module(self) -> str:
        """Path of the innermost module that runs."""

    @property
    def block_of(self) -> Callable[[str], str]:
        """From a module's path to that of the checkpointable block that holds it."""


@dataclass(frozen=True)
class Operand:
    """The past of a product's input: what it depends on."""

    fed: bool  # whether it depends on the batch
    sources: int  # the parameters that it depends on, bit i for parameter i

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Operand":
        """Read an operand's past; a real tensor has none."""
        if not isinstance(tensor, Phantom):
            return cls(not is_identity(tensor), 0)
        return cls(tensor.fed, tensor.sources if tensor.requires_grad else 0)


@dataclass(frozen=True)
class ConvolutionWindow:
    """The arithmetic of a convolution along one direction."""

    num_inputs: int  # positions of its input
    num_outputs: int  # positions of its output
    span: int  # input positions that one output position reads, holes included
    stride: int  # input positions from one output position to the next
    padding: int  # positions added on each side


@dataclass
class Operation:
    """One product that forward ran."""

    module: str  # path of the innermost module running
    kind: str  # `matmul`, `convolution`, `experts`, `attention` or `recurrence`
    # work in units of the repeated kind: rows of a matrix product, output positions of a convolution, pairs, tokens of
    # a recurrence
    units: int
    unit_flops: int  # FLOPs per unit
    # the backward's products as (phase, FLOPs per unit, sources of the gradient's operand)
    products: tuple[tuple[str, int, int], ...]
    block: str  # path of the checkpointable block that holds the module, "" for none
    # known driver, or several joined by a plus, where the mask says it; else found by comparing workloads
    driver: str = ""
    weight: tuple[int, ...] = ()  # shape of the weight, () where there is none
    stacked: int = 1  # matrices of that shape that the weight is a stack of, each for rows of its own
    fed: bool = True  # whether it depends on the batch; a product of weights alone is done once per forward pass
    from_input: bool = False
    backward_flops: int = 0  # FLOPs that backward really dispatched
    saves_after: bool = False  # whether a tensor was saved for backward after it, inside its block
    by_hand: bool = False  # whether it is a product of attention whose softmax is written out by hand
    masked: bool = False  # whether its pairs come from a mask that names no window
    scored: "list[Operation]" = field(default_factory=list)  # earlier products that its scores were made from
    executed_flops: int = 0  # FLOPs that forward dispatched, where these are more than count
    windows: tuple[ConvolutionWindow, ...] = ()  # the windows of a convolution, one for each direction
    longest: int = 0  # length of the longest piece of attention over packed pieces [positions]
    cached: int = 0  # elements of one token's keys and values, which each pair of attention reads

    @property
    def forward_flops(self) -> int:
        """FLOPs of this call's forward."""
        return self.units * self.unit_flops

    @property
    def expected_backward_flops(self) -> int:
        """FLOPs that backward should dispatch, from the operands' pasts."""
        needed = sum(flops for _, flops, sources in self.products if sources)
        if not self.unit_flops:  # a gradient of what forward did without a product
            return self.units * needed
        return (self.executed_flops or self.forward_flops) * needed // self.unit_flops

    def count_picked(self, picks: int) -> None:
        """Count only the rows of a stack of weights that were picked: so many for each that all matrices ran on."""
        self.kind, self.executed_flops = "experts", self.forward_flops
        per_row = 2 * math.prod(self.weight)
        self.units = self.forward_flops // (per_row * self.stacked) * picks
        self.products = tuple((phase, per_row, sources) for phase, _, sources in self.products)
        self.unit_flops, self.weight = per_row, (self.stacked, *self.weight)

    def count_pairs(self, pairs: int, scores: int) -> None:
        """Count only the pairs that the mask allows, of the scores that each head really computes."""
        self.kind, self.executed_flops = "attention", self.forward_flops
        per_pair = self.forward_flops // scores
        self.products = tuple((phase, per_pair, sources) for phase, _, sources in self.products)
        self.units, self.unit_flops = pairs, per_pair


class RecordedWork(torch.autograd.Function):
    """Work that a seam records: no arithmetic, but a node in the graph that tells whether backward reaches it."""

    @staticmethod
    def forward(
        ctx: Any, operation: Operation, make: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], *tensors: Phantom
    ) -> tuple[torch.Tensor, ...]:
        """Make the results on shapes; they depend on all tensors."""
        ctx.operation = operation
        ctx.save_for_backward(*tensors)
        outputs = make(tensors[0])
        for out in outputs:
            for t in tensors:
                out.sources |= t.sources  # type: ignore[attr-defined]  # new_empty of a phantom is one
            out.fed = operation.fed  # type: ignore[attr-defined]
        return outputs

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        """Note that backward reaches the work, and give gradients of the tensors' shapes."""
        ctx.operation.backward_flops += ctx.operation.expected_backward_flops
        return (None, None, *(torch.empty_like(t) for t in ctx.saved_tensors))


# operations whose kernels multiply matrices in a way that this ledger does not read; a model that dispatches one is
# refused
OPAQUE = {
    "_conv_depthwise2d", "_cslt_sparse_mm", "_cudnn_attention_forward", "_cudnn_rnn", "_dyn_quant_matmul_4bit",
    "_efficient_attention_forward", "_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace",
    "_foreach_mm", "_lstm_mps", "_mixed_dtypes_linear", "_mps_convolution", "_mps_convolution_transpose",
    "_native_multi_head_attention", "_nnpack_spatial_convolution", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable",
    "_slow_conv2d_forward", "_sparse_addmm", "_sparse_mm", "_sparse_mm_reduce_impl", "_sparse_semi_structured_addmm",
    "_sparse_semi_structured_linear", "_sparse_semi_structured_mm", "_sparse_sparse_matmul", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "_transformer_encoder_layer_fwd", "_triton_multi_head_attention",
    "_triton_scaled_dot_attention", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu",
    "_weight_int4pack_mm_with_scales_and_zeros", "_weight_int8pack_mm", "conv_depthwise3d", "conv_tbc",
    "convolution_overrideable", "cudnn_convolution", "cudnn_convolution_add_relu", "cudnn_convolution_relu",
    "cudnn_convolution_transpose", "hspmm", "linalg_matrix_exp", "miopen_convolution", "miopen_convolution_add_relu",
    "miopen_convolution_relu", "miopen_convolution_transpose", "miopen_depthwise_convolution", "miopen_rnn",
    "mkldnn_convolution", "mkldnn_linear", "mkldnn_rnn_layer", "quantized_gru", "quantized_lstm",
    "slow_conv3d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d", "slow_conv_transpose2d",
    "slow_conv_transpose3d", "sparse_sampled_addmm", "sspaddmm",
}  # fmt: skip


def _product(
    running: Running, kind: str, units: int, unit_flops: int, left: Operand, right: Operand, weight: tuple[int, ...]
) -> Operation:
    """Describe a product of two operands; the gradient of a weight is wgrad, that of an activation dgrad."""
    left_is_weight = not left.fed and right.fed
    products = (
        ("dgrad" if left.fed else "wgrad", unit_flops, left.sources),
        ("dgrad" if right.fed else "wgrad", unit_flops, right.sources),
    )
    activation = right if left_is_weight else left
    return Operation(
        running.module,
        kind,
        units,
        unit_flops,
        products,
        running.block_of(running.module),
        weight=weight if left.fed != right.fed else (),
        fed=left.fed or right.fed,
        from_input=activation.fed and activation.sources == 0,
    )


def _rows(
    running: Running, batch: int, sizes: tuple[int, int, int], left: torch.Tensor, right: torch.Tensor
) -> Operation | None:
    """Read `batch` products of m x k by k x n; a unit is one row of activations."""
    m, k, n = sizes
    a, b = Operand.of(left), Operand.of(right)
    if k == 1 and not any(isinstance(t, Phantom) and t.sources for t in (left, right)):
        return None  # an outer product without parameters, such as rotary angles: elementwise work written as a product
    if not a.fed and b.fed:
        operation = _product(running, "matmul", n, 2 * batch * m * k, a, b, (k, m))
    else:
        operation = _product(running, "matmul", batch * m, 2 * k * n, a, b, (k, n))
    if operation.weight:
        operation.stacked = batch
    return operation


def _convolution(running: Running, args: tuple[Any, ...], out: Any) -> Operation:
    """Read a convolution; a unit is one output position (input position when transposed)."""
    x, weight, transposed = args[0], args[1], args[6]
    positions = x if transposed else out
    units = positions.shape[0] * math.prod(positions.shape[2:])
    # weight is (out, in / groups, *kernel), or (in, out / groups, *kernel) when transposed: the work per position
    a, b = Operand.of(x), Operand.of(weight)
    operation = _product(running, "convolution", units, 2 * weight.numel(), a, b, tuple(weight.shape))
    if not transposed:
        spatial = x.dim() - 2
        strides, paddings, dilations = (sizes * spatial if len(sizes) == 1 else sizes for sizes in args[3:6])
        operation.windows = tuple(
            ConvolutionWindow(num_inputs, num_outputs, dilation * (kernel - 1) + 1, stride, padding)
            for num_inputs, num_outputs, kernel, stride, padding, dilation in zip(
                x.shape[2:], out.shape[2:], weight.shape[2:], strides, paddings, dilations, strict=True
            )
        )
    return operation


def _experts(running: Running, args: tuple[Any, ...], _out: Any) -> Operation:
    """Read rows [s, k] times their expert's matrix from [experts, k, n]; a unit is one row: one token in one expert."""
    rows, weight = args[0], args[1]
    unit_flops = 2 * rows.shape[-1] * weight.shape[-1]
    a, b = Operand.of(rows), Operand.of(weight)
    return _product(running, "experts", rows.shape[0], unit_flops, a, b, tuple(weight.shape))


def _of(first: int) -> Callable[[Running, tuple[Any, ...], Any], Operation | None]:
    """Read a product of the arguments at `first` and after it: [..., m, k] @ [..., k, n], or a matrix and a vector."""

    def read(running: Running, args: tuple[Any, ...], _out: Any) -> Operation | None:
        left, right = args[first], args[first + 1]
        if right.dim() == 1:
            return _rows(running, 1, (left.numel() // len(right), len(right), 1), left, right)
        return _rows(running, math.prod(left.shape[:-2]), (*left.shape[-2:], right.shape[-1]), left, right)

    return read


def _outer(running: Running, args: tuple[Any, ...], _out: Any) -> Operation | None:
    """Read `addr`: vector 1 times vector 2, added to a matrix."""
    return _rows(running, 1, (len(args[1]), 1, len(args[2])), args[1], args[2])


def _distances(running: Running, args: tuple[Any, ...], _out: Any) -> Operation | None:
    """Read Euclidean distances of x [..., p, m] and y [..., r, m] as the product x y^T that they come from.

    Other norms are elementwise work.
    """
    x, y, *norm = args
    operation = _rows(running, math.prod(x.shape[:-2]), (*x.shape[-2:], y.shape[-2]), x, y)
    if operation is None or (norm and norm[0] != 2):
        return None
    if not norm:  # one node of autograd computes both gradients, whichever is needed
        either = Operand.of(x).sources | Operand.of(y).sources
        operation.products = tuple((phase, flops, either) for phase, flops, _ in operation.products)
    return operation


def _trilinear(running: Running, args: tuple[Any, ...], _out: Any) -> Operation:
    """Read `nn.Bilinear`: rows of x [n, i] and y [n, j] with a weight [o, i, j]; a unit is one row.

    Source: z_o = sum over i and j of w_oij (x_i y_j), a product with the weight after one that is elementwise. Each
    gradient sums as many terms.
    """
    x, weight, y = args[0], args[1], args[2]
    operands = [Operand.of(t) for t in (x, weight, y)]
    unit_flops = 2 * weight.numel()
    return Operation(
        running.module,
        "matmul",
        len(x),
        unit_flops,
        tuple(("dgrad" if o.fed else "wgrad", unit_flops, o.sources) for o in operands),
        running.block_of(running.module),
        fed=any(o.fed for o in operands),
        from_input=any(o.fed and not o.sources for o in operands),
    )


def _terms(args: tuple[Any, ...], _out: Any) -> int:
    """Count the multiply-adds of `_trilinear`, twice: one for each place of the space that its operands span."""
    operands, expanded = args[:3], args[3:6]
    space = [1] * (operands[0].dim() + len(expanded[0]))
    for operand, missing in zip(operands, expanded, strict=True):
        sizes = iter(operand.shape)
        for axis in range(len(space)):
            if axis not in missing:
                space[axis] = max(space[axis], next(sizes))
    return 2 * math.prod(space)


def _again(args: tuple[Any, ...], out: Any) -> int:
    """Count a convolution that a custom gradient runs."""
    positions = args[0] if args[6] else out
    return int(2 * positions.shape[0] * math.prod(positions.shape[2:]) * args[1].numel())


def _of_convolution(args: tuple[Any, ...], _out: Any) -> int:
    grad, x, weight, transposed, needed = args[0], args[1], args[2], args[7], args[10]
    positions = x if transposed else grad
    flops = 2 * positions.shape[0] * math.prod(positions.shape[2:]) * weight.numel()  # FLOPs of each gradient
    return int(flops * (bool(needed[0]) + bool(needed[1])))


def _of_distances(args: tuple[Any, ...], _out: Any) -> int:
    grad, x, _, norm = args[:4]
    return 2 * int(grad.numel()) * x.shape[-1] if norm == 2 else 0


def _of_product(first: int) -> Callable[[tuple[Any, ...], Any], int]:
    """Count a product of the arguments at `first` and after it: matrices, or a matrix and a vector."""

    def count(args: tuple[Any, ...], _out: Any) -> int:
        left, right = args[first], args[first + 1]
        return 2 * int(left.numel()) * (right.shape[-1] if right.dim() > 1 else 1)

    return count


_Read = Callable[[Running, tuple[Any, ...], Any], Operation | None]
_Count = Callable[[tuple[Any, ...], Any], int]
_MM_V2, _GROUPED_V2 = (  # some versions of PyTorch lack these
    [getattr(aten, name)] if hasattr(aten, name) else [] for name in ("_scaled_mm_v2", "_scaled_grouped_mm_v2")
)
# operations, how their products are read in forward, and how their FLOPs are counted where a backward runs them
_TABLE: tuple[tuple[tuple[Any, ...], _Read, _Count], ...] = (
    ((aten.mm, aten.bmm, aten._int_mm, aten._scaled_mm, *_MM_V2), _of(0), _of_product(0)),
    ((aten.addmm, aten.addmm_, aten._addmm_activation), _of(1), _of_product(1)),
    ((aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_), _of(1), _of_product(1)),
    ((aten.mv, aten.dot, aten.vdot), _of(0), _of_product(0)),
    ((aten.addmv, aten.addmv_), _of(1), _of_product(1)),
    ((aten.addr, aten.addr_), _outer, _of_product(0)),
    ((aten._euclidean_dist, aten._cdist_forward), _distances, _of_product(0)),
    ((aten.convolution,), _convolution, _again),
    ((aten._trilinear,), _trilinear, _terms),
    ((aten._grouped_mm, aten._scaled_grouped_mm, *_GROUPED_V2), _experts, _of_product(0)),
)
READERS: dict[Any, _Read] = {packet: reader for packets, reader, _ in _TABLE for packet in packets}
_IN_BACKWARD: dict[Any, _Count] = {packet: count for packets, _, count in _TABLE for packet in packets} | {
    aten.convolution_backward: _of_convolution,
    aten._cdist_backward: _of_distances,
}
# autograd nodes whose gradient is an outer product, which PyTorch runs as an elementwise multiplication
_OUTER_NODES = ("MvBackward0", "AddmvBackward0", "DotBackward0", "VdotBackward0")


def backward_flops(packet: Any, args: tuple[Any, ...], out: Any, node: Any) -> int | None:
    """Count the FLOPs that one operation of the backward dispatches in an autograd node; None for no product."""
    if packet is aten.mul and node.name() in _OUTER_NODES:
        return 2 * int(out.numel())
    return _IN_BACKWARD[packet](args, out) if packet in _IN_BACKWARD else None
