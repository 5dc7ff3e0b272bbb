"""Updates of which a loss or the gradient is not finite: an error, or left out."""

import torch

from headway.train.optim import Optimizer


def take_step(optimizer: Optimizer, numbers_K: torch.Tensor, *, skips: bool) -> None:
    """Update the weights; where numbers are not finite, leave the update out if `skips` is set.

    The optimizer looks at the numbers on the device: nothing waits for them.

    Args:
        optimizer: with the gradients in place.
        numbers_K: the step's losses and gradient norm, the same on all ranks, shape (K,).
        skips: whether an update may be left out.
    """
    if skips:
        optimizer.found_inf = 1.0 - torch.isfinite(numbers_K).all().to(torch.float32)
    optimizer.step()
