"""Number of processes that each kind of parallelism takes; arithmetic alone, known before any process starts.

Ranks are laid out as replicate x shard x sequence, the last running fastest.
"""

from dataclasses import dataclass
from typing import Literal

from headway.errors import ConfigError
from headway.words import Argument


def _how_many() -> str:
    return f"(torchrun --nproc-per-node; {Argument('devices')} in a dry run)"


@dataclass(frozen=True)
class MeshShape:
    """Number of processes that each kind of parallelism takes.

    >>> MeshShape.of(8, sequence=2)
    MeshShape(replicate=1, shard=4, sequence=2, expert=1)
    """

    replicate: int = 1  # copies of the sharded weights [processes]
    shard: int = 1  # processes that share one copy of the weights, times `sequence` [processes]
    sequence: int = 1  # processes that share each pack [processes]
    expert: int = 1  # processes that the experts of a layer are spread over [processes]

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
        """Find the shape that `world_size` processes form; a shard of "auto" takes all remaining processes.

        Raises:
            ConfigError: the processes do not fit, or the experts' do not divide those that share the weights.
        """
        # the shards that the other dimensions leave
        others = replicate * sequence
        if shard == "auto":
            if world_size % others:
                raise ConfigError(
                    f"parallel.replicate {replicate} x parallel.sequence {sequence} = {others} does not divide the "
                    f"{_processes(world_size)} of this run. Start a multiple of {others} processes {_how_many()}, or "
                    f"set both to numbers whose product divides {world_size}."
                )
            shard = world_size // others
        if others * shard != world_size:
            copies, left = divmod(world_size, shard * sequence)
            more = "" if left or copies == replicate else f", or set parallel.replicate={copies}"
            raise ConfigError(
                f"parallel.replicate {replicate} x parallel.shard {shard} x parallel.sequence {sequence} = "
                f"{others * shard} processes, but this run has {_processes(world_size)}. Start {others * shard} "
                f"{_how_many()}, or set parallel.shard=auto to use all processes{more}."
            )
        if shard * sequence % expert:
            divisors = [number for number in range(1, shard * sequence + 1) if shard * sequence % number == 0]
            raise ConfigError(
                f"parallel.expert {expert} does not divide the {_processes(shard * sequence)} that share the weights "
                f"(parallel.shard {shard} x parallel.sequence {sequence}). Set it to one of "
                f"{', '.join(map(str, divisors))}, or start a multiple of {replicate * expert} "
                f"processes {_how_many()}."
            )
        return cls(replicate, shard, sequence, expert)

    @property
    def fsdp(self) -> int:
        """Processes that one copy of the weights is laid over."""
        return self.shard * self.sequence

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks: processes, or sequence-parallel groups of processes, that train on different packs."""
        return self.replicate * self.shard

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.replicate * self.fsdp


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
