"""Spread the experts of a mixture over processes; `headway.models.parallel.dispatch` carries slots there and back.

Tensor letters: T slots of this process, D hidden size.

Each process keeps an equal share of a layer's experts. Their parameters become DTensors of the whole tensor's shape,
cut along the experts, so that checkpoints, exports and norms see one tensor. Slots go to the processes that keep their
experts, and sums of what these made of them come back; nothing is dropped, whatever the router chose. The gradients of
a process' experts are then those of the whole group's slots. Where a block has shared experts behind the others, they
compute while slots travel.
"""

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from headway.errors import ConfigError
from headway.models.experts import experts_of, use_experts
from headway.models.parallel.dispatch import run_spread_experts


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
        f"parallel.expert cannot spread the experts of {type(model).__name__}: transformers does not dispatch those in "
        f"{name} ({type(module).__name__}) through its experts interface. Set parallel.expert to 1."
    )
