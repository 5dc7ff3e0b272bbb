"""Choose the least recomputation with which the activations that blocks keep fit a budget."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from headway.count import CostModel, Workload, drivers
from headway.count.activations import SavedActivations
from headway.count.recompute import KINDS, as_choice, can_keep, result_kind
from headway.count.units import remembered
from headway.errors import PlanError
from headway.predict.activations import BlockBytes, block_bytes
from headway.report import format_bytes


@dataclass(frozen=True, slots=True)
class BlockFlops:
    """FLOPs of a pack that recomputing one block runs again, by kind; `never_kept` are saved by no recomputed block."""

    attention: int = 0
    projections: int = 0
    mlp: int = 0
    never_kept: int = 0

    def again(self, kinds: Collection[str] = ()) -> int:
        """FLOPs that still run again where some kinds are kept."""
        others: int = sum(getattr(self, kind) for kind in KINDS if kind not in kinds)
        return self.never_kept + others


@remembered
def block_flops(cost_model: CostModel, pack: Workload) -> dict[str, BlockFlops]:
    """Count the FLOPs that recomputing each block of the backward runs again, by name.

    Args:
        cost_model: of the model, with what is frozen frozen.
        pack: one micro-batch.
    """
    amounts = {driver: drivers.parse_driver(driver)(pack) for driver in {row.driver for row in cost_model.rows}}
    flops: dict[str, Counter[str]] = {name: Counter() for name in cost_model.blocks_in_backward}
    for row in cost_model.rows:
        if row.recomputed and row.block in flops:
            kind = result_kind(row)
            flops[row.block][kind if kind in KINDS else "never_kept"] += row.forward * amounts[row.driver]
    return {name: BlockFlops(**parts) for name, parts in flops.items()}


@remembered
def least_within(
    cost_model: CostModel,
    saved: SavedActivations,
    pack: Workload,
    budget_bytes: int,
    *,
    fused: bool,
    compute_bytes: int,
    sequence: int = 1,
    inputs_on_host: bool = False,
) -> str:
    """Name the choice of `least_recomputed` for a model, in the form that `CostModel.count` takes.

    Args:
        cost_model: as for `block_bytes`, like the others.
        saved: what autograd saves of the model.
        pack: the largest micro-batch.
        budget_bytes: what blocks may hold [bytes].
        fused: whether blocks are compiled or run on fused kernels.
        compute_bytes: of a number that a product gives.
        sequence: processes that share the pack.
        inputs_on_host: whether what enters recomputed blocks waits in the host's memory.

    Raises:
        PlanError: all blocks recomputed are not enough.
    """
    sizes = block_bytes(cost_model, saved, pack, fused=fused, compute_bytes=compute_bytes, sequence=sequence)
    fetched: dict[str, BlockBytes] = {}
    if inputs_on_host:  # but for the one that is fetched while the block behind it is computed again
        fetched = {"": BlockBytes(*[max((size.entry for size in sizes.values()), default=0)] * 2)}
        sizes = {name: replace(size, entry=0) for name, size in sizes.items()}
    flops = block_flops(cost_model, pack)
    # kinds that the model has, those first that save the most FLOPs for a byte; sets that can be told from the rest
    worth = {
        kind: Fraction(sum(getattr(flops[name], kind) for name in sizes), num_bytes)
        for kind in KINDS
        if (num_bytes := sum(getattr(size, kind) for size in sizes.values()))
    }
    order = sorted(worth, key=lambda kind: -worth[kind])
    prefixes = [frozenset(order[:count]) for count in range(len(order) + 1)]
    levels = [kinds for kinds in prefixes if can_keep(cost_model.rows, list(sizes), kinds)]
    return as_choice(least_recomputed({**sizes, **fetched}, flops, levels, budget_bytes))


def most_kept(blocks: Mapping[str, BlockBytes], recomputed: Mapping[str, Collection[str]]) -> int:
    """Add up the bytes of blocks as backward enters the largest recomputed block, which is made again [bytes]."""
    sizes = {name: blocks[name].kept(kinds) for name, kinds in recomputed.items()}
    again = max((blocks[name].saved - size for name, size in sizes.items()), default=0)
    return sum(sizes.get(name, block.saved) for name, block in blocks.items()) + again


def least_recomputed(
    blocks: Mapping[str, BlockBytes],
    flops: Mapping[str, BlockFlops],
    levels: Sequence[frozenset[str]],
    budget_bytes: int,
) -> dict[str, frozenset[str]]:
    """Choose blocks to recompute so that `most_kept` is within a budget and few FLOPs run again.

    Greedy: all is recomputed at first. Then the step that saves the most FLOPs for a byte goes first, for as many
    blocks as fit, spread evenly over their tower: to keep the results of a kind more, or to leave a block alone.

    Args:
        blocks: bytes of each, by name.
        flops: that recomputing each runs again.
        levels: kinds that may be kept together, from none to most, each with those of the one before.
        budget_bytes: what the blocks may hold [bytes].

    Returns:
        By the name of each recomputed block, the kinds that are kept of it; in the order of `blocks`.

    Raises:
        PlanError: all blocks recomputed, with nothing kept, are not enough.

    >>> layers = {f"layers.{i}": BlockBytes(saved=100, entry=10, attention=5) for i in range(4)}
    >>> again = dict.fromkeys(layers, BlockFlops(attention=50, never_kept=90))
    >>> least_recomputed(layers, again, [frozenset()], budget_bytes=320)
    {'layers.0': frozenset(), 'layers.2': frozenset()}
    """
    chosen = {name: levels[0] for name, block in blocks.items() if block.saved > block.entry}
    if most_kept(blocks, chosen) > budget_bytes:
        raise PlanError(
            f"with all blocks recomputed, the largest pack still holds {format_bytes(most_kept(blocks, chosen))} of "
            f"activations on a device, more than the {format_bytes(budget_bytes)} that are allowed. Allow more, lower "
            "data.tokens_per_pack or data.patches_per_pack, or raise parallel.sequence."
        )
    # blocks of one tower that are alike take the same steps
    alike: dict[tuple[str, BlockBytes, BlockFlops], list[str]] = {}
    for name in chosen:
        alike.setdefault((name.rpartition(".")[0], blocks[name], flops[name]), []).append(name)
    steps = [(step, names) for (_, size, again), names in alike.items() for step in _steps(size, again, levels)]
    for step, names in sorted(steps, key=lambda pair: -pair[0].worth):
        candidates = [name for name in names if name in chosen and chosen[name] == step.low]
        for name in _spread(candidates, _most_that_fit(blocks, chosen, candidates, step, budget_bytes)):
            if step.high is None:
                del chosen[name]
            else:
                chosen[name] = step.high
    return {name: chosen[name] for name in blocks if name in chosen}


@dataclass(frozen=True, slots=True)
class _Step:
    """Step from the kept kinds of a recomputed block to more kinds, or to a block that is left alone."""

    low: frozenset[str]
    high: frozenset[str] | None
    worth: float  # FLOPs saved for a byte


def _steps(size: BlockBytes, again: BlockFlops, levels: Sequence[frozenset[str]]) -> Iterator[_Step]:
    """List the steps of one block, each worth less than the one before."""
    ladder = [*((size.kept(kinds), again.again(kinds), kinds) for kinds in levels), (size.saved, 0, None)]
    place = 0
    while place < len(ladder) - 1:
        num_bytes, num_flops, low = ladder[place]
        worths = [
            (num_flops - other[1]) / (other[0] - num_bytes) if other[0] > num_bytes else math.inf
            for other in ladder[place + 1 :]
        ]
        place += 1 + worths.index(max(worths))
        assert low is not None  # None stands at the end of the ladder alone
        yield _Step(low, ladder[place][2], max(worths))


def _most_that_fit(
    blocks: Mapping[str, BlockBytes],
    chosen: Mapping[str, frozenset[str]],
    candidates: Sequence[str],
    step: _Step,
    budget_bytes: int,
) -> int:
    """Find how many of some blocks that are alike can take a step within the budget."""
    if not candidates:
        return 0
    size = blocks[candidates[0]]
    low, high = size.kept(step.low), size.saved if step.high is None else size.kept(step.high)
    before = sum(block.kept(chosen[name]) if name in chosen else block.saved for name, block in blocks.items())
    others = [blocks[name].saved - blocks[name].kept(chosen[name]) for name in chosen.keys() - {*candidates}]
    for count in range(len(candidates), 0, -1):
        # one block is made again: another, one that stays where it is, or one that has taken the step
        again = max([*others, size.saved - high, size.saved - low if count < len(candidates) else 0])
        if before + count * (high - low) + again <= budget_bytes:
            return count
    return 0


def _spread(names: Sequence[str], count: int) -> list[str]:
    """Pick so many of a tower's blocks, evenly."""
    return [names[(i + 1) * len(names) // count - 1] for i in range(count)]
