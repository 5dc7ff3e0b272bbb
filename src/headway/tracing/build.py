"""Phantom twins of models: the same modules over parameters that are only shapes."""

import copy
import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headway.count.models import presets
from headway.errors import TraceError
from headway.plugins import register_families
from headway.tracing import attention, unwrap
from headway.tracing.families import MASKED_TOWERS
from headway.tracing.phantom import phantom
from headway.tracing.quantised import is_quantised, plain_layers


def common_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that holds all of a model's floats: its own, or the wider one of a mixture."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    dtypes = {dtype if dtype.itemsize > 1 else torch.bfloat16 for dtype in dtypes}  # no kernel on shapes adds 8 bits
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()


def twin_of_model(model: nn.Module, dtype_of: Callable[[torch.Tensor], torch.dtype] | None = None) -> nn.Module:
    """Copy a model's modules, hooks and settings, with phantoms in place of its parameters and buffers.

    Tied parameters stay tied, and each keeps whether it is trained. What wraps or shards the model is left out. The
    model itself is not touched and no weight is copied.

    Args:
        model: any module.
        dtype_of: gives each parameter and buffer its dtype; one that all of them share when None, as a mixture may rely
            on autocast.
    """
    unwrap.refuse_flat(model)
    model = unwrap.unwrapped(model)
    if dtype_of is None:
        dtype = common_dtype(model)
        return twin_of_model(model, lambda _: dtype)
    memo = plain_layers(model, lambda parameter: _stand_in(parameter, dtype_of(parameter)))
    attributes = (value for module in model.modules() for value in vars(module).values())
    states = (
        t for t in attributes if isinstance(t, torch.Tensor) and t.grad_fn is not None
    )  # kept from an earlier forward
    for tensor in (*model.parameters(), *model.buffers(), *states):
        if id(tensor) not in memo and not is_quantised(tensor):
            memo[id(tensor)] = _stand_in(tensor, dtype_of(tensor))
    return unwrap.copy_modules(model, memo)


def twin_of_config(config: Any) -> nn.Module:
    """Build the phantom twin of a transformers model from its configuration.

    Raises:
        TraceError: transformers has no causal or image-text model for this configuration.
    """
    return twin_of_model(model_on_shapes(config))


def model_on_shapes(config: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Build a transformers model from its configuration; its parameters are on the meta device, its buffers real.

    Raises:
        TraceError: transformers has no causal or image-text model for this configuration.
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model: Any = model_class(config)._from_config(copy.deepcopy(config), dtype=dtype)
    model.tie_weights()  # building without initialisation leaves this out
    _fill_buffers(model)
    built: nn.Module = model
    return built


def _fill_buffers(model: Any) -> None:
    """Give a transformers model built on shapes alone its buffers: causal masks, positions, frequencies.

    transformers itself builds on shapes and has each module's initialisation write them afterwards. What that does not
    write stays a shape; parameters are left alone.
    """
    buffers: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                buffers.setdefault(id(buffer), torch.empty_like(buffer, device="cpu"))
                module._buffers[name] = buffers[id(buffer)]
    before = {id(buffer): buffer._version for buffer in buffers.values()}
    model.initialize_weights()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and before.get(id(buffer)) == buffer._version:
                module._buffers[name] = buffer.to("meta")


def preset_config(name: str) -> Any:
    """Build the transformers configuration of a shipped model."""
    from transformers import AutoConfig

    register_families()
    settings = dict(presets()[name])
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


LONGEST_WINDOW = 1 << 14  # a longer window is believed as its seam names it [tokens]
# attention written by hand does not name its window; tracing longer segments shows windows up to here [tokens]
_LONGEST_UNNAMED_WINDOW = 4096
_PLACES = re.compile("max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions")
_ROOM = 400  # tokens that workloads add to a window, up to the next prime
_DEPTHS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers",
)  # fmt: skip


# lists of the layers whose outputs are features: as many in a shorter tower, so that the projector's width stays
_FEATURE_LAYERS = ("vision_feature_layer", "vision_feature_layers", "intermediate_layers_indices")


def with_layers(config: Any, layers: int) -> Any:
    """Copy a configuration with at most so many layers in each of its towers.

    Lists with an entry per layer are cut to the same length; lists of layer numbers keep the numbers that remain.
    """
    config = copy.deepcopy(config)
    for part in subconfigs(config):
        if isinstance(inserted := getattr(part, "insert_layer_id", None), int):  # a merger between two of the layers
            part.insert_layer_id = min(inserted, layers - 2)
        for key in _FEATURE_LAYERS:
            if isinstance(value := getattr(part, key, None), list | tuple):
                setattr(part, key, [min(max(index, -layers), layers - 1) for index in value])
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
            read_only = isinstance(getattr(type(part), key, None), property)
            if getattr(part, key, None) == depth and not read_only:
                setattr(part, key, layers)
    return config


def subconfigs(config: Any) -> list[Any]:
    """List a configuration and those inside it, each before its own."""
    parts = [config]
    for key in getattr(config, "sub_configs", ()):
        if (part := getattr(config, key, None)) is not None:
            parts += subconfigs(part)
    return parts


def model_class(config: Any) -> Any:
    """Return the transformers class to train for a configuration: the one it names, else the richest that there is.

    That is image-text before causal before sequence to sequence and speech; the last two first for encoder-decoders.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    text = [modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING]
    pairs = [modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING]
    mapping: Any
    for mapping in (*pairs, *text) if getattr(config, "is_encoder_decoder", False) else (*text, *pairs):
        if type(config) in mapping:
            return mapping[type(config)]
    raise TraceError(f"transformers has no causal or image-text model for a configuration of {type(config).__name__}.")


def _stand_in(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make the phantom of one parameter or buffer; integer buffers stay real, and other buffers' data is known."""
    tensor = unwrap.unsharded(tensor)
    if tensor.is_complex():
        dtype = tensor.dtype
    elif not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu()
    if tensor.dtype.itemsize == 1 and not tensor.requires_grad:
        dtype = tensor.dtype  # the weight of a product of 8-bit floats, whose code may look at its dtype
    shape = phantom(tensor.detach().to("meta", dtype))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(shape, tensor.requires_grad)
    shape.constant = None if tensor.is_meta else tensor.detach().to("cpu", dtype)
    return shape


def prepare_twin(twin: nn.Module) -> list[str]:
    """Make a phantom twin ready to be recorded in training mode; returns its parameters' names in their order."""
    parameters = number_parameters(twin)
    use_seams(twin)
    twin.train()
    return parameters


def number_parameters(model: nn.Module) -> list[str]:
    """Give parameter i the source bit i; returns their names in that order, tied ones once."""
    names = []
    for i, (name, parameter) in enumerate(model.named_parameters()):
        parameter.sources = 1 << i  # type: ignore[attr-defined]  # a Phantom, by construction
        names.append(name)
    return names


def run_every_layer(model: nn.Module) -> list[tuple[Any, str, float]]:
    """Switch off LayerDrop, which skips layers of some models at random while they train; their cost is of them all.

    Returns:
        What was switched off: (holder, attribute, value).
    """
    drops = layer_drops(model)
    for holder, name, _ in drops:
        setattr(holder, name, 0.0)
    return drops


def layer_drops(model: nn.Module) -> list[tuple[Any, str, float]]:
    """List where a model says how often it leaves out layers while it trains: (holder, attribute, value)."""
    return [
        (holder, name, value)
        for holder in (*model.modules(), *configs(model))
        for name, value in vars(holder).items()
        if name.endswith("layerdrop") and value
    ]


def keep_every_row(model: nn.Module) -> None:
    """Lift the capacity beyond which a router drops tokens: how many it drops is the data's choice."""
    for module in model.modules():
        if isinstance(getattr(module, "expert_capacity", None), int):
            module.expert_capacity = sys.maxsize  # type: ignore[assignment]  # an integer, as was just seen


def configs(model: nn.Module) -> list[Any]:
    """Collect the configurations in which a model's modules look up their attention and experts."""
    return [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]


def places(model: nn.Module) -> int | None:
    """Read how many tokens a model's text may have, where its configuration says so."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def window_lengths(model: nn.Module, by_hand: bool) -> tuple[list[int], list[int]]:
    """List the lengths at which a model's attention may change without saying so [tokens].

    Windows, chunks and top-k selections go by many names in configurations, and attention written by hand may keep
    them from there too; a length that turns out to change nothing does no harm. None exceeds the model's positions.

    Args:
        model: a phantom twin.
        by_hand: whether some attention does not go through a library's function.

    Returns:
        The lengths; and lengths of blocks whose keys may be compressed into one.
    """
    windows = [_LONGEST_UNNAMED_WINDOW] if by_hand else []
    picked, rates, places = [0], [1], [LONGEST_WINDOW]
    for config in configs(model):
        for name, value in vars(config).items():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            lengths = [v for v in values if type(v) is int]
            if re.search("topk|top_k", name):
                picked += lengths
            elif re.search("window|chunk|budget", name):
                windows += lengths
            elif re.search("compress_rat|block_size", name):  # a pick may be a block of so many tokens
                rates += lengths
            elif hasattr(config, "vocab_size") and _PLACES.fullmatch(name):
                places += lengths
    windows += [number * rate for number in set(picked) for rate in set(rates)]
    most = max(min(places) - _ROOM, 0)
    return [min(length, most) for length in windows if length <= LONGEST_WINDOW], sorted({*rates} - {0, 1})


def use_seams(model: nn.Module) -> None:
    """Point attention at the recording seams and experts at grouped products; let every layer run, on every row."""
    run_every_layer(model)
    keep_every_row(model)
    names = []
    for config in {id(config): config for config in configs(model)}.values():
        masked = hasattr(config, "vocab_size") or config.model_type in MASKED_TOWERS
        names.append((config, attention.TEXT if masked else attention.TOWER))
    if names:
        attention.lead_here(names)
    for config, _ in names:
        config._experts_implementation = "grouped_mm"
        config.use_cache = False  # some forwards do not take it as an argument
    for module in model.modules():
        if getattr(module, "_supports_sdpa", True) is False:  # the module's own code expects masks of floats
            module.config._attn_implementation = attention.BY_HAND  # type: ignore[union-attr]  # a PreTrainedModel
