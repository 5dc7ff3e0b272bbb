"""What a step, or a run, made of the hardware: MFU, HFU, rates and where the waste was."""

from dataclasses import dataclass
from typing import Any

from headway.count import FlopCount
from headway.devices import Peak


@dataclass(frozen=True, slots=True)
class Utilisation:
    """FLOPs and wall time of one or more steps, and the rates that follow.

    Every rate is a total over a total. A run's MFU is therefore the time-weighted one: the sum of its FLOPs over the
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
        return self.flops.total / self.wall_s

    @property
    def mfu(self) -> float:
        """Useful model FLOPs / (wall time x peak), a fraction."""
        return self.flops_per_s / self.peak_flops_per_s

    @property
    def hfu(self) -> float:
        """MFU with the recomputed FLOPs of activation checkpointing added, a fraction."""
        return (self.flops.total + self.flops.recompute) / self.wall_s / self.peak_flops_per_s

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second, all devices together."""
        return self.tokens / self.wall_s

    @property
    def slots_per_s(self) -> float:
        """Computed positions per second, padding included."""
        return self.slots / self.wall_s

    @property
    def padding_share(self) -> float:
        """Share of the computed positions that were padding, a fraction."""
        return 1 - self.tokens / self.slots if self.slots else 0.0

    @property
    def data_wait_share(self) -> float:
        """Share of the wall time spent waiting for data, a fraction."""
        return self.data_wait_s / self.wall_s

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

    def as_record(self) -> dict[str, Any]:
        """Flatten into JSON-ready values for a record; seconds, counts and fractions, never percent."""
        return {
            "wall_s": self.wall_s,
            "data_wait_s": self.data_wait_s,
            "data_wait_share": self.data_wait_share,
            "tokens": self.tokens,
            "slots": self.slots,
            "tokens_per_s": self.tokens_per_s,
            "slots_per_s": self.slots_per_s,
            "padding_share": self.padding_share,
            "flops": {
                "total": self.flops.total,
                "forward": self.flops.forward,
                "dgrad": self.flops.dgrad,
                "wgrad": self.flops.wgrad,
                "recompute": self.flops.recompute,
            },
            "flops_by_component": self.flops.by_component(),
            "mfu": self.mfu,
            "hfu": self.hfu,
            "convention": self.convention,
            "peak_flops_per_s": self.peak.flops_per_s,
            "peak_dtype": self.peak.dtype,
            "peak_source": self.peak.source,
            "world_size": self.world_size,
        }
