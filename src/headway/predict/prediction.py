"""Prediction of a run before it starts: memory, packs, time and cost of a recipe on so many devices.

`headway.predict.predictor` makes it. `headway plan`, `train --dry-run`, `tune`, `init`, offers of devices and the error
of a run without memory read it. No weights are read. For models whose ledger ships, torch is not needed either.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headway.config import TrainConfig
from headway.count import FlopCount
from headway.count.rows import ParamCount
from headway.devices import Device
from headway.packing.mesh import MeshShape
from headway.predict.communication import Links
from headway.predict.failures import Interruptions
from headway.predict.fitting import Way, room_of
from headway.predict.memory import MemoryPlan
from headway.predict.packs import Packs
from headway.predict.recipe import assignment
from headway.predict.speeds import Cases, Speeds
from headway.predict.step_time import StepForecast

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RunTotals:
    """Totals of a whole run; of each time and cost the best, the expected and the worst case.

    Attributes:
        tokens: to train on.
        steps: of the optimizer.
        seconds: of the run [s].
        device_hours: of all devices [h].
        cost: in the currency of the price; None without one.
        energy_kwh: of the boards [kWh]; None where their power is not known.
    """

    tokens: float
    steps: float
    seconds: Cases
    device_hours: Cases
    cost: Cases | None
    energy_kwh: Cases | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {name: [*value] if isinstance(value, Cases) else value for name, value in vars(self).items()}


@dataclass(frozen=True, eq=False)
class OtherPacks:
    """A step of as many tokens in other packs, which is faster."""

    choice: "Prediction"  # the choice, with the settings that differ
    samples: float  # share of the samples that are longer than its packs
    tokens: float  # share of the tokens that these samples have
    leaves_out: bool  # true if its packs leave out more samples than the recipe's

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        choice = self.choice
        return {
            "settings": dict(choice.changes),
            "tokens_per_pack": choice.config.data.tokens_per_pack,
            "accumulation": choice.config.optim.accumulation,
            "mfu": choice.step.mfu.expected,
            "step_s": choice.step_s,
            "peak_bytes": choice.memory.peak,
            "longer_samples": self.samples,
            "longer_tokens": self.tokens,
            "leaves_out": self.leaves_out,
        }


@dataclass(frozen=True, eq=False)
class Prediction:
    """Memory, packs and time of a recipe on so many devices.

    Attributes:
        config: the recipe.
        model: name of the ledger.
        shape: how the devices share the work.
        params: numbers of parameters.
        memory: of each device.
        packs: None without lengths to plan over.
        time: of a step; None where no rates were asked for.
        device: whose memory it must fit; None if none was named.
        ways: settings that make it fit, where it does not, or all of them together, if they are not enough.
        notes: what a size recomputes, and what the numbers leave open.
        refers: when the forward of a model that does not learn is computed.
        speeds: rates that the time is from.
        links: between the devices; None where they are not known.
        making_s: that a data worker takes to make a token [s]; None where it was not timed.
        changes: settings that differ from those of a recipe that was asked about, by their dotted names.
        interruptions: by failures; None where nothing was said of them.
        padding: numbers that slices of the weights hold over those that there are.
        planned_steps: steps of packs that were planned; 0 where nobody counted.
        others: faster packs of as many tokens a step; none where nobody looked.
    """

    config: TrainConfig
    model: str
    shape: MeshShape
    params: ParamCount
    memory: MemoryPlan
    packs: Packs | None
    time: StepForecast | None = None
    device: Device | None = None
    ways: tuple[Way, ...] = ()
    notes: tuple[str, ...] = ()
    refers: Literal["each step", "once"] = "once"
    speeds: Speeds | None = None
    links: Links | None = None
    making_s: float | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    interruptions: Interruptions | None = None
    padding: float = 1.0
    planned_steps: int = 0
    others: tuple[OtherPacks, ...] = ()

    @property
    def devices(self) -> int:
        """Devices, a process each."""
        return self.shape.world_size

    @property
    def fit(self) -> Literal["fits", "tight", "does not fit"] | None:
        """Word for whether the run fits the device's memory, with the reserve or without; None if that is unknown."""
        room, total = room_of(self.device), None if self.device is None else self.device.total_memory_bytes
        if room is None or total is None:
            return None
        return "fits" if self.memory.peak <= room else "tight" if self.memory.peak <= total else "does not fit"

    @property
    def fits(self) -> bool | None:
        """True if the run fits the device's memory, with the reserve or without; None if the memory is unknown."""
        return None if self.fit is None else self.fit != "does not fit"

    @property
    def flops(self) -> FlopCount | None:
        """FLOPs of a mean step, all devices together, with a reference computed in each step; None without lengths."""
        if self.packs is None:
            return None
        reference = self.packs.reference
        return self.packs.flops if reference is None or self.refers == "once" else self.packs.flops + reference

    @property
    def work(self) -> Packs:
        """Packs of a run whose lengths are known."""
        assert self.packs is not None
        return self.packs

    @property
    def step(self) -> StepForecast:
        """Time of a step whose rates are known."""
        assert self.time is not None
        return self.time

    @property
    def step_s(self) -> float:
        """Expected time of a step [s]."""
        return self.step.step_s

    @property
    def step_tokens(self) -> int:
        """Real tokens of a mean step, all devices together [tokens]."""
        return round(self.work.step_tokens(self.config, self.shape))

    @property
    def flops_per_s(self) -> float:
        """Useful FLOPs of a step over its time, all devices together [FLOP/s]."""
        return self.work.flops.total / self.step.step_s

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of `changes`, as `--set` takes them."""
        return tuple(assignment(name, value) for name, value in self.changes.items())

    @property
    def kind(self) -> tuple[Any, ...]:
        """Settings in which it differs from more than neighbours in a search, which differ in details only."""
        data, optim, speed = self.config.data, self.config.optim, self.config.speed
        return (data.tokens_per_pack, optim.accumulation, speed.recompute.partition(":")[0], self.shape)

    @property
    def lasting_tokens_per_s(self) -> float:
        """Tokens per second that failures do not take back, as expected."""
        return self._goodput * self.step.tokens_per_s.expected

    @property
    def _goodput(self) -> float:
        return 1.0 if self.interruptions is None else self.interruptions.goodput

    def totals(self, tokens: float, *, passes: float = 1.0, price: float | None = None) -> RunTotals:
        """Extend a mean step to a run of so many tokens.

        Args:
            tokens: to train on.
            passes: over the data, at least 1.
            price: of a device-hour, in any currency.
        """
        steps = tokens / self.step.tokens
        before = self.step.before(tokens / passes).times(1 / self._goodput)
        seconds = self.step.seconds.times(steps / self._goodput) + before
        hours = seconds.times(self.devices / 3600)
        power_w = None if self.speeds is None else self.speeds.board_power_w
        cost = None if price is None else hours.times(price)
        return RunTotals(tokens, steps, seconds, hours, cost, None if power_w is None else hours.times(power_w / 1000))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        params, device, flops = self.params, self.device, self.flops
        reference = None if self.packs is None else self.packs.reference
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "devices": self.devices,
            "mesh": asdict(self.shape),
            "device": None if device is None else {"name": device.title, "memory_bytes": device.total_memory_bytes},
            "params": {"total": params.total, "trainable": params.trainable, "active": params.active},
            "memory": self.memory.to_dict(),
            "fits": self.fits,
            "fit": self.fit,
            "ways": [way.to_dict() for way in self.ways],
            "flops": None if flops is None else _flops_record(flops),
            "reference": None if reference is None else {"runs": self.refers, "flops": reference.total},
            "packs": None if self.packs is None else self.packs.to_dict(),
            "notes": list(self.notes),
            **({} if self.time is None else {"time": self.time.to_dict()}),
        }


def _flops_record(count: FlopCount) -> dict[str, Any]:
    phases = {"forward": count.forward, "dgrad": count.dgrad, "wgrad": count.wgrad, "recompute": count.recompute}
    return {"convention": count.convention, "total": count.total, **phases, "components": count.by_component()}
