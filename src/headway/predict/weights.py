"""Weights on a device: slices that FSDP2 cuts by rows and fills up, units that it gathers, and the bytes of both.

What learns is held as the optimizer sees it. What does not is held in the dtype of the products, where only products
read it or FSDP2 gathers it in that, or in 4 or 8 bits (`headway.models.quantised`). FSDP2 gathers those bits as they
are, the weights of layers converted to float8 in that (`headway.models.precision`), and all others in the dtype of the
products.
"""

import functools
import operator
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from headway.count import CostModel
from headway.count.activations import SavedActivations
from headway.count.quantised import AT_ONCE, Base, matrix_bytes, quantised_parameters
from headway.count.rows import Parameter, Row, hidden_matrices
from headway.count.units import block_of, head_features, head_parameter, product_weights, remembered, unit_names
from headway.count.updating import UpdateOf, num_moments, updating_of
from headway.predict.activations import FLOAT32
from headway.predict.recipe import Sharing, State

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

    def matrices(self, parameter: Parameter) -> tuple[int, tuple[int, int]]:
        """Number and sides of a parameter's matrices: a linear module's, or a stack with the model's width inside."""
        features = self._linear.get(parameter.name)
        if features is not None:
            return 1, features
        count, width = self.count(parameter), self._widths[""] or 1
        return count, (width, parameter.numel // count // width)

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
    sides: Counter[tuple[int, int]] = Counter()
    for parameter in cost_model.parameters:
        if parameter.name in names and parameter.trainable:
            count, shape = rows.matrices(parameter)
            sides[shape] += count if min(shape) > 1 else 0
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


_WORKING = 6
"""Bytes of each value that is dequantised, beside the result: its code as an index, and its value in float32."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Traits that decide in how many numbers and bytes a weight is held and gathered."""

    weight_bytes: int  # bytes of a number that learns
    compute_bytes: int  # bytes of a number that products read
    base: Base | None = None  # form of frozen matrices
    gathers: bool = False  # whether FSDP2 gathers the weights
    float8: bool = False  # whether it gathers those of converted layers in float8, a byte for a number
    shards: int = 1  # processes that hold one copy of the weights between them
    expert: int = 1  # processes that the experts of a layer are spread over
    reduce_bytes: int = FLOAT32  # bytes of a number in which gradients are summed

    @staticmethod
    def of(state: State, sharing: Sharing) -> "Holding":
        """Read the holding off a run's dtypes and sharing."""
        float8 = state.float8 is not None and state.float8.gathers and sharing.shards > 1 and not sharing.offload
        numbers = (state.weight_bytes, state.compute_bytes, state.base)
        return Holding(*numbers, sharing.gathers, float8, sharing.shards, sharing.expert, sharing.reduce_bytes)

    def slices(self, cost_model: CostModel) -> CostModel:
        """Give each parameter the size of its slices together; a lone process has none."""
        return sliced(cost_model, self.shards, self.expert) if self.gathers else cost_model


@remembered
def quantised_sizes(cost_model: CostModel, base: Base | None) -> dict[str, int]:
    """Bytes of each weight that is held in 4 or 8 bits, by name.

    Args:
        cost_model: of the model, with what is frozen frozen and adapters in place.
        base: how they are held; None where none is.
    """
    if base is None:
        return {}
    names, rows = quantised_parameters(cost_model), rows_of(cost_model)
    matrices = {p.name: rows.matrices(p) for p in cost_model.parameters if p.name in names}
    return {name: count * matrix_bytes(base, out, wide) for name, (count, (wide, out)) in matrices.items()}


@remembered
def _number_bytes(cost_model: CostModel, holding: Holding) -> list[int]:
    """Bytes of a number of each parameter that is not quantised."""
    products = product_weights(cost_model)
    frozen = min(holding.weight_bytes, holding.compute_bytes)
    return [
        frozen if not p.trainable and (holding.gathers or p.name in products) else holding.weight_bytes
        for p in cost_model.parameters
    ]


@remembered
def held_bytes(cost_model: CostModel, holding: Holding) -> tuple[int, int]:
    """Bytes of all weights but those in 4 or 8 bits, and of the weights in 4 or 8 bits."""
    sizes = quantised_sizes(cost_model, holding.base)
    weights = base = 0
    slices, number_bytes = holding.slices(cost_model).parameters, _number_bytes(cost_model, holding)
    for parameter, cut, size in zip(cost_model.parameters, slices, number_bytes, strict=True):
        if parameter.name in sizes:
            base += _padded(sizes[parameter.name], parameter, cut)
        else:
            weights += cut.numel * size
    return weights, base


def _padded(num_bytes: int, parameter: Parameter, cut: Parameter) -> int:
    """Bytes with the filling of slices: experts grow as their weights do, other matrices hardly."""
    is_stack = parameter.component.endswith(".experts")
    return num_bytes * cut.numel // parameter.numel if is_stack else num_bytes


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that FSDP2 gathers together, and their buffers [bytes]; of a lone process, nothing.

    Each block is a unit, and so are what is left of a vision tower, the input embedding, the head, and the root with
    the rest. Spread experts are a unit within their block. In a step,

    * forward gathers a unit into one buffer and copies the whole weights out of it. The buffer stays until the next
      unit is gathered, so the last one's is there as forward ends;
    * behind a unit its weights are let go of, but for root and head, and but for all of them without resharding;
    * backward gathers the unit again and, while it computes, the one before it;
    * the unit's gradients come whole (`arriving`). Then its weights are let go of, and the gradients are laid out for
      their sum over the processes (`summing`), which stay until those of the next unit have come.

    Source: `foreach_all_gather_copy_out` and `foreach_reduce` in torch/distributed/fsdp/_fully_shard (torch 2.13).
    """

    stored: int = 0  # weights as they are held, all slices together
    gathered: int = 0  # weights, whole, in the dtype of the products, with the filling of slices
    arriving: int = 0  # gradients of the unit as backward makes them, whole, without the filling
    summing: int = 0  # the same, laid out for their sum over the processes, with the filling


NO_UNIT = Unit()
"""Nothing is gathered."""


UnitName = tuple[str, bool]
"""Name of a unit of FSDP2, and whether it is of the spread experts in the block of that name."""


@remembered
def units_of(cost_model: CostModel, saved: SavedActivations, holding: Holding) -> dict[UnitName, Unit]:
    """Add up the units that FSDP2 gathers, of blocks and of the parts around them; none of a lone process.

    `saved` names the blocks. Weights and sums have full slices, and gradients come without the filling.
    """
    if not holding.gathers:
        return {}
    sizes, names = quantised_sizes(cost_model, holding.base), unit_names(cost_model, saved)
    in_float8 = float8_weights(cost_model) if holding.float8 else frozenset[str]()
    slices, number_bytes = holding.slices(cost_model).parameters, _number_bytes(cost_model, holding)
    sums: dict[UnitName, list[int]] = {}
    for parameter, cut, name, size in zip(cost_model.parameters, slices, names, number_bytes, strict=True):
        spread = spread_over(parameter, holding.expert)
        own, filled = parameter.numel // spread, cut.numel // spread
        stored, gathered = size * filled, (1 if parameter.name in in_float8 else holding.compute_bytes) * filled
        if parameter.name in sizes:
            stored = gathered = _padded(sizes[parameter.name], parameter, cut) // spread
        sent = (holding.compute_bytes * own, holding.reduce_bytes * filled) if parameter.trainable else (0, 0)
        unit = sums.setdefault((name, spread > 1), [0, 0, 0, 0])
        unit[:] = map(operator.add, unit, (stored, gathered, *sent))
    return {name: Unit(*numbers) for name, numbers in sums.items()}


@remembered
def dequantised_by_block(
    cost_model: CostModel, saved: SavedActivations, holding: Holding
) -> dict[str, tuple[int, int]]:
    """Bytes of the largest weight that a block dequantises, by block, and of the working memory for it."""
    sizes = quantised_sizes(cost_model, holding.base)
    most: dict[str, tuple[int, int]] = {}
    for parameter in cost_model.parameters:
        if parameter.name in sizes:
            numel, block = parameter.numel // spread_over(parameter, holding.expert), block_of(parameter, saved)
            own = (holding.compute_bytes * numel, _WORKING * min(numel, AT_ONCE))
            most[block] = max(most.get(block, own), own)
    return most


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that no pack changes: this device's share of the model, and what an update adds to it."""

    weights: int
    base: int
    gradients: int
    optimizer: int
    average: int
    updating: int
    host: int = 0  # bytes of all but `updating`, if the host's memory holds them

    @staticmethod
    def of(cost_model: CostModel, state: State, sharing: Sharing) -> "Fixed":
        """Multiply parameters with their bytes, and divide by the processes that share a copy."""
        holding = Holding.of(state, sharing)
        in_slices = holding.slices(cost_model)
        learning = in_slices.params.trainable
        of_weights, of_base = held_bytes(cost_model, holding)
        weights, base = shared(of_weights, sharing), shared(of_base, sharing)
        gradients = shared(state.weight_bytes * learning, sharing)
        optimizer = shared(state.moment_bytes * num_moments(in_slices, state.rule), sharing)
        average = shared(FLOAT32 * learning if state.averaged else 0, sharing)
        if sharing.offload:  # the host updates too
            return Fixed(0, 0, 0, 0, 0, 0, host=weights + base + gradients + optimizer + average)
        storage = UpdateOf(state.weight_bytes, state.moment_bytes, sharing.shards, state.one_pass)
        updating = updating_of(cost_model, in_slices, state.rule, storage)
        if state.update_copies is not None:
            updating = gradients * state.update_copies
        return Fixed(weights, base, gradients, optimizer, average, updating)

    def built(self) -> dict[str, int]:
        """Parts of a model just built, which are there at every moment."""
        return {"weights": self.weights, "base": self.base, "average": self.average}

    def update(self) -> dict[str, int]:
        """Parts at an update: all gradients, the optimizer state in work, and copies that the optimizer works on."""
        work = {"gradients": self.gradients, "optimizer": self.optimizer, "updating": self.updating}
        return {**self.built(), **work}


def shared(num_bytes: float, sharing: Sharing) -> int:
    """One process's share of bytes of the model, rounded up."""
    return -int(-num_bytes // sharing.shards)
