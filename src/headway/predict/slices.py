"""Numbers of weights: of the slices that FSDP2 cuts by rows and fills up, of spread experts, and of each block."""

import functools
import operator
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from headway.count import CostModel
from headway.count.activations import SavedActivations
from headway.count.rows import Parameter, Row, hidden_matrices
from headway.count.units import block_of, head_features, head_parameter, product_weights, remembered, unit_names

SPREAD = " (experts)"
"""Follows a block's name in that of the unit of its spread experts."""

FLOAT8_MULTIPLE = 16
"""Sizes of the linear layers of blocks that `run.dtype=float8` converts are multiples of this."""


def padding_of(cost_model: CostModel, shards: int, expert: int = 1) -> float:
    """Ratio of the weights that are held and gathered, padding included, to the model's: 1 where no slice is padded.

    Args:
        cost_model: of the model.
        shards: processes that hold one copy of the weights between them.
        expert: processes that the experts of a layer are spread over.
    """
    padded: int = sliced(cost_model, shards, expert).params.total
    return padded / max(1, cost_model.params.total)


@remembered
def sliced(cost_model: CostModel, shards: int, expert: int) -> CostModel:
    """Give each parameter the size of its slices together, with the filling of the last slices.

    FSDP2 cuts a tensor by its rows, so one with fewer rows than processes grows to a row for each of them, on the
    device as in a gather.

    Args:
        cost_model: of the model.
        shards: processes that hold one copy of the weights between them.
        expert: processes that the experts of a layer are spread over.
    """
    rows, parameters = rows_of(cost_model), []
    for parameter in cost_model.parameters:
        spread = spread_over(parameter, expert)
        numel = spread * rows.padded(parameter, shards, spread)
        parameters.append(
            replace(parameter, numel=numel, active=numel if parameter.active == parameter.numel else parameter.active)
        )
    return replace(cost_model, parameters=tuple(parameters))


def spread_over(parameter: Parameter, expert: int) -> int:
    """Number of processes that each keep their own part of a parameter; 1 but for experts that tokens are routed to."""
    return expert if parameter.component.endswith(".experts") and parameter.active < parameter.numel else 1


@remembered
def trained_of_process(cost_model: CostModel, expert: int) -> int:
    """Count the weights that learn on one process; experts are spread over so many processes."""
    return sum(p.numel // spread_over(p, expert) for p in cost_model.parameters if p.trainable)


def is_float8(row: Row) -> bool:
    """Tell whether a row is of a linear layer that `run.dtype=float8` converts."""
    fits = row.features is not None and not any(size % FLOAT8_MULTIPLE for size in row.features)
    return fits and row.op == "linear" and bool(row.block) and not row.component.endswith(".router")


@remembered
def float8_weights(cost_model: CostModel) -> frozenset[str]:
    """Names of the weights that a sharded model gathers in float8, a byte for a number."""
    return frozenset(f"{row.module}.weight" for row in cost_model.rows if is_float8(row))


@remembered
def numbers_by_unit(
    cost_model: CostModel, in_slices: CostModel, saved: SavedActivations, expert: int
) -> dict[str, tuple[int, int]]:
    """Sizes of the gradient in each unit that FSDP2 gathers: of the whole gradient, and of its slices.

    Args:
        cost_model: of the model.
        in_slices: the same, `sliced`.
        saved: names its blocks.
        expert: processes that the experts of a layer are spread over.
    """
    learns, padded = Counter[str](), Counter[str]()
    names = unit_names(cost_model, saved)
    for parameter, in_slices_of, name in zip(cost_model.parameters, in_slices.parameters, names, strict=True):
        spread = spread_over(parameter, expert)
        unit = f"{name}{SPREAD}" if spread > 1 else name
        learns[unit] += parameter.numel // spread if parameter.trainable else 0
        padded[unit] += in_slices_of.numel // spread if parameter.trainable else 0
    return {unit: (numel, padded[unit]) for unit, numel in learns.items()}


@remembered
def values_of_spread(cost_model: CostModel, saved: SavedActivations, expert: int) -> Counter[str]:
    """Count values per token that products of spread experts read and give, by block; backward needs them.

    Args:
        cost_model: of the model.
        saved: names its blocks.
        expert: processes that the experts of a layer are spread over.
    """
    values: Counter[str] = Counter()
    for parameter, chosen, width, inside in _matrices_of_experts(cost_model):
        if spread_over(parameter, expert) > 1:
            values[block_of(parameter, saved)] += chosen * (width + inside)
    return values


@remembered
def values_of_experts(cost_model: CostModel, saved: SavedActivations) -> dict[str, int]:
    """Count the values per token that routed experts give, a hidden state for each that is chosen, by block."""
    return {
        block_of(parameter, saved): chosen * width for parameter, chosen, width, _ in _matrices_of_experts(cost_model)
    }


def _matrices_of_experts(cost_model: CostModel) -> Iterator[tuple[Parameter, int, int, int]]:
    """Weights of routed experts, each with how many a token chooses, the width of hidden states, and the other side."""
    features, rows = head_features(cost_model), rows_of(cost_model)
    for parameter in cost_model.parameters:
        if features and parameter.component.endswith(".experts") and parameter.active < parameter.numel:
            width, count = features[0], rows.count(parameter)
            chosen, size = parameter.active * count // parameter.numel, parameter.numel // count
            yield parameter, chosen, width, size // width


class Rows:
    """Rows of parameters, by which FSDP2 cuts them: each process has as many as any other, the last ones padded."""

    def __init__(self, cost_model: CostModel) -> None:
        self._linear = {f"{row.module}.weight": row.features for row in cost_model.rows if row.features}
        self._convolutions = {f"{row.module}.weight" for row in cost_model.rows if row.op == "convolution"}
        self._numel = {parameter.name: parameter.numel for parameter in cost_model.parameters}
        self._widest = max((max(pair) for pair in self._linear.values()), default=0)
        language = head_features(cost_model)
        self._widths = {"": language[0] if language else 0}
        for row in cost_model.rows:
            if row.features and row.block:
                tower = row.component.partition(".")[0]
                self._widths[tower] = min(row.features[0], self._widths.get(tower, row.features[0]))
        self._experts = self._numbers_of_experts(cost_model)

    def padded(self, parameter: Parameter, ranks: int, spread: int) -> int:
        """Numbers of a parameter, or of the part that one of `spread` processes keeps, in slices for `ranks`."""
        count = self.count(parameter)
        row_size = parameter.numel // count
        own = count // spread
        ranks //= spread
        return -(-own // ranks) * ranks * row_size

    def count(self, parameter: Parameter) -> int:
        """Rows of a parameter: outputs of a linear module, experts, entries of a table, or the length of a vector."""
        name, numel = parameter.name, parameter.numel
        features = self._linear.get(name)
        if features is not None and numel == features[0] * features[1]:
            return features[1]
        if parameter.component.endswith(".experts") and parameter.active < numel:
            return self._experts.get(name.rpartition(".")[0], 1)
        bias = self._numel.get(f"{name.removesuffix('.weight')}.bias")
        if name.endswith(".weight") and bias is not None:  # a norm, or a convolution
            return bias
        tower = parameter.component.partition(".")[0]
        width = self._widths.get(tower if tower != "language" else "", 0) or self._widths[""]
        if not width or numel % width:
            return numel
        if name in self._convolutions:
            return width
        # a table is larger than any vector: embeddings of tokens or of positions; a router has a row per expert
        is_table = numel > self._widest or parameter.component.endswith(".router")
        return numel // width if is_table else numel

    def _numbers_of_experts(self, cost_model: CostModel) -> dict[str, int]:
        """Number of experts by the module that holds them, from the rows of the router beside it."""
        width = self._widths[""]
        largest: dict[str, int] = {}
        for parameter in cost_model.parameters:
            if parameter.component.endswith(".router") and parameter.numel >= width:
                holder = parameter.name
                while holder:
                    holder = holder.rpartition(".")[0]
                    largest[holder] = max(largest.get(holder, 0), parameter.numel)
        modules = {p.name.rpartition(".")[0] for p in cost_model.parameters if p.component.endswith(".experts")}
        candidates = ((module, largest.get(module.rpartition(".")[0], 0)) for module in modules)
        return {module: numel // width for module, numel in candidates if width and numel}


@remembered
def rows_of(cost_model: CostModel) -> Rows:
    """Rows of a model's parameters, found once."""
    return Rows(cost_model)


@remembered
def muon_matrices(cost_model: CostModel) -> Counter[tuple[int, int]]:
    """Count the matrices that Muon orthogonalises by their sides; each expert's is one of its stack."""
    names, rows = hidden_matrices(cost_model.rows, cost_model.parameters), rows_of(cost_model)
    shapes = {f"{row.module}.weight": row.features for row in cost_model.rows if row.features}
    features, sides = head_features(cost_model), Counter[tuple[int, int]]()
    for parameter in cost_model.parameters:
        if parameter.name not in names or not parameter.trainable:
            continue
        shape, count = shapes.get(parameter.name), 1
        if shape is None and features is not None:  # a stack, of matrices that have the model's width on one side
            count = rows.count(parameter)
            shape = (features[0], parameter.numel // count // features[0])
        if shape is not None:
            sides[shape] += count
    return sides


@remembered
def trained_by_block(cost_model: CostModel, saved: SavedActivations) -> Counter[str]:
    """Numbers of weights that learn, by block; "" for weights outside of blocks."""
    numbers: Counter[str] = Counter()
    for parameter in cost_model.parameters:
        if parameter.trainable:
            numbers[block_of(parameter, saved)] += parameter.numel
    return numbers


def _of_products(cost_model: CostModel) -> set[int]:
    """Numbers of the parameters that are cast for their products."""
    bits = functools.reduce(
        operator.or_, (g.needs for row in cost_model.rows for g in row.gradients if g.phase == "wgrad"), 0
    )
    # a frozen weight that nothing but products reads is held in their dtype, or dequantised to it
    narrow = product_weights(cost_model)
    return {i for i, p in enumerate(cost_model.parameters) if bits >> i & 1 and (p.trainable or p.name not in narrow)}


def cast_weights(cost_model: CostModel, saved: SavedActivations) -> Counter[str]:
    """Numbers of weights by block that are cast for their products; the head's under "(head)"."""
    head = head_parameter(cost_model)
    numbers: Counter[str] = Counter()
    for number in _of_products(cost_model):
        parameter = cost_model.parameters[number]
        numbers["(head)" if number == head else block_of(parameter, saved)] += parameter.numel
    return numbers


def kept_casts(cost_model: CostModel, saved: SavedActivations, chosen: Collection[str]) -> int:
    """Number of weights whose copies exist as forward ends.

    Autocast keeps what it cast of a linear layer that learns until forward ends. Experts cast their own weights, and of
    a frozen weight nothing keeps the copy but the graph: those a recomputed block drops with everything else, and a
    block without a backward at once.
    """
    head = head_parameter(cost_model)
    alive = cost_model.blocks_in_backward
    numel = 0
    for number in _of_products(cost_model):
        parameter = cost_model.parameters[number]
        block = block_of(parameter, saved)
        is_cached = parameter.trainable and not parameter.component.endswith(".experts")
        if number == head or is_cached or (block in alive and block not in chosen):
            numel += parameter.numel
    return numel
