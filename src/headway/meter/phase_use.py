"""Phases of a window: those that its loop names, and those into which sampled steps are divided."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from headway.meter.utilisation import Utilisation, known, mbu_of, ratio

LATENESS = ("late_rank", "late_rank_s", "late_rank_phase")  # entries of a record


@dataclass(frozen=True, slots=True)
class SampledPhases:
    """Phases of a window's sampled steps, each the mean of a step, by the device's clock.

    Attributes:
        num_steps: that were sampled, on the first rank.
        seconds: of each phase of `headway.meter.phases`, on the first rank [s].
        host_s: in which its host went through forward, backward and optimizer [s]; NaN on a CPU.
        lead_s: the most that its host was ahead of its device within a step [s]; NaN on a CPU.
        by_rank_s: of each rank, the phases before ranks wait for each other's gradients [s]; NaN where it took none.
    """

    num_steps: int
    seconds: Mapping[str, float]
    host_s: float
    lead_s: float
    by_rank_s: tuple[Mapping[str, float], ...]

    @property
    def late_rank(self) -> tuple[int, float, str] | None:
        """The rank that comes last to its backward, how much later than any other [s], and by which phase most."""
        totals = [sum(phases.values()) for phases in self.by_rank_s]
        if len(totals) < 2 or any(math.isnan(total) for total in totals):
            return None
        rank = max(range(len(totals)), key=totals.__getitem__)
        others = [phases for place, phases in enumerate(self.by_rank_s) if place != rank]
        more = {
            name: seconds - median(phases[name] for phases in others) for name, seconds in self.by_rank_s[rank].items()
        }
        return (
            rank,
            totals[rank] - max(map(sum, (phases.values() for phases in others))),
            max(more, key=more.__getitem__),
        )

    def to_dict(self) -> dict[str, Any]:
        """Give the entries of a record."""
        return {
            "num_sampled": self.num_steps,
            "phases_s": dict(self.seconds),
            "host_s": self.host_s,
            "host_lead_s": self.lead_s,
            **dict(zip(LATENESS, self.late_rank or (None, None, None), strict=True)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUse(Utilisation):
    """A named phase of a window's steps; its time, `wall_s`, is that of its own devices where they tell it.

    Attributes:
        loop_s: time that the loop was in it [s]; those of all phases add up to the steps' time.
        is_elsewhere: whether it has devices of its own, whose FLOPs are not those of the steps.
        supervised: labelled tokens.
        generation: what was generated in it, by the names in `headway.count.generation.GENERATION_QUANTITIES`.
        scored_tokens: tokens of forwards without a backward, of the model beside the trained one with most of them.
        bytes_moved: bytes that it moved at least; 0 where they are not known.
        weight_bytes: those of them that generations read of weights.
        peak_bytes_per_s: memory bandwidth of one device [B/s]; NaN where it is not known.
    """

    loop_s: float
    is_elsewhere: bool
    supervised: int
    generation: Mapping[str, int]
    scored_tokens: int
    bytes_moved: int
    weight_bytes: int
    peak_bytes_per_s: float

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that were answered, each prompt once."""
        return self.generation["prompt_tokens"]

    @property
    def generated_tokens(self) -> int:
        """Tokens of the answers."""
        return self.generation["generated_tokens"]

    @property
    def mbu(self) -> float:
        """Bytes moved at least / (wall time x peak bytes/s), a fraction; NaN where either is not known."""
        return mbu_of(self)

    @property
    def bound(self) -> str | None:
        """Limit of the phase on perfect hardware, `compute` or `memory`; None where it is not known."""
        mfu, mbu = self.mfu, self.mbu
        if math.isnan(mfu) or math.isnan(mbu) or not (mfu or mbu):
            return None
        return "compute" if mfu >= mbu else "memory"

    def to_dict(self) -> dict[str, Any]:
        """Give its entries of a record."""
        entries = known(
            {
                "wall_s": self.loop_s,
                "devices_s": self.wall_s if self.is_elsewhere else None,
                "num_devices": self.world_size if self.is_elsewhere else None,
                "flops": self._flops(),
                "tokens": self.tokens,
                "slots": self.slots,
                "supervised": self.supervised,
                **self.generation,
                "scored_tokens": self.scored_tokens,
                "tokens_per_s": self.tokens_per_s,
                "generated_tokens_per_s": ratio(self.generated_tokens, self.wall_s),
                "mfu": self.mfu,
                "mbu": self.mbu,
                "bytes_moved": self.bytes_moved or None,
                "weight_bytes": self.weight_bytes or None,
                "bound": self.bound,
            }
        )
        return dict(entries)
