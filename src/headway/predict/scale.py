"""Growth of a recipe's step with devices: the real plan of packs, memory, time, exchanges and failures at each size.

Each rank keeps its packs, so a step of more devices has more tokens. Packs are planned by the planner that training
uses, for all ranks and as many steps as it plans at a time, over the lengths of the recipe's plan section.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headway.config import TrainConfig
from headway.count import CostModel
from headway.count.activations import SavedActivations
from headway.devices import Device
from headway.errors import PlanError
from headway.packing.lengths import LengthTable
from headway.packing.mesh import MeshShape
from headway.predict.collectives import Links
from headway.predict.dry_run import Packs, memory_and_ways, plan_packs, recompute_of, room_of
from headway.predict.failures import Interruptions, Reliability
from headway.predict.fitting import Way
from headway.predict.forecast import Forecaster
from headway.predict.memory import MemoryPlan
from headway.predict.planned_lengths import (
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
from headway.predict.slices import padding_of
from headway.predict.speeds import Cases, Speeds
from headway.predict.step_time import StepForecast
from headway.report.quantity import parse_number
from headway.words import Argument

MOST_DEVICES = 2**20
FEWEST_STEPS = 2
"""Steps that are planned at least; a plan has one more, which is left out where samples run short."""
_FEW_STEPS = 4  # four balance ranks like 16: a step's time at 1,024 devices is within half a percent
_MANY_SAMPLES = 3_000_000  # for more steps than these few: some seconds, and 600 MB


@dataclass(frozen=True)
class SizedRun:
    """A recipe on so many devices.

    Attributes:
        shape: how they share the work.
        packs: planned for all ranks.
        planned_steps: steps of packs that were planned.
        memory: of each device.
        time: of a step.
        interruptions: by failures; None where nothing was said of them.
        padding: numbers that slices of the weights hold over those that there are.
        fits: whether a device has room for it; None where its memory is not known.
        ways: settings that make it fit, where it does not.
    """

    shape: MeshShape
    packs: Packs
    planned_steps: int
    memory: MemoryPlan
    time: StepForecast
    interruptions: Interruptions | None
    padding: float = 1.0
    fits: bool | None = None
    ways: tuple[Way, ...] = ()

    @property
    def devices(self) -> int:
        """Devices, a process each."""
        return self.shape.world_size

    @property
    def exposed(self) -> Cases:
        """Time of a step that its exchanges take and computing does not hide [s]."""
        return self._line("communication.transfer")

    @property
    def waiting(self) -> Cases:
        """Time of a step that a mean rank waits for the heaviest [s]."""
        return self._line("communication.waiting")

    @property
    def lasting_tokens_per_s(self) -> float:
        """Tokens per second that failures do not take back, as expected."""
        share = 1.0 if self.interruptions is None else self.interruptions.goodput
        return share * self.time.tokens_per_s.expected

    def _line(self, key: str) -> Cases:
        return next((line.seconds for line in self.time.lines if line.key == key), Cases.exact(0.0))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; of each time the best, the expected and the worst case."""
        return {
            "devices": self.devices,
            "mesh": asdict(self.shape),
            "planned_steps": self.planned_steps,
            "fill": self.packs.report.fill,
            "balance": self.packs.report.balance,
            "memory_bytes": self.memory.peak,
            "fits": self.fits,
            "ways": [way.to_dict() for way in self.ways],
            "padding": self.padding,
            "time": self.time.to_dict(),
            "exposed_s": [*self.exposed],
            "waiting_s": [*self.waiting],
            "interruptions": None if self.interruptions is None else asdict(self.interruptions),
            "lasting_tokens_per_s": self.lasting_tokens_per_s,
        }


@dataclass(frozen=True)
class Scaling:
    """Hardware and run of a recipe, whatever its size.

    Attributes:
        cost_model: of the model, with what is frozen frozen and adapters in place.
        saved: what autograd saves of it, by precision.
        speeds: of the device.
        links: between devices.
        reliability: of the device; None where nothing is said of failures.
        device: whose memory it must fit; None not to look.
    """

    cost_model: CostModel
    saved: Mapping[str, SavedActivations]
    speeds: Speeds
    links: Links
    reliability: Reliability | None = None
    device: Device | None = None

    def at(self, config: TrainConfig, devices: int, pattern: tuple[str, LengthTable] | None = None) -> SizedRun:
        """Plan a recipe for so many devices.

        Args:
            config: the recipe.
            devices: processes, a device each.
            pattern: name and table of samples that repeat; the recipe's plan section says the lengths when None.

        Raises:
            ConfigError: a mesh that the devices do not fit, or lengths of which none fits a pack.
            PlanError: no lengths, or nodes whose network is not known.
        """
        config = sized(config, devices)
        shape = config.parallel.mesh_shape(devices)
        links = self.links if devices > 1 else None  # a lone device exchanges nothing
        forecaster = Forecaster(self.cost_model, self.saved, self.speeds, devices, links)
        recompute = recompute_of(config, self.cost_model, self.saved, shape)
        lengths, steps = enough_lengths(config, self.cost_model, shape, pattern)
        packs = plan_packs(config, self.cost_model, shape, recompute, lengths)
        assert packs is not None
        largest = packs.most_tokens, packs.most_patches
        memory, ways = memory_and_ways(config, self.cost_model, self.saved, devices, self.device, largest, packs.padded)
        room = room_of(self.device)
        time = forecaster.predict(config, packs)
        failures = None if self.reliability is None else Interruptions.of(self.reliability, devices)
        return SizedRun(
            shape,
            packs,
            steps,
            memory,
            time,
            failures,
            padding_of(self.cost_model, shape.fsdp, shape.expert),
            None if room is None else memory.peak <= room,
            ways,
        )


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
    copies = max(1, devices // (parallel.shard * parallel.sequence))
    return config.model_copy(update={"parallel": parallel.model_copy(update={"replicate": copies})})


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
