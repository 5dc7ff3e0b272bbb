"""A loop of one rank among several, on a clock that it moves itself; the last rank is late for its backward.

Each exchange of the meter's logs takes an eighth of a second, and a callback behind the update a sixteenth.
"""

import os
import sys
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from headway import Meter, Workload
from headway.devices import Peak
from headway.meter.meter import HostAllGather
from helpers.device import COST_MODEL, Clock


def main() -> None:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if size > 1 else 0
    clock, model = Clock(), nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peak = Peak("a test", 1e5, "fp32", "made up")
    exchange = HostAllGather.exchange

    def slow_exchange(ranks, numbers):
        clock.now_s += 0.125
        return exchange(ranks, numbers)

    slow = patch.object(HostAllGather, "exchange", slow_exchange)
    options = {"cost_model": COST_MODEL, "peak": peak, "clock": clock, "log_every": 1, "log_to": [sys.argv[1]]}
    with slow, Meter(model, **options) as meter:
        for step in range(10):
            for _ in range(1 if step % 2 else 3):  # micro-batches
                meter.await_data()
                clock.now_s += 0.5
                meter.got_data()
                clock.now_s += 2.0 if rank == size - 1 else 0.25
                meter.count(Workload([100]) if rank or step != 4 else Workload())  # one empty step
                results = model(torch.ones(2, 3))
                clock.now_s += 1.0
                results.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.now_s += 0.0625
            meter.step()
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
