"""FLOPs and time of steps, and the rates that follow: MFU, HFU, tokens per second, waste."""

import math
from dataclasses import dataclass
from typing import Any

from headway.count import FlopCount
from headway.devices import Peak


def ratio(numerator: float, denominator: float) -> float:
    """Divide numbers that were measured; NaN, "not known", where they have no ratio.

    A step may have had no work, no time or no rank that worked, and what only observes it is not to fail of that.

    >>> ratio(3, 4), ratio(0, 0)
    (0.75, nan)
    """
    try:
        quotient = numerator / denominator
        is_known = math.isfinite(quotient) and math.isfinite(denominator)
    except (ZeroDivisionError, OverflowError):  # counts are integers of any size
        return math.nan
    return quotient if is_known else math.nan


@dataclass(frozen=True, slots=True)
class Utilisation:
    """FLOPs and wall time of one or more steps, and the rates that follow.

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
    """

    flops: FlopCount
    wall_s: float
    data_wait_s: float
    tokens: int
    slots: int
    peak: Peak
    world_size: int

    @property
    def convention(self) -> str:
        """Rule by which the FLOPs were counted, such as "useful/1"."""
        return self.flops.convention

    @property
    def peak_flops_per_s(self) -> float:
        """Peak of all devices together [FLOP/s]."""
        return self.peak.flops_per_s * self.world_size

    @property
    def flops_per_s(self) -> float:
        """Useful model FLOPs per second, all devices together [FLOP/s]."""
        return ratio(self.flops.total, self.wall_s)

    @property
    def mfu(self) -> float:
        """Useful model FLOPs / (wall time x peak), a fraction."""
        return ratio(self.flops_per_s, self.peak_flops_per_s)

    @property
    def hfu(self) -> float:
        """MFU with the recomputed FLOPs of activation checkpointing added, a fraction."""
        return ratio(ratio(self.flops.total + self.flops.recompute, self.wall_s), self.peak_flops_per_s)

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second, all devices together."""
        return ratio(self.tokens, self.wall_s)

    @property
    def slots_per_s(self) -> float:
        """Computed positions per second, padding included."""
        return ratio(self.slots, self.wall_s)

    @property
    def padding_share(self) -> float:
        """Share of the computed positions that were padding, a fraction."""
        return 1 - ratio(self.tokens, self.slots)

    @property
    def data_wait_share(self) -> float:
        """Share of the wall time spent waiting for data, a fraction."""
        return ratio(self.data_wait_s, self.wall_s)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Say what cannot be right about these numbers, why that may be, and what to look at; usually empty."""
        if not self.hfu > 1:  # NaN too: an unknown peak
            return ()
        name, value = ("MFU", self.mfu) if self.mfu > 1 else ("HFU", self.hfu)
        return (
            f"{name} of {value:.1%} is above 100 %, which no device can reach. Likely causes: the peak is too low "
            f"({self.peak.flops_per_s:.4g} FLOP/s in {self.peak.dtype}, {self.peak.source}); the step was timed "
            "without waiting for the device; or the "
            "workload handed to the meter is not the one that was computed, or comes from more devices than "
            f"world_size={self.world_size}.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Flatten into JSON-ready values; seconds, counts and fractions, never percent; None for what is not known."""
        record: dict[str, Any] = known(self._record())
        return record

    def _flops(self) -> dict[str, int]:
        return {name: getattr(self.flops, name) for name in ("total", "forward", "dgrad", "wgrad", "recompute")}

    def _record(self) -> dict[str, Any]:
        return {
            "wall_s": self.wall_s,
            "data_wait_s": self.data_wait_s,
            "data_wait_share": self.data_wait_share,
            # tokens are real ones, slots have padding too
            "tokens": self.tokens,
            "slots": self.slots,
            "tokens_per_s": self.tokens_per_s,
            "slots_per_s": self.slots_per_s,
            "padding_share": self.padding_share,
            "flops": self._flops(),
            "flops_by_component": self.flops.by_component(),
            # shares of the peak, with the convention and the peak that they are of
            "mfu": self.mfu,
            "hfu": self.hfu,
            "convention": self.convention,
            "peak_flops_per_s": self.peak.flops_per_s,
            "peak_dtype": self.peak.dtype,
            "peak_source": self.peak.source,
            "world_size": self.world_size,
        }


def mbu_of(use: Any) -> float:
    """Divide the bytes that were moved at least by what memory could have moved; NaN where either is not known."""
    if not use.bytes_moved:
        return math.nan
    return ratio(ratio(use.bytes_moved, use.wall_s), use.peak_bytes_per_s * use.world_size)


def known(node: Any) -> Any:
    """Replace numbers that are not finite, for which JSON has no word, by None: they are not known."""
    if isinstance(node, dict):
        return {key: known(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [known(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node
