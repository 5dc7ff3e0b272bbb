"""The processes that train together: how many, which one this is, and sums over all of them.

A run that torchrun did not start is one process, and every sum is the number itself.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a run.

    Attributes:
        rank: this process, from 0.
        size: number of processes.
    """

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """What every rank gives, in order; exchanged between hosts, so that no device is waited for."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace every gradient by its sum over the ranks, in one message per dtype.

        A parameter that this rank's packs did not touch counts as zero, so that the ranks always exchange the same.
        """
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for group in by_dtype.values():
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in group]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for parameter, part in zip(group, torch.split(flat, [p.numel() for p in group]), strict=True):
                parameter.grad = part.view_as(parameter)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over the ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Wait until every rank has come here."""
        if self.size > 1:
            dist.barrier()


def join_ranks(device: torch.device, *, watchdog_s: float | None = None) -> Ranks:
    """Join the process group that torchrun prepared, if it started this process; a lone process is a group of one.

    Args:
        device: whose processes exchange what is on it.
        watchdog_s: a rank that stands still so long ends itself; exchanges give up later than that [s].
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Two backends at once: numbers on the host are exchanged there and never wait for the device.
        timeout = timedelta(seconds=2.0 * watchdog_s) if watchdog_s is not None else None
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    if not dist.is_initialized():
        return Ranks(0, 1)
    return Ranks(dist.get_rank(), dist.get_world_size())
