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
    reshard: bool = Field(
        default=True,
        description="Free a block's gathered weights after its forward and gather them again for its backward; false "
        "keeps them, for speed where they fit",
    )
    reduce: Literal["pack", "step"] = Field(
        default="pack",
        description="Sum gradients over the processes after every pack, or once per step, which sends less and holds "
        "the whole model's gradients on every process",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Precision in which gradients are summed over the processes"
    )
    offload: bool = Field(
        default=False, description="Keep weights, gradients and optimizer state in the host's memory; CUDA only"
    )
