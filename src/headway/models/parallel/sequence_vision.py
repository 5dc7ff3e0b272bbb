"""The vision tower's half of sequence parallelism: each process computes a part of the patches.

Patches are dealt in units of those that merge into one token, in the order in which the tower attends. Blocks and
mergers work on a process's own patches, attention exchanges patches for heads with the tower's own boundaries, and
behind the mergers every process is given all visual tokens, for they may stand anywhere in the pack.

Towers other than those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL are left whole: every process of the group computes all of
their patches, which is right and costs what it costs.

Tensor letters: P patches of the pack, U units of patches, C channels.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from headway.data.vision import VisionGeometry, vision_geometry, vision_tower
from headway.models.parallel.exchange import Split, gather_slots, split_over

_PER_PATCH = ("hidden_states", "position_ids", "interp_indices", "interp_weights")
_ORDER = "pack_window_index"  # the whole pack's order of units, for putting them back


def share_patches(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Make a model's vision tower compute this process's patches of every pack; a model without one is left alone.

    Args:
        model: whose attention exchanges patches for heads where it is told how they are split.
        group: the processes that are given the same packs.
    """
    tower, geometry = vision_tower(model), vision_geometry(model)
    if tower is None or geometry is None:
        return
    parameters = list(inspect.signature(tower.forward).parameters)
    unit = geometry.merge_size**2

    def cut(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        inputs = {**dict(zip(parameters, args, strict=False)), **given}
        patches = len(inputs["hidden_states"])
        # Fewer units than processes are less work than dealing them out.
        if inputs.get("pack_cu_seqlens") is not None and patches // unit >= dist.get_world_size(group):
            _cut(inputs, geometry, split_over(group, patches, unit))
        return (), inputs

    def gather(_module: nn.Module, _args: tuple[Any, ...], inputs: dict[str, Any], output: Any) -> None:
        split = inputs.get("pack_split")
        if split is not None:
            _gather(output, split, inputs.get(_ORDER))

    tower.register_forward_pre_hook(cut, with_kwargs=True)
    tower.register_forward_hook(gather, with_kwargs=True)


def _cut(inputs: dict[str, Any], geometry: VisionGeometry, split: Split) -> None:
    """Leave this process's patches in the arguments of a tower's forward; boundaries stay the whole pack's."""
    pixels_PC = inputs["hidden_states"]
    if "cu_seqlens" not in inputs:
        derived = geometry.inputs(inputs["grid_thw"].cpu(), "")
        inputs |= {k: v.to(pixels_PC.device) if isinstance(v, torch.Tensor) else v for k, v in derived.items()}
    local = split.local()
    units = slice(local.start // split.unit, local.stop // split.unit)
    order_U = inputs.get("window_index")
    if order_U is not None:
        # The tower puts units in the order of windows first. Here they are cut in that order, so it finds them ordered.
        inputs[_ORDER] = order_U
        inputs["window_index"] = torch.arange(units.stop - units.start, device=order_U.device)
    for name in _PER_PATCH:
        whole = inputs.get(name)
        if whole is not None and order_U is not None:
            inputs[name] = whole.unflatten(0, (-1, split.unit)).index_select(0, order_U[units]).flatten(0, 1)
        elif whole is not None:
            inputs[name] = whole[local]
    inputs["pack_split"] = split


def _gather(output: Any, split: Split, order_U: torch.Tensor | None) -> None:
    """Give every process the visual tokens of all patches, in the order of the pack, in one exchange."""
    deepstack = getattr(output, "deepstack_features", None) or []
    merged = [output.pooler_output, *deepstack]
    units = split._replace(slots=split.slots // split.unit, unit=1)
    whole_UC = gather_slots(torch.cat(merged, dim=1), units)
    if order_U is not None:
        whole_UC = whole_UC[torch.argsort(order_U)]
    output.pooler_output, *features = torch.split(whole_UC, [x.shape[1] for x in merged], dim=1)
    if deepstack:
        output.deepstack_features = features
