"""A step of reinforcement learning before it runs, by phase: rollout, scoring, reference, reward, sync and update.

Engines write the answers (`headway.predict.engine`); scoring and the reference are forwards, and the update is a step,
both as `headway.predict.forecast` predicts them for packs of these lengths.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headway.config import RolloutConfig, TrainConfig
from headway.count import CostModel, FlopCount, Generation, Workload
from headway.count.activations import SavedActivations
from headway.devices import Device
from headway.errors import PlanError
from headway.packing.mesh import MeshShape
from headway.predict.collectives import Links, RankGroup, collective_s
from headway.predict.dry_run import DryRun, precision_of
from headway.predict.engine import EngineRun, EngineTimes
from headway.predict.forecast import Forecaster
from headway.predict.moments import BFLOAT16, FLOAT32
from headway.predict.planned_lengths import answer_lengths
from headway.predict.speeds import Cases, Speeds
from headway.predict.step_time import StepForecast
from headway.report import format_bytes
from headway.words import Argument

_MOST_TOKENS = 2 * 10**9  # of all answers: some seconds
_ROOT = "plan.rollout"


@dataclass(frozen=True)
class PhaseForecast:
    """A predicted phase of a step.

    Attributes:
        name: which one, as records name it.
        wall_s: time that the step is in it; those of all phases add up to the step [s].
        devices_s: time that its devices take, longer where a part runs beside other phases [s].
        num_devices: that it runs on.
        flops: useful ones of all devices together.
        peak_flops_per_s: of all its devices together [FLOP/s].
        tokens: that it computes.
        bound: what most of its time goes to: `compute`, `memory`, `communication` or `host`; None without work.
        mbu: bytes that it moves over what its devices could move meanwhile; None where it is not known.
    """

    name: str
    wall_s: Cases
    devices_s: Cases
    num_devices: int
    flops: int = 0
    peak_flops_per_s: float = math.nan
    tokens: int = 0
    bound: str | None = None
    mbu: Cases | None = None

    @property
    def mfu(self) -> Cases | None:
        """Useful FLOPs over what its devices could compute meanwhile; None without FLOPs."""
        if not self.flops:
            return None
        return Cases(*(self.flops / (self.peak_flops_per_s * seconds) for seconds in self.devices_s))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, by the names of a record; of each quantity the best, the expected and the worst case."""
        cases = {"wall_s": self.wall_s, "devices_s": self.devices_s, "mfu": self.mfu, "mbu": self.mbu}
        return {
            **{name: None if value is None else [*value] for name, value in cases.items()},
            "num_devices": self.num_devices,
            "flops": self.flops,
            "tokens": self.tokens,
            "bound": self.bound,
        }


@dataclass(frozen=True)
class RolloutForecast:
    """Predicted answers of a step.

    Attributes:
        engines: that write them.
        runs: what each engine does.
        room_bytes: for cache on each device [bytes]; infinite where its memory is not known.
        max_rows: most answers at a time, as the recipe allows.
        prompt_tokens: each prompt once.
        generated_tokens: of the answers.
    """

    engines: int
    runs: tuple[EngineRun, ...]
    room_bytes: float
    max_rows: int
    prompt_tokens: int
    generated_tokens: int

    @property
    def slowest(self) -> EngineRun:
        """The engine that ends last."""
        return max(self.runs, key=lambda run: run.seconds.expected)

    @property
    def seconds(self) -> Cases:
        """Time until the last engine has ended [s]."""
        return Cases(*(max(run.seconds[case] for run in self.runs) for case in range(3)))

    @property
    def limit(self) -> str:
        """What keeps an engine from writing more answers at a time: `cache`, `max_rows`, or that there are no more."""
        if any(run.waited_for_cache for run in self.runs):
            return "cache"
        return "max_rows" if any(run.most_rows == self.max_rows for run in self.runs) else "answers"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; times of the slowest engine."""
        run = self.slowest
        return {
            "engines": self.engines,
            "prefill_s": [*run.prefill],
            "decode_s": [*run.decode],
            "decode_steps": run.steps,
            "rows": run.rows,
            "most_rows": run.most_rows,
            "limit": self.limit,
            "room_bytes": None if math.isinf(self.room_bytes) else self.room_bytes,
            "cache_bytes": run.cache_bytes,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
        }


@dataclass(frozen=True)
class RlForecast:
    """A predicted step of reinforcement learning.

    Attributes:
        phases: their `wall_s` add up to the step.
        rollout: what the engines do.
        update: one optimizer step.
        tokens: that the step learns from.
        peak_flops_per_s: of all devices together, those of the engines among them [FLOP/s].
    """

    phases: tuple[PhaseForecast, ...]
    rollout: RolloutForecast
    update: StepForecast
    tokens: float
    peak_flops_per_s: float

    @property
    def seconds(self) -> Cases:
        """Time of a step [s]."""
        return sum((phase.wall_s for phase in self.phases), Cases.exact(0.0))

    @property
    def mfu(self) -> Cases:
        """Useful FLOPs of all phases over what all devices could compute meanwhile, a fraction."""
        flops = sum(phase.flops for phase in self.phases)
        return Cases(*(flops / (self.peak_flops_per_s * seconds) for seconds in self.seconds))

    @property
    def tokens_per_s(self) -> Cases:
        """Tokens that are learnt from, per second."""
        return Cases(*(self.tokens / seconds for seconds in self.seconds))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; of each quantity the best, the expected and the worst case."""
        return {
            "step_s": [*self.seconds],
            "mfu_of_all_devices": [*self.mfu],
            "tokens_per_s": [*self.tokens_per_s],
            "tokens": self.tokens,
            "phases": {phase.name: phase.to_dict() for phase in self.phases},
            "rollout": self.rollout.to_dict(),
            "update": self.update.to_dict(),
        }


@dataclass(frozen=True)
class EngineDevices:
    """Devices that engines run on.

    Attributes:
        count: of all engines together.
        speeds: of a device.
        peak_bytes_per_s: of its memory, as printed [byte/s].
        memory_bytes: of a device; None where it is not known.
        links: between them; None where they are not known.
    """

    count: int
    speeds: Speeds
    peak_bytes_per_s: float
    memory_bytes: int | None
    links: Links | None

    @classmethod
    def of(cls, count: int, speeds: Speeds, device: Device | None, links: Links | None) -> "EngineDevices":
        """Take devices of a kind; of this machine where none is named."""
        bandwidth = None if device is None else device.memory_bytes_per_s
        memory = None if device is None else device.memory_bytes
        return cls(count, speeds, bandwidth or speeds.bytes_per_s.expected, memory, links)


def config_of_update(config: TrainConfig, shape: MeshShape) -> TrainConfig:
    """Give a recipe the packs of one optimizer step on a rollout's answers: as many for each rank as hold its share.

    Args:
        config: the recipe, with a rollout.
        shape: how the devices of the update share the work.

    Raises:
        PlanError: an answer is longer than a pack, or there are fewer answers than ranks.
    """
    rollout = _rollout_of(config)
    ranks, pack = shape.data_ranks, config.data.tokens_per_pack
    samples = rollout.prompt_tokens + answer_lengths(rollout)
    longest, per_update = int(samples.max()), len(samples) // rollout.updates
    if longest > pack:
        raise PlanError(
            f"a prompt with its answer has up to {longest:,} tokens, and a pack holds {pack:,}: give ",
            Argument("data.tokens_per_pack", example=str(longest)),
            ".",
        )
    if per_update < ranks:
        raise PlanError(
            f"{len(samples):,} answers in ",
            Argument(f"{_ROOT}.updates", rollout.updates),
            f" leave {per_update:,} for each update, fewer than its {ranks:,} ranks that have packs of their own: give "
            "more answers, fewer updates or fewer devices.",
        )
    # packs no larger than a rank's share, and as many as hold it
    per_rank = math.ceil(samples.sum() / rollout.updates / ranks)
    packs = math.ceil(per_rank / pack)
    tokens = max(longest, math.ceil(per_rank / packs))
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"tokens_per_pack": tokens}),
            "optim": config.optim.model_copy(update={"accumulation": math.ceil(per_rank / tokens)}),
        }
    )


def predict_rl(
    config: TrainConfig,
    cost_model: CostModel,
    saved: Mapping[str, SavedActivations],
    planned: DryRun,
    speeds: Speeds,
    links: Links | None,
    engines: EngineDevices,
) -> RlForecast:
    """Predict a step of reinforcement learning.

    Args:
        config: the recipe with the packs of an update, of `config_of_update`.
        cost_model: of its model, with what is frozen frozen and adapters in place.
        saved: what autograd saves of the model, by precision.
        planned: packs and memory of an update.
        speeds: of a device of the update.
        links: between these devices; None where they are not known.
        engines: that write the answers.

    Raises:
        PlanError: the cache of an answer does not fit beside the weights, or the lengths are too many to plan.
    """
    rollout, devices = _rollout_of(config), planned.shape.world_size
    assert planned.packs is not None
    answers = answer_lengths(rollout)
    samples = Workload(rollout.prompt_tokens + answers)
    # the answers are written
    written = predict_rollout(config, cost_model, engines, _kept_bytes(config, planned))
    counted = _flops_of_rollout(cost_model, rollout, answers, written)
    moved = sum(run.num_bytes for run in written.runs) * rollout.tensor
    at_peak = moved / engines.count / engines.peak_bytes_per_s
    memory_s, compute_s = written.slowest.memory_s, written.slowest.compute_s
    phase = PhaseForecast(
        "rollout",
        written.seconds,
        written.seconds,
        engines.count,
        counted,
        engines.count * engines.speeds.peak_flops_per_s,
        written.prompt_tokens + written.generated_tokens,
        "memory" if memory_s > compute_s else "compute",
        Cases(*(at_peak / seconds for seconds in written.seconds)),
    )
    # forwards over the answers, of the policy and of its frozen copy: nothing is recomputed or learnt
    phases = []
    reading = config.model_copy(update={"speed": config.speed.model_copy(update={"recompute": "none"})})
    frozen, updates = cost_model.freeze(["*"]), rollout.updates
    forward = _forecast(reading, frozen, saved, planned, frozen.count(samples), samples.tokens, updates, speeds, links)
    for name, runs in (("scoring", rollout.scoring), ("reference", rollout.reference)):
        if runs:
            phases.append(_phase_of_step(name, forward, 1, devices))
    if rollout.reward_s:
        phases.append(PhaseForecast("reward", reward_s := Cases.exact(rollout.reward_s), reward_s, devices))
    # optimizer steps, each on its part of the answers; then new weights go to the engines
    flops, tokens = cost_model.count(samples).split(updates)[0], samples.tokens / updates
    update = _forecast(config, cost_model, saved, planned, flops, tokens, 1, speeds, links)
    phases.append(_phase_of_step("update", update, updates, devices))
    sync = _sync_s(cost_model, rollout, planned.shape, links, engines, number_bytes_of(config, devices))
    bound = "communication" if planned.shape.fsdp > 1 or rollout.devices else "memory"
    phases.append(PhaseForecast("sync", sync, sync, max(devices, engines.count), bound=bound))
    # answers that are written beside the other phases take what these leave
    if rollout.asynchronous:
        others = sum((phase.wall_s for phase in phases), Cases.exact(0.0))
        phase = replace(phase, wall_s=Cases(*(max(0.0, seconds) for seconds in phase.devices_s - others)))
    peak = devices * speeds.peak_flops_per_s
    if rollout.devices is not None:
        peak += engines.count * engines.speeds.peak_flops_per_s
    return RlForecast((phase, *phases), written, update, float(samples.tokens), peak)


def predict_rollout(
    config: TrainConfig, cost_model: CostModel, engines: EngineDevices, kept_bytes: int
) -> RolloutForecast:
    """Predict how the answers of a step are written: prompts are dealt to engines in a row, each with its answers.

    Args:
        config: the recipe, with a rollout.
        cost_model: of its model.
        engines: devices that they run on.
        kept_bytes: what else their devices hold meanwhile [bytes].

    Raises:
        PlanError: the devices form no engines, the cache of an answer does not fit beside the weights, or the lengths
            are too many to plan.
    """
    rollout = _rollout_of(config)
    if engines.count % rollout.tensor:
        raise PlanError(
            f"{engines.count:,} devices cannot form engines of ", Argument(f"{_ROOT}.tensor", rollout.tensor), "."
        )
    answers = answer_lengths(rollout)
    if answers.sum() > _MOST_TOKENS:
        raise PlanError(f"{int(answers.sum()):,} tokens of answers; {_MOST_TOKENS:,} can be planned.")
    number_bytes = number_bytes_of(config, engines.count)
    times = EngineTimes(cost_model, engines.speeds, number_bytes, tensor=rollout.tensor, links=engines.links)
    # what weights and other tenants leave for the cache
    weights = cost_model.params.total * number_bytes // rollout.tensor
    room = math.inf
    if engines.memory_bytes is not None:
        room = rollout.memory * engines.memory_bytes - weights - kept_bytes
    longest = times.cache_of(rollout.prompt_tokens + int(answers.max()) - 1)
    if longest > room:
        raise _no_room(rollout, engines, weights, kept_bytes, longest)
    # each engine takes a run of answers, and reads each prompt among them once, or once for each
    shared_by = rollout.group if rollout.prefix == "computed once" else 1
    runs = tuple(
        times.write(
            rollout.prompt_tokens,
            answers[places],
            prefills=_prompts_of(places, shared_by),
            max_rows=rollout.max_rows,
            room=room,
            static=rollout.batching == "static",
            shared_by=shared_by,
        )
        for places in _dealt(rollout, engines.count)
    )
    prompts = rollout.prompts * rollout.prompt_tokens
    return RolloutForecast(len(runs), runs, room, rollout.max_rows, prompts, int(answers.sum()))


def _no_room(rollout: RolloutConfig, engines: EngineDevices, weights: int, kept_bytes: int, cache: float) -> PlanError:
    """Make the error of an engine that cannot hold an answer, with what would make room.

    Args:
        rollout: as the recipe has it.
        engines: devices that they run on.
        weights: on each device [bytes].
        kept_bytes: what the update keeps there [bytes].
        cache: of the longest answer on each device [bytes].
    """
    assert engines.memory_bytes is not None
    tenants = f", what the update keeps there {format_bytes(kept_bytes)}" if kept_bytes else ""
    filled = rollout.memory * engines.memory_bytes
    sizes = (size for size in range(rollout.tensor + 1, engines.count + 1) if engines.count % size == 0)
    enough = next((n for n in sizes if (weights + cache) * rollout.tensor / n + kept_bytes <= filled), None)
    ways: list[object] = ["Let more devices share an engine: "]
    if enough is not None:
        ways += [Argument(f"{_ROOT}.tensor", example=str(enough))]
    elif kept_bytes:
        ways = ["Move what the update keeps to the host: ", Argument(f"{_ROOT}.offload", example="true")]
    else:
        ways = ["Give more or larger devices"]
    return PlanError(
        f"there is no room for an answer: of each device weights take {format_bytes(weights)}{tenants}, the cache of "
        f"the longest answer {format_bytes(round(cache))}, and of {format_bytes(engines.memory_bytes)} ",
        Argument(f"{_ROOT}.memory", rollout.memory),
        " may be filled. ",
        *ways,
        ".",
    )


def number_bytes_of(config: TrainConfig, devices: int) -> int:
    """Bytes of a weight as products see it."""
    return FLOAT32 if precision_of(config, devices) == "float32" else BFLOAT16


def _rollout_of(config: TrainConfig) -> RolloutConfig:
    assert config.plan.rollout is not None
    return config.plan.rollout


def _dealt(rollout: RolloutConfig, devices: int) -> list[Any]:
    """Places of each engine's answers, those of a prompt in a row."""
    return np.array_split(np.arange(rollout.answers), devices // rollout.tensor)


def _prompts_of(places: Any, shared_by: int) -> int:
    """Prompts that an engine reads for its answers."""
    return int(places[-1] // shared_by - places[0] // shared_by + 1) if len(places) else 0


def _flops_of_rollout(cost_model: CostModel, rollout: RolloutConfig, answers: Any, written: RolloutForecast) -> int:
    """Useful FLOPs of all engines: a prompt whose answers two engines share is read by both."""
    shared_by = rollout.group if rollout.prefix == "computed once" else 1
    prefills = sum(_prompts_of(places, shared_by) for places in _dealt(rollout, written.engines * rollout.tensor))
    prefill = Workload([rollout.prompt_tokens] * prefills, logits=prefills)
    decode = Generation([rollout.prompt_tokens] * rollout.prompts, answers, group=rollout.group).decode
    return sum(cost_model.count(work, forward_only=True).total for work in (prefill, decode))


def _kept_bytes(config: TrainConfig, planned: DryRun) -> int:
    """What the update keeps on devices that it shares with engines [bytes]."""
    rollout = _rollout_of(config)
    return 0 if rollout.offload or rollout.devices is not None else planned.memory.always


def _forecast(
    config: TrainConfig,
    cost_model: CostModel,
    saved: Mapping[str, SavedActivations],
    planned: DryRun,
    flops: FlopCount,
    tokens: float,
    updates: int,
    speeds: Speeds,
    links: Links | None,
) -> StepForecast:
    """Predict a step over the packs of so many updates together."""
    assert planned.packs is not None
    packs_of_rank = updates * config.optim.accumulation
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"accumulation": packs_of_rank})})
    fill = tokens / (planned.shape.data_ranks * packs_of_rank * config.data.tokens_per_pack)
    packs = replace(planned.packs, flops=flops, report=replace(planned.packs.report, fill=fill))
    return Forecaster(cost_model, saved, speeds, planned.shape.world_size, links).predict(config, packs)


_KINDS = {"memory": "memory", "optimizer": "memory", "communication": "communication", "idle": "host"}


def _phase_of_step(name: str, step: StepForecast, times: int, devices: int) -> PhaseForecast:
    """A phase that is so many steps, bound by what most of their time goes to."""
    shares: dict[str, float] = {}
    for line in step.lines:
        kind = _KINDS.get(line.key.partition(".")[0], "compute")
        shares[kind] = shares.get(kind, 0.0) + line.seconds.expected
    seconds = step.seconds.times(times)
    return PhaseForecast(
        name,
        seconds,
        seconds,
        devices,
        step.flops * times,
        step.peak_flops_per_s,
        round(step.tokens * times),
        max(shares, key=shares.__getitem__),
    )


def _sync_s(
    cost_model: CostModel,
    rollout: RolloutConfig,
    shape: MeshShape,
    links: Links | None,
    engines: EngineDevices,
    number_bytes: int,
) -> Cases:
    """Time until engines hold new weights: they are gathered from the shards, and each device writes its part."""
    whole_bytes = cost_model.params.total * number_bytes
    writing = engines.speeds.memory_s(2 * whole_bytes / rollout.tensor)
    # engines on devices of their own are one group with those that hold the shards
    size = shape.fsdp if rollout.devices is None else shape.fsdp + rollout.tensor
    if links is None or size == 1 or not links.reaches(size):
        return writing
    return writing + collective_s("all-gather", whole_bytes, RankGroup.of(size, 1, links), links)
