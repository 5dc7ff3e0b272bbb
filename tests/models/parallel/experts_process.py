"""One of several processes that share experts; it ends with an error where they differ from those of one process.

python experts_process.py DEGREE      DEGREE processes share the experts; FSDP2 takes the rest
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from headway.models.attention import use_attention
from headway.models.blocks import experts_of
from headway.models.experts import use_experts
from headway.models.load import load_model
from headway.models.materialise import read_weights
from headway.models.parallel.experts import spread_experts
from helpers.models import tiny_config

FAMILIES = ("qwen3_moe", "qwen3_vl_moe", "gpt_oss_sinks", "deepseek_v3")
EXPERTS, TOKENS = 4, 23


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = tiny_config(family)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float64, attn_implementation="eager").train()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return model


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 as a run lays it out: experts over the processes that keep the same ones, the rest over all."""
    groups = [(module, mesh["expert_shard"]) for module in experts_of(model).values()]
    for module, over in [*groups, (model, init_device_mesh("cpu", (mesh.size(),)))]:
        fully_shard(module, mesh=over)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    tokens = torch.randint(10, 160, (1, TOKENS + rank), generator=torch.Generator().manual_seed(rank))
    logits = model(input_ids=tokens, use_cache=False).logits[0]
    return nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="sum")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_model(family: str, mesh: DeviceMesh, *, folder: Path | None = None, compiled: bool = False) -> None:
    """Losses and every parameter's gradient are those of one process that has all packs, on its own experts' loop.

    Args:
        family: as in `helpers.models`.
        mesh: of processes.
        folder: where the weights are written and read, if the model is shared out before it has them.
        compiled: whether its layers are compiled, and recomputed in the backward pass.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, model = build(family), build(family)
    use_experts(alone, "eager")
    losses = torch.stack([loss_of(alone, each) for each in range(size)])
    losses.sum().backward()

    if folder is not None:
        model = load_model(tiny_config(family), dtype=torch.float64, device="meta", random_init=True)
        if rank == 0:
            alone.save_pretrained(folder)
        dist.barrier()
    spread_experts(model, mesh["expert"])
    shard(model, mesh)
    if folder is not None:
        read_weights(model, folder, "cpu")
        use_attention(model, "eager")  # exact in float64, as the other's
    if compiled:
        for layer in model.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            layer.compile(backend="aot_eager")
    loss = loss_of(model, rank)
    loss.backward()
    torch.testing.assert_close(loss.detach(), losses[rank].detach(), rtol=1e-6, atol=0)
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.shape == expected[name].shape, name
        gradient = expected[name].grad
        if gradient is None:  # no token chose it, and the loop did not come by
            gradient = torch.zeros_like(expected[name])
        found = torch.zeros_like(expected[name]) if parameter.grad is None else whole(parameter.grad)
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{family} {n}: {m}")


def choices(rank: int, slots: int) -> dict[str, list[list[int]]]:
    """Routings: the two experts of each slot of a rank. All ranks, some or one expert may be left out."""
    return {
        "spread": [[(slot + rank) % EXPERTS, (slot * 3 + 1 + rank) % EXPERTS] for slot in range(slots)],
        "all to the first": [[0, 0]] * slots,
        "all to the last two": [[EXPERTS - 1, EXPERTS - 2]] * slots,
        "everyone to the next": [[(rank + 1) % EXPERTS] * 2] * slots,
        "the first as it comes, the others elsewhere": [
            [3, 1] if rank else [slot % EXPERTS, 2] for slot in range(slots)
        ],
    }


def check_layer(family: str, mesh: DeviceMesh, choice: str) -> None:
    """A layer alone, under a routing that is set by hand: values, and gradients of rows, weights and parameters."""
    rank = dist.get_rank()
    alone, model = build(family), build(family)
    use_experts(alone, "eager")
    spread_experts(model, mesh["expert"])
    ours, theirs = (next(iter(experts_of(each).values())) for each in (model, alone))

    def inputs(of: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(of)
        slots = TOKENS + 5 * of
        chosen = torch.tensor(choices(of, slots)[choice])
        rows = torch.randn(slots, 32, generator=generator, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(slots, 2, generator=generator, dtype=torch.float64, requires_grad=True)
        return rows, chosen, weights

    rows, chosen, weights = inputs(rank)
    out = ours(rows, chosen, weights)
    out.square().sum().backward()
    group = dist.get_process_group_ranks(mesh["expert"].get_group())
    for member in group:
        their_rows, their_chosen, their_weights = inputs(member)
        expected = theirs(their_rows, their_chosen, their_weights)
        expected.square().sum().backward()
        if member == rank:
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(rows.grad, their_rows.grad)
            torch.testing.assert_close(weights.grad, their_weights.grad)
    for name, parameter in ours.named_parameters():
        place = distribute_tensor(theirs.get_parameter(name).grad, mesh["expert"], [Shard(0)], src_data_rank=None)
        torch.testing.assert_close(parameter.grad.to_local(), place.to_local())


def main(degree: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // degree, degree), mesh_dim_names=("expert_shard", "expert"))
    for choice in choices(0, 0):
        for family in ("qwen3_moe", "gpt_oss_sinks", "nemotron_h"):
            check_layer(family, mesh, choice)
    for family in FAMILIES:
        check_model(family, mesh)
    for family in ("qwen3_moe", "qwen3_vl_moe", "gpt_oss_sinks"):
        check_model(family, mesh, folder=folder / family)
    for family in ("qwen3_moe", "deepseek_v3"):
        check_model(family, mesh, compiled=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
