"""Exposed communication: the time of a step's collectives that computation does not overlap.

FSDP2 gathers the weights of each unit before its forward and, where they were freed, before its backward, and sums its
gradients after it: a reduce-scatter among the processes that share a copy, then an all-reduce among copies. A gather
runs while the unit before computes, a sum while the next does. Inside a block, attention over a shared pack and spread
experts exchange activations, for which everything waits but shared experts. `headway.predict.exchanges` lists all of
it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.predict.collectives import Kind, Links, RankGroup, collective_s, host_copy_s
from headway.predict.speeds import Cases

Phase = Literal["forward", "backward"]


class _Overlap(NamedTuple):
    """Exchanges of a pass, in seconds by case.

    Attributes:
        unhidden: before the first unit and after the last, shape (3,).
        by_unit: while each unit computes, shape (units, 3).
        by_part: while parts of blocks do, shape (parts, 3).
        part_shares: of these parts in the time of forward, shape (parts, 1).
    """

    unhidden: NDArray[np.float64]
    by_unit: NDArray[np.float64]
    by_part: NDArray[np.float64]
    part_shares: NDArray[np.float64]


class _PackOverlap(NamedTuple):
    """Exchanges of a pack: exchanges that computing waits for [s], and exchanges beside each pass."""

    waits_s: Cases
    forward: _Overlap
    backward: _Overlap


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
        concurrent_flops: of forward that, where computing waits, run meanwhile.
        once: whether it happens after a step's last pack alone.
        host_bytes: that each process moves from or to its host's memory for it.
    """

    kind: Kind
    unit: str
    phase: Phase
    num_bytes: int
    ranks: int
    stride: int = 1
    waits: bool = False
    concurrent_flops: float = 0.0
    once: bool = False
    host_bytes: int = 0


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
        return sum(exchange.num_bytes for exchange in self.all if kind in (None, exchange.kind))


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
    timeline = exchanges.timeline(links)
    times = forward.times(1 / packs), backward.times(1 / packs)
    return timeline.exposed(*times, last=False).times(packs - 1) + timeline.exposed(*times, last=True)


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
        self._total = sum(exchanges.compute.values()) or 1.0
        self._shares = np.array([[exchanges.compute.get(unit, 0.0) / self._total] for unit in exchanges.order])
        self._times: dict[tuple[Kind, int, int, int, int], Cases] = {}  # blocks are alike
        of_last = self._overlaps_of(exchanges.all)
        repeated = [exchange for exchange in exchanges.all if not exchange.once]
        of_others = of_last if len(repeated) == len(exchanges.all) else self._overlaps_of(repeated)
        self._overlaps = {False: of_others, True: of_last}

    def exposed(self, forward: Cases, backward: Cases, *, last: bool) -> Cases:
        """Predict how long a pack waits for exchanges [s].

        Args:
            forward: time that a process computes it forward [s].
            backward: the same of backward [s].
            last: whether it is a step's last pack.
        """
        overlaps = self._overlaps[last]
        waits_s = overlaps.waits_s
        passes = (forward, self._shares, overlaps.forward), (backward, self._shares[::-1], overlaps.backward)
        for seconds, shares, overlap in passes:
            by_unit = np.maximum(0.0, overlap.by_unit - shares * np.array(seconds))
            by_part = np.maximum(0.0, overlap.by_part - overlap.part_shares * np.array(seconds))
            beyond = np.concatenate([overlap.unhidden[None], by_unit, by_part])
            waits_s += Cases(*np.cumsum(beyond, axis=0)[-1].tolist())
        return waits_s

    def _overlaps_of(self, exchanges: Iterable[Exchange]) -> _PackOverlap:
        """Sort exchanges into ones that computing waits for and ones that run beside forward and backward."""
        waits = Cases.exact(0.0)
        gathers: dict[Phase, dict[str, Cases]] = {"forward": {}, "backward": {}}
        sums: dict[str, Cases] = {}
        parts: dict[Phase, dict[tuple[str, float], Cases]] = {"forward": {}, "backward": {}}
        for exchange in exchanges:
            took = self._seconds(exchange)
            if exchange.waits and exchange.concurrent_flops:  # the exchanges of a block that share what they run beside
                of_part, part = parts[exchange.phase], (exchange.unit, exchange.concurrent_flops / self._total)
                of_part[part] = of_part.get(part, Cases.exact(0.0)) + took
            elif exchange.waits:
                waits += took
            elif exchange.kind == "all-gather":
                of_phase = gathers[exchange.phase]
                of_phase[exchange.unit] = of_phase.get(exchange.unit, Cases.exact(0.0)) + took
            else:
                sums[exchange.unit] = sums.get(exchange.unit, Cases.exact(0.0)) + took
        backward = _overlap_of(self._order[::-1], gathers["backward"], sums, parts["backward"])
        return _PackOverlap(waits, _overlap_of(self._order, gathers["forward"], {}, parts["forward"]), backward)

    def _seconds(self, exchange: Exchange) -> Cases:
        key = (exchange.kind, exchange.num_bytes, exchange.ranks, exchange.stride, exchange.host_bytes)
        if key not in self._times:
            group = RankGroup.of(exchange.ranks, exchange.stride, self._links)
            own = collective_s(exchange.kind, exchange.num_bytes, group, self._links)
            self._times[key] = own + host_copy_s(exchange.host_bytes, self._links)
        return self._times[key]


def _overlap_of(
    order: Sequence[str],
    gathers: Mapping[str, Cases],
    sums: Mapping[str, Cases],
    parts: Mapping[tuple[str, float], Cases],
) -> _Overlap:
    """Exchanges before the first unit and after the last, which nothing overlaps, and beside units and parts."""
    none = Cases.exact(0.0)
    unhidden = gathers.get(order[0], none) + sums.get(order[-1], none)
    overlapped = [
        gathers.get(following, none) + sums.get(before, none)
        for before, following in zip(("", *order[:-1]), (*order[1:], ""), strict=True)
    ]
    part_shares = [[share] for _, share in parts]
    return _Overlap(
        np.array(unhidden),
        np.array(overlapped),
        np.array([*parts.values()]).reshape(-1, 3),
        np.array(part_shares).reshape(-1, 1),
    )
