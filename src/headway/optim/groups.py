"""Groups of parameters that are updated together, by rule, rate and decay; frozen ones are in none."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headway.config import ModelConfig, OptimConfig
from headway.config.optim import factor_of
from headway.count import CostModel
from headway.count.updating import RULES, rules_of
from headway.data.new_tokens import NewIds, NewTokens, new_ids
from headway.errors import ConfigError, UsageError, errors_in
from headway.models.load import named_config
from headway.models.lora import adapter_modules, add_adapters
from headway.models.scores import scoring_config
from headway.tracing import trace
from headway.tracing.build import model_on_shapes
from headway.words import RUN_KEYS


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
    with errors_in(RUN_KEYS):
        try:
            frozen = cost_model.freeze(patterns)
        except UsageError as error:
            raise error.as_kind(ConfigError) from error
    parameters = dict(model.named_parameters())
    for entry in frozen.parameters:
        parameters[entry.name].requires_grad_(entry.trainable)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError("model.freeze leaves no parameter to train. Take a pattern out.")
    return frozen


def adapt(model: PreTrainedModel, cost_model: CostModel, settings: ModelConfig) -> CostModel:
    """Put the adapters of `model.lora` into a model, and trace it again if it has any; arguments as for `put_adapters`.

    Returns:
        The cost model of the model as it trains now.
    """
    put_adapters(model, cost_model, settings)
    return cost_model if settings.lora is None else trace(model)


def put_adapters(model: PreTrainedModel, cost_model: CostModel, settings: ModelConfig) -> None:
    """Put the adapters of `model.lora` into a model, if it has any; they have no weights yet.

    Args:
        model: changed in place.
        cost_model: of this model, with what is frozen; frozen modules take no adapter.
        settings: rank, scale and targets.

    Raises:
        ConfigError: a target names no module that can take an adapter, peft is not installed, or tokens are added and
            their rows would not learn.
    """
    lora = settings.lora
    embedding: Any = model.get_input_embeddings()
    if settings.adds_tokens and lora is None and not embedding.weight.requires_grad:
        raise ConfigError(
            "model.new_tokens add rows to the embedding, but model.freeze freezes the embedding, so the rows would "
            "not learn. Take the embedding out of model.freeze, or train adapters (model.lora). New rows learn "
            "beside adapters."
        )
    if lora is None:
        return
    modules = adapter_modules(cost_model, lora.targets)
    alpha = lora.rank if lora.alpha is None else lora.alpha
    base = Path(settings.path)
    name = str(base.resolve()) if base.exists() else settings.path  # a Hub name stays one
    ids = new_ids_of(settings).ids if settings.adds_tokens else ()
    add_adapters(model, modules, rank=lora.rank, alpha=alpha, dropout=lora.dropout, base=name, new_ids=ids)


def new_ids_of(settings: ModelConfig) -> NewIds:
    """Find the tokens that a run adds in its model's vocabulary.

    Raises:
        ConfigError: one cannot be added.
    """
    return new_ids(settings.path, NewTokens(settings.new_tokens, settings.new_special_tokens))


def rows_for_new_tokens(settings: ModelConfig) -> int:
    """Rows that the embedding of a run's model needs for the tokens that are added; 0 without any [tokens]."""
    return new_ids_of(settings).rows if settings.adds_tokens else 0


def with_new_rows(architecture: Any, learns: ModelConfig) -> Any:
    """A transformers configuration with the rows of a run's new tokens, and the head of a reward model if it is one."""
    if learns.scores:
        architecture = scoring_config(architecture)
    if not learns.adds_tokens:
        return architecture
    architecture = copy.deepcopy(architecture)
    text = architecture.get_text_config()
    text.vocab_size = max(text.vocab_size, rows_for_new_tokens(learns))
    return architecture


def learning_with_tokens(learns: ModelConfig) -> CostModel:
    """The ledger of a recipe's model with new tokens or the head of a reward model, as it learns.

    Args:
        learns: the model, what of it is frozen, and its adapters.
    """
    model: Any = model_on_shapes(with_new_rows(named_config(learns.path), learns))
    return adapt(model, freeze(model, trace(model), learns.freeze), learns)


def parameter_groups(model: nn.Module, optim: OptimConfig, cost_model: CostModel) -> list[dict[str, Any]]:
    """Sort the parameters that learn into the groups of an optimizer.

    Matrices decay, vectors (norms, biases, scalars) do not.

    Args:
        model: its parameters with `requires_grad`.
        optim: rules, learning rates and decay.
        cost_model: of this model, for the parts that `optim.lr_of` names.

    Returns:
        Groups with `params`, `rule`, `lr_factor` (of `optim.lr`) and `weight_decay`.

    Raises:
        ConfigError: a pattern of `optim.lr_of` matches nothing, nothing that learns, or nothing that no later pattern
            matches; or a rule for matrices finds none.
    """
    rules, rates = rules_of(cost_model, optim.name), _rates(model, optim, cost_model)
    groups: dict[tuple[str, float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rule, rate = rules.get(name, "adamw"), rates.get(name)
        own = getattr(getattr(optim, rule, None), "lr", None)  # a rate of the section that has the name of the rule
        factor = 1.0 if own is None else own / optim.lr
        if rate is not None:
            factor = factor_of(rate, optim.lr) * (factor if isinstance(rate, str) else 1.0)
        decay = optim.weight_decay if parameter.ndim >= 2 else 0.0
        groups.setdefault((rule, factor, decay), []).append(parameter)
    if RULES[optim.name].only_matrices and not any(rule == optim.name for rule, _, _ in groups):
        raise ConfigError(
            f"optim.name is {optim.name!r}, but no matrix of a hidden layer of {cost_model.name} learns. Use 'adamw'."
        )
    return [
        {"params": params, "rule": rule, "lr_factor": factor, "weight_decay": decay}
        for (rule, factor, decay), params in groups.items()
    ]


def _rates(model: nn.Module, optim: OptimConfig, cost_model: CostModel) -> dict[str, float | str]:
    """Learning rate that `optim.lr_of` gives each parameter it matches; of several patterns the last one holds."""
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    last: dict[str, str] = {}
    for pattern in optim.lr_of:
        with errors_in(RUN_KEYS):
            try:
                matches = {cost_model.parameters[i].name for i in cost_model.matching(pattern, "lr_of")}
            except UsageError as error:
                raise error.as_kind(ConfigError) from error
        if not matches & learning:
            raise ConfigError(
                f"optim.lr_of: {pattern} matches {len(matches)} parameters of {cost_model.name}, but none of these "
                "learns. Take the pattern out, or take the parameters out of model.freeze."
            )
        last |= dict.fromkeys(matches & learning, pattern)
    for pattern in optim.lr_of:
        if pattern not in last.values():
            raise ConfigError(
                f"optim.lr_of: {pattern} has no effect, because later patterns match the same parameters and the "
                "last match holds. Move this pattern behind the later ones, or take it out."
            )
    return {name: optim.lr_of[pattern] for name, pattern in last.items()}
