"""Run under torchrun: the same step on several ranks through each way of sharing it out; rank 0 writes what it cost.

torchrun --nproc-per-node 2 tests/integrations/metered_ranks.py FILE
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from headway.integrations import HeadwayCallback
from headway.meter import Meter
from helpers.loops import PEAK, ROWS, collate, loader, run_accelerate, run_lightning, tiny, trainer_arguments

NUM_RANKS, ACCUMULATION = 2, 2
ROWS_PER_BATCH = len(ROWS) // NUM_RANKS // ACCUMULATION


def plain_loop(model):
    """Meter a loop of this rank's share of the rows."""
    meter = Meter(model, peak=PEAK)
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


def main():
    dist.init_process_group("gloo")
    try:
        windows = {way.__name__: way() for way in (ddp, fsdp2, accelerate, transformers_trainer, lightning_trainer)}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        measured = {
            name: {
                "world_size": run.world_size,
                "rank_flops": run.rank_flops,
                "total": run.flops.total,
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
