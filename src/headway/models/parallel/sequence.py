"""Several processes share a pack: each computes a part of its slots, and attention exchanges tokens for heads.

`share_packs(model, group)` hooks a model so that `model(**batch.model_inputs())`, called with the same pack by every
process of the group, gives each the logits of its own slots, `local_slots(batch.slots, group)`. The language model is
cut behind the embedding, the vision tower behind its pixels (`sequence_vision`); all in between but attention works on
slots one by one. Nothing of a model's code is replaced. Packs that a family of models lays out are cut on the CPU
(`Batch.dealt`): such a model is left as it is.

A process's gradients are what its own slots contribute: summed over the group they are those of the whole pack. What is
not a pack, generation for one, is left alone: every process of the group computes all of it.

Tensor letters: T slots of the pack, C channels, V visual tokens.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from headway.errors import ConfigError, TrainingError
from headway.models.attention.backend import NAME
from headway.models.parallel.exchange import split_over
from headway.models.parallel.sequence_vision import share_patches
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
                f"The language model is given {name!r}, which holds something for each token and which Headway cannot "
                "cut for the processes that share a pack. Set parallel.sequence to 1."
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
            f"parallel.sequence is {degree}, but {mixing} mixes tokens outside attention, so its tokens cannot be "
            "dealt to several processes. Set parallel.sequence to 1."
        )
    if config._attn_implementation != NAME or not decoder._supports_attention_backend:
        raise ConfigError(
            f"parallel.sequence is {degree}, but {type(decoder).__name__} does not attend through the backend "
            f"{NAME!r}, which exchanges tokens for heads. Set parallel.sequence to 1."
        )
    heads = config.num_attention_heads
    if degree > heads:
        raise ConfigError(
            f"parallel.sequence is {degree}, but the model has {heads} query heads, and each process that shares a "
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
