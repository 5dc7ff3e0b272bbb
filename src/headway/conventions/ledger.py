"""Facts of a decoder in a traced ledger: the mask of each layer, and how many weights a token meets.

The ledger was read off the code that runs, so it settles what a configuration leaves to its class, and shows where the
sizes of a configuration do not make the model.
"""

from dataclasses import dataclass

from headway.count import drivers
from headway.count.adapters import is_adapter
from headway.count.cost_model import CostModel
from headway.count.rows import Row

# drivers of the weights that a text token meets; where blocks exist twice, of the copy for text
_OF_TEXT = ("tokens", "understood", "supervised")
_FEED_FORWARD = frozenset({"language.mlp", "language.experts", "language.router"})


@dataclass(frozen=True, slots=True)
class Decoder:
    """A language model's layers, as traced."""

    masks: tuple[str, ...]  # the driver of each attention, in the order of the layers, such as "pairs:sliding:4096"
    projections: int  # matrix elements of all attention projections that one token meets
    feed_forward: int  # matrix elements of MLPs, active experts, shared experts and routers
    head: int  # matrix elements of the head
    pair_features: int  # features that one query-key pair multiplies, query-key and value heads, over all layers
    expert_layers: int = 0  # modules of routed experts
    experts: int = 0  # elements of all routed experts
    active_experts: int = 0  # elements of the experts that one token is routed to

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer [tokens], None where there is none."""
        return tuple(_length(mask, "pairs:sliding:") for mask in self.masks)

    @property
    def chunks(self) -> tuple[int | None, ...]:
        """Chunk that each layer's attention stays in [tokens], None where there is none."""
        return tuple(_length(mask, "pairs:chunked:") for mask in self.masks)


def decoder(cost_model: CostModel) -> Decoder:
    """Sum up the rows of a cost model's language model; adapters are left out."""
    rows = [row for row in cost_model.rows if row.component.startswith("language.")]
    attention = [row for row in rows if row.op == "attention" and drivers.tower(row.driver) == "language"]
    masks = {row.module: row.driver for row in attention}
    routed = {row.module for row in rows if row.op == "experts" and row.driver == "tokens"}
    experts = [p for p in cost_model.parameters if _is_inside(p.name, routed)]
    return Decoder(
        tuple(masks.values()),
        sum(_weights(row) for row in rows if row.component == "language.projections"),
        sum(_weights(row) for row in rows if row.component in _FEED_FORWARD),
        sum(_weights(row) for row in rows if row.component == "language.head"),
        sum(row.forward for row in attention) // 2,
        len(routed),
        sum(p.numel for p in experts),
        sum(p.active for p in experts),
    )


def linear_weights(cost_model: CostModel) -> int:
    """Matrix elements of the language model's linear modules, head included and adapters left out."""
    rows = (row for row in cost_model.rows if row.op == "linear" and row.component.startswith("language."))
    return sum(_weights(row) for row in rows)


def _weights(row: Row) -> int:
    """Matrix elements that one token of text meets; 0 for rows that are not counted by tokens."""
    return 0 if row.driver not in _OF_TEXT or is_adapter(row.module) else row.forward // 2


def _is_inside(name: str, modules: set[str]) -> bool:
    while name and modules:
        name = name.rpartition(".")[0]
        if name in modules:
            return True
    return False


def _length(mask: str, prefix: str) -> int | None:
    return int(mask.removeprefix(prefix)) if mask.startswith(prefix) else None
