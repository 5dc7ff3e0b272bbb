"""Run on each rank: a step on ranks of which pairs share each batch; rank 0 writes what the meter counted.

torchrun --nproc-per-node 4 tests/integrations/shared_ranks.py FILE
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import accelerate.parallelism_config
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from headway.count import Workload
from headway.errors import UsageError
from headway.integrations import AccelerateMeter, HeadwayCallback
from headway.meter import Meter
from headway.tracing import trace
from helpers.loops import PEAK, ROWS, collate, lightning_module, loader, run_lightning, tiny, trainer_arguments

SIZE, PARALLEL = 4, 2
BATCHES = 2  # of each pair


def cut_over(mesh, model):
    """Cut attention and MLPs over the ranks of a mesh, as PyTorch's tutorial of tensor parallelism does."""
    for layer in model.model.layers:
        columns = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
        parallelize_module(layer.self_attn, mesh, {**columns, "o_proj": RowwiseParallel()})
        columns = dict.fromkeys(("gate_proj", "up_proj"), ColwiseParallel())
        parallelize_module(layer.mlp, mesh, {**columns, "down_proj": RowwiseParallel()})
    return model


def rows_of(data_rank):
    return loader(ROWS[data_rank :: SIZE // PARALLEL], len(ROWS) // (SIZE // PARALLEL) // BATCHES)


def loop(model, data_rank, rows=None, **options):
    meter = Meter(model, peak=PEAK, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for batch in meter.batches(rows or rows_of(data_rank)):
        meter.count(batch)
        model(**batch).loss.backward()
    optimizer.step()
    meter.step()
    return meter.close()


def pairs_in_a_row():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return loop(cut_over(mesh["tp"], tiny()), mesh["dp"].get_local_rank())


def pairs_apart():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    return loop(cut_over(mesh["tp"], tiny()), mesh["dp"].get_local_rank())


def without_names():
    mesh = init_device_mesh("cpu", (2, 2))
    groups = [dist.new_group(ranks) for ranks in mesh.mesh.tolist()]
    own = torch.distributed.device_mesh.DeviceMesh.from_group(groups[dist.get_rank() // 2], "cpu")
    return loop(cut_over(own, tiny()), dist.get_rank() // 2)


def with_fsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = cut_over(mesh["tp"], tiny())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return loop(fully_shard(model, mesh=mesh["dp"]), mesh["dp"].get_local_rank())


def data_alone(names, *sizes):
    """Every rank has rows of its own, whatever the mesh of FSDP is called."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = tiny()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    rows = loader(ROWS[dist.get_rank() :: SIZE], 1)
    return loop(fully_shard(model, mesh=mesh), None, rows=rows)


def sharded_by_another_name():
    return data_alone(("gpus",), 4)


def sharded_copies():
    return data_alone(("a", "b"), 2, 2)


def said():
    """Pairs share batches in a way that no mesh tells, such as stages of a pipeline."""
    return loop(tiny(), dist.get_rank() // 2, batch_ranks=2)


class Stage(nn.Module):
    """Some layers of a model, under the names that they have in it; the first stage embeds, the last one has the head.

    Modules are kept by name, as in torchtitan's stages.
    """

    def __init__(self, whole, layers, *, is_first, is_last):
        super().__init__()
        self.model = nn.Module()
        self.model.rotary_emb = whole.model.rotary_emb
        self.model.layers = nn.ModuleDict({str(number): whole.model.layers[number] for number in layers})
        if is_first:
            self.model.embed_tokens = whole.model.embed_tokens
        if is_last:
            self.model.norm, self.lm_head = whole.model.norm, whole.lm_head
        self.is_first, self.is_last = is_first, is_last

    def forward(self, states):
        states = self.model.embed_tokens(states) if self.is_first else states
        places = self.model.rotary_emb(states, torch.arange(states.shape[1])[None])
        for layer in self.model.layers.values():
            states = layer(states, position_embeddings=places, attention_mask=None)
        return self.lm_head(self.model.norm(states)) if self.is_last else states


def pipelined():
    """Pairs of ranks run the two halves of a model in turn, each the same batch, by PyTorch's own schedule."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    place = mesh["pp"].get_local_rank()
    whole = tiny()
    half = len(whole.model.layers) // 2
    layers = range(half) if place == 0 else range(half, len(whole.model.layers))
    module = Stage(whole, layers, is_first=place == 0, is_last=place == 1)
    ids = torch.full((4, 8), 7)
    meter = Meter(module, cost_model=trace(whole), peak=PEAK, batch_ranks=2)

    def loss(logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    stage = PipelineStage(module, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss)
    for _ in range(2):
        meter.count({"input_ids": ids, "labels": ids})
        if place == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=[])
        meter.step()
    return numbers(meter.close())


def trainer():
    callback = HeadwayCallback(peak=PEAK)
    place = Path(sys.argv[1]).parent / "model"
    tiny().save_pretrained(place)  # by rank 0
    dist.barrier()
    parallel = DistributedConfig(tp_size=2, fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(place, distributed_config=parallel)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**trainer_arguments(folder, 2, BATCHES), ddp_backend="gloo", optim="sgd")
        Trainer(model, arguments, train_dataset=ROWS, data_collator=collate, callbacks=[callback]).train()
    return callback.run


def accelerated():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    model = cut_over(mesh["tp"], tiny())
    meter = AccelerateMeter(Accelerator(cpu=True), model, peak=PEAK)
    for batch in meter.batches(rows_of(mesh["dp_replicate"].get_local_rank())):
        model(**batch).loss.backward()
    meter.step()
    return meter.close()


def lightning_trainer():
    class Lit(lightning_module()):
        def configure_model(self):
            cut_over(self.device_mesh["tensor_parallel"], self.model)

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    return run_lightning(loader(ROWS, 2), BATCHES, module=Lit, devices=SIZE, strategy=strategy)


def cut_sequences():
    """Context parallelism gives each forward a slice of its sequences, of which nobody can count the pairs."""
    AcceleratorState._reset_state()  # of the ways before
    parallel = ParallelismConfig(cp_size=2, dp_shard_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=parallel)
    try:
        AccelerateMeter(accelerator, tiny(), peak=PEAK)
    except UsageError as error:
        refusal = str(error)
    # rows of the whole batch, as the loop knows them
    meter = AccelerateMeter(accelerator, tiny(), peak=PEAK, workload=lambda _: Workload([8, 8]))
    meter.count(Workload([8, 8]))
    meter.step()
    return {**numbers(meter.close()), "refusal": refusal}


def numbers(run):
    return {"total": run.flops.total, "tokens": run.tokens, "rank_flops": run.rank_flops, "steps": run.num_steps}


def main():
    torch.set_num_threads(1)
    # Accelerate builds such meshes on accelerators only; nothing of what is measured here depends on one.
    accelerate.parallelism_config.ParallelismConfig._validate_accelerator = lambda *_: None
    dist.init_process_group("gloo")
    ways = (pairs_in_a_row, pairs_apart, without_names, with_fsdp, said, trainer, accelerated, lightning_trainer)
    try:
        measured = {way.__name__: numbers(way()) for way in ways}
        measured["own_rows"] = [numbers(way()) for way in (sharded_by_another_name, sharded_copies)]
        try:
            Meter(tiny(), peak=PEAK, batch_ranks=3)
        except UsageError as error:
            measured["refused"] = str(error)
        measured["cut_sequences"] = cut_sequences()
        measured["pipelined"] = pipelined()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        Path(sys.argv[1]).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
