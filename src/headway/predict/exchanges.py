"""Exchanges of a step between processes: weights, gradients, and activations of shared packs and spread experts.

Bytes are exact, padding of uneven slices included: `tests/predict/test_exchanges.py` holds them against what PyTorch
runs. Those of spread experts are expected of tokens that choose at random. Left out, as they are small: the counts of
rows that experts exchange first, numbers for the loss and the norm, and what ranks tell each other of their packs,
which goes between hosts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import comb
from typing import NamedTuple

from headway.count import CostModel, Workload, drivers
from headway.count.activations import SavedActivations
from headway.count.rows import Row
from headway.count.units import chosen_blocks, head_features, remembered, unit_names, unit_of_tower
from headway.packing.mesh import MeshShape
from headway.predict.activations import FLOAT32, attentions
from headway.predict.communication import Exchange, Exchanges, Phase
from headway.predict.recipe import Sharing, State
from headway.predict.weights import Holding, rows_of, units_of


def exchanges_of(
    cost_model: CostModel,
    saved: SavedActivations,
    pack: Workload,
    state: State,
    sharing: Sharing,
    shape: MeshShape,
    ranks_of_token: int | None = None,
) -> Exchanges:
    """List the exchanges of a process for a pack.

    Args:
        cost_model: of the model, with what is frozen frozen and adapters in place.
        saved: what autograd saves of it, by which blocks are known.
        pack: a micro-batch, of which the processes of a sequence group each take a share.
        state: dtypes, and what is computed again.
        sharing: of the model among processes.
        shape: the mesh that they form.
        ranks_of_token: processes that a token is sent to where experts are spread; None for those that keep any of its
            experts.

    Raises:
        UsageError: `state.recompute` chooses no block.
    """
    chosen_blocks(state.recompute, cost_model, saved)  # raises an error if no block is chosen
    if not sharing.gathers:
        return Exchanges()
    # for weights alone
    computing = State(state.weight_bytes, state.compute_bytes, float8=state.float8, base=state.base)
    if sharing.sequence > 1 or sharing.expert > 1:
        computing = replace(computing, recompute=state.recompute)
    return _all_of(cost_model, saved, pack, computing, sharing, shape, ranks_of_token)


@remembered
def _all_of(
    cost_model: CostModel,
    saved: SavedActivations,
    pack: Workload,
    state: State,
    sharing: Sharing,
    shape: MeshShape,
    ranks_of_token: int | None,
) -> Exchanges:
    """List exchanges once for choices that differ in nothing that is exchanged."""
    order, gathered = _order_of(cost_model, saved, pack.patches > 0)
    again = gathered if sharing.reshard else frozenset()
    exchanges = [
        exchange for exchange in _of_weights(cost_model, saved, again, state, sharing, shape) if exchange.unit in order
    ]
    exchanges += _of_activations(cost_model, saved, pack, state, sharing, ranks_of_token)
    copied = sum(
        2 * exchange.num_bytes if exchange.kind == "all-gather" else exchange.num_bytes
        for exchange in exchanges
        if exchange.kind in ("all-gather", "reduce-scatter")
    )
    compute = _computed(cost_model, saved, pack)
    return Exchanges(tuple(e for e in exchanges if e.ranks > 1 or e.host_bytes), order, compute, copied)


@remembered
def _order_of(
    cost_model: CostModel, saved: SavedActivations, has_pictures: bool
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Units in the order of forward, and the units whose weights are gathered again for backward."""
    units = unit_names(cost_model, saved)
    runs = [has_pictures or not parameter.component.startswith("vision.") for parameter in cost_model.parameters]
    places = _Places(cost_model)
    order = sorted({unit for unit, there in zip(units, runs, strict=True) if there}, key=places.before)
    alive = _units_with_backward(cost_model, saved)
    return tuple(order), frozenset(_gathered_again(sorted(order, key=places.after), alive))


@remembered
def _computed(cost_model: CostModel, saved: SavedActivations, pack: Workload) -> Counter[str]:
    """FLOPs of each unit's forward."""
    units = {driver: drivers.parse_driver(driver)(pack) for driver in {row.driver for row in cost_model.rows}}
    compute: Counter[str] = Counter()
    for row in cost_model.rows:
        compute[_unit_of(row, cost_model, saved)] += row.forward * units[row.driver]
    return compute


@remembered
def _of_weights(
    cost_model: CostModel,
    saved: SavedActivations,
    again: frozenset[str],
    state: State,
    sharing: Sharing,
    shape: MeshShape,
) -> tuple[Exchange, ...]:
    """Gathers of weights and sums of gradients; spread experts have a mesh of their own."""
    exchanges: list[Exchange] = []
    for (unit, spread), weights in units_of(cost_model, saved, Holding.of(state, sharing)).items():
        ranks, stride = (shape.fsdp // shape.expert, shape.expert) if spread else (shape.fsdp, 1)
        # offloaded weights come to the device in their own precision, a slice for each process
        copied = weights.stored // ranks if sharing.offload else 0
        gather = Exchange("all-gather", unit, "forward", weights.gathered, ranks, stride, host_bytes=copied)
        exchanges.append(gather)
        if unit in again:
            exchanges.append(replace(gather, phase="backward"))
        summed, once = weights.summing, not sharing.reduce_each_pack
        if summed:
            gradients = summed // sharing.reduce_bytes * state.weight_bytes // ranks if sharing.offload else 0
            summing = Exchange("reduce-scatter", unit, "backward", summed, ranks, stride, once=once)
            exchanges.append(replace(summing, host_bytes=gradients))
            part = summed // ranks
            exchanges.append(Exchange("all-reduce", unit, "backward", part, shape.replicate, shape.fsdp, once=once))
    return tuple(exchanges)


def _of_activations(
    cost_model: CostModel,
    saved: SavedActivations,
    pack: Workload,
    state: State,
    sharing: Sharing,
    ranks_of_token: int | None,
) -> Iterator[Exchange]:
    """List all-to-alls of shared packs and spread experts: forward, again where recomputed, and backward."""
    again, alive = chosen_blocks(state.recompute, cost_model, saved), _units_with_backward(cost_model, saved)

    def through(
        unit: str,
        forward: int,
        backward: int,
        ranks: int,
        size: int = state.compute_bytes,
        concurrent_flops: float = 0.0,
    ) -> Iterator[Exchange]:
        """List an all-to-all of forward, its repetition in a recomputed block, and its counterpart in backward.

        `forward` and `backward` are the numbers of values of `size` bytes that a process sends in each;
        `concurrent_flops` are those of forward that run meanwhile.
        """
        phases: list[tuple[Phase, int]] = [("forward", forward)]
        if unit in alive:
            phases.extend([("backward", backward)] if backward else [])
            phases.extend([("backward", forward)] if unit in again else [])
        for phase, numbers in phases:
            yield Exchange(
                "all-to-all", unit, phase, numbers * size, ranks, waits=True, concurrent_flops=concurrent_flops
            )

    # shared packs (Ulysses): tokens for heads before attention, heads for tokens behind it
    if sharing.sequence > 1:
        for attention in attentions(cost_model, saved, state.compute_bytes):
            unit = cost_model.merge_group if attention.driver.startswith("patches") else 1
            sent = attention.sent(pack, sharing.sequence, unit)
            yield from through(attention.block, sent["tokens for heads"], sent["gradients of heads"], sharing.sequence)
            yield from through(attention.block, sent["heads for tokens"], sent["gradients of tokens"], sharing.sequence)
        merged = 0 if cost_model.has_latents else _merged_width(cost_model)  # a patch's token is where the patch is
        if merged and pack.patches:  # every process is given all visual tokens, and gradients come back
            tokens = pack.patches // cost_model.merge_group
            local = -(-tokens // sharing.sequence)
            yield from through("(vision)", local * merged * sharing.sequence, tokens * merged, sharing.sequence)
    # spread experts: a token's hidden state to each process that keeps any of its experts, and their sums back
    if sharing.expert > 1:
        slots = -(-pack.slots // sharing.sequence)
        for layer in _expert_layers(cost_model):
            ranks = ranks_of_token or distinct_ranks(layer.experts, layer.chosen, sharing.expert)
            values = round(slots * ranks) * layer.width
            items, concurrent = slots * layer.chosen, float(layer.shared * pack.slots)
            yield from through(layer.block, values, values, sharing.expert, concurrent_flops=concurrent)
            # with it go the weights of its experts, in float32, and which of a process' experts they are
            yield from through(layer.block, items, items, sharing.expert, FLOAT32, concurrent)
            yield from through(layer.block, items, 0, sharing.expert, FLOAT32, concurrent)
            yield from through(layer.block, values, values, sharing.expert)


def _merged_width(cost_model: CostModel) -> int:
    """Values that mergers make of each visual token, deep features included."""
    modules: dict[str, Row] = {}
    for row in cost_model.rows:
        if row.component == "vision.merger" and row.features:
            modules[row.module.rpartition(".")[0]] = row  # the last one of each merger
    return sum(row.features[1] for row in modules.values() if row.features)


def distinct_ranks(experts: int, chosen: int, ranks: int) -> float:
    """Expect the number of ranks that keep any of a token's experts, where each choice of experts is as likely.

    A rank keeps L = E / P of E experts. Of the C(E, K) choices of K experts, C(E - L, K) leave it out (hypergeometric
    distribution), so P (1 - C(E - L, K) / C(E, K)) of P ranks are expected. Routers that prefer experts, or choose
    among groups of them, send less.

    Args:
        experts: of a layer; `ranks` divides them.
        chosen: by a token.
        ranks: that the experts are spread over.

    >>> round(distinct_ranks(128, 8, 8), 2)
    5.34
    >>> distinct_ranks(128, 8, 1), distinct_ranks(8, 8, 4)
    (1.0, 4.0)
    """
    return ranks * (1 - comb(experts - experts // ranks, chosen) / comb(experts, chosen))


class _ExpertLayer(NamedTuple):
    """A layer of experts."""

    block: str  # block that holds it
    experts: int  # experts of the layer
    chosen: int  # experts of a token
    width: int  # values of a hidden state
    shared: int  # FLOPs a token of shared experts, which hide the exchange of routed ones


@remembered
def _expert_layers(cost_model: CostModel) -> list[_ExpertLayer]:
    """List a model's layers of experts; rows of a cost model are in the order in which they run."""
    features = head_features(cost_model)
    width, rows = features[0] if features else 0, rows_of(cost_model)
    places = {row.module: (number, row.block) for number, row in enumerate(cost_model.rows) if row.op == "experts"}
    layers = []
    for module, (place, block) in places.items():
        parameter = next((p for p in cost_model.parameters if p.name.startswith(f"{module}.")), None)
        if parameter is None:
            continue
        count, parent = rows.count(parameter), module.rpartition(".")[0]
        # Rows that the block calls behind its experts, as long as they are of the block's other parts.
        flops_of_part: Counter[str] = Counter()
        last: dict[str, int] = {}  # width that each part gives
        for row in cost_model.rows[place + 1 :]:
            if not row.module.startswith(f"{parent}."):
                break
            part = row.module.removeprefix(f"{parent}.").partition(".")[0]
            flops_of_part[part] += row.forward
            last[part] = row.features[1] if row.features else 0
        shared = [flops for part, flops in flops_of_part.items() if last[part] == width]
        chosen = count * parameter.active // parameter.numel
        layers.append(_ExpertLayer(block, count, chosen, width, shared[0] if len(shared) == 1 else 0))
    return layers


@remembered
def _units_with_backward(cost_model: CostModel, saved: SavedActivations) -> set[str]:
    """Units that have a backward: a parameter in the unit, or in a unit before it, is trained."""
    trained = cost_model.trained
    alive = {
        _unit_of(row, cost_model, saved)
        for row in cost_model.rows
        if any(gradient.runs(trained) for gradient in row.gradients)
    }
    learning = {
        unit
        for unit, parameter in zip(unit_names(cost_model, saved), cost_model.parameters, strict=True)
        if parameter.trainable
    }
    return alive | learning


def _unit_of(row: Row, cost_model: CostModel, saved: SavedActivations) -> str:
    if row.block in saved.blocks and row.block:
        return row.block
    if row.component == "language.head":
        return "(head)"
    return unit_of_tower(row.component, cost_model)


def _gathered_again(order: Sequence[str], alive: set[str]) -> set[str]:
    """Units whose weights are gathered again for backward: units with a backward, and the unit that FSDP2 prefetches.

    Args:
        order: units as their forwards end.
        alive: units whose backward runs.
    """
    fetched = {before for before, unit in pairwise(order) if unit in alive}
    return (alive & {*order} | fetched) - {"(root)", "(head)"}


class _Places:
    """Order of units in forward: the embedding, a vision tower with its blocks, the language model's, the head."""

    def __init__(self, cost_model: CostModel) -> None:
        self._first: dict[str, tuple[int, int]] = {}
        for number, row in enumerate(cost_model.rows):
            self._first.setdefault(row.block, (3 if row.component.startswith("vision.") else 5, number))

    def before(self, unit: str) -> tuple[int, int]:
        """Place of its beginning: the root holds all, and a tower its blocks."""
        return {"(root)": (0, 0), "(embedding)": (1, 0), "(vision)": (2, 0), "(head)": (6, 0)}.get(
            unit, self._first.get(unit, (5, 0))
        )

    def after(self, unit: str) -> tuple[int, int]:
        """Place of its end."""
        return {"(root)": (7, 0), "(vision)": (4, 0)}.get(unit, self.before(unit))
