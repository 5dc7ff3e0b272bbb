"""Activations that autograd saves of a recipe's model as the recipe trains it, frozen parts and adapters included.

They are read from the shipped file of a model that learns whole. All else is traced: the input of a frozen layer is not
saved for its weight's gradient, and an adapter saves inputs of its own. Without torch, what adapters save is estimated,
which a prediction says.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

from headway.config import ModelConfig, TrainConfig
from headway.count import CostModel, load_cost_model
from headway.count.activations import SavedActivations, SavedByPrecision, shipped_activations
from headway.count.models import shipped_name
from headway.log.working import working
from headway.meter.slow_code import installed_kernels, kernel_package
from headway.predict.activations import BFLOAT16, FLOAT32

_ESTIMATED = (
    "PyTorch is not installed, so activations beside {parts} are estimated from those of the model that learns whole; "
    "with PyTorch they are traced, and the numbers differ"
)


def learning_model(model: ModelConfig, cost_model: CostModel) -> CostModel:
    """Freeze the frozen parts of a recipe, and put its adapters in place.

    Args:
        model: the recipe's section.
        cost_model: of the model as it ships or was traced.
    """
    if model.has_own_shape:
        from headway.optim import learning_with_tokens  # the model's own code says what its shape changes

        return learning_with_tokens(model)
    learning = cost_model.freeze(model.freeze)
    return learning if model.lora is None else learning.lora(model.lora.rank, model.lora.targets)


def saved_of_recipe(config: TrainConfig) -> SavedByPrecision:
    """Activations that autograd saves of a recipe's model, by precision, each read or traced when it is looked up."""
    return SavedByPrecision(partial(saved_as_trained, config.model, packages=packages_of(config)))


def packages_of(config: TrainConfig) -> frozenset[str]:
    """Packages of kernels on the machine that trains, by the names under which they are imported."""
    if config.plan.assume is None:
        return installed_kernels()
    return frozenset(kernel_package(name) for name in config.plan.assume if name != "none")


def saved_as_trained(model: ModelConfig, precision: str, *, packages: frozenset[str] = frozenset()) -> SavedActivations:
    """Read or trace the activations that autograd saves of a recipe's model.

    Args:
        model: the recipe's section.
        precision: one of `headway.count.activations.PRECISIONS`.
        packages: of kernels on the machine that trains.

    Raises:
        TraceError: the model cannot be traced.
        ConfigError: something is to be frozen or adapted that the model does not have.
        ModuleNotFoundError: it is to be traced, and torch is not installed.
    """
    shipped = shipped_name(model.path)
    if shipped is not None and not (model.freeze or model.lora or model.has_own_shape):
        return shipped_activations(shipped, precision)
    try:
        from headway.models.load import named_config
    except ModuleNotFoundError:
        if shipped is None or model.has_own_shape:
            raise
        return _estimated(model, shipped, precision)
    with working(f"tracing what autograd saves of {model.path}"):
        if shipped is None or model.has_own_shape:
            return saved_of_partly_trained(named_config(model.path), model, precision, packages=packages)
        # a shipped model never changes: one trace serves all that ask in a process
        key = model.model_dump_json(include={"path", "freeze", "lora", "base"})
        return _traced_of_shipped(shipped, key, precision)


@lru_cache(maxsize=8)
def _traced_of_shipped(shipped: str, learns: str, precision: str) -> SavedActivations:
    from headway.models.load import named_config

    model = ModelConfig.model_validate_json(learns)
    return saved_of_partly_trained(named_config(shipped), model, precision, load_cost_model(shipped))


def saved_of_partly_trained(
    architecture: Any,
    learns: ModelConfig,
    precision: str,
    ledger: CostModel | None = None,
    *,
    packages: frozenset[str] = frozenset(),
) -> SavedActivations:
    """Trace the activations from a transformers configuration.

    Args:
        architecture: a transformers configuration.
        learns: what of it is frozen, and its adapters.
        precision: as for `saved_as_trained`.
        ledger: cost model of the model as it is built; traced when None.
        packages: of kernels on the machine that trains.
    """
    import torch

    from headway.models.recurrent import running_code
    from headway.optim import freeze, put_adapters, with_new_rows
    from headway.tracing import trace_config
    from headway.tracing.activations import saved_by_block
    from headway.tracing.build import model_on_shapes

    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    architecture = with_new_rows(architecture, learns)
    model: Any = model_on_shapes(architecture, dtype)
    if learns.freeze or learns.lora:
        put_adapters(model, freeze(model, ledger or trace_config(architecture), learns.freeze), learns)
    autocast = torch.bfloat16 if precision == "bfloat16-autocast" else None
    return saved_by_block(model, autocast=autocast, code=running_code(packages))


def _estimated(model: ModelConfig, shipped: str, precision: str) -> SavedActivations:
    """Estimate the activations of a shipped model without torch: frozen parts count as trained, which saves more."""
    saved = shipped_activations(shipped, precision)
    parts = [name for name, there in (("frozen parts", model.freeze), ("adapters", model.lora)) if there]
    if model.lora is not None:
        adapted = learning_model(model, load_cost_model(shipped))
        saved = saved_with_adapters(saved, adapted, FLOAT32 if precision == "float32" else BFLOAT16)
    return replace(saved, note=_ESTIMATED.format(parts=" and ".join(parts)))


def saved_with_adapters(saved: SavedActivations, adapted: CostModel, compute_bytes: int) -> SavedActivations:
    """Estimate the activations that autograd saves of a model with adapters, without a trace of it.

    An adapter keeps as many values as its rank. Its result is added to its host's, and backward needs the sum alone.
    Plain operations save no more than those of a model that learns whole.

    Args:
        saved: of the model without adapters.
        adapted: cost model, with adapters in place.
        compute_bytes: of a number that a product gives.
    """
    ends = {row.module.removesuffix(".lora_B"): row for row in adapted.rows if row.module.endswith(".lora_B")}
    added: dict[str, Counter[str]] = defaultdict(Counter)
    for row in adapted.rows:
        if row.module in ends and row.features is not None:
            _, out = row.features
            added[row.block][row.driver] += compute_bytes * (ends[row.module].forward // (2 * out))  # for each call
    blocks = dict(saved.blocks)
    for name in added.keys() & blocks.keys():
        fused = {
            d: blocks[name].fused.get(d, Fraction(0)) + added[name][d] for d in {**blocks[name].fused, **added[name]}
        }
        blocks[name] = replace(blocks[name], fused=fused)
    return replace(saved, blocks=blocks)
