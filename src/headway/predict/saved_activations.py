"""Activations that autograd saves of a recipe's model as the recipe trains it, frozen parts and adapters included.

The input of a frozen layer is not saved for its weight's gradient, and an adapter saves inputs of its own, so both are
traced with the model. A model that learns whole is read from the shipped file where it ships.
"""

from typing import Any

import torch

from headway.config import TrainConfig
from headway.config.model import ModelConfig
from headway.count.activations import SavedActivations
from headway.models.load import named_config
from headway.optim import adapt, freeze, with_new_rows
from headway.predict.speed import saved_of
from headway.tracing import trace
from headway.tracing.block_activations import saved_by_block
from headway.tracing.build import model_on_shapes


def saved_as_trained(config: TrainConfig, precision: str) -> SavedActivations:
    """Activations that autograd saves of a recipe's model.

    Args:
        config: the recipe.
        precision: one of `headway.count.activations.PRECISIONS`.

    Raises:
        TraceError: the model cannot be traced.
        ConfigError: something is to be frozen or adapted that the model does not have.
    """
    if not config.model.freeze and config.model.lora is None and not config.model.has_own_shape:
        return saved_of(config.model.path, precision)
    return saved_of_partly_trained(named_config(config.model.path), config.model, precision)


def saved_of_partly_trained(architecture: Any, learns: ModelConfig, precision: str) -> SavedActivations:
    """The same from a transformers configuration.

    Args:
        architecture: a transformers configuration.
        learns: what of it is frozen, and its adapters.
        precision: as for `saved_as_trained`.
    """
    model: Any = model_on_shapes(
        with_new_rows(architecture, learns), torch.bfloat16 if precision == "bfloat16" else torch.float32
    )
    adapt(model, freeze(model, trace(model), learns.freeze), learns)
    return saved_by_block(model, autocast=torch.bfloat16 if precision == "bfloat16-autocast" else None)
