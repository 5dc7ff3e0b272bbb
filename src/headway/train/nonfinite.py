"""Updates of which a loss or the gradient is not finite: an error, or left out."""

import torch

from headway.train.optim import Optimizer


def take_step(optimizer: Optimizer, numbers_K: torch.Tensor, *, skips: bool) -> None:
    """Update the weights; where numbers are not finite, leave the update out if `skips` is set.

    PyTorch's fused AdamW looks at the numbers on the device and nothing waits for them. The other rules need them on
    the host, so each of their steps waits for its own backward.

    Args:
        optimizer: with the gradients in place.
        numbers_K: the step's losses and gradient norm, the same on all ranks, shape (K,).
        skips: whether an update may be left out.
    """
    if not skips:
        optimizer.step()
    elif all(group["fused"] for group in optimizer.param_groups):
        optimizer.found_inf = 1.0 - torch.isfinite(numbers_K).all().to(torch.float32)
        optimizer.step()
    elif bool(torch.isfinite(numbers_K).all()):
        optimizer.step()
