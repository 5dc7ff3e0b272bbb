"""The processes that train together: how many, which one this is, and sums over all of them.

A run that torchrun did not start is one process, and every sum is the number itself.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headway.count import Workload

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a run.

    Attributes:
        rank: this process, from 0.
        size: number of processes.
        sequence: neighbours among them that share each pack; what a group of them has is counted once.
    """

    rank: int
    size: int
    sequence: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Whose packs this process computes, from 0."""
        return self.rank // self.sequence

    @property
    def num_data_ranks(self) -> int:
        """How many have packs of their own."""
        return self.size // self.sequence

    def billed(self, workload: Workload) -> Workload:
        """What this process counts of a pack: all of it as the first of those that share it, nothing as another."""
        return Workload() if self.rank % self.sequence else workload

    def gather(self, value: T) -> list[T]:
        """What everyone with packs of their own gives, in order, one for each group that shares its packs.

        Exchanged between hosts, so that no device is waited for.
        """
        return self.gather_all(value)[:: self.sequence]

    def gather_all(self, value: T) -> list[T]:
        """What every process gives, in order, exchanged between hosts."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Wait until every process has come here."""
        if self.size > 1:
            dist.barrier()


def join_ranks(device: torch.device, sequence: int = 1, *, watchdog_s: float | None = None) -> Ranks:
    """Join the process group that torchrun prepared, if it started this process; a lone process is a group of one.

    Args:
        device: where this process computes.
        sequence: processes that share each pack; checked with the rest of the mesh.
        watchdog_s: a rank that stands still so long ends itself; exchanges give up later than that [s].
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Two backends at once: numbers on the host are exchanged there and never wait for the device.
        timeout = timedelta(seconds=2.0 * watchdog_s) if watchdog_s is not None else None
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    if not dist.is_initialized():
        return Ranks(0, 1)
    return Ranks(dist.get_rank(), dist.get_world_size(), sequence)
