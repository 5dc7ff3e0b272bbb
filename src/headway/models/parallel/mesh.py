"""The mesh of processes: replicas, shards, sequence groups and expert groups; and the norm of gradients over it.

Ranks are laid out as replicate x shard x sequence, the last running fastest, so that the processes of a sequence group
are neighbours. Weights are sharded over shard x sequence. Experts are spread over neighbours within shard x sequence,
and what each of them holds is sharded over the rest.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from headway.packing.mesh import MeshShape
from headway.tracing.unwrap import local


@dataclass(frozen=True)
class Mesh:
    """The groups that a process belongs to.

    Attributes:
        shape: their sizes.
        fsdp: what weights are laid over: (shard), or (replicate, shard) with replicas; sequence groups are part of it.
        sequence: the processes that share this one's packs; None where every process has its own.
        expert: the processes that this one shares the experts of a layer with; None without.
        expert_fsdp: what experts' weights are laid over besides, as `fsdp`; None without `expert`.
    """

    shape: MeshShape
    fsdp: DeviceMesh
    sequence: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    expert_fsdp: DeviceMesh | None = None


def build_mesh(shape: MeshShape, device_type: str) -> Mesh:
    """Make the groups of a shape, on "cpu" or "cuda"; every process of the run calls it."""
    dense = init_device_mesh(device_type, (shape.replicate, shape.fsdp), mesh_dim_names=("replicate", "shard"))
    sequence = expert = expert_fsdp = None
    if shape.sequence > 1:
        num_groups = shape.world_size // shape.sequence
        groups = init_device_mesh(device_type, (num_groups, shape.sequence), mesh_dim_names=("data", "sequence"))
        sequence = groups["sequence"]
    if shape.expert > 1:
        sizes = (shape.replicate, shape.fsdp // shape.expert, shape.expert)
        names = ("replicate", "expert_shard", "expert")
        sparse = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        expert, expert_fsdp = sparse["expert"], _without_replicas(sparse, shape, "expert_shard")
    return Mesh(shape, _without_replicas(dense, shape, "shard"), sequence, expert, expert_fsdp)


def _without_replicas(mesh: DeviceMesh, shape: MeshShape, sharded: str) -> DeviceMesh:
    """Mesh dimensions that FSDP takes: without replicas, the sharded one alone."""
    return mesh[sharded] if shape.replicate == 1 else mesh["replicate", sharded]


def fill(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Copy into a parameter, sharded or not, this process's part of all its values, which every process has."""
    if isinstance(parameter, DTensor):
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
    local(parameter).copy_(local(values))


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
