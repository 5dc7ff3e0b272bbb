"""A window: consecutive steps of all ranks, and the record of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from headway.meter.phase_use import LATENESS, PhaseUse, SampledPhases
from headway.meter.utilisation import Utilisation, mbu_of, ratio
from headway.report import format_count, format_duration, format_rounded, format_share

SCHEMA_VERSION = 1
_SMOOTHED = ("mfu", "hfu", "tokens_per_s", "step_s")
_LISTED = 128  # ranks up to which a record lists each of them

# Entries of a record of which no step was divided: all records have the same names.
_NO_PHASES = {"num_sampled": 0, **dict.fromkeys(("phases_s", "host_s", "host_lead_s", *LATENESS))}
_NO_FACTS = dict.fromkeys(("device_memory_bytes", "weights_dtype", "optimizer", "places", "anomaly_mode"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Utilisation):
    """Consecutive steps of all ranks together.

    Attributes:
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
        sampled: phases of the sampled steps; None where none was sampled.
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

    step: int
    num_steps: int
    num_left_out: int
    left_out_s: float
    num_skipped: int
    segments: int
    media: Mapping[str, int]
    rank_flops: tuple[int, ...]
    rank_busy_s: tuple[float, ...]
    rank_busy_flops: tuple[int, ...]
    away_s: float = 0.0
    away_for_s: Mapping[str, float] = field(default_factory=dict)
    collection_s: float = 0.0
    num_profiled: int = 0
    sampled: SampledPhases | None = None
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
    extra: dict[str, float]

    @property
    def step_s(self) -> float:
        """Mean wall time of a step [s]."""
        return ratio(self.wall_s, self.num_steps)

    @property
    def mfu_of_ceiling(self) -> float:
        """Useful FLOPs / (wall time x measured ceiling), a fraction; NaN without a ceiling."""
        return ratio(self.flops_per_s, self.ceiling_flops_per_s * self.world_size)

    @property
    def mbu(self) -> float:
        """Bytes moved at least / (wall time x peak bytes/s), a fraction; NaN where either is not known."""
        return mbu_of(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Say what cannot be right about these numbers, of a phase after its name; usually empty."""
        own: tuple[str, ...] = Utilisation.warnings.__get__(self)  # as slots rebuild the class
        return own + tuple(
            f"phase {name}: {warning}" for name, phase in self.phases.items() for warning in phase.warnings
        )

    @property
    def mfu_of_all_devices(self) -> float:
        """MFU with the devices that phases have of their own, over the time of the steps, a fraction."""
        elsewhere = [phase for phase in self.phases.values() if phase.is_elsewhere]
        flops = self.flops.total + sum(phase.flops.total for phase in elsewhere)
        peak = self.peak_flops_per_s + sum(phase.peak_flops_per_s for phase in elsewhere)
        return ratio(ratio(flops, self.wall_s), peak)

    @property
    def num_supervised(self) -> float:
        """Tokens with a label; NaN where a micro-batch did not tell."""
        return math.nan if self.num_without_labels else self.supervised

    @property
    def fill(self) -> float:
        """Real tokens / room in the micro-batches, a fraction; NaN without a packing length."""
        return ratio(self.tokens, self.num_batches * (self.packing_length or 0))

    def __str__(self) -> str:
        """The window in a line, as for `print`; `to_dict` has all of it."""
        steps = f"{format_count(self.num_steps)} step{'' if self.num_steps == 1 else 's'}"
        return (
            f"step {format_count(self.step)}: {steps} in {format_duration(self.wall_s)}, MFU {format_share(self.mfu)}, "
            f"{format_rounded(self.tokens_per_s)} tokens/s, padding {format_share(self.padding_share)}"
        )

    @property
    def joules_per_token(self) -> float:
        """Energy of the boards per real token [J]; NaN where it is not known."""
        return ratio(self.energy_j, self.tokens)

    @property
    def balance(self) -> float:
        """Mean over maximum of the ranks' useful FLOPs, a fraction: 1 when all carry the same, NaN without any."""
        return ratio(sum(self.rank_flops), len(self.rank_flops) * max(self.rank_flops, default=0))

    @property
    def straggler_share(self) -> float:
        """Least share of the time that ranks waited for the heaviest one, were all equally fast: 1 - balance."""
        return 1 - self.balance

    @property
    def heaviest_rank(self) -> int | None:
        """The rank that was given the most FLOPs, the first of several; None when none has any."""
        if not any(self.rank_flops):
            return None
        return max(range(len(self.rank_flops)), key=self.rank_flops.__getitem__)

    @property
    def heaviest_rank_load(self) -> float:
        """FLOPs of the heaviest rank over the mean of all, 1 or more: where the work makes the others wait."""
        return ratio(1, self.balance)

    @property
    def rank_speeds(self) -> tuple[float, ...]:
        """FLOPs of each rank's forwards over the time that it computed them [FLOP/s].

        NaN of a rank that had no work, which says nothing of its device, and where nobody looked.
        """
        spans = zip(self.rank_busy_flops, self.rank_busy_s, strict=True)
        return tuple(ratio(flops, busy_s) if flops else math.nan for flops, busy_s in spans)

    @property
    def slowest_rank(self) -> int | None:
        """The rank whose device computed slowest, of those that had work; None without any, or where nobody looked."""
        speeds = self.rank_speeds
        worked = [rank for rank, flops in enumerate(self.rank_busy_flops) if flops]
        if not worked or any(math.isnan(speeds[rank]) for rank in worked):
            return None
        return min(worked, key=speeds.__getitem__)

    @property
    def slowest_rank_speed(self) -> float:
        """Speed of the slowest rank over the median of those that had work: where a device makes the others wait."""
        rank, speeds = self.slowest_rank, self.rank_speeds
        if rank is None:
            return math.nan
        return ratio(speeds[rank], median(speed for speed in speeds if not math.isnan(speed)))

    def _record(self) -> dict[str, Any]:
        per_device = self.wall_s * self.world_size
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "step",
            **Utilisation._record(self),  # slots rebuild the class, which a bare super() would miss
            "step": self.step,
            "num_steps": self.num_steps,
            # time that no step is billed for
            "num_left_out": self.num_left_out,
            "left_out_s": self.left_out_s,
            "away_s": self.away_s,
            **{f"{bucket}_s": seconds for bucket, seconds in self.away_for_s.items()},
            "collection_s": self.collection_s,
            "num_profiled": self.num_profiled,
            **(_NO_PHASES if self.sampled is None else self.sampled.to_dict()),
            "phases": {name: phase.to_dict() for name, phase in self.phases.items()},
            "num_skipped": self.num_skipped,
            "step_s": self.step_s,
            # rates of all devices together, and of one
            "flops_per_s": self.flops_per_s,
            "flops_per_s_per_device": ratio(self.flops_per_s, self.world_size),
            "tokens_per_s_per_device": ratio(self.tokens, per_device),
            "slots_per_s_per_device": ratio(self.slots, per_device),
            # what the tokens belonged to, and media
            "supervised": self.num_supervised,
            "supervised_per_s": ratio(self.num_supervised, self.wall_s),
            "segments": self.segments,
            **self.media,
            "images_per_s": ratio(self.media["images"], self.wall_s),
            "patches_per_s": ratio(self.media["patches"], self.wall_s),
            "flops_share_by_component": self._shares(),
            "mfu_of_all_devices": self.mfu_of_all_devices,
            "mfu_of_ceiling": self.mfu_of_ceiling,
            "mbu": self.mbu,
            "bytes_moved": self.bytes_moved or None,
            "fill": self.fill,
            "energy_j": self.energy_j,
            "joules_per_token": self.joules_per_token,
            # differences between ranks; each rank's own numbers where there are few
            "balance": self.balance,
            "straggler_share": self.straggler_share,
            "heaviest_rank": self.heaviest_rank,
            "heaviest_rank_load": self.heaviest_rank_load,
            "slowest_rank": self.slowest_rank,
            "slowest_rank_speed": self.slowest_rank_speed,
            **(self._by_rank() if self.world_size <= _LISTED else {}),
            "peak_memory_bytes": self.peak_memory_bytes,
            **_NO_FACTS,
            **self.loop,
            **({f"{name}_smoothed": getattr(self.smoothed, name) for name in _SMOOTHED} if self.smoothed else {}),
            **self.extra,
        }

    def _by_rank(self) -> dict[str, list[float]]:
        """List the FLOPs of each rank, and its FLOPs per busy second, which tell a heavy pack from a slow device."""
        return {"rank_flops": [*self.rank_flops], "rank_flops_per_busy_s": [*self.rank_speeds]}

    def _shares(self) -> dict[str, float]:
        total = self.flops.total
        return {name: ratio(flops, total) for name, flops in self.flops.by_component().items()} if total else {}
