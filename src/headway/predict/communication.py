"""Exposed communication: the time of a step's collectives that computation does not overlap.

FSDP2 gathers the weights of each unit before its forward and, where they were freed, before its backward, and sums its
gradients after it: a reduce-scatter among the processes that share a copy, then an all-reduce among copies. A gather
runs while the unit before computes, a sum while the next does. Inside a block, attention over a shared pack and spread
experts exchange activations, for which everything waits. `headway.predict.exchanges` lists all of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.predict.collectives import Kind, Links, RankGroup, collective_s
from headway.predict.speeds import Cases

Phase = Literal["forward", "backward"]
_Overlap = tuple[
    NDArray[np.float64], NDArray[np.float64]
]  # seconds by case: beside no unit, (3,), and each, (units, 3)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of one pack on each process.

    Attributes:
        kind: which one.
        unit: whose weights, gradients or activations; a block, or (vision), (embedding), (head) or (root).
        phase: when; what is computed again belongs to backward.
        num_bytes: as `collective_s` counts them.
        ranks: that take part.
        stride: between neighbours of theirs in the order of ranks.
        waits: whether computing waits for it, wherever it is.
        once: whether it happens after a step's last pack alone.
    """

    kind: Kind
    unit: str
    phase: Phase
    num_bytes: int
    ranks: int
    stride: int = 1
    waits: bool = False
    once: bool = False


@dataclass(frozen=True)
class Exchanges:
    """All that a process exchanges for a pack.

    Attributes:
        all: in no order.
        order: units as forward computes them.
        compute: FLOPs of each unit's forward; shares of its time.
        copied_bytes: read and written on the device to lay gathered weights and gradients out.
    """

    all: tuple[Exchange, ...] = ()
    order: tuple[str, ...] = ()
    compute: Mapping[str, float] = field(default_factory=dict)
    copied_bytes: int = 0
    _timelines: "dict[Links, Timeline]" = field(default_factory=dict, repr=False, compare=False)

    def timeline(self, links: Links) -> "Timeline":
        """The units' overlap between devices that are joined so, laid out once for many steps.

        Raises:
            PlanError: the processes are on several nodes, whose network is not known.
        """
        if links not in self._timelines:
            self._timelines[links] = Timeline(self, links)
        return self._timelines[links]

    def num_bytes(self, kind: Kind | None = None) -> int:
        """Bytes of a pack's exchanges, of one kind or of all."""
        return sum(one.num_bytes for one in self.all if kind in (None, one.kind))


def exposed_s(
    exchanges: Exchanges, packs: int, forward: Cases, backward: Cases, links: Links, *, overlap: bool = True
) -> Cases:
    """Predict how long a step waits for exchanges [s].

    Args:
        exchanges: of a pack.
        packs: micro-batches of a step.
        forward: time that a process computes forward in a step [s].
        backward: the same of backward, with what is computed again [s].
        links: between the devices.
        overlap: whether devices compute meanwhile. A CPU does not: FSDP2 has no streams there, and waits for each.

    Raises:
        PlanError: the processes are on several nodes, whose network is not known.
    """
    if not overlap:
        forward = backward = Cases.exact(0.0)
    each = exchanges.timeline(links)
    times = forward.times(1 / packs), backward.times(1 / packs)
    return each.exposed(*times, last=False).times(packs - 1) + each.exposed(*times, last=True)


class Timeline:
    """Forward and backward of one pack, unit by unit: compute time beside the collectives that overlap it.

    Args:
        exchanges: of a pack.
        links: between the devices.

    Raises:
        PlanError: the processes are on several nodes, whose network is not known.
    """

    def __init__(self, exchanges: Exchanges, links: Links) -> None:
        self._order, self._links = exchanges.order, links
        whole = sum(exchanges.compute.values()) or 1.0
        self._shares = np.array([[exchanges.compute.get(unit, 0.0) / whole] for unit in exchanges.order])
        self._known: dict[tuple[Kind, int, int, int], Cases] = {}  # blocks are alike
        of_last = self._overlaps_of(exchanges.all)
        repeated = [one for one in exchanges.all if not one.once]
        of_others = of_last if len(repeated) == len(exchanges.all) else self._overlaps_of(repeated)
        self._overlaps = {False: of_others, True: of_last}

    def exposed(self, forward: Cases, backward: Cases, *, last: bool) -> Cases:
        """Predict how long a pack waits for exchanges [s].

        Args:
            forward: time that a process computes it forward [s].
            backward: the same of backward [s].
            last: whether it is a step's last pack.
        """
        waits, *phases = self._overlaps[last]
        found = waits
        for seconds, shares, (before, beside) in zip(
            (forward, backward), (self._shares, self._shares[::-1]), phases, strict=True
        ):
            left = np.maximum(0.0, beside - shares * np.array(seconds))
            found += Cases(*np.cumsum(np.concatenate([before[None], left]), axis=0)[-1].tolist())
        return found

    def _overlaps_of(self, found: Iterable[Exchange]) -> tuple[Cases, _Overlap, _Overlap]:
        """What computing waits for, and what runs beside forward and backward."""
        waits = Cases.exact(0.0)
        gathers: dict[Phase, dict[str, Cases]] = {"forward": {}, "backward": {}}
        sums: dict[str, Cases] = {}
        for one in found:
            took = self._seconds(one)
            if one.waits:
                waits += took
            elif one.kind == "all-gather":
                of_phase = gathers[one.phase]
                of_phase[one.unit] = of_phase.get(one.unit, Cases.exact(0.0)) + took
            else:
                sums[one.unit] = sums.get(one.unit, Cases.exact(0.0)) + took
        backward = _beside(self._order[::-1], gathers["backward"], sums)
        return waits, _beside(self._order, gathers["forward"], {}), backward

    def _seconds(self, one: Exchange) -> Cases:
        key = (one.kind, one.num_bytes, one.ranks, one.stride)
        if key not in self._known:
            group = RankGroup.of(one.ranks, one.stride, self._links)
            self._known[key] = collective_s(one.kind, one.num_bytes, group, self._links)
        return self._known[key]


def _beside(order: Sequence[str], gathers: Mapping[str, Cases], sums: Mapping[str, Cases]) -> _Overlap:
    """Exchanges that nothing overlaps, before the first unit and after the last, and those beside each unit [s]."""
    none = Cases.exact(0.0)
    alone = gathers.get(order[0], none) + sums.get(order[-1], none)
    beside = [
        gathers.get(following, none) + sums.get(before, none)
        for before, following in zip(("", *order[:-1]), (*order[1:], ""), strict=True)
    ]
    return np.array(alone), np.array(beside)
