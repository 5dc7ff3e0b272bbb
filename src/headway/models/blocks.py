"""Parts of a model: its body, decoder, experts, and the blocks of its towers, each sharded and compiled as a unit."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.errors import ConfigError

_OF_EXPERTS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")  # attributes that transformers gives them


@dataclass(frozen=True)
class Block:
    """One of the equal layers that a tower is made of.

    Attributes:
        name: where it is in the model, such as `model.language_model.layers.0`.
        module: the layer.
        tower: name of the list that holds it, such as `model.language_model.layers`.
    """

    name: str
    module: nn.Module
    tower: str


def blocks(model: PreTrainedModel) -> tuple[Block, ...]:
    """Find the blocks of every tower, in the order in which the model holds them.

    A block is an item of a module list that transformers can recompute (`GradientCheckpointingLayer`), outermost only.

    Raises:
        ConfigError: the model has none.
    """
    outermost: list[Block] = []
    for tower, holder in model.named_modules():
        if not isinstance(holder, nn.ModuleList) or any(tower.startswith(block.name + ".") for block in outermost):
            continue
        for index, module in enumerate(holder):
            if isinstance(module, GradientCheckpointingLayer):
                outermost.append(Block(f"{tower}.{index}", module, tower))
    if not outermost:
        raise ConfigError(
            f"{type(model).__name__} has no repeated layers that transformers can recompute, so it cannot be sharded, "
            "compiled or recomputed layer by layer."
        )
    return tuple(outermost)


def body_of(model: PreTrainedModel) -> nn.Module:
    """Find the part of a model that gives hidden states to its output layer; the model itself where it has none.

    transformers names it in `base_model_prefix`, which some classes (Llama 4's) inherit from a larger model.
    """
    body: nn.Module = model.base_model
    if body is not model:
        return body
    return next((part for part in model.children() if isinstance(part, PreTrainedModel)), model)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Find the part of a model that turns embedded text into hidden states, without its output layer."""
    hf_model: Any = model
    decoder, head = hf_model.get_decoder(), hf_model.get_output_embeddings()
    if decoder is head:  # ModernBERT names its output layer as its decoder
        return body_of(model)
    holds_head = decoder is model or any(part is head for part in decoder.modules())
    body: nn.Module = body_of(decoder) if holds_head else decoder
    return body


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Find the experts that transformers dispatches, by their names in the model, in its order."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, declared) for declared in _OF_EXPERTS)
    }
