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
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from headway.models.load import check_weights, weights_of


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
    with weights_of(str(name)) as missing, ExitStack() as opened:
        folder = Path(name) if Path(name).is_dir() else _fetched(str(name))
        slices: dict[str, Any] = {}
        for file in check_weights(folder):
            reader = opened.enter_context(safe_open(str(file), framework="pt"))
            slices.update({key: reader.get_slice(key) for key in reader.keys()})  # noqa: SIM118 - no mapping
        plan = LoadStateDictConfig(
            pretrained_model_name_or_path=str(name),
            device_map={"": torch.device(device if keep_on is None else keep_on)},
            dtype=model.dtype,
            weight_mapping=cast(Any, get_model_conversion_mapping(model)),
        )
        info, _ = convert_and_load_state_dict_in_model(model, slices, plan)
        info = model._finalize_model_loading(model, plan, info)
        missing.update(info.missing_keys)
    for module in model.modules():
        for buffer_name, buffer in module.named_buffers(recurse=False):
            module._buffers[buffer_name] = buffer.to(device)


@torch.no_grad()
def make_room(model: PreTrainedModel, device: torch.device | str, *, keep_on: torch.device | str | None = None) -> None:
    """Give a model that was built on the meta device memory for weights that are read later, and what no file holds.

    Args:
        model: changed in place; its parameters and persistent buffers have no values yet, its other buffers theirs.
        device: where buffers live.
        keep_on: where parameters live, for those that are offloaded; `device` if not given.
    """
    model.to_empty(device=device if keep_on is None else keep_on)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    model.tie_weights(recompute_mapping=False)  # `to_empty` makes two of a tied one
    saved: set[Any] = set(model.state_dict(keep_vars=True).values())
    for tensor in saved:
        tensor._is_hf_initialized = True  # transformers' rules leave it alone then
    model.initialize_weights()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    for tensor in saved:
        del tensor._is_hf_initialized


def _fetched(name: str) -> Path:
    """The folder of a Hub model in this machine's cache, fetched if it is not there."""
    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
