"""The processes that train together: how many, which one this is, and sums over all of them.

A run that torchrun did not start is one process, and every sum is the number itself.
"""

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from headway.errors import HeadwayError, RankLostError, UsageError
from headway.words import Argument

T = TypeVar("T")

_SILENT_S = 5.0  # a wait for other ranks that is longer is told [s]


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of a run.

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
        """True if this process writes the run folder."""
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
        """True if this process counts its packs: the first of those that share them does."""
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
    """This process among all of the run, also before it has joined them.

    Raises:
        UsageError: as for `launched`.
    """
    return dist.get_rank() if dist.is_initialized() else launched()[0]


def launched() -> tuple[int, int]:
    """This process and the number of processes, as a launcher such as torchrun says in the environment.

    Raises:
        UsageError: a variable that is missing, no whole number or out of its range.
    """
    size = whole_variable("WORLD_SIZE", 1, 2**31 - 1, unset=1)
    return whole_variable("RANK", 0, size - 1, unset=0 if size == 1 else None), size


def whole_variable(name: str, least: int, most: int, unset: int | None = None) -> int:
    """Read a whole number from a variable of a launcher.

    Args:
        name: of the variable.
        least: smallest value allowed.
        most: largest value allowed.
        unset: what it is where it is not set; None if it must be.

    Raises:
        UsageError: it is missing, no whole number or out of its range.
    """
    text = os.environ.get(name)
    if text is None and unset is not None:
        return unset
    if text is not None and text.strip().isdecimal() and least <= int(text) <= most:
        return int(text)
    raise _wrong_variable(name, f"a whole number from {least} to {most}")


def _wrong_variable(name: str, allowed: str) -> UsageError:
    value = f"is {os.environ[name]!r}" if name in os.environ else "is not set"
    return UsageError(
        f"The environment variable {name} {value}, but {allowed} is needed. The processes of a run find each other "
        "by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and their devices by LOCAL_RANK. torchrun sets these "
        "variables. With another launcher, such as srun, set them in the job script. To train with one process, "
        "unset them all."
    )


def join_ranks(device: torch.device, sequence: int = 1, *, watchdog_s: float | None = None) -> Ranks:
    """Join the process group that torchrun prepared, if it started this process; a lone process is a group of one.

    Args:
        device: where this process computes.
        sequence: processes that share each pack; checked with the rest of the mesh.
        watchdog_s: how long the others are waited for, as a rank that stands still so long ends itself; exchanges give
            up later than that [s].

    Raises:
        UsageError: as for `launched`.
        RankLostError: the others cannot be reached, or have not come in time.
    """
    if not dist.is_initialized() and launched()[1] > 1:
        # Two backends at once: numbers on the host are exchanged there and never wait for the device.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        patience = timedelta(seconds=watchdog_s) if watchdog_s is not None else dist.default_pg_timeout
        timeout = patience if watchdog_s is None else 2 * patience
        if not os.environ.get("MASTER_ADDR", "").strip():
            raise _wrong_variable("MASTER_ADDR", "the name or address of the first rank's machine")
        place = f"{os.environ['MASTER_ADDR']}:{whole_variable('MASTER_PORT', 1, 65535)}"
        with _announcing_wait(f"rank {launched()[0]} waits for the other ranks at {place} (MASTER_ADDR, MASTER_PORT)"):
            try:
                store, rank, size = next(rendezvous("env://", timeout=patience))
            except (ValueError, RuntimeError, OSError) as error:
                raise RankLostError(
                    f"rank {launched()[0]} could not meet the other ranks at {place} (MASTER_ADDR, MASTER_PORT): "
                    f"{str(error).strip().splitlines()[0]} The address must be that of rank 0's machine, with a port "
                    "that is free there and that all machines reach."
                ) from error
            store.set_timeout(patience)
            name = agree_on_meeting(store, rank, size, patience.total_seconds())
        store.set_timeout(timeout)
        meeting = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # documented, if not declared
        dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=timeout)
    if not dist.is_initialized():
        return Ranks(0, 1)
    return Ranks(dist.get_rank(), dist.get_world_size(), sequence)


@contextmanager
def _announcing_wait(text: str) -> Iterator[None]:
    """Say on stderr, once and after some seconds, the reason of a wait."""
    timer = threading.Timer(_SILENT_S, lambda: sys.stderr.write(f"{text}\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
                f"{min(silent)}. The output of that rank says why. Start again with "
                f"{Argument('resume', example='None')}."
            )
        time.sleep(0.02)
    return own
