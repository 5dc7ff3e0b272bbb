"""Lengths of the samples that packs are planned over: of a mix, a file, measured datasets, or samples in turn.

They are enough for some steps: a table with fewer samples is drawn from again. Measured datasets also tell how long
making packs of them takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from headway.config import TrainConfig
from headway.count import CostModel
from headway.errors import ConfigError, DataError, PlanError
from headway.packing.budget import square_grid
from headway.packing.items import Overlong, Policies
from headway.packing.lengths import MIXES, LengthTable, Numbers, SamplePlaces, read_lengths
from headway.packing.mesh import MeshShape
from headway.packing.pieces import TargetRuns
from headway.words import Argument

if TYPE_CHECKING:
    from headway.data.encode import Encoder
    from headway.data.index import LengthIndex
    from headway.data.sources import Source

STEPS = 16
"""Optimizer steps that packs are planned for, as many as a plan's window has at least."""

MOST_SAMPLES = 50_000_000
"""Samples that are planned at most: two minutes, and 10 GB."""
FEWEST_STEPS = 2
"""Steps that are planned at least; a plan has one more, which is left out where samples run short."""
_FEW_STEPS = 4  # four balance ranks like 16: a step's time at 1,024 devices is within half a percent
_MANY_SAMPLES = 3_000_000  # for more steps than these few: some seconds, and 600 MB
_MOST_S, _MOST_SAMPLES = 2.0, 512


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


@dataclass(frozen=True)
class MeasuredData:
    """Measurements of datasets before they are trained on.

    Attributes:
        name: of all of them.
        lengths: of every row that can be used.
        making_s: that one process takes to read and encode a token [s].
    """

    name: str
    lengths: LengthTable
    making_s: float


def making_s(sources: "Sequence[Source]", indices: "Sequence[LengthIndex]", encoder: "Encoder") -> float:
    """Time that a process takes to read and encode a token [s], by samples from all over the data, for two seconds.

    Args:
        sources: the datasets.
        indices: theirs, in the same order.
        encoder: of the model.

    Raises:
        DataError: a sample cannot be used any more.
    """
    places = [(source, row) for source, index in zip(sources, indices, strict=True) for row in np.flatnonzero(index.ok)]
    chosen = [places[number] for number in np.random.default_rng(0).permutation(len(places))[:_MOST_SAMPLES]]
    first, row = chosen[0]
    encoder.encode(first[int(row)])  # opens files and compiles templates
    tokens, begin = 0, perf_counter()
    for source, row in chosen:
        tokens += encoder.encode(source[int(row)]).tokens
        if perf_counter() - begin > _MOST_S:
            break
    return (perf_counter() - begin) / tokens


def joined(indices: "Mapping[str, LengthIndex]", overlong: Policies) -> LengthTable:
    """Put the usable rows of several indices one after the other.

    Args:
        indices: of the datasets, by their names.
        overlong: what becomes of samples that exceed a pack, of all datasets or by name of each.

    Raises:
        DataError: no dataset has a row that can be used.
    """
    if not any(np.any(index.ok) for index in indices.values()):
        raise DataError(f"No row of {', '.join(indices)} can be used; `headway index` says why.")
    columns: dict[str, list[Numbers]] = {name: [] for name in ("tokens", "patches", "first_target", "media_end")}
    grids, grid_rows, runs, run_rows, source = [], [], [], [], []
    segments: dict[int, list[int]] = {}
    branches: dict[int, list[int]] = {}
    start = 0
    for number, index in enumerate(indices.values()):
        ok = np.asarray(index.ok)
        place = np.cumsum(ok) - 1 + start  # place of each usable row in the table
        for name, column in columns.items():
            column.append(getattr(index, name)[ok])
        for ragged in (index.media["images"], index.media["videos"]):
            of_row = ragged.rows
            grids.append(ragged.values[ok[of_row]].reshape(-1, 3))
            grid_rows.append(place[of_row[ok[of_row]]])
        of_row = index.targets.rows
        runs.append(index.targets.values[ok[of_row]].reshape(-1, 2))
        run_rows.append(place[of_row[ok[of_row]]])
        segments |= {int(place[row]): index.segments_of(row) for row in set(index.segments.rows.tolist()) if ok[row]}
        of_prompts = np.flatnonzero(np.diff(index.branches.offsets))
        branches |= {int(place[row]): index.branches[row].tolist() for row in of_prompts.tolist() if ok[row]}
        source.append(np.full(int(ok.sum()), number))
        start += int(ok.sum())
    joint = {name: _whole(column) for name, column in columns.items()}
    targets = TargetRuns(_whole(run_rows), _whole(runs))
    return LengthTable(
        joint["tokens"],
        joint["patches"],
        _whole(grids),
        _whole(grid_rows),
        segments,
        SamplePlaces(joint["first_target"], joint["media_end"], targets),
        _whole(source),
        tuple((name, overlong if isinstance(overlong, str) else overlong[name]) for name in indices),
        branches,
    )


def _whole(parts: Sequence[Numbers]) -> Numbers:
    return np.concatenate(parts).astype(np.int64)
