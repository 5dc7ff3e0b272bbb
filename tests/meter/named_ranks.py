"""A loop of one rank among several whose steps have phases, on a clock that it moves; the last rank names one alone."""

import os
import sys

import torch.distributed as dist

from headway import Generation, Meter, Workload
from headway.devices import Peak
from helpers.device import COST_MODEL, Clock


def main() -> None:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if size > 1 else 0
    clock, peak = Clock(), Peak("a test", 1e5, "fp32", "made up")
    with Meter(COST_MODEL, peak=peak, clock=clock, log_every=2, log_to=[sys.argv[1]]) as meter:
        for step in range(6):
            with meter.phase("rollout", forward_only=True):
                if rank != 1:  # which has no prompt
                    meter.count(Generation([10 + rank] * 2, [4, 6]))
                clock.now_s += 2.0
            if rank == size - 1 and step == 3:
                with meter.phase("repair on the last rank"):
                    meter.count(Workload([1]), forward_only=True)
            with meter.phase("update"):
                meter.count(Workload([100 + rank]).with_counts(supervised=40))
                clock.now_s += 1.0
            clock.now_s += 0.25
            meter.step()
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
