"""Weights for a model that was built and sharded on the meta device: each process reads its own slices.

transformers' loader renames keys and merges experts; where a parameter is a DTensor it reads, of each tensor in the
safetensors files, the rows that this process keeps. What is made of several tensors in another way, such as a fused
projection, is made whole, kept in slices and forgotten, one after the other. So no process ever holds the whole model.
"""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.loading_report import LoadStateDictInfo

from headway.hub import located
from headway.models.init_weights import to_memory
from headway.models.load import check_weights, load_model, load_model_config, weights_of
from headway.models.new_rows import embedding_rows, grown, vocabulary_names
from headway.models.parallel.mesh import fill
from headway.models.parallel.shard import own_classes
from headway.models.quantised import layouts_by_name
from headway.models.scores import SCORE_WEIGHT, initialise_score, is_scorer
from headway.tracing.unwrap import local


def read_weights(
    model: PreTrainedModel,
    name: str | Path,
    device: torch.device | str,
    *,
    keep_on: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> None:
    """Give a model that was built on the meta device its saved weights, in slices where it is sharded.

    Args:
        model: changed in place; every parameter keeps its dtype and whether it is trained.
        name: a model folder or Hub name.
        device: where buffers live.
        keep_on: where parameters live, for those that are offloaded; `device` if not given.
        dtype: that values are read in, whatever they are held in; the model's own if not given.
        seed: of the first values of rows that the model's vocabulary has beyond the saved ones, and of the head of a
            reward model that is made of another model.

    Raises:
        UnknownModelError: nothing of that name, on this machine or on the Hub.
        CheckpointError: files are missing, cut short, or of another model.
    """
    # Memory for this process's slices of every parameter; values come below.
    name, place = located(name), torch.device(device if keep_on is None else keep_on)
    model.to_empty(device=place)
    model.tie_weights(recompute_mapping=False)  # `to_empty` makes two of a tied one
    with weights_of(str(name)) as missing, ExitStack() as opened:
        here = Path(name).is_dir()
        folder = Path(name if here else snapshot_download(str(name), allow_patterns=["*.safetensors", "*.json"]))
        # Slices of the files by name: nothing is read until asked for.
        stored: dict[str, Any] = {}
        for file in check_weights(folder):
            reader = opened.enter_context(safe_open(str(file), framework="pt"))
            stored.update({key: reader.get_slice(key) for key in reader.keys()})  # noqa: SIM118 - no mapping
        with own_classes(model):
            rules = cast(Any, get_model_conversion_mapping(model))
        # transformers' own rules of renaming and merging, so that any of its checkpoints opens.
        read_in = model.dtype if dtype is None else dtype
        plan = LoadStateDictConfig(
            pretrained_model_name_or_path=str(name), device_map={"": place}, dtype=read_in, weight_mapping=rules
        )
        # A vocabulary that grew: its rows beyond the saved ones get first values from the saved ones.
        config = load_model_config(name)
        grows = embedding_rows(config) < embedding_rows(model.config)
        growing = vocabulary_names(model) if grows else {}
        # Weights for which a slice of the file suffices, and weights that are made in full and then cut.
        sliced, full_tensors = _sorted_out(stored, model, plan, growing)
        done = _read_whole(full_tensors, model, plan, config if grows else model.config, growing, seed)
        info = _read_slices(sliced, model, plan)
        for key in done:
            model.get_parameter(key)._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark
        # Weights that are still missing are initialised by the model's rule, tied names aside, and reported.
        info.missing_keys -= done
        info = model._finalize_model_loading(model, plan, info)
        missing.update(info.missing_keys - model.all_tied_weights_keys.keys())
        if SCORE_WEIGHT in missing and not is_scorer(config):  # a model that becomes a reward model has no score yet
            initialise_score(model, seed)
            missing.remove(SCORE_WEIGHT)
    # Buffers (rotary frequencies and the like) live on the device even where parameters are kept on the host.
    for module in model.modules():
        for buffer_name, buffer in module.named_buffers(recurse=False):
            module._buffers[buffer_name] = buffer.to(device)


@torch.no_grad()
def allocate(model: PreTrainedModel, device: torch.device | str, *, keep_on: torch.device | str | None = None) -> None:
    """Allocate a model that was built on the meta device, for weights that are read later; compute unsaved buffers.

    Args:
        model: changed in place; its parameters and persistent buffers have no values yet, its other buffers theirs.
        device: where buffers live.
        keep_on: where parameters live, for those that are offloaded; `device` if not given.
    """
    to_memory(model, device, keep_on)
    saved: set[Any] = set(model.state_dict(keep_vars=True).values())
    for tensor in saved:
        tensor._is_hf_initialized = True  # transformers' rules leave it alone then
    with own_classes(model):
        model.initialize_weights()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    for tensor in saved:
        del tensor._is_hf_initialized


def _sorted_out(
    stored: dict[str, Any], model: PreTrainedModel, plan: LoadStateDictConfig, growing: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Tensors of the files that are read in slices, and those, by the parameter they make, that must be read whole.

    A parameter that is made of several tensors, or of a changed one, is not in general made of their slices; merging
    experts is, as long as a process has some.
    """
    rules = plan.weight_mapping or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    quantised = layouts_by_name(model)
    sliced: dict[str, Any] = {}
    full_tensors: dict[str, dict[str, Any]] = {}
    for key, rows in stored.items():
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        parameter = names.get(target)
        # rows that the files do not have come from all that they have, bytes of the whole weight
        if target in growing or target in quantised:
            full_tensors.setdefault(target, {})[key] = rows
        elif pattern is None or not isinstance(parameter, DTensor) or _cuts_alike(by_pattern[pattern], parameter):
            sliced[key] = rows
        else:
            full_tensors.setdefault(target, {})[key] = rows
    return sliced, full_tensors


@torch.no_grad()
def _read_slices(sliced: dict[str, Any], model: PreTrainedModel, plan: LoadStateDictConfig) -> LoadStateDictInfo:
    """Read this process's rows into the memory of its parameters.

    The loader's own tensors are windows on the mapped files, which would have to stay as they are.
    """
    parameters = dict(model.named_parameters())
    info: LoadStateDictInfo = convert_and_load_state_dict_in_model(model, sliced, plan)[0]
    for name, parameter in parameters.items():
        loaded: Any = model.get_parameter(name)
        if loaded is parameter:
            continue
        local(parameter).copy_(local(loaded))
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        home, _, own = name.rpartition(".")
        model.get_submodule(home)._parameters[own] = parameter
    return info


def _cuts_alike(rule: WeightConverter, parameter: DTensor) -> bool:
    """Tell whether a process's rows of a parameter can be made from the same rows of the stored tensors alone."""
    merges = all(
        (isinstance(op, MergeModulelist) and op.dim == 0) or (isinstance(op, Concatenate) and op.dim > 0)
        for op in rule.operations
    )
    by_rows = all(place.is_replicate() or place.is_shard(0) for place in parameter.placements)
    return merges and by_rows and local(parameter).numel() > 0


@torch.no_grad()
def _read_whole(
    full_tensors: dict[str, dict[str, Any]],
    model: PreTrainedModel,
    plan: LoadStateDictConfig,
    config: PreTrainedConfig,
    growing: Mapping[str, str],
    seed: int,
) -> set[str]:
    """Make parameters whole, one group after the other, and keep this process's slices.

    Args:
        full_tensors: stored tensors, by the parameter that they make.
        model: whose parameters are filled.
        plan: how stored tensors become parameters.
        config: of the stored model, whose vocabulary may be smaller.
        growing: parameters that have more rows than the stored ones, by each of their names the first.
        seed: of the first values of rows beyond the stored ones.
    """
    if not full_tensors:
        return set()
    twin = load_model(copy.deepcopy(config), dtype=plan.dtype or model.dtype, device="meta", random_init=True)
    names, layouts = set[str](), layouts_by_name(model)
    for rows in full_tensors.values():
        convert_and_load_state_dict_in_model(twin, rows, plan)
        loaded = {name: value for name, value in twin.named_parameters() if not value.is_meta}
        for name, stored in loaded.items():
            parameter: Any = model.get_parameter(name)
            value: torch.Tensor = stored
            if name in growing:
                value = grown(growing[name], stored, len(parameter), seed).to(stored.device)
            if name in layouts:
                value = layouts[name].quantise(value)
            if value.shape != parameter.shape:
                raise RuntimeError(f"{name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}.")
            fill(parameter, value)
            home, _, own = name.rpartition(".")
            twin.get_submodule(home)._parameters[own] = nn.Parameter(stored.to("meta"), requires_grad=False)
        names |= loaded.keys()
    return names
