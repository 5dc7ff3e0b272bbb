"""Run on each rank: steps of diffusion on ranks whose pictures have other sizes; rank 0 writes what they cost.

torchrun --nproc-per-node 3 tests/integrations/diffusing_ranks.py FILE
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from headway.meter import Meter
from helpers.denoisers import TEXT_WIDTH, autoencoder, denoiser
from helpers.loops import PEAK

SIDES = (8, 16, None)  # of each rank's pictures; the last reads its latents from a cache


def main(path):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    unet, vae = DistributedDataParallel(denoiser("UNet2DConditionModel")), autoencoder()
    meter = Meter(unet, peak=PEAK, watch=True, others=[vae], log_every=2)
    optimizer = torch.optim.SGD(unet.parameters(), lr=1e-3)
    windows, flops = [], 0
    for _ in range(2):
        counter = FlopCounterMode(display=False)
        with sdpa_kernel(SDPBackend.MATH), counter:
            latents = torch.randn(1, 4, 4, 4)
            if SIDES[rank] is not None:
                with torch.no_grad():
                    latents = vae.encode(torch.randn(1, 3, 2 * SIDES[rank], 2 * SIDES[rank])).latent_dist.sample()
            prediction = unet(latents, torch.tensor([3]), torch.randn(1, 5, TEXT_WIDTH), return_dict=False)[0]
            F.mse_loss(prediction, torch.randn_like(prediction)).backward()
        optimizer.step()
        optimizer.zero_grad()
        windows.append(meter.step())
        flops += counter.get_total_flops()
    run = meter.close()
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, flops)
    if rank == 0:
        totals = [window.flops.total for window in windows if window is not None]
        record = {"counted": counts, "total": run.flops.total, "rank_flops": run.rank_flops, "windows": totals}
        Path(path).write_text(json.dumps(record | {"images": run.entries["images"]}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
