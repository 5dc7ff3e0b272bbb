"""Rows taken by index where each index also says how to go back, so that the gradient is taken and not scattered."""

from typing import Any

import torch


def take(x: torch.Tensor, index_S: torch.Tensor, back_S: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """Take rows of a tensor, each of its rows `copies` times, in another order.

    Args:
        x: shape (S / copies, D).
        index_S: which copy comes at each place, shape (S,); copy i is of row i // copies.
        back_S: at which place each copy is, the inverse of `index_S`, shape (S,).
        copies: how often each row is taken.

    Returns:
        The rows, shape (S, D).

    >>> take(torch.tensor([[1.0], [2.0]]), torch.tensor([3, 0, 2, 1]), torch.tensor([1, 3, 2, 0]), copies=2).tolist()
    [[2.0], [1.0], [2.0], [1.0]]
    """
    taken: torch.Tensor = _Take.apply(x, index_S, back_S, copies)  # type: ignore[no-untyped-call]  # torch's own
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index_S: torch.Tensor, back_S: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(back_S)
        ctx.copies = copies
        return x[index_S // copies if copies > 1 else index_S]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back_S,) = ctx.saved_tensors
        grad = grads[0][back_S]
        if ctx.copies > 1:
            grad = grad.view(grad.shape[0] // ctx.copies, ctx.copies, -1).sum(1)
        return grad, None, None, None
