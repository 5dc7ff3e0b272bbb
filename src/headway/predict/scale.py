"""Growth of a recipe's step with devices: the real plan of packs, memory, time, exchanges and failures at each size.

Each rank keeps its packs, so a step of more devices has more tokens. Packs are planned by the planner that training
uses, for all ranks and as many steps as it plans at a time, over the lengths of the recipe's plan section.
"""

from dataclasses import replace

from headway.config import TrainConfig, changed_config
from headway.errors import PlanError
from headway.packing.lengths import LengthTable
from headway.predict.failures import Interruptions, Reliability
from headway.predict.lengths import enough_lengths
from headway.predict.prediction import Prediction
from headway.predict.predictor import Predictor
from headway.report.quantity import parse_number
from headway.words import Argument

MOST_DEVICES = 2**20


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
        PlanError: no lengths.
    """
    config = sized(config, devices)
    shape = config.parallel.mesh_shape(devices)
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
                f": {part.strip()!r} is not a number of devices. Write numbers from 1 to {MOST_DEVICES:,} "
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
