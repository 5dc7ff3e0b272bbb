"""Sums of steps: those of one rank, as whole numbers that ranks exchange exactly, and windows of all ranks."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from typing import Any

from headway.count import FlopCount, FlopRow, Workload, modalities
from headway.count.generation import GENERATION_QUANTITIES
from headway.devices import Peak
from headway.meter.phases import PHASES
from headway.meter.step_phases import REST, PhaseDevices
from headway.meter.window import PhaseUse, Window, late_rank

NS = 1_000_000_000
Packed = tuple[Sequence[int], list[list[int]], dict[str, Any]]  # sums on their way to another rank
_QUANTITIES = ("tokens", "slots", "segments", "supervised")
AWAY_FOR = ("compile", "evaluation", "checkpoint")  # buckets of time away whose sums a record has
_TOTALS = (
    "num_steps",
    "num_left_out",
    "num_skipped",
    "num_batches",
    "wall_ns",
    "left_out_ns",  # time of steps that are left out
    "data_wait_ns",
    "away_ns",  # what came within counted steps and was not training, in none of their times
    *(f"{bucket}_ns" for bucket in AWAY_FOR),  # the same of steps that are left out as well
    "busy_ns",  # forwards of the model, without waiting for other ranks
    "busy_flops",  # useful FLOPs of these forwards
    "collection_ns",  # garbage collections
    "profiled",  # steps that were recorded
    "num_sampled",  # steps whose phases were taken
    *(f"{phase}_phase_ns" for phase in PHASES),
    "host_ns",  # of these steps, in which the host gave work to a device: forward, backward, optimizer
    "lead_ns",  # the most that the host was ahead of a device
    "num_without_labels",  # micro-batches that did not tell which tokens are learnt
    *GENERATION_QUANTITIES,
    "scored_tokens",  # of forwards without a backward, of the model beside the trained one that ran most of them
    "devices_ns",  # what a phase's own devices said they worked
    "energy_mj",
    "num_without_energy",  # windows of ranks that cannot tell their energy
    "bytes_moved",
    "weight_bytes",  # that generations read of weights
    *_QUANTITIES,
)
_PHASES = ("forward", "dgrad", "wgrad", "recompute")
_OF_ALL_STEPS = ("num_left_out", "left_out_ns", *(f"{bucket}_ns" for bucket in AWAY_FOR))


@cache
def _media_names(_kinds: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(modalities.totals({}))


class Sums:
    """Add up time, quantities and FLOPs of counted steps, on one rank or on all, as whole numbers to exchange exactly.

    Args:
        keys: component and driver of each row of FLOPs.
        packed: sums as `packed` lists them.

    Attributes:
        phases: sums of each named phase, by its name.
    """

    __slots__ = ("flops", "keys", "phases", "totals")

    def __init__(self, keys: tuple[tuple[str, str], ...], packed: Packed | None = None) -> None:
        self.keys = keys
        names = (*_TOTALS, *_media_names(tuple(modalities.MODALITIES)))
        totals, flops, phases = packed or ((0,) * len(names), [[]] * len(_PHASES), {})
        self.totals = dict(zip(names, totals, strict=True))
        # keys that joined while the loop ran stand behind the others
        self.flops = [[*row, *[0] * (len(keys) - len(row))] for row in flops]
        self.phases: dict[str, Sums] = {name: Sums(keys, of_phase) for name, of_phase in phases.items()}

    def packed(self) -> Packed:
        """List totals, FLOPs by row and the same of each named phase, without the names that all ranks know."""
        phases = {name: sums.packed() for name, sums in self.phases.items()}
        return [*self.totals.values()], self.flops, phases

    def __add__(self, other: "Sums") -> "Sums":
        sums = Sums(max(self.keys, other.keys, key=len))  # keys that joined while the loop ran stand behind the others
        sums.totals = {name: total + other.totals[name] for name, total in self.totals.items()}
        sums.flops = [
            [a + b for a, b in zip_longest(*rows, fillvalue=0)] for rows in zip(self.flops, other.flops, strict=True)
        ]
        sums.phases = {name: self.of_phase(name) + other.of_phase(name) for name in {**self.phases, **other.phases}}
        return sums

    def phase(self, name: str) -> "Sums":
        """Sums of a named phase, to add to."""
        sums = self.phases.get(name)
        if sums is None:
            sums = self.phases[name] = Sums(self.keys)
        return sums

    def of_phase(self, name: str) -> "Sums":
        """Sums of a named phase; empty ones of a phase that there is none of."""
        return self.phases.get(name) or Sums(self.keys)

    def left_out(self) -> "Sums":
        """Return what stays of steps that are left out: how many, and their time."""
        sums = self.uncounted()
        sums.totals["num_left_out"] += self.totals["num_steps"]
        sums.totals["left_out_ns"] += self.totals["wall_ns"]
        return sums

    def uncounted(self) -> "Sums":
        """Return what these sums have of steps that are left out, without the counted ones."""
        sums = Sums(self.keys)
        sums.totals.update({name: self.totals[name] for name in _OF_ALL_STEPS})
        return sums

    def counted(self) -> "Sums":
        """Return these sums without what is left out."""
        sums = Sums(self.keys, self.packed())
        sums.totals.update(dict.fromkeys(_OF_ALL_STEPS, 0))
        return sums

    def add_count(self, count: FlopCount) -> None:
        """Add counted FLOPs, in no named phase."""
        place = {key: i for i, key in enumerate(self.keys)}
        for row in count.rows:
            for phase, sums in zip(_PHASES, self.flops, strict=True):
                sums[place[row.name, row.driver]] += getattr(row, phase)

    def add_quantities(self, workload: Workload) -> None:
        """Add the tokens, images and other quantities of a workload, in no named phase."""
        self.totals["tokens"] += workload.tokens
        self.totals["slots"] += workload.slots
        self.totals["segments"] += workload.num_segments
        self.totals["supervised"] += workload.supervised if workload.knows_supervised else 0
        if workload.media:  # most have none
            for name, number in modalities.totals(workload.media).items():
                self.totals[name] += number

    @property
    def useful(self) -> int:
        """Useful FLOPs: all phases but recomputation."""
        return sum(map(sum, self.flops[:3]))

    def count(self) -> FlopCount:
        """Return the FLOPs as a count."""
        rows = zip(self.keys, *self.flops, strict=True)
        return FlopCount(tuple(FlopRow(*key, *phases) for key, *phases in rows if any(phases)))


@dataclass(frozen=True)
class Yardstick:
    """Peaks, and what else a window needs to turn sums into fractions."""

    peak: Peak  # of one device
    ceiling_flops_per_s: float = math.nan  # rate measured on one such device [FLOP/s]; NaN where it was not
    peak_bytes_per_s: float = math.nan  # memory bandwidth of one device [B/s]; NaN where it is not known
    packing_length: int | None = None  # tokens that a micro-batch has room for; None where it was not said
    batch_ranks: int = 1  # ranks in a row that work on each batch together, of which the first counts it
    devices: Mapping[str, PhaseDevices] = field(default_factory=dict)  # of phases that have devices of their own


class Tally:
    """Sums of all ranks, since the run began and in its last windows."""

    def __init__(self, yardstick: Yardstick, smooth_over: int) -> None:
        self._yardstick = yardstick
        self._run: list[Sums] = []
        self._left_out: list[Sums] = []
        self._carried: list[Sums] = []  # of ranks that are ahead of the first one
        self._recent: deque[list[Sums]] = deque(maxlen=smooth_over)
        self._memory = 0

    def window(self, ranks: list[Sums], memory: int, step: int, extra: dict[str, Any]) -> Window | None:
        """Add steps of all ranks; None if the first rank's device has passed none.

        Where all that it has passed are left out, the window has no counted step: how many they are, and their time.
        """
        self._run = _added(self._run, ranks)
        self._memory = max(self._memory, memory)
        ranks = _added(self._carried, ranks)
        if not ranks[0].totals["num_steps"]:
            self._carried = [rank.counted() for rank in ranks]
            left_out = [rank.uncounted() for rank in ranks]
            return self._describe(left_out, step, extra) if ranks[0].totals["num_left_out"] else None
        self._carried = []
        self._recent.append(ranks)
        window = self._describe(ranks, step, extra)
        if len(self._recent) > 1:
            recent = [sum(rank[1:], rank[0]) for rank in zip(*self._recent, strict=True)]
            window = replace(window, smoothed=self._describe(recent, step, extra))
        return window

    def one_step(self, ranks: list[Sums], memory: int, step: int) -> Window:
        """Add one step of all ranks, which has a window also where the run's numbers leave it out."""
        self._memory = max(self._memory, memory)
        is_left_out = any(rank.totals["num_left_out"] for rank in ranks)
        for rank in ranks:
            rank.totals["num_left_out"] = int(is_left_out)
        if is_left_out:
            self._left_out = _added(self._left_out, ranks)
        else:
            self._run = _added(self._run, ranks)
        return self._describe(ranks, step, {})

    def only(self, rank: int) -> None:
        """Forget the other ranks, which have been lost."""
        self._run, self._left_out = self._run[rank : rank + 1], self._left_out[rank : rank + 1]
        self._carried = self._carried[rank : rank + 1]
        self._recent.clear()

    def forget_peak(self) -> None:
        """Give windows no MFU from now on."""
        self._yardstick = replace(self._yardstick, peak=replace(self._yardstick.peak, flops_per_s=math.nan))

    def run(self, step: int, extra: dict[str, Any]) -> Window:
        """Describe all counted steps; those that compiled something if there are no others."""
        if not self._run or not self._run[0].totals["num_steps"]:
            return self._describe(self._left_out or self._run or [Sums(())], step, extra)
        run = self._describe(self._run, step, extra)
        if not self._left_out:
            return run
        left_out = self._describe(self._left_out, step, extra)
        return replace(
            run,
            num_left_out=run.num_left_out + left_out.num_left_out,
            left_out_s=run.left_out_s + left_out.wall_s,
            away_for_s={bucket: run.away_for_s[bucket] + left_out.away_for_s[bucket] for bucket in AWAY_FOR},
        )

    def _describe(self, ranks: Sequence[Sums], step: int, extra: dict[str, Any]) -> Window:
        total, first, yardstick = sum(ranks[1:], ranks[0]), ranks[0].totals, self._yardstick
        # ranks that work on each batch together know it whole on the first of them; each is billed its share
        billed = [ranks[place - place % yardstick.batch_ranks] for place in range(len(ranks))]
        quantities: dict[str, Any] = {name: total.totals[name] for name in _QUANTITIES}
        return Window(
            flops=total.count(),
            wall_s=first["wall_ns"] / NS,
            data_wait_s=first["data_wait_ns"] / NS,
            away_s=first["away_ns"] / NS,
            away_for_s={bucket: first[f"{bucket}_ns"] / NS for bucket in AWAY_FOR},
            peak=yardstick.peak,
            world_size=len(ranks),
            step=step,
            num_steps=first["num_steps"],
            num_left_out=first["num_left_out"],
            left_out_s=first["left_out_ns"] / NS,
            num_skipped=first["num_skipped"],
            rank_flops=tuple(rank.useful // yardstick.batch_ranks for rank in billed),
            rank_busy_s=tuple(rank.totals["busy_ns"] / NS for rank in ranks),
            rank_busy_flops=tuple(rank.totals["busy_flops"] // yardstick.batch_ranks for rank in billed),
            peak_memory_bytes=self._memory,
            # not known as soon as one rank has none
            collection_s=first["collection_ns"] / NS,
            sampled=_phases(ranks),
            phases=self._named(ranks),
            num_profiled=first["profiled"],
            num_without_labels=total.totals["num_without_labels"],
            energy_j=math.nan if total.totals["num_without_energy"] else total.totals["energy_mj"] / 1000,
            packing_length=yardstick.packing_length,
            bytes_moved=total.totals["bytes_moved"],
            peak_bytes_per_s=yardstick.peak_bytes_per_s,
            num_batches=total.totals["num_batches"],
            ceiling_flops_per_s=yardstick.ceiling_flops_per_s,
            extra=extra,
            media={name: total.totals[name] for name in _media_names(tuple(modalities.MODALITIES))},
            **quantities,
        )

    def _named(self, ranks: Sequence[Sums]) -> dict[str, PhaseUse]:
        """Describe the named phases of all ranks, and the rest of their steps; nothing where none is named."""
        phases, yardstick = sum(ranks[1:], ranks[0]).phases, self._yardstick
        if phases.keys() <= {REST}:
            return {}
        here = PhaseDevices(yardstick.peak, len(ranks), yardstick.peak_bytes_per_s)
        return {
            name: _use(sums, ranks[0].of_phase(name), yardstick.devices.get(name, here), name in yardstick.devices)
            for name, sums in sorted(phases.items(), key=lambda phase: phase[0] == REST)
        }


def _use(sums: Sums, first: Sums, devices: PhaseDevices, is_elsewhere: bool) -> PhaseUse:
    """Describe a phase by the sums of all ranks, and by the time of the first."""
    totals, loop_s = sums.totals, first.totals["wall_ns"] / NS
    return PhaseUse(
        flops=sums.count(),
        wall_s=first.totals["devices_ns"] / NS or loop_s,
        loop_s=loop_s,
        tokens=totals["tokens"],
        slots=totals["slots"],
        peak=devices.peak,
        world_size=devices.num_devices,
        is_elsewhere=is_elsewhere,
        supervised=totals["supervised"],
        generation={name: totals[name] for name in GENERATION_QUANTITIES},
        scored_tokens=totals["scored_tokens"],
        bytes_moved=totals["bytes_moved"],
        weight_bytes=totals["weight_bytes"],
        peak_bytes_per_s=devices.memory_bytes_per_s,
    )


def _added(before: list[Sums], ranks: list[Sums]) -> list[Sums]:
    return [a + b for a, b in zip(before, ranks, strict=True)] if before else ranks


def _phases(ranks: Sequence[Sums]) -> dict[str, Any] | None:
    """Describe the phases of the first rank's sampled steps, and which rank was late for the others' gradients."""
    first = ranks[0].totals
    if not first["num_sampled"]:
        return None
    per_step = [
        {phase: rank.totals[f"{phase}_phase_ns"] / (rank.totals["num_sampled"] or math.nan) / NS for phase in PHASES}
        for rank in ranks
    ]
    looked = first["num_sampled"] if first["lead_ns"] else math.nan  # a CPU has no queue to be ahead of
    return {
        "num_sampled": first["num_sampled"],
        "phases_s": per_step[0],
        "host_s": first["host_ns"] / looked / NS,
        "host_lead_s": first["lead_ns"] / looked / NS,
        **late_rank([{phase: times[phase] for phase in _OWN} for times in per_step]),
    }


_OWN = ("data", "input", "inference", "forward", "loss")  # before ranks wait for each other's gradients
