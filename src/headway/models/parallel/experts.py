"""Spread the experts of a mixture over processes, and carry slots there, each once, and the sums of their results back.

Tensor letters: T slots of this process, K experts a slot, I = T x K items (a slot at one of its experts), S rows that
this process sends (one for each slot and process that keeps experts of it), R rows and M items that it receives,
L experts of this process, P processes of the expert group, D hidden size.

Each process keeps an equal share of a layer's experts. Their parameters become DTensors of the whole tensor's shape,
cut along the experts, so that checkpoints, exports and norms see one tensor. Slots go to the processes that keep their
experts, and sums of what these made of them come back; nothing is dropped, whatever the router chose. The gradients of
a process' experts are then those of the whole group's slots. Where a block has shared experts behind the others, they
compute while slots travel.

A slot's hidden state goes once to each process that keeps any of its experts, with the experts it is for and their
weights; that process adds up what they made of it, and one row comes back. Rows and products are those of one process;
only the sum over a slot's experts has another order: over the experts of each process, then over processes. Both sums
have a fixed order, so that a step repeats bit for bit.

Source: Liu et al. 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.2.2, which sends a token once to a
node; the overlap with shared experts: Megatron-LM, megatron/core/transformer/moe/README.md.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from headway.errors import ConfigError
from headway.models.blocks import experts_of
from headway.models.experts import apply_experts, use_experts
from headway.models.products import Copies, copy_rows, permute_rows, sum_copies


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
    layers: dict[str, Any] = {**experts_of(model)}  # torch types attributes as modules
    if not layers:
        raise ConfigError(_no_experts(model))
    for name, module in layers.items():
        _check(name, module, mesh.size())
    use_experts(model)
    for path, module in layers.items():
        shared = shared_path_of(model.get_submodule(path.rpartition(".")[0]), module)
        module.shared_path = None if shared is None else SharedPath(shared)
        for name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
        module.run_spread = run_spread_experts


class SharedPath:
    """A module beside the experts that reads what they read: it computes while rows are on their way.

    Args:
        module: called behind the experts; its `forward` then hands over what was computed ahead.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._ahead: tuple[StorageWeakRef, torch.Tensor] | None = None
        module.forward = self._forward

    def compute_ahead(self, x_TD: torch.Tensor) -> None:
        """Compute the shared path of the experts' input."""
        self._ahead = _storage_of(x_TD), self._compute(x_TD)

    @torch.compiler.disable(reason="what was computed ahead is taken")  # type: ignore[no-untyped-call, untyped-decorator]
    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        computed, self._ahead = self._ahead, None
        if computed is not None and computed[0] == _storage_of(x):
            return computed[1].view_as(x)
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = type(self._module).forward(self._module, x)
        return out


def _storage_of(x: torch.Tensor) -> StorageWeakRef:
    """Name a tensor's memory, which views share, on the meta device too."""
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]  # torch's own


def shared_path_of(parent: nn.Module, experts: nn.Module) -> nn.Module | None:
    """Find the module that a block calls behind its experts with the experts' input, as shared experts are.

    The block is tried on the meta device, so no rule goes by names. A path that is called before the router leaves
    nothing to compute while rows travel, and is not found.

    Args:
        parent: the block.
        experts: its module of experts, switched to "headway_experts".
    """
    arguments = inspect.signature(parent.forward).parameters.values()
    needed = [argument for argument in arguments if argument.default is argument.empty]
    if len(needed) != 1:  # a block that wants more than hidden states
        return None
    reads: list[StorageWeakRef] = []  # storages that the experts read, once they have been called
    paths: list[nn.Module] = []

    def stand_in(_module: nn.Module, hidden_TD: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        reads.append(_storage_of(hidden_TD))
        return torch.empty_like(hidden_TD)

    def note(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        is_path = len(args) == 1 and isinstance(out, torch.Tensor) and out.shape == args[0].shape
        if is_path and reads == [_storage_of(args[0])]:
            paths.append(module)

    config: Any = experts.config
    weight = experts.get_parameter("down_proj")
    hidden = torch.empty(1, 2, config.hidden_size, dtype=weight.dtype, device="meta")
    on_meta = {name: x.to("meta") for name, x in (*parent.named_parameters(), *parent.named_buffers())}
    hooks = [child.register_forward_hook(note) for child in parent.children() if child is not experts]
    experts.run_spread = stand_in  # type: ignore[assignment]  # torch types attributes as modules
    try:
        with torch.no_grad():
            functional_call(parent, on_meta, hidden)
    except (RuntimeError, ValueError):  # a block that reads values, or takes another shape
        return None
    finally:
        del experts.run_spread
        for hook in hooks:
            hook.remove()
    return paths[0] if len(paths) == 1 else None


def _check(name: str, module: nn.Module, processes: int) -> None:
    if name.rpartition(".")[2] == "base_layer":  # name by which peft holds the layer that it wraps
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
        f"parallel.expert cannot spread the experts of {type(model).__name__}, because transformers does not "
        f"dispatch the experts in {name} ({type(module).__name__}) through its experts interface. Set "
        "parallel.expert to 1."
    )


@torch.compiler.disable(reason="how many rows arrive is known when they do")  # type: ignore[no-untyped-call, untyped-decorator]
def run_spread_experts(
    module: Any, hidden_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Have each slot worked on by the processes that keep its experts; `run_experts` where these are spread.

    How many rows go where is exchanged first, and the host waits for those numbers: the one wait of a layer.

    Args:
        module: the layer's experts; its attribute `shared_path`, where there is one, computes while rows travel.
        hidden_TD: what the experts see, shape (T, D).
        chosen_TK: the experts of each slot, shape (T, K); process p of the group keeps the p-th share of all.
        weights_TK: their weights, shape (T, K).

    Returns:
        The weighted sums of what each slot's experts made of it, shape (T, D).
    """
    mesh = module.down_proj.device_mesh
    group, processes, device = mesh.get_group(), mesh.size(), hidden_TD.device
    num_local = module.down_proj.shape[0] // processes
    if module.training and hasattr(module, "router_load"):
        module.router_load.scatter_add_(0, chosen_TK.flatten(), torch.ones_like(chosen_TK).flatten())

    # Items by process, then by slot. Those of one slot and process share a row; a row's first item begins it.
    slots, per_slot = chosen_TK.shape
    slot_T1 = torch.arange(slots, device=device).unsqueeze(1)
    key_I, order_I = (chosen_TK // num_local * slots + slot_T1).flatten().sort(stable=True)
    begins_I = key_I.diff(prepend=key_I.new_full((1,), -1)) != 0
    rows_before = torch.nn.functional.pad(begins_I.cumsum(0), (1, 0))
    # The rows and the items that go to each process, and come from each.
    ends_P = torch.searchsorted(key_I, torch.arange(1, processes + 1, device=device) * slots)
    sent_2P = torch.stack((rows_before[ends_P], ends_P)).diff(prepend=ends_P.new_zeros(2, 1))
    received_P2 = sent_2P.new_empty(processes, 2)
    dist.all_to_all_single(received_P2, sent_2P.T.contiguous(), group=group)
    (rows_sent, items_sent), (rows_received, items_received) = torch.stack((sent_2P, received_P2.T)).tolist()

    # A row's slot is that of its first item; the rows of a slot are added up in the order of processes.
    first_S = torch.searchsorted(rows_before[1:], torch.arange(1, sum(rows_sent) + 1, device=device))
    slot_S = order_I[first_S] // per_slot
    sorted_S, copy_S = slot_S.sort(stable=True)
    rows = Copies(slot_S, copy_S, torch.searchsorted(sorted_S, slot_T1.squeeze(1)))
    # Each item says which of the process' experts it is for, and whether it begins a row.
    code_I = (2 * (chosen_TK.flatten()[order_I] % num_local) + begins_I).int()
    weights_I = permute_rows(weights_TK.reshape(-1, 1), order_I, order_I.argsort())
    weights_I = weights_I.to(torch.promote_types(weights_I.dtype, torch.float32))

    transfer = Transfer(group, (rows_sent, rows_received), (items_sent, items_received), (items_sent, items_received))
    tensors = transfer.start(copy_rows(hidden_TD, rows), weights_I, code_I)
    if module.shared_path is not None:
        module.shared_path.compute_ahead(hidden_TD)
    rows_RD, weights_M, code_M = transfer.finish(*tensors)

    # Items arrive by sender and row; the grouped product wants them by expert.
    row_M = (code_M & 1).cumsum(0) - 1
    expert_M, order_M = (code_M >> 1).sort(stable=True)
    place_M = order_M.argsort()
    local_experts = torch.arange(num_local, device=device, dtype=expert_M.dtype)
    ends_L = torch.searchsorted(expert_M, local_experts, right=True, out_int32=True)
    starts_R = torch.searchsorted(row_M, torch.arange(sum(rows_received), device=device))
    items = Copies(row_M[order_M], place_M, starts_R)
    out_MD = apply_experts(module, copy_rows(rows_RD, items), ends_L, expert_M)
    weights_M = permute_rows(weights_M.to(weights_TK.dtype), order_M, place_M).squeeze(1)
    sums_RD = sum_copies(out_MD, items, weights_M).to(out_MD.dtype)

    # One row for each slot and process goes back.
    way_back = Transfer(group, (rows_received, rows_sent))
    (sums_SD,) = way_back.finish(*way_back.start(sums_RD))
    return sum_copies(sums_SD, rows).to(hidden_TD.dtype)


class Transfer:
    """Consecutive rows of tensors on their way to the processes of a group, and their gradients on the way back.

    Between `start` and `finish` other work may run; it then also runs between both in backward, as autograd takes what
    was computed last first.

    Args:
        group: the processes.
        *sizes: of each tensor, the rows that go to each process and those that come from each.
    """

    def __init__(self, group: dist.ProcessGroup, *sizes: tuple[list[int], list[int]]) -> None:
        self._group, self._sizes = group, sizes
        self._learns: tuple[bool, ...] = ()  # whether each tensor needs a gradient
        self._gradients: list[torch.Tensor | None] = []
        self._pending: list[tuple[Any, torch.Tensor]] = []

    def start(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send tensors; what is returned is filled once `finish` has taken it."""
        arriving: tuple[torch.Tensor, ...] = _Start.apply(self, *tensors)  # type: ignore[no-untyped-call]  # torch's own
        return arriving

    def finish(self, *arriving: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Wait for the tensors that `start` returned: the device waits, or, on a CPU, the host."""
        arrived: tuple[torch.Tensor, ...] = _Finish.apply(self, *arriving)  # type: ignore[no-untyped-call]
        return arrived

    def send(self, tensors: tuple[torch.Tensor, ...], learns: tuple[bool, ...]) -> tuple[torch.Tensor, ...]:
        """Begin to send tensors, of which some need gradients; other processes' rows arrive in what is returned."""
        self._learns = learns
        return tuple(self._send(rows, *sizes) for rows, sizes in zip(tensors, self._sizes, strict=True))

    def send_back(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Begin to send gradients back."""
        self._gradients = [
            self._send(rows, received, sent) if learns else None
            for rows, (sent, received), learns in zip(gradients, self._sizes, self._learns, strict=True)
        ]

    def wait(self) -> list[torch.Tensor | None]:
        """Make later work wait until everything has arrived; returns gradients that have been sent back."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
        gradients, self._gradients = self._gradients, []
        return gradients

    def _send(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        rows = rows.contiguous()
        self._pending.append((all_to_all(arriving, rows, received, sent, self._group), rows))
        return arriving


def all_to_all(
    out: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Any:
    """Begin to exchange consecutive rows with the processes of a group; what is returned waits for them."""
    return dist.all_to_all_single(out, rows, received, sent, group=group, async_op=True)


class _Start(torch.autograd.Function):
    """Sends in forward; waits in backward for the gradients that `_Finish` has sent back."""

    @staticmethod
    def forward(ctx: Any, transfer: Transfer, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.transfer = transfer
        arriving = transfer.send(tensors, ctx.needs_input_grad[1:])
        ctx.mark_non_differentiable(*_integers(arriving))
        return arriving

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.transfer.wait()


class _Finish(torch.autograd.Function):
    """Waits in forward for `_Start`'s tensors; sends gradients back in backward, directly to `_Start`."""

    @staticmethod
    def forward(ctx: Any, transfer: Transfer, *arriving: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.transfer = transfer
        transfer.wait()
        arrived = tuple(rows.view_as(rows) for rows in arriving)
        ctx.mark_non_differentiable(*_integers(arrived))
        return arrived

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.transfer.send_back(gradients)
        return None, *gradients


def _integers(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if not tensor.is_floating_point()]
