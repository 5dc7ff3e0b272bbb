"""Where a parameter belongs: the blocks of a model, and the units that FSDP2 gathers together."""

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

from headway.count import CostModel
from headway.count.activations import SavedActivations
from headway.count.recompute import kept_layers, recomputed_blocks
from headway.count.rows import Parameter

P = ParamSpec("P")
T = TypeVar("T")


class _Same:
    """A key that equals itself alone, for objects that are large to compare."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Keep a function's result for the last arguments, because a search asks thousands of times.

    Models and what they save are told apart by identity. Nobody changes what is found.
    """

    @lru_cache(maxsize=256)
    def result_for(*keys: Any, **keys_by_name: Any) -> Any:
        options = {name: _value(key) for name, key in keys_by_name.items()}
        return cast("Any", function)(*map(_value, keys), **options)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return cast("T", result_for(*map(_key, args), **{name: _key(value) for name, value in kwargs.items()}))

    return call


def _key(value: object) -> object:
    return _Same(value) if isinstance(value, CostModel | SavedActivations) else value


def _value(key: object) -> object:
    return key.value if isinstance(key, _Same) else key


@remembered
def chosen_blocks(recompute: str, cost_model: CostModel, saved: SavedActivations) -> Mapping[str, frozenset[str]]:
    """Say which blocks of a model are recomputed, and which results are kept beside each.

    Args:
        recompute: as for `recomputed_blocks`.
        cost_model: of the model.
        saved: names its blocks.

    Raises:
        UsageError: a term names no block, or what is to be kept cannot be.
    """
    chosen = recomputed_blocks(recompute, [name for name in saved.blocks if name], cost_model.block_towers)
    kept_layers(chosen, cost_model.rows)  # raises an error for operations that cannot be kept
    return chosen


def block_of(parameter: Parameter, saved: SavedActivations) -> str:
    """Name the block that a parameter is in; empty outside of blocks."""
    path = parameter.name
    while path and path not in saved.blocks:
        path = path.rpartition(".")[0]
    return path


@remembered
def unit_names(cost_model: CostModel, saved: SavedActivations) -> list[str]:
    """Name the unit that FSDP2 gathers each parameter with: a block, or (vision), (embedding), (head) or (root)."""
    head = head_parameter(cost_model)
    return [
        block_of(parameter, saved) or _outer_unit(number, parameter, cost_model, head)
        for number, parameter in enumerate(cost_model.parameters)
    ]


def _outer_unit(number: int, parameter: Parameter, cost_model: CostModel, head: int | None) -> str:
    if head is not None and parameter.numel == cost_model.parameters[head].numel and not is_tied(cost_model, head):
        return "(head)" if number == head else "(embedding)"
    return unit_of_tower(parameter.component, cost_model)


def unit_of_tower(component: str, cost_model: CostModel) -> str:
    """Name the unit of parameters outside of blocks: the tower's unit, or the root.

    What leads from the tower to the text is in the tower, but where latents are beside it.
    """
    inside = component.startswith("vision.") and not (cost_model.has_latents and component == "vision.merger")
    return "(vision)" if inside else "(root)"


@remembered
def is_tied(cost_model: CostModel, head: int) -> bool:
    """Tell whether the head's weight is the input embedding's: no other parameter is as large."""
    size = cost_model.parameters[head].numel
    return not any(p.numel == size for number, p in enumerate(cost_model.parameters) if number != head)


@remembered
def head_parameter(cost_model: CostModel) -> int | None:
    """Number of the head's weight among the parameters; None without a language head."""
    for row in cost_model.rows:
        if row.component == "language.head":
            for gradient in row.gradients:
                if gradient.phase == "wgrad":
                    return gradient.needs.bit_length() - 1
    return None


@remembered
def head_features(cost_model: CostModel) -> tuple[int, int] | None:
    """Width of the hidden states and size of the vocabulary; None without a language head."""
    rows = (row for row in cost_model.rows if row.component == "language.head")
    return next((row.features for row in rows if row.features), None)


@remembered
def product_weights(cost_model: CostModel) -> frozenset[str]:
    """Name the weights of linear layers and experts that nothing but products reads; a tied head's is an embedding too.

    Args:
        cost_model: of the model.
    """
    multiplied = 0  # bit i set for parameter i
    for row in cost_model.rows:
        if row.op in ("linear", "experts"):
            for gradient in row.gradients:
                multiplied |= gradient.needs if gradient.phase == "wgrad" else 0
    head = head_parameter(cost_model)
    tied = head if head is not None and is_tied(cost_model, head) else None
    return frozenset(
        parameter.name
        for number, parameter in enumerate(cost_model.parameters)
        if multiplied >> number & 1 and number != tied
    )
