"""The mesh of processes: replicas, shards, sequence groups and expert groups.

Ranks are laid out as replicate x shard x sequence, the last running fastest, so that the processes of a sequence group
are neighbours. Weights are sharded over shard x sequence. Experts are spread over neighbours within shard x sequence,
and what each of them holds is sharded over the rest.
"""

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.errors import ConfigError


@dataclass(frozen=True)
class MeshShape:
    """How many processes each kind of parallelism takes.

    Attributes:
        replicate: copies of the sharded weights [processes].
        shard: processes that share one copy of the weights, times `sequence` [processes].
        sequence: processes that share each pack [processes].
        expert: processes that the experts of a layer are spread over [processes].

    >>> MeshShape.of(8, sequence=2)
    MeshShape(replicate=1, shard=4, sequence=2, expert=1)
    """

    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    expert: int = 1

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        replicate: int = 1,
        shard: int | Literal["auto"] = "auto",
        sequence: int = 1,
        expert: int = 1,
    ) -> "MeshShape":
        """The shape that so many processes form.

        Args:
            world_size: processes that train together.
            replicate: as the attribute.
            shard: as the attribute; "auto" for all that the others leave.
            sequence: as the attribute.
            expert: as the attribute.

        Raises:
            ConfigError: the processes do not fit, or the experts' do not divide those that share the weights.
        """
        others = replicate * sequence
        if shard == "auto":
            if world_size % others:
                raise ConfigError(
                    f"parallel.replicate {replicate} x parallel.sequence {sequence} = {others} does not divide the "
                    f"{_processes(world_size)} of this run. Start a multiple of {others} processes "
                    f"(torchrun --nproc-per-node), or set both to numbers whose product divides {world_size}."
                )
            shard = world_size // others
        if others * shard != world_size:
            raise ConfigError(
                f"parallel.replicate {replicate} x parallel.shard {shard} x parallel.sequence {sequence} = "
                f"{others * shard} processes, but this run has {_processes(world_size)}. Start {others * shard} "
                "(torchrun --nproc-per-node), or set parallel.shard=auto to take as many as there are."
            )
        if shard * sequence % expert:
            raise ConfigError(
                f"parallel.expert {expert} does not divide the {_processes(shard * sequence)} that share the weights "
                f"(parallel.shard {shard} x parallel.sequence {sequence}). Set it to one of "
                f"{', '.join(map(str, _divisors(shard * sequence)))}."
            )
        return cls(replicate, shard, sequence, expert)

    @property
    def fsdp(self) -> int:
        """Processes that one copy of the weights is laid over."""
        return self.shard * self.sequence

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.replicate * self.fsdp


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
    """The dimensions that FSDP takes: one where there are no replicas."""
    return mesh[sharded] if shape.replicate == 1 else mesh["replicate", sharded]


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
