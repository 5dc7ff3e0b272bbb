"""One of several processes that share the experts of a block; it ends with an error where they differ from one's.

python dispatch_process.py

Float32, 6 experts of which a slot chooses 3, uneven loads, one process without any slot.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from headway.models.blocks import experts_of
from headway.models.experts import use_experts
from headway.models.parallel import experts as dispatch
from headway.models.parallel.experts import spread_experts
from helpers.models import tiny_config

EXPERTS, CHOSEN, HIDDEN = 6, 3, 32
SLOTS = (40, 0, 7)  # of each process
FLOAT = 4  # bytes


def build(family: str, skew: float) -> nn.Module:
    """A small model whose routers prefer the first two experts, the more the larger `skew`."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config.num_experts_per_tok = CHOSEN
    setattr(
        config,
        {"deepseek_v3": "n_routed_experts", "qwen3_moe": "num_experts"}.get(family, "num_local_experts"),
        EXPERTS,
    )
    if family == "deepseek_v3":
        config.n_group = 1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    for name, parameter in model.named_parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
        if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
            parameter.data[:2] += skew
    return model


def block_of(model: nn.Module) -> nn.Module:
    return model.get_submodule(next(iter(experts_of(model))).rpartition(".")[0])


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(1, SLOTS[rank], HIDDEN, generator=generator) + 0.5
    return hidden.requires_grad_(), torch.randn(1, SLOTS[rank], HIDDEN, generator=generator)


def gradients(block: nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What a block makes of a process' slots, and the gradients of these and of its parameters."""
    hidden, factors = inputs(rank)
    out = block(hidden)
    out = out[0] if isinstance(out, tuple) else out  # some give the router's scores too
    (out * factors).sum().backward()
    found = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    block.zero_grad()
    return out.detach(), hidden.grad, found


def assert_close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Equal to 1e-6 of the largest value."""
    assert found.shape == expected.shape, name
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * largest, msg=lambda m: f"{name}: {m}")


def check(family: str, skew: float) -> None:
    """A block's values and gradients, and the bytes that it sends for a forward and a backward."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    alone = build(family, skew)
    use_experts(alone)
    chosen: list[torch.Tensor] = []  # experts of the slots of each process
    hook = block_of(alone).experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    expected = [gradients(block_of(alone), each) for each in range(processes)]
    hook.remove()

    model = build(family, skew)
    assert next(iter(experts_of(model).values())).down_proj.shape[0] == EXPERTS
    spread_experts(model, init_device_mesh("cpu", (processes,)))
    sent = []
    all_to_all = dispatch.all_to_all
    dispatch.all_to_all = lambda out, rows, *given: (sent.append(rows), all_to_all(out, rows, *given))[1]
    out, of_hidden, of_parameters = gradients(block_of(model), rank)
    dispatch.all_to_all = all_to_all

    assert_close(out, expected[rank][0], "out")
    assert_close(of_hidden, expected[rank][1], "hidden states")
    for name, gradient in of_parameters.items():
        if name.startswith("experts."):  # of the slots of all processes
            total = sum(each[2][name] for each in expected)
            place = distribute_tensor(total, model_mesh(model), [Shard(0)], src_data_rank=None)
            assert_close(gradient.to_local(), place.to_local(), name)
        else:  # of the router and of shared experts: of this process' slots
            assert_close(gradient, expected[rank][2][name], name)
    assert of_parameters.keys() == expected[rank][2].keys()

    # Rows: one for each slot and process that keeps an expert of it, each way, forward and backward.
    homes = [ids // (EXPERTS // processes) for ids in chosen]
    pairs = [[int((home == p).any(1).sum()) for p in range(processes)] for home in homes]
    rows = sum(pairs[rank]) + sum(from_[rank] for from_ in pairs)  # sent, and arrived
    wide = sum(x.nbytes for x in sent if x.dim() == 2 and x.shape[1] == HIDDEN)
    assert wide == 2 * rows * HIDDEN * FLOAT
    # With a row for each expert of a slot it would be these; two of three experts are on one process where skewed.
    of_all, before = sum(map(sum, pairs)), sum(SLOTS[:processes]) * CHOSEN
    assert of_all <= (2 / 3 if skew else 0.95) * before, (of_all, before)
    # Weights and codes of items, and gradients of weights, are few.
    arrived = sum(int((home == rank).sum()) for home in homes)
    small = sum(x.nbytes for x in sent) - wide
    assert small == (2 * SLOTS[rank] * CHOSEN + arrived) * FLOAT


def model_mesh(model: nn.Module):
    return next(iter(experts_of(model).values())).down_proj.device_mesh


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for family in ("qwen3_moe", "deepseek_v3", "gpt_oss_sinks"):
        for skew in (0.0, 1.0):
            check(family, skew)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
