"""Run on two ranks: profiles a loop in which the second one sleeps in each step, and has more to compute.

python tests/explain/awaited_ranks.py FOLDER SLEEP_S
"""

import sys
import time

import torch
import torch.distributed as dist

import headway
from headway.count import Workload
from headway.devices import Peak
from headway.meter import Meter
from helpers.device import COST_MODEL

TOKENS = (4, 12)  # of each rank
STEPS = range(2, 5)
PEAK = Peak("test device", 1000.0, "fp32", "made up for a test")


def main(folder, sleep_s):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weight = torch.ones(3, 5)
    meter = Meter(COST_MODEL, peak=PEAK, device=torch.device("cpu"))
    with headway.profile(meter, folder, steps=STEPS, ranks=range(2), report=lambda _: None):
        for _ in range(STEPS[-1]):
            meter.count(Workload([TOKENS[rank]]))
            product = torch.ones(TOKENS[rank], 3) @ weight
            if rank == 1:
                time.sleep(float(sleep_s))
            dist.all_reduce(product.sum())
            meter.step()
        meter.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
