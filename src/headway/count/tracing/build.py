"""Phantom twins of models: the same modules over parameters that are only shapes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from headway.count.models import presets
from headway.count.tracing import attention
from headway.count.tracing.phantom import phantom
from headway.errors import TraceError


def twin_of_model(model: nn.Module) -> nn.Module:
    """Copy a model's modules, hooks and settings, with phantoms in place of its parameters and buffers.

    Tied parameters stay tied. The model itself is not touched and no weight is copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in memo:
            memo[id(tensor)] = _stand_in(tensor)
    return copy.deepcopy(model, memo)


def twin_of_config(config: Any) -> nn.Module:
    """Build a transformers model from its configuration, on shapes alone.

    Raises:
        TraceError: transformers has no causal or image-text model for this configuration.
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model: Any = model_class(config)._from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    model.tie_weights()  # building without initialisation leaves this out
    return twin_of_model(model)


def preset_config(name: str) -> Any:
    """Build the transformers configuration of a shipped model."""
    from transformers import AutoConfig

    settings = dict(presets()[name])
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")


def with_layers(config: Any, layers: int) -> Any:
    """Copy a configuration with at most so many layers in each of its towers.

    Lists with an entry per layer are cut to the same length; lists of layer numbers keep the numbers that remain.
    """
    config = copy.deepcopy(config)
    pending = [config]
    while pending:
        part = pending.pop()
        pending += [sub for key in part.sub_configs if (sub := getattr(part, key, None)) is not None]
        depth = next((n for key in _DEPTHS if isinstance(n := getattr(part, key, None), int)), 0)
        if depth <= layers:
            continue
        for key, value in list(vars(part).items()):
            if not isinstance(value, list | tuple):
                continue
            if len(value) == depth:
                setattr(part, key, value[:layers])
            elif key.endswith("indexes"):
                setattr(part, key, [index for index in value if index < layers])
        for key in _DEPTHS:
            if getattr(part, key, None) == depth:
                setattr(part, key, layers)
    return config


def model_class(config: Any) -> Any:
    """Return the transformers class to train for a configuration: the one it names, else image-text, else causal."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    mapping: Any
    for mapping in (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise TraceError(f"transformers has no causal or image-text model for a configuration of {type(config).__name__}.")


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Make the phantom of one parameter or buffer; integer buffers stay real.

    Floats become bfloat16 whatever they are: the ledger does not depend on it, and grouped products take nothing else.
    """
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu()
    shape = phantom(tensor.detach().to("meta", torch.bfloat16))
    return nn.Parameter(shape) if isinstance(tensor, nn.Parameter) else shape


def number_parameters(model: nn.Module) -> list[str]:
    """Give parameter i the source bit i; returns their names in that order, tied ones once."""
    names = []
    for i, (name, parameter) in enumerate(model.named_parameters()):
        parameter.sources = 1 << i  # type: ignore[attr-defined]  # a Phantom, by construction
        names.append(name)
    return names


def run_every_layer(model: nn.Module) -> None:
    """Switch off LayerDrop, which skips layers of some models at random while they train; their cost is of them all."""
    for holder in (*model.modules(), *configs(model)):
        for name in [key for key, value in vars(holder).items() if key.endswith("layerdrop") and value]:
            setattr(holder, name, 0.0)


def configs(model: nn.Module) -> list[Any]:
    """Collect the configurations in which a model's modules look up their attention and experts."""
    return [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]


def use_seams(model: nn.Module) -> None:
    """Point every attention at the recording seams and every expert layer at grouped products; let every layer run."""
    run_every_layer(model)
    if configs(model):
        attention.register()
    for config in configs(model):
        config._attn_implementation = attention.NAME
        config._experts_implementation = "grouped_mm"
