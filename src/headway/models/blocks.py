"""The repeated layers of a model's towers: each is sharded, compiled and recomputed as a unit."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.errors import ConfigError


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
