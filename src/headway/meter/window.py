"""A window: consecutive steps of all ranks, and the record of it."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from headway.count import FlopCount, modalities
from headway.devices import Peak
from headway.log.records import LISTED, SCHEMA_VERSION, StepRecord, known, of_ranks, phase_entries, ratio
from headway.report import format_count, format_duration, format_rounded, format_share

PASSES = ("forward", "dgrad", "wgrad", "recompute")
_SMOOTHED = ("mfu", "hfu", "tokens_per_s", "step_s")
_OF_RANKS = ("rank_flops", "rank_busy_s", "rank_busy_flops")
# Entries that every record measures, in their order, as they are where nobody measured them.
_UNMEASURED: Mapping[str, Any] = {
    "schema_version": SCHEMA_VERSION, "kind": "step", "step": 0, "num_steps": 1, "wall_s": math.nan, "data_wait_s": 0.0,
    "tokens": 0, "slots": 0, "supervised": 0, "segments": 0, **modalities.totals({}),
    **dict.fromkeys(("flops", "components", "flops_by_component", "convention", "peak_dtype", "peak_source")),
    "ceiling_flops_per_s": math.nan, "world_size": 1, "peak_flops_per_s": math.nan, "peak_bytes_per_s": math.nan,
    "num_batches": 0, "packing_length": None, "num_left_out": 0, "left_out_s": 0.0, "away_s": 0.0, "compile_s": 0.0,
    "evaluation_s": 0.0, "checkpoint_s": 0.0, "collection_s": 0.0, "core_wait_s": 0.0, "num_profiled": 0,
    "num_sampled": 0,
    **dict.fromkeys(("phases_s", "host_s", "host_lead_s", "late_rank", "late_rank_s", "late_rank_phase")),
    "extra_passes": {}, "phases": {}, "num_skipped": 0, "bytes_moved": 0, "energy_j": math.nan,
    **dict.fromkeys(_OF_RANKS, ()), "peak_memory_bytes": 0,
    **dict.fromkeys(("device_memory_bytes", "weights_dtype", "optimizer", "places", "anomaly_mode", "machine_state")),
}  # fmt: skip


class _Entry(property):
    """An entry of a record as an attribute.

    Args:
        meaning: of it.
        unknown: its value where it is not known.
    """

    def __init__(self, meaning: str, unknown: float | None = math.nan) -> None:
        super().__init__(self._read)
        self.__doc__, self._unknown = meaning, unknown  # Python before 3.13 keeps the class's own docstring

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def _read(self, use: Any) -> Any:
        measured = {**use.unmeasured, **use.readings}
        value = measured[self._name] if self._name in measured else use.entries[self._name]
        is_known = value is not None and not (isinstance(value, float) and not math.isfinite(value))
        return value if is_known else self._unknown


@dataclass(frozen=True)
class PhaseUse:
    """A named phase of a window's steps.

    Attributes:
        flops: counted FLOPs, by component and phase.
        peak: what one of its devices can do.
        world_size: devices that shared the work.
        peak_bytes_per_s: memory bandwidth of one device [B/s]; NaN where it is not known.
        readings: what was measured, as entries of a record; counts of 0 are left out.
    """

    unmeasured: ClassVar[Mapping[str, Any]] = {}

    flops: FlopCount
    peak: Peak
    world_size: int
    peak_bytes_per_s: float
    readings: Mapping[str, Any]

    mfu = _Entry("Useful model FLOPs / (wall time x peak), a fraction.")
    mbu = _Entry("Bytes moved at least / (wall time x peak bytes/s), a fraction; NaN where either is not known.")
    tokens_per_s = _Entry("Real tokens per second, all devices together.")
    tokens = _Entry("Real tokens.")
    slots = _Entry("Positions computed, padding included.")
    supervised = _Entry("Labelled tokens.")
    scored_tokens = _Entry("Tokens of forwards without a backward, of the model beside the trained one with most.")
    prompt_tokens = _Entry("Tokens of prompts that were answered, each prompt once.")
    generated_tokens = _Entry("Tokens of the answers.")
    bytes_moved = _Entry("Bytes that it moved at least; 0 where they are not known.", unknown=0)
    weight_bytes = _Entry("Bytes of weights that generations read; 0 where they are not known.", unknown=0)
    bound = _Entry("Limit on perfect hardware, `compute` or `memory`; None if it is unknown.", unknown=None)

    @property
    def is_elsewhere(self) -> bool:
        """True if it has devices of its own, whose FLOPs are not those of the steps."""
        return "num_devices" in self.readings

    @property
    def loop_s(self) -> float:
        """Time that the loop was in it [s]; those of all phases add up to the steps' time."""
        return float(self.readings["wall_s"])

    @property
    def wall_s(self) -> float:
        """Its time [s]: that of its own devices where they tell it."""
        return float(self.readings.get("devices_s", self.readings.get("busy_s", self.loop_s)))

    def to_dict(self) -> dict[str, Any]:
        """Give its entries of a record."""
        return self.entries

    @cached_property
    def entries(self) -> dict[str, Any]:
        """The entries that `to_dict` gives."""
        devices = {"world_size": self.world_size, "peak_flops_per_s": self.peak.flops_per_s}
        return phase_entries(known(self.readings), {**devices, "peak_bytes_per_s": self.peak_bytes_per_s})


@dataclass(frozen=True)
class Window:
    """Consecutive steps of all ranks together: its attributes are entries of its record.

    Every rate is a total over a total, and NaN where that is not known: of a step without work, time or slots, or with
    an unknown peak. A run's MFU is therefore the time-weighted one: the sum of its FLOPs over the
    sum of its time, not the mean of its steps' MFUs, which would let short steps count as much as long ones.

    Attributes:
        flops: counted FLOPs, by component and phase.
        peak: what one device can do.
        readings: what else was measured, as entries of a record.
        phases: phases that the loop names, and the rest, by name; none where it names none.
        smoothed: this window and some before it as one; None for the first.
        extra: the loop's own numbers (loss, learning rate): those of this rank's last step.
        unmeasured: entries that every record measures, as they are where nobody measured them.
    """

    unmeasured: ClassVar[Mapping[str, Any]] = _UNMEASURED

    flops: FlopCount
    peak: Peak
    readings: Mapping[str, Any]
    phases: Mapping[str, PhaseUse] = field(default_factory=dict)
    smoothed: "Window | None" = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    mfu = _Entry("Useful model FLOPs / (wall time x peak), a fraction.")
    hfu = _Entry("MFU with the recomputed FLOPs of activation checkpointing added, a fraction.")
    mfu_of_ceiling = _Entry("Useful FLOPs / (wall time x measured ceiling), a fraction; NaN without a ceiling.")
    mfu_of_all_devices = _Entry("MFU with the devices that phases have of their own, over the steps' time, a fraction.")
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
    straggler_share = _Entry("Least share of the time that equally fast ranks wait for the heaviest: 1 - balance.")
    heaviest_rank_load = _Entry("FLOPs of the heaviest rank over the mean of all: where work makes the others wait.")
    slowest_rank_speed = _Entry("Speed of the slowest rank over the median: where a device makes the others wait.")
    heaviest_rank = _Entry("The rank with the most FLOPs, the first of several; None when none has any.", unknown=None)
    slowest_rank = _Entry("The slowest rank of those with work; None without any, or if nobody looked.", unknown=None)
    # measured entries
    step = _Entry("Number of the last step in it, from 1.")
    num_steps = _Entry("Steps counted in it.")
    wall_s = _Entry("Wall-clock time, the wait for data included [s].")
    data_wait_s = _Entry("Part of the wall time spent waiting for data [s].")
    tokens = _Entry("Real tokens.")
    slots = _Entry("Positions computed, padding included.")
    supervised = _Entry("Tokens with a label; NaN where a micro-batch did not tell.")
    segments = _Entry("Segments.")
    world_size = _Entry("Devices that shared the work.")
    num_batches = _Entry("Micro-batches with a backward, of all ranks.")
    packing_length = _Entry("Tokens that a micro-batch has room for; None where it was not said.", unknown=None)
    num_left_out = _Entry("Steps of it that were warm-up or compiled something, and are not counted.")
    left_out_s = _Entry("Time of the steps that were left out [s].")
    away_s = _Entry(
        "Time within the counted steps that was not training and is not in `wall_s`: evaluations, checkpoints, "
        "compiling, each in the step that ends after it [s]."
    )
    compile_s = _Entry("Compiling, also within steps that are left out [s].")
    evaluation_s = _Entry("Evaluations, also within steps that are left out [s].")
    checkpoint_s = _Entry("Checkpoints, also within steps that are left out [s].")
    collection_s = _Entry("Time of Python's garbage collections on the first rank, within the counted steps [s].")
    core_wait_s = _Entry(
        "Time for which the loop's thread of the first rank waited for a core, where it computes itself [s]."
    )
    num_profiled = _Entry("Counted steps that the first rank recorded with a profiler, which makes them slower.")
    num_skipped = _Entry("Counted steps whose update the loop skipped, such as a gradient scaler that found inf.")
    rank_flops = _Entry("Useful FLOPs of each rank.")
    rank_busy_s = _Entry("Time of each rank's forwards, without waits for other ranks [s]; 0 where nobody looked.")
    rank_busy_flops = _Entry("Useful FLOPs of these forwards.")
    peak_memory_bytes = _Entry("Largest memory allocated on any rank since the run began [bytes]; 0 where unknown.")
    ceiling_flops_per_s = _Entry("Rate measured on one such device; NaN where it was not.")
    peak_bytes_per_s = _Entry("Memory bandwidth of one device [B/s]; NaN where it is not known.")
    machine_state = _Entry(
        "State of the device whose clock is furthest below its highest, and of its processor: `sm_mhz`, `most_sm_mhz`, "
        "`power_mw`, `temperature_c`, `utilisation_percent`, `limits` of the clock, `processor_percent` and "
        "`processor_mhz`; None where nobody sampled it.",
        unknown=None,
    )
    energy_j = _Entry("Energy that the boards of all ranks drew [J]; NaN where one cannot tell.")
    bytes_moved = _Entry("Bytes that all ranks moved at least; 0 where the meter has no optimizer.", unknown=0)

    @property
    def convention(self) -> str:
        """Rule by which the FLOPs were counted, such as "useful/1"."""
        return self.flops.convention

    @property
    def peak_flops_per_s(self) -> float:
        """Peak of all devices together [FLOP/s]."""
        return self.peak.flops_per_s * float(self.world_size)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about impossible numbers, a phase's after its name; usually empty."""
        of_phases = (_above_peak(phase, f"phase {name}: ") for name, phase in self.phases.items())
        return tuple(itertools.chain(_above_peak(self, ""), *of_phases))

    def __str__(self) -> str:
        """The window in a line, as for `print`; `to_dict` has all of it."""
        steps = f"{format_count(self.num_steps)} step{'' if self.num_steps == 1 else 's'}"
        return (
            f"step {format_count(self.step)}: {steps} in {format_duration(self.wall_s)}, MFU {format_share(self.mfu)}, "
            f"{format_rounded(self.tokens_per_s)} tokens/s, padding {format_share(self.padding_share)}"
        )

    def to_dict(self) -> StepRecord:
        """Flatten into JSON-ready values; seconds, counts and fractions, never percent; None for unknown values."""
        return self.entries

    @cached_property
    def entries(self) -> StepRecord:
        """The record, which `to_dict` gives."""
        return StepRecord(known(self.measured()))

    def measured(self) -> dict[str, Any]:
        """Give the entries that a file keeps, from which `StepRecord` makes a record."""
        flops, by_component = self.flops, self.flops.by_component()
        measured = {
            **self.unmeasured,
            **self.readings,
            "flops": {name: getattr(flops, name) for name in PASSES},
            "components": [*by_component],
            "flops_by_component": [*by_component.values()],
            "convention": flops.convention,
            "peak_dtype": self.peak.dtype,
            "peak_source": self.peak.source,
            "peak_flops_per_s": self.peak.flops_per_s,
            "phases": {name: phase.readings for name, phase in self.phases.items()},
        }
        measured["bytes_moved"] = measured["bytes_moved"] or None
        if measured["world_size"] > LISTED:  # many ranks have no numbers of their own
            measured |= of_ranks({name: measured.pop(name) for name in _OF_RANKS}, is_listed=False)
        if self.smoothed is not None:
            measured |= {f"{name}_smoothed": getattr(self.smoothed, name) for name in _SMOOTHED}
        return measured | {**self.extra}


def _above_peak(use: Window | PhaseUse, name: str) -> tuple[str, ...]:
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
