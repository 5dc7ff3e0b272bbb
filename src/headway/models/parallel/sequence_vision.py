"""The vision tower's half of sequence parallelism: each process computes a part of the patches.

Patches are dealt in units of those that merge into one token, in the order in which the tower attends. Blocks and
mergers work on a process's own patches, attention exchanges patches for heads with the tower's own boundaries, and
behind the mergers every process is given all visual tokens, for they may stand anywhere in the pack. Where there are
fewer units than processes, a blank image fills up what is missing.

Towers other than those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL are left whole: every process of the group computes all of
their patches, which is right and costs what it costs.

Tensor letters: P patches of the pack, U units of patches, C channels.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from headway.models.parallel.exchange import Split, gather_slots, split_over
from headway.models.vision import VisionGeometry, vision_geometry, vision_tower

_PER_PATCH = ("hidden_states", "position_ids", "interp_indices", "interp_weights")


def share_patches(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Make a model's vision tower compute this process's patches of every pack; a model without one is left alone.

    Args:
        model: whose attention exchanges patches for heads where it is told how they are split.
        group: the processes that are given the same packs.
    """
    tower, geometry = vision_tower(model), vision_geometry(model)
    if tower is None or geometry is None:
        return
    hooks = _TowerHooks(list(inspect.signature(tower.forward).parameters), geometry, group)
    tower.register_forward_pre_hook(hooks.before, with_kwargs=True)
    tower.register_forward_hook(hooks.after)


class _TowerHooks:
    """Hooks that cut the inputs of a vision tower and gather its outputs; remember how they cut in between."""

    def __init__(self, parameters: list[str], geometry: VisionGeometry, group: dist.ProcessGroup) -> None:
        self._parameters, self._geometry, self._group = parameters, geometry, group
        self._split: Split | None = None
        self._order_U: torch.Tensor | None = None
        self._num_units = 0  # without blank ones

    def before(
        self, _module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        inputs = {**dict(zip(self._parameters, args, strict=False)), **options}
        self._split = None
        if inputs.get("pack_cu_seqlens") is not None:
            self._cut(inputs)
        return (), inputs

    def after(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if self._split is not None:
            self._gather(output, self._split)

    def _cut(self, inputs: dict[str, Any]) -> None:
        """Cut the arguments to this process's patches; segment boundaries stay whole."""
        unit = self._geometry.merge_size**2
        self._num_units = len(inputs["hidden_states"]) // unit
        self._derive(inputs, blank=unit * max(0, dist.get_world_size(self._group) - self._num_units))
        self._split = split = split_over(self._group, len(inputs["hidden_states"]), unit)
        local = split.local()
        units = slice(local.start // unit, local.stop // unit)
        self._order_U = order_U = inputs.get("window_index")
        if order_U is not None:  # the tower first puts units in the order of windows; cut in that order, they are in it
            inputs["window_index"] = torch.arange(units.stop - units.start, device=order_U.device)
        for name in _PER_PATCH:
            values = inputs.get(name)
            if values is not None and order_U is not None:
                inputs[name] = values.unflatten(0, (-1, unit)).index_select(0, order_U[units]).flatten(0, 1)
            elif values is not None:
                inputs[name] = values[local]
        inputs["pack_split"] = split

    def _derive(self, inputs: dict[str, Any], blank: int) -> None:
        """Add a blank image of so many patches, and recompute boundaries and positions from the grids."""
        if blank == 0 and "cu_seqlens" in inputs:
            return
        pixels_PC, grids_M3 = inputs["hidden_states"], inputs["grid_thw"].cpu()
        derived = self._geometry.inputs(torch.cat([grids_M3, self._geometry.padding_grids(blank)]), "")
        inputs |= {k: v.to(pixels_PC.device) if isinstance(v, torch.Tensor) else v for k, v in derived.items()}
        inputs["hidden_states"] = pad(pixels_PC, (0, 0, 0, blank))

    def _gather(self, output: Any, split: Split) -> None:
        """Give every process the visual tokens of all patches, in pack order, in one exchange."""
        deepstack = getattr(output, "deepstack_features", None) or []
        merged = [output.pooler_output, *deepstack]
        units = split._replace(slots=split.slots // split.unit, unit=1)
        whole_UC = gather_slots(torch.cat(merged, dim=1), units)
        if self._order_U is not None:
            whole_UC = whole_UC[torch.argsort(self._order_U)]
        whole_UC = whole_UC[: self._num_units]
        output.pooler_output, *features = torch.split(whole_UC, [x.shape[1] for x in merged], dim=1)
        if deepstack:
            output.deepstack_features = features
