"""Spread the experts of a mixture over processes, and carry every row to its expert and back.

Tensor letters: S rows of this process, R rows that it receives, E experts of a layer, L experts of this process,
P processes of the expert group, D hidden size.

Each process keeps an equal share of a layer's experts. Their parameters become DTensors of the whole tensor's shape,
cut along the experts, so that checkpoints, exports and norms see one tensor. A process' rows go to the processes that
keep their experts in one all-to-all and come back in another; nothing is dropped, whatever the router chose. The
gradients of a process' experts are then those of the whole group's rows.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from headway.errors import ConfigError
from headway.models.experts import apply_experts, experts_of, sizes_of, use_experts
from headway.models.grouped import permute_rows


def spread_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Keep an equal share of every layer's experts on each process of a mesh, in place.

    Parameters may still be without data (on the meta device); those with data must be the same on every process. FSDP2
    over further processes comes afterwards: `fully_shard` on each of `experts_of(model)`, over processes that keep the
    same experts, so that it sums their gradients; the rest of the model over all processes.

    Args:
        model: its experts are switched to "headway_experts".
        mesh: the processes that share the experts, one-dimensional.

    Raises:
        ConfigError: the model has no experts, or experts that transformers does not dispatch; or the number of
            processes does not divide the number of experts; or something else learns inside them.
    """
    layers = experts_of(model)
    if not layers:
        raise ConfigError(_no_experts(model))
    for name, module in layers.items():
        _check(name, module, mesh.size())
    for module in layers.values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
        module.apply_rows = _exchange
    use_experts(model)


@torch.compiler.disable(reason="how many rows arrive is known when they do")  # type: ignore[no-untyped-call, untyped-decorator]
def _exchange(module: Any, rows_SD: torch.Tensor, ends_E: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Have each row worked on by the process that keeps its expert.

    How many rows go where is exchanged first, and the host waits for those numbers: the one wait of a layer.

    Args:
        module: the layer's experts.
        rows_SD: sorted by expert, shape (S, D); process p of the group keeps the p-th share of the experts.
        ends_E: where the rows of each expert end [rows], int32, shape (E,).

    Returns:
        What the experts made of this process' rows, in their order, shape (S, D).
    """
    mesh: DeviceMesh = module.down_proj.device_mesh
    group = mesh.get_group()
    # How many rows go to each process, and come from each, for each of its experts.
    sent_PL = sizes_of(ends_E).view(mesh.size(), -1)
    received_PL = torch.empty_like(sent_PL)
    dist.all_to_all_single(received_PL, sent_PL, group=group)
    sent_P, received_P = torch.stack((sent_PL.sum(1), received_PL.sum(1))).tolist()

    arrived_RD = _Send.apply(rows_SD, received_P, sent_P, group)  # type: ignore[no-untyped-call]  # torch's own
    # They come sorted by sender, then by expert; the grouped product wants them by expert alone.
    local_L = torch.arange(sent_PL.shape[1], device=rows_SD.device)
    expert_R = local_L.repeat(mesh.size()).repeat_interleave(received_PL.flatten(), output_size=sum(received_P))
    sorted_R, order_R = expert_R.sort(stable=True)
    place_R = order_R.argsort()
    ends_L = received_PL.sum(0).cumsum(0, dtype=torch.int32)
    out_RD = apply_experts(module, permute_rows(arrived_RD, order_R, place_R), ends_L, sorted_R)
    # Back into the order of arrival, and each to its sender.
    out_SD: torch.Tensor = _Send.apply(permute_rows(out_RD, place_R, order_R), sent_P, received_P, group)  # type: ignore[no-untyped-call]
    return out_SD


class _Send(torch.autograd.Function):
    """Send consecutive rows to the processes of a group; gradients are sent back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received_P: list[int], sent_P: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way_back = sent_P, received_P, group
        return _all_to_all(rows, received_P, sent_P, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(grads[0], *ctx.way_back), None, None, None


def _all_to_all(rows: torch.Tensor, received_P: list[int], sent_P: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty(sum(received_P), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received_P, sent_P, group=group)
    return arrived


def _check(name: str, module: nn.Module, processes: int) -> None:
    if name.rpartition(".")[2] == "base_layer":  # as peft names what it wraps
        raise ConfigError(
            f"The experts {name} have adapters, which cannot be spread over processes. Leave the experts out of the "
            "adapters' targets, or set parallel.expert to 1."
        )
    cut = dict(module.named_parameters(recurse=False))
    experts = module.get_parameter("down_proj").shape[0] if "down_proj" in cut else 0
    uncut = [key for key, parameter in module.named_parameters() if key not in cut or parameter.shape[0] != experts]
    if uncut or not experts:
        raise ConfigError(
            f"The experts {name} ({type(module).__name__}) cannot be spread over processes: "
            f"{', '.join(uncut) or 'down_proj'} is not a tensor with a row for each expert. Set parallel.expert to 1."
        )
    if experts % processes:
        raise ConfigError(
            f"parallel.expert {processes} does not divide the {experts} experts of {name}. Set it to one of "
            f"{', '.join(str(n) for n in range(1, experts + 1) if experts % n == 0)}."
        )


def _no_experts(model: nn.Module) -> str:
    unknown = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
    if not unknown:
        return f"{type(model).__name__} has no experts to spread over processes. Set parallel.expert to 1."
    name, module = unknown[0]
    return (
        f"parallel.expert cannot spread the experts of {type(model).__name__}: transformers does not dispatch those in "
        f"{name} ({type(module).__name__}) through its experts interface. Set parallel.expert to 1."
    )
