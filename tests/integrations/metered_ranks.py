"""Run on each rank: the same step on several ranks through each way of sharing it out; rank 0 writes what it cost.

torchrun --nproc-per-node 2 tests/integrations/metered_ranks.py FILE
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from headway import trace
from headway.errors import TraceError
from headway.integrations import HeadwayCallback
from headway.meter import Meter
from helpers.loops import PEAK, ROWS, collate, loader, run_accelerate, run_lightning, tiny, trainer_arguments

NUM_RANKS, ACCUMULATION = 2, 2
ROWS_PER_BATCH = len(ROWS) // NUM_RANKS // ACCUMULATION


def plain_loop(model, cost_model=None):
    """Meter a loop of this rank's share of the rows."""
    meter = Meter(model, peak=PEAK, cost_model=cost_model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in meter.batches(loader(ROWS[dist.get_rank() :: NUM_RANKS], ROWS_PER_BATCH)):
        meter.count(batch)
        model(**batch).loss.backward()
    optimizer.step()
    meter.step()
    return meter.close()


def ddp():
    return plain_loop(DistributedDataParallel(tiny()))


def fsdp2():
    model = tiny()
    for layer in model.model.layers:
        fully_shard(layer)
    return plain_loop(fully_shard(model))


def fsdp1():
    """Parameters lie flat, so that the model is traced before; its layers are checkpointed."""
    model = tiny()
    layer = type(model.model.layers[0])
    policy, cost_model = ModuleWrapPolicy({layer}), trace(model)
    model.config.use_cache = False
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))
    options = {"auto_wrap_policy": policy, "use_orig_params": True, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(model, **options)
    with pytest.raises(TraceError, match="Trace the model before wrapping"):
        Meter(model, watch=True)
    return plain_loop(model, cost_model)


def accelerate():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    return run_accelerate(accelerator, loader(ROWS, ROWS_PER_BATCH))


def transformers_trainer():
    callback = HeadwayCallback(peak=PEAK)
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(**trainer_arguments(folder, ROWS_PER_BATCH, ACCUMULATION), ddp_backend="gloo")
        Trainer(tiny(), given, train_dataset=ROWS, data_collator=collate, callbacks=[callback]).train()
    return callback.run


def lightning_trainer():
    batches = loader(ROWS, ROWS_PER_BATCH)
    return run_lightning(batches, ACCUMULATION, devices=NUM_RANKS, strategy="ddp")


WAYS = (ddp, fsdp2, fsdp1, accelerate, transformers_trainer, lightning_trainer)


def main():
    dist.init_process_group("gloo")
    try:
        windows = {way.__name__: way() for way in WAYS}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        measured = {
            name: {
                "world_size": run.world_size,
                "rank_flops": run.rank_flops,
                "total": run.flops.total,
                "recompute": run.flops.recompute,
                "components": run.flops.by_component(),
                "num_steps": run.num_steps,
                "tokens": run.tokens,
                "num_batches": run.num_batches,
            }
            for name, run in windows.items()
        }
        Path(sys.argv[1]).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
