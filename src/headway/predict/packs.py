"""Packs of a run before it starts, by the planner of training, over its samples' lengths or typical ones.

Lengths come from who calls, or from a recipe's plan section, enough for some steps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config import TrainConfig
from headway.count import CostModel, FlopCount, Workload
from headway.count.recompute import with_head
from headway.count.splits import branched
from headway.errors import ConfigError
from headway.packing import Budget, Items, Order, OverlongCounts, Plan, PlanReport
from headway.packing.budget import segments_within
from headway.packing.lengths import LengthTable
from headway.packing.measure import report_on
from headway.packing.mesh import MeshShape
from headway.packing.pieces import targets_within
from headway.predict.engine import HEADWAY, engine_named
from headway.predict.lengths import lengths_of, policies_of
from headway.predict.recipe import frozen_forward


@dataclass(frozen=True)
class Packs:
    """Packs planned over typical lengths."""

    lengths: str  # source of the lengths
    report: PlanReport  # fill, balance and mixing
    counts: OverlongCounts  # fate of over-long samples
    samples_per_pack: float  # mean number of segments in a pack
    most_tokens: int  # tokens of the fullest pack
    most_patches: int  # patches of the pack with the most
    padded: tuple[int, int]  # most tokens and patches of a pack if all its segments were as long as the longest
    mean_patches: float  # patches of a pack on average
    flops: FlopCount  # FLOPs of a mean step of all devices, by component
    epoch_tokens: int  # tokens of one pass over all samples that are used
    reference: FlopCount | None = None  # FLOPs of the forward of a model that does not learn, likewise
    headed: float = 1.0  # share of tokens that the head runs on

    @property
    def tokens_per_sample(self) -> float:
        """Tokens that are trained on for each sample of the data, left-out samples included in the number."""
        return self.epoch_tokens / self.counts.read

    def step_tokens(self, config: TrainConfig, shape: MeshShape) -> float:
        """Real tokens of a mean step, all devices together [tokens]."""
        ranks = shape.world_size // shape.sequence
        return self.report.fill * config.data.tokens_per_pack * ranks * config.optim.accumulation

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = ("lengths", "samples_per_pack", "most_tokens", "most_patches", "mean_patches")
        numbers = {name: getattr(self, name) for name in names}
        return {**numbers, **self.report.to_dict(), "overlong": self.counts.to_dict()}


def plan_packs(
    config: TrainConfig,
    cost_model: CostModel,
    shape: MeshShape,
    recompute: str,
    lengths: tuple[str, LengthTable] | None = None,
) -> Packs | None:
    """Plan the packs of some steps with the planner that training uses.

    Args:
        config: the recipe.
        cost_model: of its model, with what is frozen frozen.
        shape: how the devices share the work.
        recompute: blocks to compute again, as `CostModel.count` takes them.
        lengths: name and table of the samples' lengths; those of the recipe's plan section when None.

    Returns:
        None where there are no lengths.

    Raises:
        ConfigError: none of the lengths fits a pack, or too many samples would have to be planned.
        DataError: a sample exceeds a pack and the policy for those is "error".
    """
    named_lengths = lengths or lengths_of(config, cost_model, shape)
    if named_lengths is None:
        return None
    name, table = named_lengths
    cost_model = cost_model.with_splits() if table.branches else cost_model
    data, accumulation = config.data, config.optim.accumulation
    # the planner of training, over one epoch of these lengths
    budget = Budget(data.tokens_per_pack, data.patches_per_pack, data.samples_per_pack)
    ranks = shape.data_ranks
    # Each dataset has a policy of its own for samples that exceed a pack; of mere lengths nobody knows the dataset.
    parts = {name: part.table for name, part in table.parts.items()}
    # Headway's own head leaves out tokens without a label, where the lengths say which have one.
    skips = config.skips_unlabelled and table.places is not None and engine_named(config.plan.engine) is HEADWAY
    policies = policies_of(table, data.overlong_of_all)
    items, counts = Items.build(parts, budget, policies, cost_model, skips_unlabelled=skips)
    if not len(items):
        raise ConfigError(f"of the lengths {name} none fits a pack of {budget.tokens} tokens; raise it.")
    order = Order.epochs(items.sizes, 1, seed=data.seed)
    plan = Plan(items, order, budget, ranks * accumulation, strategy=data.strategy, accumulation=accumulation)
    steps = [step for step, _ in plan.steps()]
    report, _ = report_on(steps, items, order, budget, ranks, data.strategy, 0.0)
    # the last step of an epoch is short, and no mean step is like it
    full_steps = steps[:-1] or steps
    chosen = np.concatenate([pack for step in full_steps for pack in step.packs])
    origins = items.locate(chosen)
    numbered = [part.rows for part in table.parts.values()]  # rows of the table, dataset by dataset
    first = np.cumsum([0, *map(len, numbered[:-1])])
    rows = np.concatenate(numbered)[first[origins.source] + origins.row]
    assert table.grids is not None
    assert table.grid_rows is not None
    grids = table.grids[np.isin(table.grid_rows, rows)]
    # the FLOPs of all these packs, divided by their steps, are those of a mean step
    segments_N, splits_N = _segments_of(table, rows, origins.start, origins.stop)
    work = Workload(segments_N, images=grids, splits=splits_N, packs=len(full_steps) * ranks * accumulation)
    if skips:
        work = work.with_counts(logits=int(targets_within(table.targets, table.tokens, rows, *origins[2:4]).sum()))
    recompute = with_head(recompute) if config.weighs_losses else recompute
    count = cost_model.count(work, recompute=recompute).split(len(full_steps))[0]
    second = frozen_forward(config, cost_model)
    reference = None if second is None else second.cost_model.count(work).split(len(full_steps))[0]
    # the most tokens and the most patches need not be in one pack
    by_pack = [[sizes[pack] for step in full_steps for pack in step.packs] for sizes in (items.tokens, items.patches)]
    most = [max(int(sizes.sum()) for sizes in packs) for packs in by_pack]
    padded = [max(int(np.count_nonzero(sizes) * sizes.max(initial=0)) for sizes in packs) for packs in by_pack]
    num_packs = len(by_pack[0])
    segments, patches = len(chosen) / num_packs, float(items.patches[chosen].sum()) / num_packs
    epoch = int(items.tokens.sum())
    return Packs(
        name,
        report,
        OverlongCounts.of_all(counts.values()),
        segments,
        most[0],
        most[1],
        (padded[0], padded[1]),
        patches,
        count,
        epoch,
        reference,
        1.0 if work.logits is None else work.logits / work.tokens,
    )


def _segments_of(
    table: LengthTable, rows: NDArray[Any], start: NDArray[Any], stop: NDArray[Any]
) -> tuple[NDArray[Any] | list[int], list[list[tuple[str, int]]]]:
    """Segments [tokens] of pieces of samples, and their splits, as `Workload` takes them.

    A piece is tokens `start` to `stop` of the sample in a row of the table; each array has the shape (P,).
    """
    if not table.segments and not table.branches:  # a segment each: packs of many devices are tens of millions
        return stop - start, []
    lengths, splits = list[int](), list[list[tuple[str, int]]]()
    for row, first, end in zip(rows.tolist(), start.tolist(), stop.tolist(), strict=True):
        own = segments_within(table.segments_of(row), first, end) or (end - first,)
        lengths += own
        prompt, *answers = table.branches.get(row, [0])
        splits += [branched(prompt, answers)] if answers else [[] for _ in own]
    return lengths, splits if table.branches else []
