"""Bytes that no pack changes: weights as they are held and gathered, and the additions of their update.

What learns is held as the optimizer sees it. What does not is held in the dtype of the products, where only products
read it or FSDP2 gathers it in that (`headway.models.quantised`), or in 4 or 8 bits (`headway.models.quantised`). FSDP2
gathers those bits as they are, the weights of layers converted to float8 in that (`headway.models.precision`), and all
others in the dtype of the products.
"""

from collections import Counter
from dataclasses import dataclass

from headway.count import CostModel
from headway.count.activations import SavedActivations
from headway.count.quantised import AT_ONCE, Base, matrix_bytes, quantised_parameters
from headway.count.rows import Parameter
from headway.count.units import block_of, head_features, product_weights, remembered, unit_names
from headway.count.updating import UpdateOf, num_moments, updating_of
from headway.predict.moments import BFLOAT16, FLOAT32
from headway.predict.slices import SPREAD, float8_weights, rows_of, spread_over

_WORKING = 6
"""Bytes of each value that is dequantised, beside the result: its code as an index, and its value in float32."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Sharing of a model among processes."""

    shards: int = 1  # processes that hold one copy of the weights between them
    gathers: bool = False  # whether FSDP2 gathers them block by block; a lone process has a plain model
    sequence: int = 1  # processes that share each pack
    expert: int = 1  # processes that the experts of a layer are spread over
    reshard: bool = True  # whether a block's gathered weights are freed between forward and backward
    # whether gradients are summed after every pack; otherwise whole ones wait for the last
    reduce_each_pack: bool = True
    reduce_bytes: int = FLOAT32  # bytes of a number in which gradients are summed
    offload: bool = False  # whether weights, gradients and state lie in the host's memory


@dataclass(frozen=True, slots=True)
class State:
    """Dtypes of weights, gradients and optimizer state, and of forward's products."""

    weight_bytes: int = FLOAT32  # bytes of a weight as the optimizer sees it
    compute_bytes: int = BFLOAT16  # bytes of a weight as matrix products see it
    moment_bytes: float = FLOAT32  # bytes of an optimizer moment; 8-bit codes and their scales are 1 + 4 / 256
    rule: str = "adamw"  # a rule of updating, a name in `headway.count.updating.RULES`
    clips: bool = True  # whether gradients are scaled to a norm
    averaged: bool = False  # whether there is a moving average of the weights that learn, in float32
    average_every: int = 1  # steps between its updates
    float8: bool = False  # whether blocks multiply in float8
    offload: bool = False  # whether the host updates
    one_pass: bool = False  # whether AdamW makes one pass over large parameters in bfloat16
    accumulates: bool = False  # whether a step sums several packs
    recompute: str = "none"  # blocks that are computed again, as for `recomputed_blocks`
    fused: bool = False  # whether blocks are compiled or run on fused kernels
    liger: bool = False  # whether Liger computes the loss, and gated products, whose gradients it writes over them
    inputs_on_host: bool = False  # whether what enters recomputed blocks waits there for backward
    weighs: bool = False  # whether the output layer runs once more, for the losses that its chunks are weighed by
    chunk: int | None = None  # slots whose logits exist at a time [slots]; None for those of a whole pack
    base: Base | None = None  # form of frozen matrices, where not in the dtype of the products
    # tokens and patches of a pack if its segments were all as long as the longest; None where attention's sums are not
    padded: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """Traits that decide in how many bytes a weight is held and gathered."""

    weight_bytes: int  # bytes of a number that learns
    compute_bytes: int  # bytes of a number that products read
    base: Base | None = None  # form of frozen matrices
    gathers: bool = False  # whether FSDP2 gathers the weights
    float8: bool = False  # whether it gathers those of converted layers in float8, a byte for a number

    @staticmethod
    def of(state: State, sharing: Sharing) -> "Holding":
        """Read the holding off a run's dtypes and sharing."""
        float8 = state.float8 and sharing.shards > 1 and not sharing.offload
        return Holding(state.weight_bytes, state.compute_bytes, state.base, sharing.gathers, float8)


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
    shapes = {f"{row.module}.weight": row.features for row in cost_model.rows if row.features}
    width = (head_features(cost_model) or (1, 1))[0]
    sizes = {}
    for parameter in cost_model.parameters:
        if parameter.name in names:
            shape, stack = shapes.get(parameter.name), 1
            if shape is None:  # experts, whose matrices have the model's width on one side
                stack = rows.count(parameter)
                shape = (width, parameter.numel // stack // width)
            sizes[parameter.name] = stack * matrix_bytes(base, shape[1], shape[0])
    return sizes


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
def held_bytes(cost_model: CostModel, in_slices: CostModel, holding: Holding) -> tuple[int, int]:
    """Bytes of all weights but those in 4 or 8 bits, and of the weights in 4 or 8 bits.

    Args:
        cost_model: of the model.
        in_slices: the same, `sliced`.
        holding: in how many bytes each is held.
    """
    sizes = quantised_sizes(cost_model, holding.base)
    weights = base = 0
    every = zip(cost_model.parameters, in_slices.parameters, _number_bytes(cost_model, holding), strict=True)
    for parameter, cut, number_bytes in every:
        if parameter.name in sizes:
            base += _padded(sizes[parameter.name], parameter, cut)
        else:
            weights += cut.numel * number_bytes
    return weights, base


def _padded(num_bytes: int, parameter: Parameter, cut: Parameter) -> int:
    """Bytes with the filling of slices: experts grow as their weights do, other matrices hardly."""
    is_stack = parameter.component.endswith(".experts")
    return num_bytes * cut.numel // parameter.numel if is_stack else num_bytes


@remembered
def weights_by_unit(
    cost_model: CostModel, in_slices: CostModel, saved: SavedActivations, expert: int, holding: Holding
) -> dict[str, tuple[int, int]]:
    """Bytes of each unit of FSDP2: as its weights are held, all slices together, and as they are gathered.

    Args:
        cost_model: of the model.
        in_slices: the same, `sliced`.
        saved: names its blocks.
        expert: processes that the experts of a layer are spread over.
        holding: in how many bytes each weight is held.
    """
    sizes, names = quantised_sizes(cost_model, holding.base), unit_names(cost_model, saved)
    in_float8 = float8_weights(cost_model) if holding.float8 else frozenset[str]()
    stored, gathered = Counter[str](), Counter[str]()
    every = zip(cost_model.parameters, in_slices.parameters, names, _number_bytes(cost_model, holding), strict=True)
    for parameter, cut, name, number_bytes in every:
        spread = spread_over(parameter, expert)
        unit = f"{name}{SPREAD}" if spread > 1 else name
        if parameter.name in sizes:
            own = _padded(sizes[parameter.name], parameter, cut) // spread
            stored[unit] += own
            gathered[unit] += own
        else:
            stored[unit] += number_bytes * (cut.numel // spread)
            gathered[unit] += (1 if parameter.name in in_float8 else holding.compute_bytes) * (cut.numel // spread)
    return {unit: (stored[unit], gathered[unit]) for unit in stored}


@remembered
def dequantised_by_block(
    cost_model: CostModel, saved: SavedActivations, holding: Holding, expert: int
) -> dict[str, tuple[int, int]]:
    """Bytes of the largest weight that a block dequantises, by block, and of the working memory for it.

    Args:
        cost_model: of the model.
        saved: names its blocks.
        holding: in how many bytes each weight is held.
        expert: processes that the experts of a layer are spread over.
    """
    sizes = quantised_sizes(cost_model, holding.base)
    most: dict[str, tuple[int, int]] = {}
    for parameter in cost_model.parameters:
        if parameter.name in sizes:
            numel, block = parameter.numel // spread_over(parameter, expert), block_of(parameter, saved)
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
    def of(cost_model: CostModel, in_slices: CostModel, state: State, sharing: Sharing) -> "Fixed":
        """Multiply parameters with their bytes, and divide by the processes that share a copy."""
        learning = in_slices.params.trainable
        of_weights, of_base = held_bytes(cost_model, in_slices, Holding.of(state, sharing))
        weights, base = shared(of_weights, sharing), shared(of_base, sharing)
        gradients = shared(state.weight_bytes * learning, sharing)
        optimizer = shared(state.moment_bytes * num_moments(in_slices, state.rule), sharing)
        average = shared(FLOAT32 * learning if state.averaged else 0, sharing)
        if sharing.offload:  # the host updates too
            return Fixed(0, 0, 0, 0, 0, 0, host=weights + base + gradients + optimizer + average)
        storage = UpdateOf(state.weight_bytes, state.moment_bytes, sharing.shards, state.one_pass)
        updating = updating_of(cost_model, in_slices, state.rule, storage)
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
