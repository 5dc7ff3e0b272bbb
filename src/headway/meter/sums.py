"""Sums of steps, as whole numbers that ranks can exchange exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.count import FlopCount, FlopRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.count import Workload

NS = 1_000_000_000
COUNTED = ("tokens", "slots", "segments", "images", "videos", "patches", "audio_frames")
_TOTALS = (
    "num_steps",
    "num_left_out",
    "num_skipped",
    "num_batches",
    "wall_ns",
    "left_out_ns",  # time of steps that are left out
    "data_wait_ns",
    "busy_ns",  # forwards of the model, without waiting for other ranks
    "busy_flops",  # useful FLOPs of these forwards
    "energy_mj",
    "num_without_energy",  # windows of ranks that cannot tell their energy
    "bytes_moved",
    *COUNTED,
)
_PHASES = ("forward", "dgrad", "wgrad", "recompute")


class Sums:
    """What counted steps add up to, on one rank or on all of them, as whole numbers that can be exchanged exactly.

    Args:
        keys: component and driver of each row of FLOPs.
    """

    __slots__ = ("flops", "keys", "totals")

    def __init__(self, keys: tuple[tuple[str, str], ...], numbers: Sequence[int] | None = None) -> None:
        self.keys = keys
        numbers = [0] * (len(_TOTALS) + len(_PHASES) * len(keys)) if numbers is None else numbers
        self.totals = dict(zip(_TOTALS, numbers, strict=False))
        rest = numbers[len(_TOTALS) :]
        self.flops = [list(rest[i :: len(_PHASES)]) for i in range(len(_PHASES))]

    def numbers(self) -> list[int]:
        """List all numbers in one order."""
        return [*self.totals.values(), *(n for row in zip(*self.flops, strict=True) for n in row)]

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.keys, [a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)])

    def left_out(self) -> Sums:
        """Return what stays of steps that are left out: how many, and their time."""
        sums = Sums(self.keys)
        sums.totals["num_left_out"] = self.totals["num_steps"] + self.totals["num_left_out"]
        sums.totals["left_out_ns"] = self.totals["wall_ns"] + self.totals["left_out_ns"]
        return sums

    def add_count(self, count: FlopCount) -> None:
        """Add counted FLOPs."""
        place = {key: i for i, key in enumerate(self.keys)}
        for row in count.rows:
            for phase, sums in zip(_PHASES, self.flops, strict=True):
                sums[place[row.name, row.driver]] += getattr(row, phase)

    def add_quantities(self, workload: Workload) -> None:
        """Add the tokens, images and other quantities of a workload."""
        self.totals["tokens"] += workload.tokens
        self.totals["slots"] += workload.slots
        self.totals["segments"] += workload.num_segments
        self.totals["images"] += workload.num_images
        self.totals["videos"] += workload.num_videos
        self.totals["patches"] += workload.patches
        self.totals["audio_frames"] += int(workload.audio.sum())

    @property
    def useful(self) -> int:
        """Useful FLOPs: all phases but recomputation."""
        return sum(map(sum, self.flops[:3]))

    def count(self) -> FlopCount:
        """Return the FLOPs as a count."""
        rows = zip(self.keys, *self.flops, strict=True)
        return FlopCount(tuple(FlopRow(*key, *phases) for key, *phases in rows if any(phases)))
