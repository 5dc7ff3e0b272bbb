"""Lengths that packs are planned over before there are data: of a recipe's plan section, enough for some steps."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.config import TrainConfig
from headway.count import CostModel, Workload, drivers
from headway.count.units import remembered
from headway.errors import ConfigError, PlanError
from headway.packing.budget import square_grid
from headway.packing.items import Overlong
from headway.packing.lengths import MIXES, LengthTable, read_lengths
from headway.packing.mesh import MeshShape
from headway.predict.moments import FLOAT32
from headway.words import Argument

Floats = NDArray[np.float64]

STEPS = 16
"""Optimizer steps that packs are planned for, as many as a plan's window has at least."""


def no_lengths() -> PlanError:
    """Make the error of a step that is to be predicted with neither a file nor a mix of lengths."""
    return PlanError(
        "nothing says how long the samples are, without which a step has no work. Give ",
        Argument("lengths", example="FILE"),
        ", or set plan.lengths or plan.mix, such as ",
        Argument("plan.mix", example="chats"),
        ".",
    )


MOST_SAMPLES = 50_000_000
"""Samples that are planned at most: two minutes, and 10 GB."""


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
    """Draw so many samples from a table that has fewer; one that has enough stays as it is.

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
    """Say what becomes of samples that exceed a pack, by the name of each dataset of a table.

    Args:
        table: the samples.
        default: for datasets that do not say.
    """
    return {name: part.overlong or default for name, part in table.parts.items()}


def fullest_pack(config: TrainConfig, cost_model: CostModel) -> Workload:
    """The largest pack that fits the budget: one segment, with a picture of as many patches as there may be."""
    images = one_picture(most_patches(config, cost_model), cost_model)
    return Workload([config.data.tokens_per_pack], images=images)


def most_patches(config: TrainConfig, cost_model: CostModel) -> int:
    """Patches that a pack may hold: its budget, or as many as its tokens can stand for."""
    if not cost_model.has_vision:
        return 0
    return config.data.patches_per_pack or config.data.tokens_per_pack * cost_model.merge_group


def one_picture(patches: int, cost_model: CostModel) -> list[tuple[int, int, int]]:
    """Make the grid of one picture with so many patches; saved activations depend on their number alone."""
    return [square_grid(patches, int(cost_model.merge_group**0.5))] if patches else []


@remembered
def pixel_bytes(cost_model: CostModel, pack: Workload, compute_bytes: int) -> int:
    """Bytes of a pack's pixels: as bytes, scaled to float32, and where autocast is, once more for the product.

    A value of a patch is multiplied into each channel of the tower once, which gives how many there are.
    """
    row = next((row for row in cost_model.rows if row.component == "vision.embed"), None)
    width = min(
        (min(r.features) for r in cost_model.rows if r.features and r.block and r.component.startswith("vision.")),
        default=0,
    )
    if row is None or not width:
        return 0
    values = row.forward * drivers.parse_driver(row.driver)(pack) // (2 * width)
    copies = FLOAT32 + (compute_bytes if compute_bytes < FLOAT32 else 0)
    return values * (1 + copies)
