"""Lengths of the samples that packs are planned over: of a mix, a file, or samples in turn.

They are enough for some steps: a table with fewer samples is drawn from again.
"""

from pathlib import Path

import numpy as np

from headway.config import TrainConfig
from headway.count import CostModel
from headway.errors import ConfigError, PlanError
from headway.packing.budget import square_grid
from headway.packing.items import Overlong
from headway.packing.lengths import MIXES, LengthTable, read_lengths
from headway.packing.mesh import MeshShape
from headway.words import Argument

STEPS = 16
"""Optimizer steps that packs are planned for, as many as a plan's window has at least."""

MOST_SAMPLES = 50_000_000
"""Samples that are planned at most: two minutes, and 10 GB."""
FEWEST_STEPS = 2
"""Steps that are planned at least; a plan has one more, which is left out where samples run short."""
_FEW_STEPS = 4  # four balance ranks like 16: a step's time at 1,024 devices is within half a percent
_MANY_SAMPLES = 3_000_000  # for more steps than these few: some seconds, and 600 MB


def no_lengths() -> PlanError:
    """Make the error of a step that is to be predicted with neither a file nor a mix of lengths."""
    return PlanError(
        "nothing says how long the samples are, without which a step has no work. Give ",
        Argument("lengths", example="FILE"),
        ", or set plan.lengths or plan.mix, such as ",
        Argument("plan.mix", example="chats"),
        ".",
    )


def lengths_of(
    config: TrainConfig, cost_model: CostModel, shape: MeshShape, steps: int = STEPS
) -> tuple[str, LengthTable] | None:
    """Name and table of the lengths that a recipe's plan section names, enough for some steps; None without any.

    Raises:
        ConfigError: steps so large that too many samples would have to be planned.
        DataError: the file of lengths cannot be read.
    """
    data, accumulation = config.data, config.optim.accumulation
    if config.plan.lengths is not None:
        return read_table(config.plan.lengths, cost_model)
    if config.plan.mix is None:
        return None
    mix = MIXES[config.plan.mix]
    samples = samples_of(config, shape, mean_of(config.plan.mix), steps)
    if samples > MOST_SAMPLES:
        raise ConfigError(
            f"{shape.data_ranks} ranks x {accumulation} packs of {data.tokens_per_pack} tokens need {samples:,} "
            f"samples of {mix.name} in {steps} steps, and a dry run plans {MOST_SAMPLES:,} at most. Lower "
            f"data.tokens_per_pack, optim.accumulation or {Argument('devices')}."
        )
    table = mix.lengths(samples)
    return f"{mix.name}: {mix.description}", table if cost_model.has_vision else _without_media(table)


def lengths_in_turn(
    config: TrainConfig, pattern: tuple[str, LengthTable], shape: MeshShape, steps: int = STEPS
) -> tuple[str, LengthTable]:
    """Name and table of samples that repeat a few in turn, enough for some steps, or for as many as can be planned.

    Args:
        config: the recipe.
        pattern: name and table of the samples that repeat.
        shape: how the devices share the work.
        steps: optimizer steps to have samples for.
    """
    name, table = pattern
    mean = float(np.minimum(table.tokens, config.data.tokens_per_pack).mean())
    return name, repeated(table, min(MOST_SAMPLES, samples_of(config, shape, mean, steps)), None)


def read_table(path: Path, cost_model: CostModel) -> tuple[str, LengthTable]:
    """Name and table of measured lengths, with a grid for each sample that has patches."""
    return str(path), _with_grids(read_lengths(path), cost_model)


def mean_of(mix: str) -> float:
    """Mean length of a mix's samples [tokens]."""
    return float(MIXES[mix].lengths(2000).tokens.mean())


def samples_of(config: TrainConfig, shape: MeshShape, mean_tokens: float, steps: int) -> int:
    """Count the samples of some mean length that fill so many steps, with one more step to choose from."""
    filled = min(mean_tokens * (config.data.samples_per_pack or np.inf), config.data.tokens_per_pack)
    return int((steps + 1) * shape.data_ranks * config.optim.accumulation * filled / mean_tokens) + 1000


def _with_grids(table: LengthTable, cost_model: CostModel) -> LengthTable:
    """Give each sample one picture with its number of patches where grids are not known."""
    if table.grids is not None:
        return table
    rows = np.flatnonzero(table.patches)
    side = int(cost_model.merge_group**0.5)
    grids = [square_grid(int(patches), side) for patches in table.patches[rows]]
    return LengthTable(table.tokens, table.patches, np.array(grids, dtype=np.int64).reshape(-1, 3), rows)


def _without_media(table: LengthTable) -> LengthTable:
    none = np.zeros((0, 3), dtype=np.int64)
    return LengthTable(table.tokens, np.zeros_like(table.patches), none, none[:, 0])


def repeated(table: LengthTable, samples: int, seed: int | None) -> LengthTable:
    """Draw so many samples from a table that has fewer; a large enough table stays as it is.

    Args:
        table: the samples.
        samples: how many are wanted at least.
        seed: of draws with replacement; None to take the rows in turn, each as often as the others.
    """
    rows_there = len(table.tokens)
    if rows_there >= samples:
        return table
    if seed is None:
        rows = np.arange(-(-samples // rows_there) * rows_there) % rows_there
    else:
        rows = np.random.default_rng(seed).integers(rows_there, size=samples)
    return table.take(rows)


def policies_of(table: LengthTable, default: Overlong) -> dict[str, Overlong]:
    """Describe the fate of samples that exceed a pack, by the name of each dataset of a table.

    Args:
        table: the samples.
        default: for datasets that do not say.
    """
    return {name: part.overlong or default for name, part in table.parts.items()}


def enough_lengths(
    config: TrainConfig, cost_model: CostModel, shape: MeshShape, pattern: tuple[str, LengthTable] | None = None
) -> tuple[tuple[str, LengthTable], int]:
    """Lengths for as many steps as a plan's window has, or for as many as can be planned; and how many steps that is.

    A table that has fewer samples is drawn from again and again.

    Raises:
        PlanError: no lengths.
        ConfigError: not even two steps can be planned.
    """

    def fitting(mean: float) -> int:
        steps = STEPS
        while steps > _FEW_STEPS and samples_of(config, shape, mean, steps) > min(_MANY_SAMPLES, MOST_SAMPLES):
            steps //= 2
        while steps > FEWEST_STEPS and samples_of(config, shape, mean, steps) > MOST_SAMPLES:
            steps //= 2
        return steps

    # lengths that were measured, drawn in turn
    if pattern is not None:
        steps = fitting(float(np.minimum(pattern[1].tokens, config.data.tokens_per_pack).mean()))
        return lengths_in_turn(config, pattern, shape, steps), steps
    # a table of the recipe, repeated as often as needed
    if config.plan.lengths is not None:
        name, table = read_table(config.plan.lengths, cost_model)
        mean = float(np.minimum(table.tokens, config.data.tokens_per_pack).mean())
        steps = fitting(mean)
        return (name, repeated(table, samples_of(config, shape, mean, steps), config.data.seed)), steps
    # a mix of the recipe, from which any number can be drawn
    steps = fitting(mean_of(config.plan.mix)) if config.plan.mix is not None else STEPS
    drawn = lengths_of(config, cost_model, shape, steps)
    if drawn is None:
        raise no_lengths()
    return drawn, steps
