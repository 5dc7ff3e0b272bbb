"""Choose what to recompute, as little as possible, so that what blocks keep from forward to backward fits a budget."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway.count import CostModel, Workload
from headway.count.activations import SavedActivations, bytes_of
from headway.count.recompute import as_choice
from headway.count.units import remembered
from headway.errors import PlanError
from headway.report import format_bytes


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Activations that one block keeps from forward to backward [bytes]."""

    saved: int  # all of them, where it is not recomputed
    entry: int  # where it is: what enters it
    attention: int = 0  # kept beside the entry where attention does not run again

    def kept(self, keeps_attention: bool) -> int:
        """Bytes that it keeps where it is recomputed."""
        return min(self.saved, self.entry + (self.attention if keeps_attention else 0))


@remembered
def block_bytes(
    cost_model: CostModel, saved: SavedActivations, pack: Workload, *, fused: bool, sequence: int = 1
) -> dict[str, BlockBytes]:
    """List the activations that each block of the backward keeps on one device, by name.

    Args:
        cost_model: of the model, with what is frozen frozen.
        saved: what autograd saves of it, in the precision of its forward.
        pack: one micro-batch.
        fused: whether blocks are compiled or run on fused kernels.
        sequence: processes that share the pack.
    """
    alive = cost_model.blocks_in_backward
    sizes: dict[int, BlockBytes] = {}  # blocks of one stack are mostly one object
    for block in saved.blocks.values():
        if id(block) not in sizes:
            parts = (block.fused if fused else block.plain, block.entry, block.attention)
            sizes[id(block)] = BlockBytes(*(-(-bytes_of(rows, pack) // sequence) for rows in parts))
    return {name: sizes[id(block)] for name, block in saved.blocks.items() if name and name in alive}


@remembered
def least_within(
    cost_model: CostModel,
    saved: SavedActivations,
    pack: Workload,
    budget_bytes: int,
    *,
    fused: bool,
    sequence: int = 1,
) -> str:
    """Name the blocks that `least_recomputed` chooses of a model, as `CostModel.count` takes them.

    Args:
        cost_model: as for `block_bytes`, like the others.
        saved: what autograd saves of the model.
        pack: the largest micro-batch.
        budget_bytes: what blocks may hold [bytes].
        fused: whether blocks are compiled or run on fused kernels.
        sequence: processes that share the pack.

    Raises:
        PlanError: all blocks recomputed are not enough.
    """
    return as_choice(
        least_recomputed(block_bytes(cost_model, saved, pack, fused=fused, sequence=sequence), budget_bytes)
    )


def most_kept(blocks: Mapping[str, BlockBytes], recomputed: Mapping[str, bool]) -> int:
    """The most that blocks hold at a time: what all keep, and what the largest recomputed one makes again [bytes]."""
    entries = {name: blocks[name].kept(keeps) for name, keeps in recomputed.items()}
    again = max((blocks[name].saved - size for name, size in entries.items()), default=0)
    return sum(entries.get(name, block.saved) for name, block in blocks.items()) + again


def least_recomputed(blocks: Mapping[str, BlockBytes], budget_bytes: int) -> dict[str, bool]:
    """Choose the least to recompute with which `most_kept` is within a budget.

    That is the fewest blocks, and attention not at all. Where all blocks without their attention are not enough,
    attention is recomputed too, in the fewest blocks. Both are spread evenly over their tower; towers whose blocks
    free the most come first.

    Returns:
        By the name of each recomputed block, whether its attention is kept; in the order of `blocks`.

    Raises:
        PlanError: all blocks recomputed, with attention, are not enough.

    >>> layers = {f"layers.{i}": BlockBytes(saved=100, entry=10, attention=5) for i in range(4)}
    >>> least_recomputed(layers, budget_bytes=320)
    {'layers.1': True, 'layers.3': True}
    """
    # stacks of blocks, those first that free the most per block; blocks that free nothing are left as they are
    towers: dict[str, list[str]] = {}
    for name, block in blocks.items():
        if block.saved > block.entry:
            towers.setdefault(name.rpartition(".")[0], []).append(name)
    order = sorted(towers.values(), key=lambda names: -_mean([blocks[n].saved - blocks[n].kept(True) for n in names]))
    all_blocks = [name for names in order for name in names]
    # block by block, attention kept, until it fits
    for chosen in _growing(order):
        if most_kept(blocks, dict.fromkeys(chosen, True)) <= budget_bytes:
            return {name: True for name in blocks if name in set(chosen)}
    # A tower of small blocks may be enough where the larger ones would make more again at a time than they free.
    fitting = []
    for towers_in_turn in itertools.permutations(order):
        for chosen in _growing(towers_in_turn):
            recomputed = {name: name not in chosen for name in all_blocks}
            if most_kept(blocks, recomputed) <= budget_bytes:
                fitting.append(recomputed)
                break
    if fitting:
        best = max(fitting, key=lambda recomputed: sum(recomputed.values()))
        return {name: best[name] for name in blocks if name in best}
    raise PlanError(
        f"with all blocks recomputed, the largest pack still holds "
        f"{format_bytes(most_kept(blocks, dict.fromkeys(all_blocks, False)))} of activations on a device, more than "
        f"the {format_bytes(budget_bytes)} that are allowed. Allow more, lower data.tokens_per_pack or "
        "data.patches_per_pack, or raise parallel.sequence."
    )


def _growing(towers: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Choices of more and more blocks, tower after tower, each spread evenly."""
    before: list[str] = []
    yield before
    for names in towers:
        for count in range(1, len(names) + 1):
            yield before + [names[(i + 1) * len(names) // count - 1] for i in range(count)]
        before = [*before, *names]


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
