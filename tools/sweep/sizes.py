"""Hold what conventions read off a configuration against the ledger that was traced from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headway.conventions.reading import architecture, decoder
from headway.errors import UnknownModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headway.conventions.architecture import Architecture
    from headway.count.cost_model import CostModel
    from tools.sweep.witness import Mixture


@dataclass(frozen=True)
class Reading:
    """What became of reading one model's sizes.

    Attributes:
        status: `agrees` with the ledger; `refuses`, so that no formula has a number; or `disagrees`.
        detail: the reason, "" where it agrees.
    """

    status: Literal["agrees", "refuses", "disagrees"]
    detail: str = ""


def read_sizes(
    config: Mapping[str, Any], name: str, cost: CostModel, mixtures: Sequence[Mixture], *, alone: bool
) -> Reading:
    """Read a configuration as conventions do, and compare layers, masks, experts and MLPs with the ledger's.

    Args:
        config: the content of a `config.json`.
        name: of the model.
        cost: traced from it.
        mixtures: its modules of experts, by the second witness.
        alone: whether conventions get the configuration only, or the ledger too.
    """
    try:
        read = architecture(config, name, None if alone else cost)
    except UnknownModelError as error:
        return Reading("refuses", str(error))
    if read.unread or read.recurrent:
        return Reading("refuses", read.unread or "it has recurrent layers, which these rules are not kept for")
    differences = [
        f"{what} {ours} for {theirs}" for what, (ours, theirs) in _facts(read, cost, mixtures).items() if ours != theirs
    ]
    return Reading("disagrees", "; ".join(differences)) if differences else Reading("agrees")


def _facts(read: Architecture, cost: CostModel, mixtures: Sequence[Mixture]) -> dict[str, tuple[Any, Any]]:
    """Put what was read beside what the ledger has."""
    ledger = decoder(cost)
    spoken = [mixture for mixture in mixtures if mixture.driver == "tokens"]
    feed_forward = ledger.feed_forward
    if read.shared_ffn and feed_forward - read.moe_layers * read.hidden == read.feed_forward_weights:
        feed_forward = read.feed_forward_weights  # the gate of a shared expert, one feature wide, is in no size
    return {
        "layers with attention": (read.layers, len(ledger.masks)),
        "windows": (read.windows, ledger.windows),
        "chunks": (read.chunks, ledger.chunks),
        "layers with experts": (read.moe_layers, len({mixture.module for mixture in spoken})),
        "experts and picks": (
            {(read.num_experts, read.top_k)} if read.moe_layers else set(),
            {(mixture.experts, mixture.picks) for mixture in spoken},
        ),
        "weights of MLPs, experts and routers": (read.feed_forward_weights, feed_forward),
        "features of a query-key pair": (read.layers * read.heads * (read.qk_dim + read.v_dim), ledger.pair_features),
    }
