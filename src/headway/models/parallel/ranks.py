"""The processes that train together: how many, which one this is, and sums over all of them.

A run that torchrun did not start is one process, and every sum is the number itself.
"""

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from headway.errors import HeadwayError, RankLostError
from headway.words import Argument

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
        """Index of the group of processes that shares this one's packs, from 0."""
        return self.rank // self.sequence

    @property
    def num_data_ranks(self) -> int:
        """Number of groups with packs of their own."""
        return self.size // self.sequence

    @property
    def bills(self) -> bool:
        """Whether this process counts its packs: the first of those that share them does."""
        return self.rank % self.sequence == 0

    def gather(self, value: T) -> list[T]:
        """Gather one value from each group that shares packs, in order.

        Exchanged between hosts, so that no device is waited for.
        """
        return self.gather_all(value)[:: self.sequence]

    def gather_all(self, value: T) -> list[T]:
        """Gather a value from every process, in order, exchanged between hosts."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def by_first(self, act: Callable[[], T]) -> T:
        """Call a function on the first process alone, and give its result to all.

        Raises:
            HeadwayError: what it raised, on all of them.
        """
        outcome: tuple[T | None, HeadwayError | None] | None = None
        if self.is_first:
            try:
                outcome = act(), None
            except HeadwayError as error:
                outcome = None, error
        heard: Any = self.gather_all(outcome)[0]
        value, refused = heard
        if refused is not None:
            raise refused
        return cast(T, value)

    def after_first(self, act: Callable[[], T]) -> T:
        """Call a function on the first process, then on the others, which find in the cache what it left there.

        Raises:
            HeadwayError: what it raised on the first process, on all of them.
        """
        results: list[T] = []
        self.by_first(lambda: results.append(act()))
        return results[0] if self.is_first else act()

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Wait until every process has come here."""
        if self.size > 1:
            dist.barrier()


def own_rank() -> int:
    """This process among all of the run, also before it has joined them."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def join_ranks(device: torch.device, sequence: int = 1, *, watchdog_s: float | None = None) -> Ranks:
    """Join the process group that torchrun prepared, if it started this process; a lone process is a group of one.

    Args:
        device: where this process computes.
        sequence: processes that share each pack; checked with the rest of the mesh.
        watchdog_s: a rank that stands still so long ends itself; exchanges give up later than that [s].
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Two backends at once: numbers on the host are exchanged there and never wait for the device.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=2.0 * watchdog_s) if watchdog_s is not None else dist.default_pg_timeout
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        name = agree_on_meeting(store, rank, size, timeout.total_seconds())
        meeting = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # documented, if not declared
        dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=timeout)
    if not dist.is_initialized():
        return Ranks(0, 1)
    return Ranks(dist.get_rank(), dist.get_world_size(), sequence)


def agree_on_meeting(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """Agree on a key prefix in the store that no earlier processes have used.

    torchrun keeps one store for all its restarts. Under the same names, a new process would read the address of one
    that has died, and wait for it. TORCHELASTIC_RESTART_COUNT does not tell the restarts apart: each machine's torchrun
    counts its own, from 0 again when the machine comes back, and some restarts not at all.

    So each process says that it is there under a name of its own, and the first one answers those names until all have
    heard it: what the dead have left is answered too, and nobody hears it.

    Args:
        store: of torch.distributed, that all of them reach, with anything in it.
        rank: this process.
        size: number of processes.
        timeout_s: how long the others are waited for [s].

    Raises:
        RankLostError: the first process has not heard of all others in time.
    """
    # Any other process: say its name, wait for the answer under that name, and say that it was heard.
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"headway/here/{rank}", own)
        meeting: str = store.get(f"headway/meeting of/{own}").decode()
        store.set(f"headway/heard/{meeting}/{rank}", "")
        return meeting
    # The first process: answer every name that stands in the store until each rank has heard this prefix.
    answered: set[str] = set()
    silent = set(range(1, size))
    deadline_s = time.monotonic() + timeout_s
    while silent:
        for other in sorted(silent):
            if store.check([f"headway/heard/{own}/{other}"]):
                silent.discard(other)
            elif store.check([f"headway/here/{other}"]):
                name = store.get(f"headway/here/{other}").decode()
                # A name of a dead process is answered too; its successor writes another one over it.
                if name not in answered:
                    store.set(f"headway/meeting of/{name}", own)
                    answered.add(name)
        if silent and time.monotonic() > deadline_s:
            raise RankLostError(
                f"{len(silent)} of {size} ranks have not come within {timeout_s:g} s, the first of them rank "
                f"{min(silent)}. Its own output says why; start again with {Argument('resume', example='None')}."
            )
        time.sleep(0.02)
    return own
