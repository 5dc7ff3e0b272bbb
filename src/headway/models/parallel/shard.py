"""FSDP2 over a model: every process keeps a slice of the weights and gathers one block at a time.

The units that are gathered together are: each block of the language model and of a vision tower, the rest of that tower
(patch embedding, mergers), the input embedding, the head, and the root with all that is left. What does not run on
every pack, such as an audio tower, stays with the root, whose weights every process gathers whether it needs them or
not; so no process waits for another that has no use for a unit.

Gradients are summed over the processes, never averaged: the loss is divided by the targets of all of them beforehand.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from headway.errors import ConfigError
from headway.models.blocks import Block, blocks
from headway.models.parallel.mesh import Mesh
from headway.models.waits import keep_on_host

_SHARDS_BYTES = "2.13"
"""The torch whose FSDP2 was seen to shard and gather parameters that are no floats; 2.11 does not."""


def shard_model(
    model: PreTrainedModel,
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype = torch.float32,
    reshard: bool = True,
    offload: bool = False,
    vision: nn.Module | None = None,
) -> None:
    """Lay a model's parameters over a mesh, in place; on the meta device too, before there are weights.

    Args:
        model: frozen and trained parameters may mix; experts that are spread are DTensors on `mesh.expert`.
        mesh: the groups of this process.
        compute_dtype: dtype that weights are gathered in; the parameters' own, or a smaller one with the parameters as
            master weights.
        reduce_dtype: dtype that gradients are summed in.
        reshard: whether a block's gathered weights are freed after its forward and gathered again for its backward.
        offload: whether weights, gradients and optimizer state stay in the host's memory, for devices other than CPUs.
        vision: the tower that runs on every pack of every process or on none; other towers join the root.

    Raises:
        ConfigError: weights that are held in 4 or 8 bits, with a torch that cannot shard them.
    """
    _refuse_bytes(model)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,  # rotary angles and normalised pixels keep their precision, as on one device
    )
    policy = CPUOffloadPolicy(pin_memory=mesh.fsdp.device_type == "cuda") if offload else OffloadPolicy()

    def shard(module: nn.Module, over: DeviceMesh = mesh.fsdp, *, again: bool = reshard) -> None:
        fully_shard(module, mesh=over, mp_policy=precision, reshard_after_forward=again, offload_policy=policy)

    # Block by block, experts apart: their copies lie on other processes than those of the rest.
    units = _regular_blocks(model, vision)
    for block in units:
        for part in _spread_parts(block.module, mesh):
            assert mesh.expert_fsdp is not None
            shard(part, mesh.expert_fsdp)
        shard(block.module)
    if vision is not None:
        vision.register_forward_hook(_own_outputs)  # before FSDP2's, which hooks onto what this returns
        shard(vision)
    # An untied embedding and head are units of their own; what is left joins the root.
    hf_model: Any = model  # transformers leaves these untyped
    embedding, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:
        shard(embedding)
        shard(head, again=False)  # the head's backward follows at once
    shard(model, again=False)

    # Gradients are summed: the loss is already divided by the step's supervised tokens over all processes.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
    _reduce_unused(model)
    _prefetch(units)
    if mesh.fsdp.device_type != "cpu":
        keep_on_host(model)


def _own_outputs(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Copy outputs that are views: backward would pass by FSDP2's hook if the model wrote into one in place."""
    if not torch.is_grad_enabled():
        return output
    return tree_map_only(torch.Tensor, lambda tensor: tensor if tensor._base is None else tensor.clone(), output)


def reduce_gradients(model: nn.Module, now: bool) -> None:
    """Say whether the next backward sums the gradients over the processes, or leaves them to a later one.

    Args:
        model: one that was sharded; for another this does nothing.
        now: False where packs of the same step follow and whole gradients fit in memory.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that a forward without a backward has left, so that parameters are slices again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Give sharded modules their original classes for a while: FSDP2 replaces the classes by its own.

    transformers finds the rules by which it renames weights by the classes of a model and its parts.
    """
    sharded = {module: type(module) for module in model.modules() if isinstance(module, FSDPModule)}
    for module, kind in sharded.items():
        module.__class__ = kind.__mro__[kind._orig_cls_mro_index]
    try:
        yield
    finally:
        for module, kind in sharded.items():
            module.__class__ = kind


def model_name(model: nn.Module) -> str:
    """The name of a model's own class."""
    with own_classes(model):
        return type(model).__name__


def _refuse_bytes(model: nn.Module) -> None:
    """Refuse weights that are held in bytes where FSDP2 takes floats alone (torch 2.11).

    Raises:
        ConfigError: there are such weights.
    """
    takes_bytes = TorchVersion(torch.__version__) >= _SHARDS_BYTES
    if not takes_bytes and not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise ConfigError(
            f"model.base among several processes needs torch {_SHARDS_BYTES} or later, but this is torch "
            f"{torch.__version__}, which shards only floats. Train on one process, or take model.base out."
        )


def _regular_blocks(model: PreTrainedModel, vision: nn.Module | None) -> list[Block]:
    hf_model: Any = model
    towers = [hf_model.get_decoder(), *([vision] if vision is not None else [])]
    regular = {module for tower in towers for module in tower.modules()}
    return [block for block in blocks(model) if block.module in regular]


def _spread_parts(block: nn.Module, mesh: Mesh) -> list[nn.Module]:
    """Modules of a block whose parameters are spread over the expert mesh."""

    def is_spread(module: nn.Module) -> bool:
        own = module.parameters(recurse=False)
        return any(isinstance(parameter, DTensor) and parameter.device_mesh == mesh.expert for parameter in own)

    return [module for module in block.modules() if is_spread(module)]


def _reduce_unused(model: Any) -> None:
    """Give parameters of towers that this pack does not use a zero gradient, so that every process joins the same sums.

    Without it, a process that has no gradient for such a tower would bring less to the sum than the others, which hangs
    or mixes gradients up. torch 2.11 has no setting for it, so the gradients are made before its sum looks for them.
    """
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = model._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    summed = group.post_backward

    def post_backward(*arguments: Any) -> None:
        for fsdp_parameter in group.fsdp_params if group.reduce_grads else ():
            if not hasattr(fsdp_parameter, "_unsharded_param") or fsdp_parameter.unsharded_accumulated_grad is not None:
                continue  # the weight is not gathered yet, or has a gradient of an earlier pack
            full_parameter = fsdp_parameter.unsharded_param
            if full_parameter.requires_grad and full_parameter.grad is None:
                full_parameter.grad = torch.zeros_like(full_parameter)
        summed(*arguments)

    group.post_backward = post_backward


def _prefetch(units: Sequence[Block]) -> None:
    """Have each block start gathering the next block's weights before it computes, also where the host is not ahead."""
    for block, following in pairwise(units):
        if block.tower == following.tower:
            assert isinstance(block.module, FSDPModule)
            assert isinstance(following.module, FSDPModule)
            block.module.set_modules_to_forward_prefetch([following.module])
