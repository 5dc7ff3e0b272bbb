"""Growth of a recipe's step with devices: the real plan of packs, memory, time, exchanges and failures at each size.

Each rank keeps its packs, so a step of more devices has more tokens. Packs are planned by the planner that training
uses, for all ranks and as many steps as it plans at a time, over the lengths of the recipe's plan section.
"""

from dataclasses import replace

import numpy as np

from headway.config import TrainConfig, changed_config
from headway.count import CostModel
from headway.errors import PlanError
from headway.packing.lengths import LengthTable
from headway.packing.mesh import MeshShape
from headway.predict.failures import Interruptions, Reliability
from headway.predict.packs import (
    MOST_SAMPLES,
    STEPS,
    lengths_in_turn,
    lengths_of,
    mean_of,
    no_lengths,
    read_table,
    repeated,
    samples_of,
)
from headway.predict.prediction import Prediction, Predictor
from headway.report.quantity import parse_number
from headway.words import Argument

MOST_DEVICES = 2**20
FEWEST_STEPS = 2
"""Steps that are planned at least; a plan has one more, which is left out where samples run short."""
_FEW_STEPS = 4  # four balance ranks like 16: a step's time at 1,024 devices is within half a percent
_MANY_SAMPLES = 3_000_000  # for more steps than these few: some seconds, and 600 MB


def at_size(
    predictor: Predictor,
    config: TrainConfig,
    devices: int,
    pattern: tuple[str, LengthTable] | None = None,
    reliability: Reliability | None = None,
) -> Prediction:
    """Predict a recipe on so many devices, over as many steps of packs as a plan's window has.

    Args:
        predictor: of its model, with links between devices.
        config: the recipe.
        devices: processes, a device each.
        pattern: name and table of samples that repeat; the recipe's plan section says the lengths when None.
        reliability: of a device; None where nothing is said of failures.

    Raises:
        ConfigError: a mesh that the devices do not fit, or lengths of which none fits a pack.
        PlanError: no lengths, or nodes whose network is not known.
    """
    config = sized(config, devices)
    shape = config.parallel.mesh_shape(devices)
    if devices > 1 and predictor.links is not None:
        predictor.links.require(devices)  # before packs are planned, which takes long
    lengths, steps = enough_lengths(config, predictor.cost_model, shape, pattern)
    failures = None if reliability is None else Interruptions.of(reliability, devices)
    return replace(predictor.at(config, devices, lengths), interruptions=failures, planned_steps=steps)


def sizes_of(text: str) -> tuple[int, ...]:
    """Read numbers of devices, "8,64,512".

    Raises:
        PlanError: something else, or a number that is none of devices.
    """
    sizes = []
    for part in text.split(","):
        size = parse_number(part, "devices", whole=True)
        if not isinstance(size, int) or not 1 <= size <= MOST_DEVICES:
            raise PlanError(
                Argument("scale", text),
                f": {part.strip()!r} is no number of devices. Write numbers from 1 to {MOST_DEVICES:,} "
                "joined by commas, such as 8,64,512.",
            )
        sizes.append(size)
    return tuple(dict.fromkeys(sizes))


def sized(config: TrainConfig, devices: int) -> TrainConfig:
    """Return the recipe for a number of devices: where `parallel.shard` is a number, `parallel.replicate` follows."""
    parallel = config.parallel
    if parallel.shard == "auto":
        return config
    return changed_config(config, {"parallel.replicate": max(1, devices // (parallel.shard * parallel.sequence))})


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
