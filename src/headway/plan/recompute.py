"""Choose the fewest blocks to recompute so that what the blocks keep from forward to backward fits a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.count.saved import bytes_of
from headway.errors import PlanError
from headway.report import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headway.count import CostModel, Workload
    from headway.count.saved import SavedActivations


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What one block keeps from forward to backward [bytes].

    Attributes:
        whole: where it is not recomputed.
        entry: where it is: what enters it.
    """

    whole: int
    entry: int


def block_bytes(
    cost_model: CostModel, saved: SavedActivations, pack: Workload, *, fused: bool, sequence: int = 1
) -> dict[str, BlockBytes]:
    """What each block that takes part in backward keeps on one device, by name.

    Args:
        cost_model: of the model, with what is frozen frozen.
        saved: what autograd saves of it, in the precision of its forward.
        pack: one micro-batch.
        fused: whether blocks are compiled or run on fused kernels.
        sequence: processes that share the pack.
    """
    trained = sum(1 << i for i, p in enumerate(cost_model.parameters) if p.trainable)
    alive = {row.block for row in cost_model.rows if any(g.needs & trained for g in row.gradients)}
    return {
        name: BlockBytes(
            -(-bytes_of(block.fused if fused else block.plain, pack) // sequence),
            -(-bytes_of(block.entry, pack) // sequence),
        )
        for name, block in saved.blocks.items()
        if name and name in alive
    }


def most_kept(blocks: Mapping[str, BlockBytes], recomputed: Iterable[str]) -> int:
    """The most that blocks hold at a time: what all keep, and what the largest recomputed one makes again [bytes]."""
    chosen = set(recomputed)
    kept = sum(block.entry if name in chosen else block.whole for name, block in blocks.items())
    return kept + max((blocks[name].whole - blocks[name].entry for name in chosen), default=0)


def fewest_recomputed(blocks: Mapping[str, BlockBytes], budget_bytes: int) -> tuple[str, ...]:
    """Choose the fewest blocks, spread evenly over their tower, so that `most_kept` is within a budget.

    Towers whose blocks free the most come first, so that few blocks are enough.

    Raises:
        PlanError: all of them together are not enough.

    >>> layers = {f"layers.{i}": BlockBytes(whole=100, entry=10) for i in range(4)}
    >>> fewest_recomputed(layers, budget_bytes=400), fewest_recomputed(layers, budget_bytes=310)
    ((), ('layers.1', 'layers.3'))
    """
    towers: dict[str, list[str]] = {}
    for name, block in blocks.items():
        if block.whole > block.entry:
            towers.setdefault(name.rpartition(".")[0], []).append(name)
    freed = {t: sum(blocks[n].whole - blocks[n].entry for n in names) / len(names) for t, names in towers.items()}
    before: list[str] = []
    for tower in sorted(towers, key=freed.__getitem__, reverse=True):
        names = towers[tower]
        for count in range(len(names) + 1):
            chosen = before + [names[(i + 1) * len(names) // count - 1] for i in range(count)]
            if most_kept(blocks, chosen) <= budget_bytes:
                return tuple(name for name in blocks if name in set(chosen))
        before += names
    least = most_kept(blocks, before)
    if least <= budget_bytes:  # where there is nothing to recompute
        return ()
    raise PlanError(
        f"with all blocks recomputed, the largest pack still holds {format_bytes(least)} of activations on a device, "
        f"more than the {format_bytes(budget_bytes)} that are allowed. Allow more, lower data.tokens_per_pack or "
        "data.patches_per_pack, or raise parallel.sequence."
    )
