"""The norm of all gradients and the factor that clips it, for parameters on any mesh or on none."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from headway.tracing.unwrap import local

_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s, against a division by zero

Spread = tuple[DeviceMesh, tuple[int, ...]] | None
"""The mesh of a gradient and its dimensions over which the gradient is cut; None for a whole gradient."""


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Compute the common norm of all gradients; no device is waited for.

    Gradients that are cut over processes are squared and summed there, mesh by mesh, and whole ones, which every
    process holds alike, once; so the norm is that of the whole gradient, and the same on all.

    Args:
        parameters: those without a gradient are passed over, which must be the same ones on every process.

    Returns:
        The norm, a scalar; on the device of the first gradient.
    """
    grads: dict[Spread, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grads.setdefault(_spread(parameter.grad), []).append(local(parameter.grad))
    if not grads:
        return torch.zeros(())
    norms = [_norm(group, spread) for spread, group in grads.items()]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([group_norm.to(norms[0].device) for group_norm in norms]))
    return norm


def clipping_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Compute the factor that brings the gradients' norm to at most `max_norm`; on the norm's device.

    The optimizer multiplies by it while it reads gradients (`headway.optim.Optimizer.factor`).

    Source: Pascanu et al. 2013 (arXiv:1211.5063), algorithm 1; the factor of torch.nn.utils.clip_grad_norm_.

    >>> clipping_factor(torch.tensor(4.0), 1.0), clipping_factor(torch.tensor(0.5), 1.0)
    (tensor(0.2500), tensor(1.))
    """
    return torch.clamp(max_norm / (norm + _EPSILON), max=1.0)


def _norm(grads: list[torch.Tensor], spread: Spread) -> torch.Tensor:
    """Norm of gradients on one mesh, over the slices of all processes."""
    dtype = torch.promote_types(grads[0].dtype, torch.float32)  # a sum of squares in bfloat16 would lose its tail
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0, dtype=dtype)))
    if spread is None:
        return norm
    mesh, dims = spread
    squared = norm.square()
    for dim in dims:
        dist.all_reduce(squared, group=mesh.get_group(dim))
    return squared.sqrt()


def _spread(grad: torch.Tensor) -> Spread:
    if not isinstance(grad, DTensor):
        return None
    # A strided shard, of an expert's weights over two dimensions, is no `Shard` but cut all the same.
    return grad.device_mesh, tuple(dim for dim, place in enumerate(grad.placements) if not place.is_replicate())
