"""How the processes of a run share the work: a mesh of replicas, shards, sequence and expert parallelism."""

from typing import Literal

from pydantic import Field

from headway.train.config.sections import Positive, Section


class ParallelConfig(Section):
    """The mesh: replicate x shard x sequence processes; experts are spread over shard x sequence.

    Processes of one sequence group share a pack; every other process has packs of its own.
    """

    replicate: Positive = Field(default=1, description="Copies of the sharded weights (HSDP) [processes]")
    shard: Positive | Literal["auto"] = Field(
        default="auto", description="Processes that share one copy of the weights (FSDP2); auto for all that are left"
    )
    sequence: Positive = Field(default=1, description="Processes that share each pack (Ulysses) [processes]")
    expert: Positive = Field(default=1, description="Processes that the experts of a layer are spread over [processes]")
