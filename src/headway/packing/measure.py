"""Quality of a plan: how full packs are, how equal ranks, how well mixed steps, and how long planning takes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.packing.balanced import sums_of
from headway.packing.budget import Budget
from headway.packing.items import Items
from headway.packing.order import Order, key_of, shuffled
from headway.packing.plan import Plan, PlannedStep
from headway.packing.steps import rank_costs

Floats = NDArray[np.float64]

_RANDOM_PACKINGS = 8  # over which the spread of random packing is averaged
_BASELINE = 0x4D  # makes the shuffles of random packing other ones than the plan's own


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Statistics of a plan: of its packs, its steps and the ranks that share them.

    The last step of one pass is rarely full, so `fill`, `balance`, `mixing`, `step_flops` and `straggler_loss` are
    taken over all steps but that one; `last_step_fill` tells how full it is.

    Attributes:
        strategy: name of the packing strategy.
        samples: items that were planned.
        tokens: tokens in all packs [tokens].
        packs: packs made.
        steps: optimizer steps.
        fill: tokens in packs over their token budget, a fraction.
        balance: mean over steps of mean / max FLOPs over ranks, a fraction.
        mixing: standard deviation over steps of the token-weighted mean segment length, over that of random packing; 1
            is as random, more means that some steps hold only long samples and others only short ones.
        us_per_sample: processor time of planning, which runs on one thread [us].
        step_flops: mean useful FLOPs of a step over all ranks [FLOP].
        straggler_loss: share of the ranks' time spent waiting for the one with the most FLOPs, a fraction.
        padding_loss: share of slots that would be padding if each pack were a padded batch instead, every sample as
            long as the pack's longest, a fraction.
        last_step_fill: fill of the last step, a fraction; None where it is the only one.
    """

    strategy: str
    samples: int
    tokens: int
    packs: int
    steps: int
    fill: float
    balance: float
    mixing: float
    us_per_sample: float
    step_flops: float
    straggler_loss: float
    padding_loss: float
    last_step_fill: float | None

    @property
    def waste(self) -> float:
        """Share of the packs' token budget that stays empty, a fraction; it costs memory alone, as packs are flat."""
        return 1 - self.fill

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return {**asdict(self), "waste": self.waste}


def measure(plan: Plan, ranks: int) -> tuple[PlanReport, Floats]:
    """Run through a plan whose order ends, and report on its steps.

    Args:
        plan: the plan.
        ranks: data-parallel ranks; the packs of a step are dealt to them.

    Returns:
        The report, and the fill of every pack but the last step's, a fraction, shape (packs,).

    Raises:
        ConfigError: an order without an end, or packs per step that the ranks cannot share.
    """
    length = plan.order.length
    if length is None or length < 1:
        raise ConfigError("This order is empty or never ends, so it cannot be measured. Give the order epochs.")
    if ranks < 1 or plan.packs_per_step % ranks:
        raise ConfigError(f"{plan.packs_per_step} packs per step cannot be shared by {ranks} ranks in equal parts.")
    start_s = time.process_time()
    planned = [step for step, _ in plan.steps()]
    cpu_s = time.process_time() - start_s
    return report_on(planned, plan.items, plan.order, plan.budget, ranks, plan.strategy, cpu_s)


def report_on(
    planned: Sequence[PlannedStep],
    items: Items,
    order: Order,
    budget: Budget,
    ranks: int,
    strategy: str,
    cpu_s: float,
) -> tuple[PlanReport, Floats]:
    """Report on steps of packs, made by a `Plan` or by another packer.

    Args:
        planned: all steps of one pass.
        items: the items that the packs' numbers stand for.
        order: the order that was packed; it ends.
        budget: limits of a pack.
        ranks: data-parallel ranks; the packs of a step are dealt to them.
        strategy: name of the packer.
        cpu_s: processor time of packing [s].

    Returns:
        As for `measure`.
    """
    length = order.length or 0
    steps = [_StepNumbers.of(step, items) for step in planned]
    full_steps = steps[:-1] or steps
    tokens_SP = np.array([step.pack_tokens for step in full_steps])
    per_rank = rank_costs(np.array([step.costs for step in planned[: len(full_steps)]]), ranks)
    heaviest, mean = per_rank.max(axis=1), per_rank.mean(axis=1)
    report = PlanReport(
        strategy=strategy,
        samples=length,
        tokens=sum(int(step.pack_tokens.sum()) for step in steps),
        packs=sum(int((step.pack_tokens > 0).sum()) for step in steps),
        steps=len(steps),
        fill=float(tokens_SP.mean()) / budget.tokens,
        balance=float((mean / heaviest).mean()),
        mixing=_mixing(np.array([step.mean_segment for step in full_steps]), order, items.tokens),
        us_per_sample=1e6 * cpu_s / length,
        step_flops=float(per_rank.sum(axis=1).mean()),
        straggler_loss=1 - float(mean.sum() / heaviest.sum()),
        padding_loss=1 - float(sum(step.pack_tokens.sum() for step in steps)) / sum(step.padded for step in steps),
        last_step_fill=float(steps[-1].pack_tokens.mean()) / budget.tokens if len(steps) > 1 else None,
    )
    return report, tokens_SP.reshape(-1) / budget.tokens


@dataclass(frozen=True, slots=True)
class _StepNumbers:
    pack_tokens: Floats
    mean_segment: float  # token-weighted: of the segment that a random token lies in
    padded: int  # slots of a padded batch for each pack

    @classmethod
    def of(cls, step: PlannedStep, items: Items) -> "_StepNumbers":
        sizes = np.array([len(pack) for pack in step.packs])
        tokens = items.tokens[np.concatenate(step.packs)].astype(np.float64)
        pack_of = np.repeat(np.arange(len(sizes)), sizes)
        longest = np.zeros(len(sizes))
        np.maximum.at(longest, pack_of, tokens)
        return cls(
            sums_of(pack_of, tokens, len(sizes)),
            float((tokens * tokens).sum() / tokens.sum()),
            int((sizes * longest).sum()),
        )


def _mixing(mean_segments: Floats, order: Order, tokens: NDArray[Any]) -> float:
    """Relate the spread of the steps' mean segments to that of shuffled samples cut into as many steps."""
    num_steps = len(mean_segments)
    lengths = tokens[order.draw(0, order.length or 0)].astype(np.float64)
    spreads = [spread for spread in _random_spreads(lengths, num_steps, order.seed) if spread > 0]
    return float(mean_segments.std()) / (sum(spreads) / len(spreads)) if spreads else 1.0


def _random_spreads(lengths: Floats, num_steps: int, seed: int) -> Iterator[float]:
    for number in range(_RANDOM_PACKINGS):
        shuffle = lengths[shuffled(len(lengths), key_of(seed, _BASELINE, number))]
        reached = np.cumsum(shuffle)
        step_of = np.minimum((reached - shuffle) * num_steps // reached[-1], num_steps - 1).astype(np.int64)
        tokens = np.bincount(step_of, shuffle, num_steps)
        squares = np.bincount(step_of, shuffle * shuffle, num_steps)
        yield float((squares[tokens > 0] / tokens[tokens > 0]).std())
