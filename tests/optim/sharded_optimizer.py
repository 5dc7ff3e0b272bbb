"""Run by `test_sharded.py` in several processes: optimizers on sharded parameters. Argument: a folder.

copies FOLDER          copies of a slice of weights in bfloat16, which are rounded by chance, stay copies
muon FOLDER            Muon's step on parameters cut in every way, against the same step on whole ones
save FOLDER STATE      train a sharded model, checkpoint optimizer and average on the way, write what came out
resume FOLDER STATE    go on from that checkpoint with this number of processes and compare
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headway.config import OptimConfig
from headway.config.optim import EmaConfig
from headway.count.updating import RULES
from headway.models.load import load_model
from headway.optim import Optimizer, WeightAverage, make_optimizer, set_learning_rate
from headway.tracing import trace
from helpers.models import tiny_config

STEPS_BEFORE, STEPS_AFTER, LR = 3, 3, 0.01
# shape and cut of parameters: tall, wide, fewer rows than processes, columns, stacks cut along each dimension
CUTS = [
    *[((37, 15), 0)] * 5,
    ((5, 23), 0),
    ((3, 40), 0),
    ((16, 12), 1),
    ((6, 10, 12), 0),
    ((3, 10, 12), 1),
    ((5, 12, 8), 2),
]


def muon():
    """Compare to the bit: whole matrices are put together and computed by the arithmetic of one process."""
    count = dist.get_world_size()
    meshes = [(init_device_mesh("cpu", (count,)), ())]
    if count == 4:  # copies of what two processes share
        meshes.append((init_device_mesh("cpu", (2, 2)), (Replicate(),)))
    for mesh, before in meshes:
        whole = [nn.Parameter(torch.randn(shape)) for shape, _ in CUTS]
        parts = [
            nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [*before, Shard(cut)]))
            for p, (_, cut) in zip(whole, CUTS, strict=True)
        ]
        optimizers = [
            Optimizer(
                [{"params": each, "rule": "muon", "lr_factor": 1.0, "weight_decay": 0.1}],
                OptimConfig(steps=1, lr=0.02, betas=(0.9, 0.95), eps=1e-8),
            )
            for each in (whole, parts)
        ]  # fmt: skip
        for _ in range(3):
            for one, part in zip(whole, parts, strict=True):
                one.grad = torch.randn(one.shape)
                part.grad = distribute_tensor(one.grad, mesh, part.placements)
            for optimizer in optimizers:
                optimizer.factor = torch.tensor(0.3)  # as of clipping
                optimizer.step()
        for one, part in zip(whole, parts, strict=True):
            assert torch.equal(one, part.full_tensor()), (one.shape, part.placements)


def copies():
    """Weights in bfloat16, some cut over one mesh and some over another: copies of a slice must round alike."""
    count = dist.get_world_size()
    flat, both = init_device_mesh("cpu", (count,)), init_device_mesh("cpu", (2, count // 2))
    layouts = [(flat, [Shard(0)]), (both, [Replicate(), Shard(0)]), (both, [Replicate(), Replicate()])]
    for rule in RULES:
        parts = [
            nn.Parameter(distribute_tensor(torch.randn(shape).bfloat16(), mesh, placements))
            for shape in ((37, 15), (5, 23), (3, 40))
            for mesh, placements in layouts
        ]
        optimizer = Optimizer(
            [{"params": parts, "rule": rule, "lr_factor": 1.0, "weight_decay": 0.1}],
            OptimConfig(steps=1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8),
        )  # fmt: skip
        for _ in range(3):
            for part in parts:
                part.grad = distribute_tensor(torch.randn(part.shape).bfloat16(), part.device_mesh, part.placements)
            optimizer.factor = torch.tensor(0.3)
            optimizer.step()
        for part in parts:
            everyone = [None] * count
            dist.all_gather_object(everyone, part.to_local())
            mine = part.device_mesh.get_coordinate()
            assert mine is not None
            for rank, theirs in enumerate(everyone):
                place = (part.device_mesh.mesh == rank).nonzero()[0].tolist()
                cuts = [axis for axis, placement in enumerate(part.placements) if isinstance(placement, Shard)]
                if all(place[axis] == mine[axis] for axis in cuts):
                    assert torch.equal(theirs, part.to_local()), (rule, part.shape, part.placements)
        # slices of equal values and gradients round independently: where chance decides, they are not all alike
        flat_part = nn.Parameter(distribute_tensor(torch.ones(count * 64, 8).bfloat16(), flat, [Shard(0)]))
        flat_part.grad = distribute_tensor(torch.ones(count * 64, 8).bfloat16(), flat, [Shard(0)])
        Optimizer(
            [{"params": [flat_part], "rule": rule, "lr_factor": 1.0, "weight_decay": 0.0}],
            OptimConfig(steps=1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8),
        ).step()
        slices = flat_part.detach().full_tensor().float().view(count, -1)
        assert not torch.equal(slices[0], slices[1]), rule


def build(held):
    """A tiny model, sharded where there are several processes, with everything that is kept of it."""
    torch.manual_seed(7)
    config = tiny_config("qwen3")
    config.hidden_size, config.intermediate_size = 64, 128  # rows long enough for blocks of 8-bit codes
    model = load_model(config, random_init=True)
    cost_model = trace(model)
    if dist.get_world_size() > 1:
        for part in (*model.model.layers, model):
            fully_shard(part)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    optim = OptimConfig(
        steps=10, lr=LR, name="muon", muon={"scale": "original"}, state=held, lr_of={"language.head": "x0.5"}
    )
    return model, make_optimizer(model, optim, cost_model), WeightAverage(model, EmaConfig(decay=0.9))


def step(model, optimizer, average, number):
    """One step on a batch whose loss the first process has alone, so that the summed gradient is exactly its own."""
    ids = torch.randint(160, (1, 12), generator=torch.Generator().manual_seed(number))
    (model(input_ids=ids, labels=ids, use_cache=False).loss * (dist.get_rank() == 0)).backward()
    set_learning_rate(optimizer, LR / number)
    optimizer.step()
    optimizer.zero_grad()
    average.update(number)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def outcome(model, average):
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return found | {f"average of {name}": whole(tensor) for name, tensor in average.state_dict().items()}


def save(folder, held):
    model, optimizer, average = build(held)
    for number in range(1, STEPS_BEFORE + 1):
        step(model, optimizer, average, number)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "ema": average}, checkpoint_id=folder / "checkpoint")
    for number in range(STEPS_BEFORE + 1, STEPS_BEFORE + STEPS_AFTER + 1):
        step(model, optimizer, average, number)
    found = outcome(model, average)
    if dist.get_rank() == 0:
        torch.save(found, folder / "outcome.pt")


def resume(folder, held):
    model, optimizer, average = build(held)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "ema": average}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for number in range(STEPS_BEFORE + 1, STEPS_BEFORE + STEPS_AFTER + 1):
        step(model, optimizer, average, number)
    found, expected = outcome(model, average), torch.load(folder / "outcome.pt")
    assert found.keys() == expected.keys()
    held_types = {tensor.dtype for state in optimizer.state.values() for tensor in state.values()}
    assert (
        held_types
        == {
            "float32": {torch.float32},
            "bfloat16": {torch.float32, torch.bfloat16},
            "8bit": {torch.float32, torch.uint8},
        }[held]
    )
    # bfloat16 rounds by chance, and what each process draws depends on what it holds
    tolerance = 1e-3 if held == "bfloat16" else 1e-6
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=tolerance, msg=name)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    what, folder, *rest = sys.argv[1:]
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    if what in ("muon", "copies"):
        {"muon": muon, "copies": copies}[what]()
    else:
        {"save": save, "resume": resume}[what](Path(folder), *rest)
    dist.destroy_process_group()
