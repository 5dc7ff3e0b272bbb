"""Sums of steps: sums of one rank, as whole numbers that ranks exchange exactly, and windows of all ranks."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from headway.count import FlopCount, FlopRow, Workload, modalities
from headway.count.generation import GENERATION_QUANTITIES
from headway.devices import Peak
from headway.meter.phases import PHASES
from headway.meter.step_phases import REST, PhaseDevices
from headway.meter.window import PASSES, PhaseUse, Window

NS = 1_000_000_000
AWAY_FOR = ("compile", "evaluation", "checkpoint")  # buckets of time away whose sums a record has
WHOLE = ""
"""Stands for the whole step where the name of a phase may stand."""
_OF_ALL_STEPS = ("num_left_out", "left_out_ns", *(f"{bucket}_ns" for bucket in AWAY_FOR))
_OWN = ("data", "input", "inference", "forward", "loss")  # before ranks wait for each other's gradients

Sums = Counter[tuple[str, ...]]
"""Whole numbers of some steps by phase and quantity, and FLOPs by phase, component, driver and pass.

Those of all ranks are the sums of theirs. Quantities are `tokens`, `num_steps`, times in ns that end in `_ns`.
"""


def add_count(sums: Sums, phases: Iterable[str], count: FlopCount) -> None:
    """Add counted FLOPs to the FLOPs of some phases."""
    for row in count.rows:
        for name in PASSES:
            if number := getattr(row, name):
                for phase in phases:
                    sums[phase, row.name, row.driver, name] += number


def add_quantities(sums: Sums, phases: Iterable[str], workload: Workload) -> None:
    """Add the tokens, images and other quantities of a workload to the quantities of some phases."""
    quantities = {
        "tokens": workload.tokens,
        "slots": workload.slots,
        "segments": workload.num_segments,
        "supervised": workload.supervised if workload.knows_supervised else 0,
        **(modalities.totals(workload.media) if workload.media else {}),  # most have none
    }
    for phase in phases:
        for name, number in quantities.items():
            sums[phase, name] += number


def left_out(sums: Sums) -> Sums:
    """Sums of the same steps if they are left out: how many they are, and their time."""
    uncounted = Sums({(WHOLE, name): sums[WHOLE, name] for name in _OF_ALL_STEPS})
    uncounted[WHOLE, "num_left_out"] += sums[WHOLE, "num_steps"]
    uncounted[WHOLE, "left_out_ns"] += sums[WHOLE, "wall_ns"]
    return uncounted


def added(every: Iterable[Sums]) -> Sums:
    """Sum of some sums, in which a 0 stays."""
    total = Sums()
    for sums in every:
        total.update(sums)
    return total


def _flops(sums: Sums) -> dict[str, FlopCount]:
    """Counted FLOPs by phase, of the whole step at least."""
    rows: dict[str, dict[tuple[str, str], dict[str, int]]] = {WHOLE: {}}
    for key, number in sums.items():
        if len(key) > 2:
            phase, component, driver, name = key
            rows.setdefault(phase, {}).setdefault((component, driver), {})[name] = number
    return {
        phase: FlopCount(tuple(FlopRow(name, driver, **n) for (name, driver), n in of_phase.items()))
        for phase, of_phase in rows.items()
    }


@dataclass
class Tally:
    """Sums of all ranks, since the run began and in its last windows, and the numbers that turn sums into fractions.

    Attributes:
        peak: of one device.
        smooth_over: windows over which smoothed numbers go.
        ceiling_flops_per_s: rate measured on one such device [FLOP/s]; NaN where it was not.
        peak_bytes_per_s: memory bandwidth of one device [B/s]; NaN where it is not known.
        packing_length: tokens that a micro-batch has room for; None where it was not said.
        batch_ranks: ranks in a row that work on each batch together, of which the first counts it.
        devices: of phases that have devices of their own.
    """

    peak: Peak
    smooth_over: int = 1
    ceiling_flops_per_s: float = math.nan
    peak_bytes_per_s: float = math.nan
    packing_length: int | None = None
    batch_ranks: int = 1
    devices: Mapping[str, PhaseDevices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._run: list[Sums] = []
        self._left_out: list[Sums] = []
        self._carried: list[Sums] = []  # sums of ranks that are ahead of the first rank
        self._recent: deque[list[Sums]] = deque(maxlen=self.smooth_over)
        self._memory = 0

    def window(self, ranks: list[Sums], memory: int, step: int, extra: dict[str, Any]) -> Window | None:
        """Add steps of all ranks; None if the first rank's device has passed none.

        Where all that it has passed are left out, the window has no counted step: how many they are, and their time.
        """
        self._run = _joined(self._run, ranks)
        self._memory = max(self._memory, memory)
        ranks = _joined(self._carried, ranks)
        first = ranks[0]
        if not first[WHOLE, "num_steps"]:
            # sums of ranks that are ahead, without what is left out, wait for the first rank
            self._carried = [Sums({k: n for k, n in rank.items() if k[1] not in _OF_ALL_STEPS}) for rank in ranks]
            uncounted = [Sums({(WHOLE, name): rank[WHOLE, name] for name in _OF_ALL_STEPS}) for rank in ranks]
            return self._describe(uncounted, step, extra) if first[WHOLE, "num_left_out"] else None
        self._carried = []
        self._recent.append(ranks)
        window = self._describe(ranks, step, extra)
        if len(self._recent) > 1:
            recent = [added(of_rank) for of_rank in zip(*self._recent, strict=True)]
            window = replace(window, smoothed=self._describe(recent, step, extra))
        return window

    def one_step(self, ranks: list[Sums], memory: int, step: int) -> Window:
        """Add one step of all ranks, which has a window also where the run's numbers leave it out."""
        self._memory = max(self._memory, memory)
        is_left_out = any(rank[WHOLE, "num_left_out"] for rank in ranks)
        for rank in ranks:
            rank[WHOLE, "num_left_out"] = int(is_left_out)
        if is_left_out:
            self._left_out = _joined(self._left_out, ranks)
        else:
            self._run = _joined(self._run, ranks)
        return self._describe(ranks, step, {})

    def only(self, rank: int) -> None:
        """Forget the other ranks, which have been lost."""
        self._run, self._left_out = self._run[rank : rank + 1], self._left_out[rank : rank + 1]
        self._carried = self._carried[rank : rank + 1]
        self._recent.clear()

    def forget_peak(self) -> None:
        """Give windows no MFU from now on."""
        self.peak = replace(self.peak, flops_per_s=math.nan)

    def run(self, step: int, extra: dict[str, Any]) -> Window:
        """Describe all counted steps; the steps that compiled something if there are no others."""
        if not self._run or not self._run[0][WHOLE, "num_steps"]:
            return self._describe(self._left_out or self._run or [Sums()], step, extra)
        run = self._describe(self._run, step, extra)
        if not self._left_out:
            return run
        compiled = self._describe(self._left_out, step, extra)
        left_out_s = run.left_out_s + compiled.wall_s
        readings = {**run.readings, "num_left_out": run.num_left_out + compiled.num_left_out, "left_out_s": left_out_s}
        for bucket in AWAY_FOR:
            readings[f"{bucket}_s"] += compiled.readings[f"{bucket}_s"]
        return replace(run, readings=readings)

    def _describe(self, ranks: Sequence[Sums], step: int, extra: dict[str, Any]) -> Window:
        total, first = ranks[0] if len(ranks) == 1 else added(ranks), ranks[0]
        flops = _flops(total)
        # ranks that work on each batch together know it whole on the first of them; each is billed its share
        billed = [ranks[place - place % self.batch_ranks] for place in range(len(ranks))]
        useful = [flops[WHOLE].total] if len(ranks) == 1 else [_useful(rank) for rank in billed]
        readings = {
            "step": step,
            "world_size": len(ranks),
            **{name: first[WHOLE, name] for name in ("num_steps", "num_left_out", "num_skipped", "num_profiled")},
            **{f"{name}_s": first[WHOLE, f"{name}_ns"] / NS for name in _TIMES},
            **{name: total[WHOLE, name] for name in _TOTALS},
            "supervised": math.nan if total[WHOLE, "num_without_labels"] else total[WHOLE, "supervised"],
            # energy is unknown as soon as one rank has none
            "energy_j": math.nan if total[WHOLE, "num_without_energy"] else total[WHOLE, "energy_mj"] / 1000,
            "packing_length": self.packing_length,
            "peak_bytes_per_s": self.peak_bytes_per_s,
            "ceiling_flops_per_s": self.ceiling_flops_per_s,
            "rank_flops": tuple(number // self.batch_ranks for number in useful),
            "rank_busy_s": tuple(rank[WHOLE, "busy_ns"] / NS for rank in ranks),
            "rank_busy_flops": tuple(rank[WHOLE, "busy_flops"] // self.batch_ranks for rank in billed),
            "peak_memory_bytes": self._memory,
            **_state(ranks),
            **(_sampled(ranks) if first[WHOLE, "num_sampled"] else {}),
            "extra_passes": _extra(first),
        }
        names = [name for name in dict.fromkeys([key[0] for key in total]) if name not in (WHOLE, REST)]
        phases = self._named([*names, REST], total, ranks, flops) if names else {}
        return Window(flops[WHOLE], self.peak, readings, phases, extra=extra)

    def _named(
        self, names: Sequence[str], total: Sums, ranks: Sequence[Sums], flops: Mapping[str, FlopCount]
    ) -> dict[str, PhaseUse]:
        """Describe the named phases of all ranks, and the rest of their steps."""
        here, first, phases = PhaseDevices(self.peak, len(ranks), self.peak_bytes_per_s), ranks[0], {}
        for name in names:
            devices = self.devices.get(name, here)
            loop_s, busy_s = first[name, "wall_ns"] / NS, first[name, "devices_ns"] / NS
            readings: dict[str, Any] = {"wall_s": loop_s}
            if name in self.devices:
                readings |= {"devices_s": busy_s or loop_s, "num_devices": devices.num_devices}
                readings |= {"world_size": devices.num_devices, "peak_flops_per_s": devices.peak.flops_per_s}
                readings["peak_bytes_per_s"] = devices.memory_bytes_per_s
            elif busy_s not in (0.0, loop_s):
                readings["busy_s"] = busy_s
            if (count := flops.get(name, FlopCount(()))).rows:
                readings["flops"] = {part: getattr(count, part) for part in PASSES}
            readings |= {quantity: number for quantity in _OF_PHASES if (number := total[name, quantity])}
            phases[name] = PhaseUse(count, devices.peak, devices.num_devices, devices.memory_bytes_per_s, readings)
        return phases


_OF_PHASES = ("tokens", "slots", "supervised", "scored_tokens", *GENERATION_QUANTITIES, "bytes_moved", "weight_bytes")
_TIMES = ("wall", "data_wait", "left_out", "away", *AWAY_FOR, "collection", "core_wait")
_TOTALS = ("tokens", "slots", "segments", *modalities.totals({}), "num_batches", "bytes_moved")


def _joined(before: list[Sums], ranks: list[Sums]) -> list[Sums]:
    return [added(of_rank) for of_rank in zip(before, ranks, strict=True)] if before else ranks


def _useful(sums: Sums) -> int:
    return sum(number for key, number in sums.items() if len(key) > 2 and not key[0] and key[3] != "recompute")


def _extra(first: Sums) -> dict[str, float]:
    """Passes and updates of the first rank's sampled steps beyond those that the steps need, and their times."""
    numbers = {name: first[WHOLE, f"extra_{name}"] for name in ("forward", "backward", "update")}
    extra: dict[str, float] = {}
    for name, number in numbers.items():
        extra |= {name: number, f"{name}_s": first[WHOLE, f"extra_{name}_ns"] / NS} if number else {}
    return extra


def _state(ranks: Sequence[Sums]) -> dict[str, Any]:
    """Describe the state of the device whose clock is furthest below its highest, and of that rank's processor."""
    states: list[dict[str, Any]] = []
    for rank, sums in enumerate(ranks):
        if number := sums[WHOLE, "num_states"]:
            readings = {
                key[1].removeprefix("state "): value for key, value in sums.items() if key[1].startswith("state ")
            }
            state = {name: round(value / number) for name, value in readings.items() if not name.startswith("limit ")}
            limits = sorted(name.removeprefix("limit ") for name in readings.keys() - state.keys())
            own = {"rank": rank} if len(ranks) > 1 else {}
            states.append({**own, **state, **({"limits": limits} if limits else {})})
    if not states:
        return {}
    return {"machine_state": min(states, key=lambda state: state.get("sm_mhz", 1) / state.get("most_sm_mhz", 1))}


def _sampled(ranks: Sequence[Sums]) -> dict[str, Any]:
    """Describe the phases of the first rank's sampled steps, and the rank whose gradients came late."""
    per_step = [
        {name: rank[WHOLE, f"{name}_phase_ns"] / (rank[WHOLE, "num_sampled"] or math.nan) / NS for name in PHASES}
        for rank in ranks
    ]
    num_sampled, lead_ns = ranks[0][WHOLE, "num_sampled"], ranks[0][WHOLE, "lead_ns"]
    num_ahead = num_sampled if lead_ns else math.nan  # a CPU has no queue to be ahead of
    return {
        "num_sampled": num_sampled,
        "phases_s": per_step[0],
        "host_s": ranks[0][WHOLE, "host_ns"] / num_ahead / NS,
        "host_lead_s": lead_ns / num_ahead / NS,
        **(late_rank([{name: times[name] for name in _OWN} for times in per_step]) if len(ranks) > 1 else {}),
    }


def late_rank(by_rank_s: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Entries about the rank that comes last to its backward: how much later [s], and by which phase most.

    Args:
        by_rank_s: of each rank, the phases before ranks wait for each other's gradients [s]; NaN where it took none.
    """
    names = "late_rank", "late_rank_s", "late_rank_phase"
    totals = [sum(phases.values()) for phases in by_rank_s]
    if len(totals) < 2 or any(math.isnan(total) for total in totals):
        return dict.fromkeys(names)
    rank = max(range(len(totals)), key=totals.__getitem__)
    others = [phases for place, phases in enumerate(by_rank_s) if place != rank]
    more = {name: seconds - median(phases[name] for phases in others) for name, seconds in by_rank_s[rank].items()}
    late_s = totals[rank] - max(total for place, total in enumerate(totals) if place != rank)
    return dict(zip(names, (rank, late_s, max(more, key=more.__getitem__)), strict=True))
