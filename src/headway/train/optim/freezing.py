"""What learns and what does not, in the model and in its ledger by one rule."""

from collections.abc import Sequence

from torch import nn

from headway.count import CostModel
from headway.errors import ConfigError, UsageError


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
