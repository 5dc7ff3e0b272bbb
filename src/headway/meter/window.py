"""A window: consecutive steps of all ranks, and the record of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from headway.count import FlopCount, modalities
from headway.devices import Peak
from headway.log.records import LISTED, SCHEMA_VERSION, StepRecord, known, of_ranks, phase_entries, ratio
from headway.report import format_count, format_duration, format_rounded, format_share

_SMOOTHED = ("mfu", "hfu", "tokens_per_s", "step_s")
_LATENESS = ("late_rank", "late_rank_s", "late_rank_phase")

# Entries of a record of which no step was divided: all records have the same names.
_NO_PHASES = {"num_sampled": 0, **dict.fromkeys(("phases_s", "host_s", "host_lead_s", *_LATENESS))}
_NO_FACTS = dict.fromkeys(("device_memory_bytes", "weights_dtype", "optimizer", "places", "anomaly_mode"))


class _Entry(property):
    """An entry of a record as an attribute; NaN if it is unknown."""

    def __init__(self, meaning: str) -> None:
        super().__init__(self._read)
        self.__doc__ = meaning  # Python before 3.13 keeps the class's own for a property of a subclass

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def _read(self, use: Any) -> float:
        value: float | None = use.entries[self._name]
        return math.nan if value is None else value


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """A named phase of a window's steps; its time, `wall_s`, is that of its own devices where they tell it.

    Attributes:
        flops: counted FLOPs, by component and phase.
        wall_s: time [s].
        loop_s: time that the loop was in it [s]; those of all phases add up to the steps' time.
        tokens: real tokens.
        slots: positions computed, padding included.
        peak: what one device can do.
        world_size: devices that shared the work.
        is_elsewhere: whether it has devices of its own, whose FLOPs are not those of the steps.
        supervised: labelled tokens.
        generation: what was generated in it, by the names in `headway.count.generation.GENERATION_QUANTITIES`.
        scored_tokens: tokens of forwards without a backward, of the model beside the trained one with most of them.
        bytes_moved: bytes that it moved at least; 0 where they are not known.
        weight_bytes: those of them that generations read of weights.
        peak_bytes_per_s: memory bandwidth of one device [B/s]; NaN where it is not known.
    """

    flops: FlopCount
    wall_s: float
    loop_s: float
    tokens: int
    slots: int
    peak: Peak
    world_size: int
    is_elsewhere: bool
    supervised: int
    generation: Mapping[str, int]
    scored_tokens: int
    bytes_moved: int
    weight_bytes: int
    peak_bytes_per_s: float

    mfu = _Entry("Useful model FLOPs / (wall time x peak), a fraction.")
    mbu = _Entry("Bytes moved at least / (wall time x peak bytes/s), a fraction; NaN where either is not known.")
    tokens_per_s = _Entry("Real tokens per second, all devices together.")

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that were answered, each prompt once."""
        return self.generation["prompt_tokens"]

    @property
    def generated_tokens(self) -> int:
        """Tokens of the answers."""
        return self.generation["generated_tokens"]

    @property
    def bound(self) -> str | None:
        """Limit of the phase on perfect hardware, `compute` or `memory`; None if it is unknown."""
        bound: str | None = self.entries["bound"]
        return bound

    @cached_property
    def entries(self) -> dict[str, Any]:
        """Its entries of a record, from which its rates are read."""
        return self.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Give its entries of a record."""
        return phase_entries(known(self.measured()), _devices(self))

    def measured(self) -> dict[str, Any]:
        """Give the entries that a file keeps: entries other than 0, with the peaks of devices of its own."""
        counts = {name: getattr(self, name) for name in ("tokens", "slots", "supervised", "scored_tokens")}
        counts |= {**self.generation, "bytes_moved": self.bytes_moved, "weight_bytes": self.weight_bytes}
        own: dict[str, Any] = {} if self.wall_s == self.loop_s else {"busy_s": self.wall_s}
        if self.is_elsewhere:
            own = {"devices_s": self.wall_s, "num_devices": self.world_size, **_devices(self)}
        flops = {"flops": _passes(self.flops)} if self.flops.rows else {}
        return {"wall_s": self.loop_s, **own, **flops, **{name: number for name, number in counts.items() if number}}


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive steps of all ranks together.

    Every rate is a total over a total, and NaN where that is not known: of a step without work, time or slots, or with
    an unknown peak. A run's MFU is therefore the time-weighted one: the sum of its FLOPs over the
    sum of its time, not the mean of its steps' MFUs, which would let short steps count as much as long ones.

    Attributes:
        flops: counted FLOPs, by component and phase.
        wall_s: wall-clock time, the wait for data included [s].
        data_wait_s: part of `wall_s` spent waiting for data [s].
        tokens: real tokens.
        slots: positions computed, padding included.
        peak: what one device can do.
        world_size: devices that shared the work.
        step: number of the last step in it, from 1.
        num_steps: steps counted in it.
        num_left_out: steps of it that were warm-up or compiled something, and are not counted.
        left_out_s: their time [s].
        away_s: time within the counted steps that was not training and is not in `wall_s`: evaluations, checkpoints,
            compiling, each in the step that ends after it [s].
        away_for_s: time of compiling, evaluations and checkpoints by these names, also within steps that are left out
            [s].
        collection_s: time of Python's garbage collections on the first rank, within the counted steps [s].
        num_profiled: counted steps that the first rank recorded with a profiler, which makes them slower.
        sampled: entries of a record about the phases of sampled steps; None where none was sampled.
        phases: phases that the loop names, and the rest, by name; none where it names none.
        supervised: tokens with a label; of micro-batches that told it.
        num_without_labels: micro-batches that did not.
        loop: what the rank that writes the record knows of its loop: its optimizer, places that it pauses in.
        num_skipped: counted steps whose update the loop skipped (a gradient scaler that found inf); computed all the
            same.
        segments: segments.
        media: items and units of each kind of input beside text, named as by `headway.count.modalities.totals`: images,
            vision patches before merging, feature frames of audio.
        rank_flops: useful FLOPs of each rank.
        rank_busy_s: time that each rank's forwards took, without waiting for other ranks [s]; 0 where nobody looked.
        rank_busy_flops: useful FLOPs of these forwards.
        peak_memory_bytes: largest memory allocated on any rank since the run began [bytes]; 0 where unknown.
        ceiling_flops_per_s: rate measured on one such device; NaN where it was not.
        num_batches: micro-batches with a backward, of all ranks.
        packing_length: tokens that a micro-batch has room for; None where it was not said.
        energy_j: energy that the boards of all ranks drew [J]; NaN where one cannot tell.
        bytes_moved: bytes that the steps of all ranks moved at least; 0 where the meter was given no optimizer.
        peak_bytes_per_s: memory bandwidth of one device [B/s]; NaN where it is not known.
        smoothed: this window and some before it as one; None for the first.
        extra: the loop's own numbers (loss, learning rate): those of this rank's last step.
    """

    flops: FlopCount
    wall_s: float
    data_wait_s: float = 0.0
    tokens: int
    slots: int
    peak: Peak
    world_size: int
    step: int = 0
    num_steps: int = 1
    num_left_out: int = 0
    left_out_s: float = 0.0
    num_skipped: int = 0
    segments: int = 0
    media: Mapping[str, int] = field(default_factory=lambda: modalities.totals({}))
    rank_flops: tuple[int, ...] = ()
    rank_busy_s: tuple[float, ...] = ()
    rank_busy_flops: tuple[int, ...] = ()
    away_s: float = 0.0
    away_for_s: Mapping[str, float] = field(default_factory=dict)
    collection_s: float = 0.0
    num_profiled: int = 0
    sampled: Mapping[str, Any] | None = None
    phases: Mapping[str, PhaseUse] = field(default_factory=dict)
    supervised: int = 0
    num_without_labels: int = 0
    loop: Mapping[str, Any] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    ceiling_flops_per_s: float = math.nan
    num_batches: int = 0
    packing_length: int | None = None
    energy_j: float = math.nan
    bytes_moved: int = 0
    peak_bytes_per_s: float = math.nan
    smoothed: "Window | None" = None
    extra: dict[str, float] = field(default_factory=dict)

    mfu = _Entry("Useful model FLOPs / (wall time x peak), a fraction.")
    hfu = _Entry("MFU with the recomputed FLOPs of activation checkpointing added, a fraction.")
    mfu_of_ceiling = _Entry("Useful FLOPs / (wall time x measured ceiling), a fraction; NaN without a ceiling.")
    mfu_of_all_devices = _Entry(
        "MFU with the devices that phases have of their own, over the time of the steps, a fraction."
    )
    mbu = _Entry("Bytes moved at least / (wall time x peak bytes/s), a fraction; NaN where either is not known.")
    flops_per_s = _Entry("Useful model FLOPs per second, all devices together [FLOP/s].")
    tokens_per_s = _Entry("Real tokens per second, all devices together.")
    slots_per_s = _Entry("Computed positions per second, padding included.")
    step_s = _Entry("Mean wall time of a step [s].")
    padding_share = _Entry("Share of the computed positions that were padding, a fraction.")
    data_wait_share = _Entry("Share of the wall time spent waiting for data, a fraction.")
    fill = _Entry("Real tokens / room in the micro-batches, a fraction; NaN without a packing length.")
    joules_per_token = _Entry("Energy of the boards per real token [J]; NaN where it is not known.")
    balance = _Entry("Mean over maximum of the ranks' useful FLOPs, a fraction: 1 when all carry the same.")
    straggler_share = _Entry(
        "Least share of the time that ranks waited for the heaviest one, were all equally fast: 1 - balance."
    )
    heaviest_rank_load = _Entry(
        "FLOPs of the heaviest rank over the mean of all, 1 or more: where the work makes the others wait."
    )
    slowest_rank_speed = _Entry(
        "Speed of the slowest rank over the median of those that had work: where a device makes the others wait."
    )

    @property
    def convention(self) -> str:
        """Rule by which the FLOPs were counted, such as "useful/1"."""
        return self.flops.convention

    @property
    def peak_flops_per_s(self) -> float:
        """Peak of all devices together [FLOP/s]."""
        return self.peak.flops_per_s * self.world_size

    @property
    def num_supervised(self) -> float:
        """Tokens with a label; NaN where a micro-batch did not tell."""
        return math.nan if self.num_without_labels else self.supervised

    @property
    def heaviest_rank(self) -> int | None:
        """The rank that was given the most FLOPs, the first of several; None when none has any."""
        rank: int | None = self.entries["heaviest_rank"]
        return rank

    @property
    def slowest_rank(self) -> int | None:
        """The rank with the slowest device among ranks that had work; None without any, or if nobody looked."""
        rank: int | None = self.entries["slowest_rank"]
        return rank

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about impossible numbers, a phase's after its name; usually empty."""
        of_phases = ((f"phase {name}: ", phase) for name, phase in self.phases.items())
        return tuple(text for name, use in (("", self), *of_phases) for text in _above_peak(use, name))

    def __str__(self) -> str:
        """The window in a line, as for `print`; `to_dict` has all of it."""
        steps = f"{format_count(self.num_steps)} step{'' if self.num_steps == 1 else 's'}"
        return (
            f"step {format_count(self.step)}: {steps} in {format_duration(self.wall_s)}, MFU {format_share(self.mfu)}, "
            f"{format_rounded(self.tokens_per_s)} tokens/s, padding {format_share(self.padding_share)}"
        )

    @cached_property
    def entries(self) -> StepRecord:
        """The record, from which the attributes that are rates and shares are read."""
        return StepRecord(known(self.measured()))

    def to_dict(self) -> StepRecord:
        """Flatten into JSON-ready values; seconds, counts and fractions, never percent; None for unknown values."""
        return StepRecord(known(self.measured()))

    def measured(self) -> dict[str, Any]:
        """Give the entries that a file keeps, from which `StepRecord` makes a record."""
        by_component = self.flops.by_component()
        ranks = {name: getattr(self, name) for name in ("rank_flops", "rank_busy_s", "rank_busy_flops")}
        smoothed = self.smoothed
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "step",
            "step": self.step,
            "num_steps": self.num_steps,
            "wall_s": self.wall_s,
            "data_wait_s": self.data_wait_s,
            # tokens are real ones, slots have padding too
            "tokens": self.tokens,
            "slots": self.slots,
            "supervised": self.num_supervised,
            "segments": self.segments,
            **self.media,
            "flops": _passes(self.flops),
            "components": [*by_component],
            "flops_by_component": [*by_component.values()],
            # Counting rule, and rates that shares refer to.
            "convention": self.convention,
            "peak_dtype": self.peak.dtype,
            "peak_source": self.peak.source,
            "ceiling_flops_per_s": self.ceiling_flops_per_s,
            **_devices(self),
            "num_batches": self.num_batches,
            "packing_length": self.packing_length,
            # time that no step is billed for
            "num_left_out": self.num_left_out,
            "left_out_s": self.left_out_s,
            "away_s": self.away_s,
            **{f"{bucket}_s": seconds for bucket, seconds in self.away_for_s.items()},
            "collection_s": self.collection_s,
            "num_profiled": self.num_profiled,
            **(_NO_PHASES if self.sampled is None else self.sampled),
            "phases": {name: phase.measured() for name, phase in self.phases.items()},
            "num_skipped": self.num_skipped,
            "bytes_moved": self.bytes_moved or None,
            "energy_j": self.energy_j,
            # each rank's own numbers where there are few, else how they differ
            **(ranks if self.world_size <= LISTED else of_ranks(ranks, is_listed=False)),
            "peak_memory_bytes": self.peak_memory_bytes,
            **_NO_FACTS,
            **self.loop,
            **({f"{name}_smoothed": getattr(smoothed, name) for name in _SMOOTHED} if smoothed else {}),
            **self.extra,
        }


def _passes(flops: FlopCount) -> dict[str, int]:
    return {name: getattr(flops, name) for name in ("forward", "dgrad", "wgrad", "recompute")}


def _devices(use: Any) -> dict[str, Any]:
    """Number and peaks of the devices, as entries of a record."""
    return {
        "world_size": use.world_size,
        "peak_flops_per_s": use.peak.flops_per_s,
        "peak_bytes_per_s": use.peak_bytes_per_s,
    }


def _above_peak(use: Any, name: str) -> tuple[str, ...]:
    """Say why numbers of steps, or of a phase, are impossible, and where to look; nothing for possible numbers."""
    count, peak_flops = use.flops, use.peak.flops_per_s * use.world_size
    mfu, hfu = (ratio(ratio(n, use.wall_s), peak_flops) for n in (count.total, count.total + count.recompute))
    if hfu is None or mfu is None or not hfu > 1:  # an unknown peak
        return ()
    kind, value = ("MFU", mfu) if mfu > 1 else ("HFU", hfu)
    return (
        f"{name}{kind} of {value:.1%} is above 100 %, which no device can reach. Likely causes: the peak is too low "
        f"({use.peak.flops_per_s:.4g} FLOP/s in {use.peak.dtype}, {use.peak.source}); the step was timed "
        "without waiting for the device; or the "
        "workload handed to the meter is not the one that was computed, or comes from more devices than "
        f"world_size={use.world_size}.",
    )


def late_rank(by_rank_s: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Entries about the rank that comes last to its backward: how much later [s], and by which phase most.

    Args:
        by_rank_s: of each rank, the phases before ranks wait for each other's gradients [s]; NaN where it took none.
    """
    totals = [sum(phases.values()) for phases in by_rank_s]
    if len(totals) < 2 or any(math.isnan(total) for total in totals):
        return dict.fromkeys(_LATENESS)
    rank = max(range(len(totals)), key=totals.__getitem__)
    others = [phases for place, phases in enumerate(by_rank_s) if place != rank]
    more = {name: seconds - median(phases[name] for phases in others) for name, seconds in by_rank_s[rank].items()}
    late_s = totals[rank] - max(total for place, total in enumerate(totals) if place != rank)
    return dict(zip(_LATENESS, (rank, late_s, max(more, key=more.__getitem__)), strict=True))
