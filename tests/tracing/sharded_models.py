"""Run by torchrun: lay tiny models over the ranks in every way, and save the cost model that each rank traces.

torchrun --nproc-per-node 2 tests/tracing/sharded_models.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from headway.count import models
from headway.tracing import trace
from helpers.counter import build


def step(model: nn.Module) -> nn.Module:
    """Run a real step, which leaves hooks, gradients and gathered parameters behind."""
    model(input_ids=torch.randint(10, 160, (1, 8)), use_cache=False).logits.sum().backward()
    return model


def layers(model: nn.Module) -> nn.ModuleList:
    return model.model.layers if hasattr(model.model, "layers") else model.model.language_model.layers


def fsdp(model, mesh, wrap=lambda block: block):
    blocks = layers(model)
    for i, block in enumerate(blocks):
        blocks[i] = wrap(block)
        fully_shard(blocks[i], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh, sequence=False):
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan = {name: ColwiseParallel() for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    plan |= {"self_attn.o_proj": rows, "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    plan |= {"mlp.down_proj": rows}
    if sequence:
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        plan |= {"mlp": PrepareModuleInput(**gather)}
    for block in layers(model):
        parallelize_module(block, mesh, plan)
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def of_transformers(model, folder, **config):
    """Load a model as transformers' own tensor or expert parallelism lays it out."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**config))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = {
        "qwen3_vl-ddp": nn.parallel.DistributedDataParallel,
        "qwen3-fsdp_after_a_step": lambda m: step(fsdp(m, mesh)),
        "qwen3_tied-fsdp": lambda m: fsdp(m, mesh),
        "qwen3_moe-fsdp": lambda m: fsdp(m, mesh),
        "qwen3_vl-fsdp": lambda m: fsdp(m, mesh),
        "qwen3-fsdp_over_checkpoints": lambda m: fsdp(m, mesh, checkpoint_wrapper),
        "qwen3-fsdp_over_compiled_blocks": lambda m: fsdp(m, mesh, torch.compile),
        "qwen3-tensor_parallel_after_a_step": lambda m: step(tensor_parallel(m, mesh)),
        "qwen3-sequence_parallel": lambda m: tensor_parallel(m, mesh, sequence=True),
        "qwen3-transformers_tensor_parallel": lambda m: of_transformers(m, folder / "dense", tp_plan="auto"),
    }
    if "ep_size" in DistributedConfig.__dataclass_fields__:  # older ones change the modules' own numbers of experts
        made["qwen3_moe-transformers_expert_parallel"] = lambda m: of_transformers(
            m, folder / "experts", enable_expert_parallel=True
        )
    for name, make in made.items():
        cost = trace(make(build(name.partition("-")[0])))
        models.save_cost_model(cost, folder / f"{name}-{dist.get_rank()}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
