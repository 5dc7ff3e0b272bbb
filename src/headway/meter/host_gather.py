"""All-gather between hosts, so that no device is waited for: once a log, and never in between."""

import atexit
import sys
from datetime import timedelta
from typing import Any, TypeVar

from headway.errors import RankLostError

T = TypeVar("T")


class HostAllGather:
    """Exchange values between the ranks of a run over a gloo group of its own; pickle keeps whole numbers exact.

    Every rank must make one, after `torch.distributed` has been set up, and exchange equally often.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self.rank, self.size = 0, 1
        dist = sys.modules.get("torch.distributed")  # this process is alone unless this is imported
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

    def exchange(self, value: T) -> list[T]:
        """Give every rank the values of all ranks, in the order of the ranks.

        Raises:
            RankLostError: a rank did not answer; it has died, or left the loop.
        """
        if self._group is None:
            return [value]
        import torch.distributed as dist

        every: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(every, value, group=self._group)
        except RuntimeError as error:
            self.close()
            raise RankLostError(
                f"rank {self.rank} of {self.size} could not add its numbers up with the others: "
                f"{str(error).splitlines()[0]}. A rank has died or left the loop; from here on this rank logs its own."
            ) from error
        return every
