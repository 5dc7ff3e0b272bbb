"""Run on several ranks: trains on text on pretended clocks, which only a layer's work and waiting for others move.

python tests/train/uneven_ranks.py CONFIG FOLDER SECONDS...    each rank's: what a layer works per token [s]
"""

import json
import os
import sys
from functools import wraps
from pathlib import Path
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from headway.config import load_config
from headway.meter.meter import Meter
from headway.optim import Optimizer
from headway.train.run import train
from helpers.device import Device


class Rank(Device):
    """A device among others, whose clock comes to the latest of them where each waits for all."""

    group = None

    def meet(self):
        """Wait for the other ranks: each calls this in the same places."""
        if self.group is None:
            self.group = dist.new_group(backend="gloo")
        latest_ns = torch.tensor(self.host_ns)
        dist.all_reduce(latest_ns, dist.ReduceOp.MAX, group=self.group)
        self.host_ns = int(latest_ns)

    def meeting(self, owner, name):
        """Patch a function, in or before which a rank waits for the others."""
        plain = getattr(owner, name)

        @wraps(plain)
        def met(*args, **kwargs):
            self.meet()
            return plain(*args, **kwargs)

        return patch.object(owner, name, met)


def main(config, folder, *seconds):
    rank = int(os.environ["RANK"])
    per_token_s = float(seconds[rank])
    forward, merge = Qwen3DecoderLayer.forward, Meter.merge
    walls_s, device = [], Rank()

    def working_forward(layer, hidden_states, *args, **kwargs):
        if layer.training:
            device.work(per_token_s * hidden_states.shape[1])
        return forward(layer, hidden_states, *args, **kwargs)

    def seen_merge(meter, every):
        for _, sums in every[rank]:
            walls_s.append(sums["", "wall_ns"] / 1e9)
        return merge(meter, every)

    with (
        device.stands_in(),
        device.meeting(FSDPParamGroup, "wait_for_unshard"),
        device.meeting(Optimizer, "step"),  # gradients of all ranks are there
        patch.object(Qwen3DecoderLayer, "forward", working_forward),
        patch.object(Meter, "merge", seen_merge),
    ):
        train(load_config(Path(config)))
    Path(folder, f"walls-{rank}.json").write_text(json.dumps(walls_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
