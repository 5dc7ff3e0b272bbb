"""All-gather of whole numbers between hosts, so that no device is waited for: once a log, and never in between."""

import atexit
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from headway.errors import RankLostError

_HALF = 62  # bits of the lower of the two words that hold a count: a window's FLOPs pass 2**63


class HostAllGather:
    """Exchange lists of whole numbers between the ranks of a run over a gloo group of its own.

    Every rank must make one, after `torch.distributed` has been set up, and exchange equally often.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self.rank, self.size = 0, 1
        dist = sys.modules.get("torch.distributed")  # where nobody imported it, this process is alone
        if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
            atexit.register(self.close)

    def close(self) -> None:
        """End the group; from here on this rank's own numbers are all there are.

        A process must not end before: gloo's threads let go of tensors when the interpreter may be gone, and abort.
        """
        atexit.unregister(self.close)
        group, self._group = self._group, None
        if group is None:
            return
        import torch.distributed as dist

        if dist.is_initialized():  # the loop may have ended all groups, and this one with them
            dist.destroy_process_group(group)

    def all_steps(self, steps: Sequence[int]) -> set[int]:
        """Give every rank the steps that any rank names, by their numbers from 1; most ranks name none.

        Raises:
            RankLostError: as for `exchange`.
        """
        bits = sum(1 << step for step in steps)
        longest = max(length for (length,) in self.exchange([bits.bit_length()]))
        words = [bits >> place & ((1 << _HALF) - 1) for place in range(0, longest, _HALF)]
        return {
            place * _HALF + bit
            for rank in (self.exchange(words) if words else ())
            for place, word in enumerate(rank)
            for bit in range(_HALF)
            if word >> bit & 1
        }

    def exchange_uneven(self, numbers: Sequence[int]) -> list[list[int]]:
        """Exchange lists whose lengths may differ from rank to rank; the shorter ones end in zeros.

        Raises:
            RankLostError: as for `exchange`.
        """
        longest = max(length for (length,) in self.exchange([len(numbers)]))
        return self.exchange([*numbers, *[0] * (longest - len(numbers))])

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Give every rank the numbers of all ranks, in the order of the ranks; exact, whatever their size.

        Raises:
            RankLostError: a rank did not answer; it has died, or left the loop.
        """
        if self._group is None:
            return [list(numbers)]
        import torch
        import torch.distributed as dist

        words = [word for n in numbers for word in (n >> _HALF, n & ((1 << _HALF) - 1))]
        mine = torch.tensor(words, dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = dist.all_gather(every, mine, group=self._group, async_op=True)
            work.wait(self._timeout)
        except RuntimeError as error:
            self.close()
            raise RankLostError(
                f"rank {self.rank} of {self.size} could not add its numbers up with the others: "
                f"{str(error).splitlines()[0]}. A rank has died or left the loop; from here on this rank logs its own."
            ) from error
        pairs = [rank.tolist() for rank in every]
        return [[(high << _HALF) + low for high, low in zip(row[::2], row[1::2], strict=True)] for row in pairs]
