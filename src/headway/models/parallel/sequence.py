"""Several processes share a pack: each computes a part of its slots, and attention exchanges tokens for heads.

`share_packs(model, group)` hooks a model so that `model(**batch.model_inputs())`, called with the same pack by every
process of the group, gives each the logits of its own slots, `local_slots(batch.slots, group)`. The language model is
cut behind the embedding, the vision tower behind its pixels; all in between but attention works on
slots one by one. Nothing of a model's code is replaced. Packs that a family of models lays out are cut on the CPU
(`Batch.dealt`): such a model is left as it is.

A process's gradients are what its own slots contribute: summed over the group they are those of the whole pack. What is
not a pack, generation for one, is left alone: every process of the group computes all of it.

Patches of a vision tower are dealt in units of those that merge into one token, in the order in which the tower
attends. Blocks and mergers work on a process's own patches, attention exchanges patches for heads with the tower's own
boundaries, and behind the mergers every process is given all visual tokens, for they may stand anywhere in the pack.
Where there are fewer units than processes, a blank image fills up what is missing. Towers other than those of Qwen2-VL,
Qwen2.5-VL and Qwen3-VL are left whole: every process of the group computes all of their patches.

Tensor letters: T slots of the pack, C channels, V visual tokens, P patches of the pack, U units of patches.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from headway.errors import ConfigError, TrainingError
from headway.models.attention.backend import NAME
from headway.models.parallel.exchange import Split, gather_slots, split_over
from headway.models.vision import VisionGeometry, vision_geometry, vision_tower
from headway.models.waits import PlacedMask, running_pack
from headway.plugins import lays_out_packs

_SLOT_AXIS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}
_DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")
_ATTENDING = ("full_attention", "sliding_attention")  # kinds of layers that mix tokens by attention alone


def share_packs(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Make a model compute this process's slots of every pack.

    Args:
        model: its attention backend is "headway_flash".
        group: the processes that are given the same packs; a group of one changes nothing.

    Raises:
        ConfigError: the model mixes tokens outside attention, attends through another backend, or has fewer query
            heads than the group has processes.
    """
    degree = dist.get_world_size(group)
    if degree == 1:
        return
    is_dealt = lays_out_packs(model.config)  # on the CPU, by its family
    decoder: Any = model if is_dealt else model.get_decoder()  # type: ignore[no-untyped-call]  # transformers leaves it so
    _check_attention(decoder, degree)
    if is_dealt:
        return
    parameters = list(inspect.signature(decoder.forward).parameters)

    def cut(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        inputs = {**dict(zip(parameters, args, strict=False)), **options}
        if inputs.get("pack_cu_seqlens") is not None:
            _cut(inputs, parameters, group)
        return (), inputs

    decoder.register_forward_pre_hook(cut, with_kwargs=True)
    share_patches(model, group)


def local_slots(slots: int, group: dist.ProcessGroup | None) -> slice:
    """The slots of a pack that this process computes, for cutting labels and sources as the model cuts tokens.

    Args:
        slots: of the whole pack [tokens].
        group: the processes that share it; None where nobody does.

    Raises:
        TrainingError: the pack has fewer slots than the group has processes.
    """
    return slice(0, slots) if group is None else split_over(group, slots).local()


def _cut(inputs: dict[str, Any], parameters: list[str], group: dist.ProcessGroup) -> None:
    """Cut the arguments of a language model's forward to this process's slots."""
    tokens = inputs["inputs_embeds"] if inputs.get("inputs_embeds") is not None else inputs["input_ids"]
    split = split_over(group, tokens.shape[1])
    if inputs.get("position_ids") is None:
        raise TrainingError("A pack that several processes share needs its positions; pass position_ids to the model.")
    local = split.local()
    if (pack := running_pack()) is not None:
        pack.local = local
    if inputs.get("visual_pos_masks") is not None:
        _cut_deepstack(inputs, local)
    for name in parameters:
        value = inputs.get(name)
        if name in _SLOT_AXIS and value is not None:
            # A copy, for a view's place in memory would be one more thing that compiled blocks depend on.
            inputs[name] = value.narrow(_SLOT_AXIS[name], local.start, local.stop - local.start).clone()
        elif name not in _DEEPSTACK and _holds_slots(value, split.slots):
            raise ConfigError(
                f"The language model takes {name!r}, which has a value for each token, but Headway cannot split "
                f"{name!r} over the processes that share a pack. Set parallel.sequence to 1."
            )
    inputs["pack_split"] = split


def _holds_slots(value: Any, slots: int) -> bool:
    return any(isinstance(leaf, torch.Tensor) and slots in leaf.shape for leaf in tree_leaves(value))


def _cut_deepstack(inputs: dict[str, Any], local: slice) -> None:
    """Leave the features that early layers add to this process's visual tokens, and the mask of these.

    Where nobody said which slots they are, their number is known on the device only. Then every local slot gets a row,
    zero where it is no image's, which spares the wait.
    """
    mask = inputs["visual_pos_masks"]
    if isinstance(mask, PlacedMask):
        inputs["visual_pos_masks"], among = mask.cut(local)
        inputs["deepstack_visual_embeds"] = [features_VC[among] for features_VC in inputs["deepstack_visual_embeds"]]
        return
    visual_T = mask[0]
    rows_T = (visual_T.cumsum(0) - 1).clamp(min=0)[local]
    elsewhere_T1 = ~visual_T[local, None]
    inputs["deepstack_visual_embeds"] = [
        features_VC.index_select(0, rows_T).masked_fill(elsewhere_T1, 0.0)
        for features_VC in inputs["deepstack_visual_embeds"]
    ]
    inputs["visual_pos_masks"] = torch.ones_like(visual_T[None, local])


def _check_attention(decoder: PreTrainedModel, degree: int) -> None:
    config: Any = decoder.config.get_text_config()
    mixing = mixes_tokens(decoder)
    if mixing is not None:
        raise ConfigError(
            f"parallel.sequence is {degree}, but {mixing} mixes tokens outside attention, so several processes "
            "cannot share a pack. Set parallel.sequence to 1."
        )
    if config._attn_implementation != NAME or not decoder._supports_attention_backend:
        raise ConfigError(
            f"parallel.sequence is {degree}, but {type(decoder).__name__} does not attend through the backend "
            f"{NAME!r}, which exchanges tokens for heads. Set parallel.sequence to 1."
        )
    heads = config.num_attention_heads
    if degree > heads:
        raise ConfigError(
            f"parallel.sequence is {degree}, but the model has {heads} query heads, but each process that shares a "
            f"pack needs one. Set parallel.sequence to at most {heads}."
        )


def mixes_tokens(decoder: PreTrainedModel) -> str | None:
    """Name the first layer that mixes tokens by a state or a convolution; None if all do by attention alone."""
    modules = dict(decoder.named_modules())
    for name, module in modules.items():
        if isinstance(module, nn.Conv1d):
            holder = name.rpartition(".")[0]
            return f"the layer {holder} ({type(modules[holder]).__name__})"
    kinds = getattr(decoder.config, "layer_types", None) or ()
    for index, kind in enumerate(kinds):
        if kind not in _ATTENDING:
            return f"layer {index}, of kind {kind!r},"
    return None


_PER_PATCH = ("hidden_states", "position_ids", "interp_indices", "interp_weights")


def share_patches(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Make a model's vision tower compute this process's patches of every pack; a model without one is left alone."""
    tower, geometry = vision_tower(model), vision_geometry(model)
    if tower is None or geometry is None:
        return
    hooks = _TowerHooks(list(inspect.signature(tower.forward).parameters), geometry, group)
    tower.register_forward_pre_hook(hooks.before, with_kwargs=True)
    tower.register_forward_hook(hooks.after)


class _TowerHooks:
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
