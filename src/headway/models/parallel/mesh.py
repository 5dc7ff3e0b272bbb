"""The mesh of processes: replicas, shards, sequence groups and expert groups.

Ranks are laid out as replicate x shard x sequence, the last running fastest, so that the processes of a sequence group
are neighbours. Weights are sharded over shard x sequence. Experts are spread over neighbours within shard x sequence,
and what each of them holds is sharded over the rest.
"""

from dataclasses import dataclass

import torch
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
    """Make the groups of a shape; every process of the run calls it.

    Args:
        shape: what `MeshShape.of` found for the processes of the initialised process group.
        device_type: "cpu" or "cuda".
    """
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
