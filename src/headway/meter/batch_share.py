"""Ranks that work on one batch together: read off the device mesh that a model's parameters lie on."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headway.count import CostModel
from headway.errors import UsageError
from headway.meter.clock import sharded_groups
from headway.words import Argument

# Dimensions of a mesh along which ranks have batches of their own. Those of `fully_shard` are read off it; these are of
# other ways to share data, by how their names begin in torchtitan (its SimpleFSDP), Accelerate, Lightning and PyTorch's
# tutorials. Experts' ranks are data ranks too: tokens travel between them within a layer.
_DATA_NAMES = ("dp", "data", "ddp", "fsdp", "hsdp", "replicate", "shard", "ep", "expert")


@dataclass(frozen=True)
class BatchShare:
    """Share that one rank has of a batch.

    Attributes:
        ranks: ranks in a row that work on it together; 1 where they do not lie in a row.
        is_first: this rank counts it for all of them.
    """

    ranks: int = 1
    is_first: bool = True


def batch_share(model: Any, batch_ranks: int | None = None) -> BatchShare:
    """Find out with which ranks this one shares its batches.

    Tensor parallelism cuts matrices over ranks that are all given the same tokens. The cut is in the parameters: they
    are DTensors, sharded along a dimension of their mesh that data parallelism does not use.

    Args:
        model: a module, or anything else, which says nothing.
        batch_ranks: ranks in a row that share a batch, where the caller says so.

    Raises:
        UsageError: `batch_ranks` does not divide the number of ranks, or a mesh does not tell tensor from data
            parallelism.
    """
    rank, size = rank_and_size()
    if batch_ranks is not None:
        if batch_ranks < 1 or (size > 1 and size % batch_ranks):
            raise UsageError(
                Argument("batch_ranks", batch_ranks), f" does not divide the {size} ranks of this run into groups."
            )
        return BatchShare(batch_ranks, rank % batch_ranks == 0)
    if not hasattr(model, "modules"):  # a cost model
        return BatchShare()
    for mesh, dimensions in _shared_dimensions(model).items():
        # this rank's place along the shared dimensions, and the ranks that have all its other places
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            continue
        places = tuple(slice(None) if i in dimensions else place for i, place in enumerate(coordinate))
        group = mesh.mesh[places].flatten().tolist()
        is_row = group == [*range(group[0], group[0] + len(group))] and group[0] % len(group) == 0
        return BatchShare(len(group) if is_row else 1, rank == group[0])
    # models of transformers say so themselves, also where their weights are no DTensors
    count = getattr(model, "tp_size", None)
    if isinstance(count, int) and count > 1 and size % count == 0:
        return BatchShare(count, rank % count == 0)
    return BatchShare()


def stage_of(model: Any, ledger: CostModel) -> CostModel | None:
    """Find the part of a ledger that a module runs as one stage of a pipeline; None if the module is no part.

    A stage keeps the names that its modules have in the whole model, as torch.distributed.pipelining's do.

    Args:
        model: a module, or anything else, which is no stage.
        ledger: of the whole model.
    """
    if not hasattr(model, "named_modules"):
        return None
    from headway.tracing.unwrap import unwrapped

    stage = unwrapped(model)
    modules = {name for name, _ in stage.named_modules()}
    run, names = {row.module for row in ledger.rows}, {parameter.name for parameter in ledger.parameters}
    own = {name for name, _ in stage.named_parameters()}
    is_part = own and all(name in names or name.rpartition(".")[0] in run for name in own)
    return ledger.stage(modules) if is_part and run - modules and run & modules else None


def rank_and_size() -> tuple[int, int]:
    """Rank of this process, and number of processes of the run."""
    distributed = sys.modules.get("torch.distributed")  # there is one rank unless this is imported
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _shared_dimensions(model: Any) -> dict[Any, list[int]]:
    """By mesh, the dimensions along which matrices are cut and batches are not; the largest mesh first."""
    dimensions_of: dict[Any, set[int]] = {}
    data_meshes = _meshes_of_fsdp(model)
    data_names = {name for mesh in data_meshes for name in mesh.mesh_dim_names or ()}
    for mesh, dimension in _cuts(model):
        if mesh in data_meshes:
            continue
        names = mesh.mesh_dim_names
        if names is None and data_meshes:
            raise UsageError(
                "parameters lie on a mesh whose dimensions have no names, beside the one of FSDP: which ranks share a "
                "batch is not known. Name its dimensions (init_device_mesh(..., mesh_dim_names=('dp', 'tp'))), or say "
                "it: ",
                Argument("batch_ranks", example="N"),
                ".",
            )
        is_of_data = names is not None and (
            names[dimension] in data_names or names[dimension].lower().startswith(_DATA_NAMES)
        )
        if not is_of_data:
            dimensions_of.setdefault(mesh, set()).add(dimension)
    ordered = sorted(dimensions_of.items(), key=lambda entry: -entry[0].size())
    return {mesh: sorted(dimensions) for mesh, dimensions in ordered}


def _cuts(model: Any) -> Iterator[tuple[Any, int]]:
    """Yield mesh and dimension of each cut through a vector or a matrix; stacks of experts are spread, not cut."""
    tensors = sys.modules.get("torch.distributed.tensor")  # there are no DTensors unless this is imported
    if tensors is None:
        return
    for parameter in model.parameters():
        if isinstance(parameter, tensors.DTensor) and parameter.ndim <= 2:
            for dimension, placement in enumerate(parameter.placements):
                if not placement.is_replicate() and parameter.device_mesh.size(dimension) > 1:
                    yield parameter.device_mesh, dimension


def _meshes_of_fsdp(model: Any) -> list[Any]:
    """List the meshes that `fully_shard` spreads parameters over."""
    groups = (group for module in model.modules() for group in sharded_groups(module))
    return list(dict.fromkeys(group.mesh_info.mesh for group in groups))
