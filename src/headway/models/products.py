"""Matrix products: their type; that of a mixture of experts, one matrix per expert for its rows; rows sorted for it.

Tensor letters: S rows sorted by expert, E experts, D input size, F output size, R rows that are taken once or more
often. Rows of expert e end at `ends_E[e]`.

bfloat16 on CUDA is one operator of torch. From compute capability 9.0 (H100) on it is one kernel that reads the
boundaries on the device; before (A100) the operator itself reads them on the host and loops in C++, which waits for
the device once a product. Anything else is a loop here over the experts that have rows, with the same wait.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

_ALIGNMENT = 8  # sizes that torch's grouped kernel takes are multiples of 16 bytes, which are 8 bfloat16
_CAPABILITY = (8, 0)  # the oldest CUDA devices that it runs on
# From these on, the kernel leaves something else than zeros in the weight's gradient of an expert without rows. Source:
# github.com/pytorch/pytorch/issues/172439 (open in November 2026; seen on a B200, not on an H800).
_CAPABILITY_OF_GARBAGE = (10, 0)


def product_dtype(x: torch.Tensor, other: torch.Tensor) -> torch.dtype:
    """The type that products compute in: autocast's on the device of `x` where it is on, else that of `other`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else other.dtype


def grouped_linear(
    rows_SD: torch.Tensor, weight: torch.Tensor, ends_E: torch.Tensor, *, is_transposed: bool
) -> torch.Tensor:
    """Multiply every row by its expert's matrix.

    Args:
        rows_SD: sorted by expert, shape (S, D).
        weight: shape (E, F, D), as linear layers keep theirs, or (E, D, F) if `is_transposed`; of the rows' type.
        ends_E: where the rows of each expert end [rows], int32, shape (E,); the last is S.
        is_transposed: the layout of `weight`.

    Returns:
        The products, shape (S, F).

    >>> rows, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[[10.0]], [[0.0]], [[100.0]]])
    >>> grouped_linear(rows, weight, torch.tensor([2, 2, 3], dtype=torch.int32), is_transposed=False).tolist()
    [[10.0], [20.0], [300.0]]
    """
    if _has_kernel(rows_SD, weight):
        if weight.requires_grad and torch.cuda.get_device_capability(rows_SD.device) >= _CAPABILITY_OF_GARBAGE:
            learns: Any = _OnlyWhereRows.apply  # torch leaves it untyped
            weight = learns(weight, ends_E)
        return F.grouped_mm(rows_SD, weight if is_transposed else weight.mT, offs=ends_E)
    product: torch.Tensor = _linear(rows_SD, weight, ends_E, is_transposed)
    return product


def _has_kernel(rows_SD: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        rows_SD.is_cuda
        and rows_SD.dtype == torch.bfloat16
        and rows_SD.shape[0] > 0
        and all(size % _ALIGNMENT == 0 for size in weight.shape[1:])
        and torch.cuda.get_device_capability(rows_SD.device) >= _CAPABILITY
    )


class _OnlyWhereRows(torch.autograd.Function):
    """Pass a weight through; its gradient is set to zero for experts without rows."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ends_E)
        return weight.view_as(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ends_E,) = ctx.saved_tensors
        has_none_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        return grad.masked_fill(has_none_E.view(-1, 1, 1), 0.0), None


@torch.library.custom_op("headway::grouped_linear", mutates_args=())
def _linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    out = rows.new_empty(rows.shape[0], weight.shape[2 if is_transposed else 1])
    start = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        if end > start:
            torch.mm(rows[start:end], matrix if is_transposed else matrix.T, out=out[start:end])
        start = end
    return out


@_linear.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, _ends: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2 if is_transposed else 1])


@torch.library.custom_op("headway::grouped_outer", mutates_args=())
def _outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sum the outer products of each expert's rows: left (S, A), right (S, B) give (E, A, B)."""
    out = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    start = 0
    for total, end in zip(out, ends.tolist(), strict=True):
        if end > start:
            torch.mm(left[start:end].T, right[start:end], out=total)
        else:
            total.zero_()
        start = end
    return out


@_outer.register_fake
def _(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool], output: torch.Tensor) -> None:  # noqa: ARG001 - torch passes all three by name
    rows, weight, ends, ctx.is_transposed = inputs
    rows_learn, weight_learns, *_ = ctx.needs_input_grad
    ctx.save_for_backward(rows if weight_learns else None, weight if rows_learn else None, ends)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, weight, ends = ctx.saved_tensors
    grad_rows = grad_weight = None
    if weight is not None:
        grad_rows = _linear(grad, weight, ends, not ctx.is_transposed)
    if rows is not None:
        grad_weight = _outer(rows, grad, ends) if ctx.is_transposed else _outer(grad, rows, ends)
    return grad_rows, grad_weight, None, None


_linear.register_autograd(_backward, setup_context=_save)


def permute_rows(
    x: torch.Tensor,
    index_S: torch.Tensor,
    back_S: torch.Tensor,
    copies: int = 1,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Take rows of a tensor, each of its rows `copies` times, in another order.

    Each index also says how to go back, so that the gradient is taken by index as well, and not scattered. The
    gradients of a row's copies are added up in the type of `x`.

    Args:
        x: shape (S / copies, D).
        index_S: which copy comes at each place, shape (S,); copy i is of row i // copies.
        back_S: at which place each copy is, the inverse of `index_S`, shape (S,).
        copies: how often each row is taken.
        dtype: of the rows, cast before there are copies of them; None for that of `x`.

    Returns:
        The rows, shape (S, D).

    >>> index, back = torch.tensor([3, 0, 2, 1]), torch.tensor([1, 3, 2, 0])
    >>> permute_rows(torch.tensor([[1.0], [2.0]]), index, back, copies=2).tolist()
    [[2.0], [1.0], [2.0], [1.0]]
    """
    rows_SD: torch.Tensor = _PermuteRows.apply(x, index_S, back_S, copies, dtype)  # type: ignore[no-untyped-call]  # torch's own
    return rows_SD


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index_S: torch.Tensor, back_S: torch.Tensor, copies: int, dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.save_for_backward(back_S)
        ctx.copies, ctx.dtype = copies, x.dtype
        return x.to(dtype or x.dtype)[index_S // copies if copies > 1 else index_S]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back_S,) = ctx.saved_tensors
        grad = grads[0][back_S]
        if ctx.copies > 1:
            grad = grad.view(grad.shape[0] // ctx.copies, ctx.copies, grad.shape[-1]).sum(1, dtype=ctx.dtype)
        return grad.to(ctx.dtype), None, None, None, None


class Copies(NamedTuple):
    """Copies of rows, each row taken once or more often; how often differs from row to row.

    Attributes:
        row_S: the row that each copy is of.
        copy_S: the copies in the order of their rows.
        start_R: where in `copy_S` the copies of each row start.
    """

    row_S: torch.Tensor
    copy_S: torch.Tensor
    start_R: torch.Tensor


def copy_rows(x_RD: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Take copies of rows; the gradient of a row is the sum of its copies' gradients, in their order.

    >>> copies = Copies(torch.tensor([1, 0, 1]), torch.tensor([1, 0, 2]), torch.tensor([0, 1]))
    >>> copy_rows(torch.tensor([[1.0], [2.0]]), copies).tolist()
    [[2.0], [1.0], [2.0]]
    """
    rows_SD: torch.Tensor = _CopyRows.apply(x_RD, *copies)  # type: ignore[no-untyped-call]  # torch's own
    return rows_SD


def sum_copies(x_SD: torch.Tensor, copies: Copies, weights_S: torch.Tensor | None = None) -> torch.Tensor:
    """Add up the results of each row's copies, in the order of `copies.copy_S`: the same on every run.

    Args:
        x_SD: of the copies, shape (S, D).
        copies: of R rows.
        weights_S: factors of the copies, shape (S,); None for ones.

    Returns:
        The sums, shape (R, D), of the type that the products with the weights have.

    >>> copies = Copies(torch.tensor([1, 0, 1]), torch.tensor([1, 0, 2]), torch.tensor([0, 1]))
    >>> sum_copies(torch.tensor([[1.0], [2.0], [3.0]]), copies, torch.tensor([1.0, 1.0, 10.0])).tolist()
    [[2.0], [31.0]]
    """
    sums_RD: torch.Tensor = _SumCopies.apply(x_SD, weights_S, *copies)  # type: ignore[no-untyped-call]
    return sums_RD


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: torch.Tensor, *copies: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*copies)
        return x_RD[copies[0]]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_SD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sums(grad_SD, Copies(*ctx.saved_tensors)), None, None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: torch.Tensor, weights_S: torch.Tensor | None, *copies: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(None if weights_S is None else x_SD, weights_S, copies[0])
        return _sums(x_SD, Copies(*copies), weights_S)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_SD, weights_S, row_S = ctx.saved_tensors
        grad_SD, grad_weights_S = grad_RD[row_S], None
        if weights_S is not None:
            if ctx.needs_input_grad[1]:
                grad_weights_S = (grad_SD * x_SD).sum(1).to(weights_S.dtype)
            grad_SD = (grad_SD * weights_S.unsqueeze(1)).to(x_SD.dtype)
        return grad_SD, grad_weights_S, None, None, None


def _sums(x_SD: torch.Tensor, copies: Copies, weights_S: torch.Tensor | None = None) -> torch.Tensor:
    """One kernel reads the copies of each row where they are and adds them up in float32 or better."""
    if weights_S is not None:
        dtype = torch.promote_types(x_SD.dtype, weights_S.dtype)
        x_SD, weights_S = x_SD.to(dtype), weights_S.to(dtype)[copies.copy_S]
    return F.embedding_bag(copies.copy_S, x_SD, copies.start_R, mode="sum", per_sample_weights=weights_S)
