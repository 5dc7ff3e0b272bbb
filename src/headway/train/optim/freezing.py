"""Freeze parts and add adapters, in the model and in its ledger by one rule."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from headway.count import CostModel
from headway.errors import ConfigError, UsageError
from headway.models.lora import adapter_modules, add_adapters
from headway.tracing import trace
from headway.train.config import ModelConfig


def freeze(model: nn.Module, cost_model: CostModel, patterns: Sequence[str]) -> CostModel:
    """Take parameters out of training, in the model and in its ledger by the same rule.

    Args:
        model: changed in place; what is frozen already stays so.
        cost_model: traced from this model.
        patterns: components of the ledger (`vision`, `language.mlp`) or globs over parameter names.

    Returns:
        The cost model of the model as it trains now.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    try:
        frozen = cost_model.freeze(patterns)
    except UsageError as error:
        raise ConfigError(f"model.freeze: {str(error).removeprefix('--freeze ')}") from error
    parameters = dict(model.named_parameters())
    for entry in frozen.parameters:
        parameters[entry.name].requires_grad_(entry.trainable)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError("model.freeze leaves no parameter to train; take a pattern out.")
    return frozen


def adapt(model: PreTrainedModel, cost_model: CostModel, settings: ModelConfig) -> CostModel:
    """Put the adapters of `model.lora` into a model, if it has any; they have no weights yet.

    Args:
        model: changed in place.
        cost_model: of this model, with what is frozen; frozen modules take no adapter.
        settings: rank, scale and targets.

    Returns:
        The cost model of the model as it trains now.

    Raises:
        ConfigError: a target names no module that can take an adapter, or peft is not installed.
    """
    lora = settings.lora
    if lora is None:
        return cost_model
    modules = adapter_modules(cost_model, lora.targets)
    alpha = lora.rank if lora.alpha is None else lora.alpha
    add_adapters(model, modules, rank=lora.rank, alpha=alpha, dropout=lora.dropout, base=settings.path)
    return trace(model)
