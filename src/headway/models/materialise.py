"""Weights for a model that was built and sharded on the meta device: each process reads its own slices.

transformers' loader renames keys and merges experts; where a parameter is a DTensor it reads, of each tensor in the
safetensors files, the rows that this process keeps. So no process ever holds the whole model.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from headway.models.load import check_weights, weights_of
from headway.models.parallel import own_classes


def read_weights(
    model: PreTrainedModel, name: str | Path, device: torch.device | str, *, keep_on: torch.device | str | None = None
) -> None:
    """Give a model that was built on the meta device its saved weights, in slices where it is sharded.

    Args:
        model: changed in place; every parameter keeps its dtype and whether it is trained.
        name: a model folder or Hub name.
        device: where buffers live.
        keep_on: where parameters live, for those that are offloaded; `device` if not given.

    Raises:
        UnknownModelError: nothing of that name, on this machine or on the Hub.
        CheckpointError: files are missing, cut short, or of another model.
    """
    model.to_empty(device=device if keep_on is None else keep_on)
    model.tie_weights(recompute_mapping=False)  # `to_empty` makes two of a tied one
    with weights_of(str(name)) as missing, ExitStack() as opened:
        folder = Path(name) if Path(name).is_dir() else _fetched(str(name))
        stored: dict[str, Any] = {}
        for file in check_weights(folder):
            reader = opened.enter_context(safe_open(str(file), framework="pt"))
            stored.update({key: reader.get_slice(key) for key in reader.keys()})  # noqa: SIM118 - no mapping
        with own_classes(model):
            renames = get_model_conversion_mapping(model)
        plan = LoadStateDictConfig(
            pretrained_model_name_or_path=str(name),
            device_map={"": torch.device(device if keep_on is None else keep_on)},
            dtype=model.dtype,
            weight_mapping=cast(Any, renames),
        )
        # What this process has no row of: the loader fails to merge none of the experts.
        nothing = {key for key, parameter in model.named_parameters() if _is_empty(parameter)}
        wanted = {key: rows for key, rows in stored.items() if _target(key, model, plan) not in nothing}
        for key in nothing:
            model.get_parameter(key)._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark
        info, _ = convert_and_load_state_dict_in_model(model, wanted, plan)
        info.missing_keys -= nothing
        info = model._finalize_model_loading(model, plan, info)
        missing.update(info.missing_keys - model.all_tied_weights_keys.keys())
    for module in model.modules():
        for buffer_name, buffer in module.named_buffers(recurse=False):
            module._buffers[buffer_name] = buffer.to(device)


def _is_empty(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.to_local().numel() == 0


def _target(key: str, model: PreTrainedModel, plan: LoadStateDictConfig) -> str:
    """The parameter that a tensor in the files goes to, or the first of them."""
    rules = plan.weight_mapping or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    names: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    return rename_source_key(key, renamings, converters, model.base_model_prefix, names)[0]


def _fetched(name: str) -> Path:
    """The folder of a Hub model in this machine's cache, fetched if it is not there."""
    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
