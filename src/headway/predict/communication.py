"""Communication: links between devices, the time of a collective over them, and what computing does not hide of it.

A collective takes a latency for each step of its algorithm, and its bytes over the bandwidth of the slowest link.
Inside a node that is a device's link to its neighbours. Between nodes it is the network, of which every device of a
node that is in the group brings its share.

FSDP2 gathers the weights of each unit before its forward and, where they were freed, before its backward, and sums its
gradients after it: a reduce-scatter among the processes that share a copy, then an all-reduce among copies. A gather
runs while the unit before computes, a sum while the next does. Inside a block, attention over a shared pack and spread
experts exchange activations, for which everything waits but shared experts. `headway.predict.exchanges` lists all of
it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import log2
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.devices import Device
from headway.predict.speeds import HOST_BYTES_PER_S, Cases, host_copy_s

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Phase = Literal["forward", "backward"]

# NCCL's own model of itself takes 20.0 and 20.6 GB/s of the 25 that an NVLink of Ampere and Hopper has, 80 and 82 %.
# Source: NCCL, src/graph/topo.h, SM80_NVLINK_BW and SM90_NVLINK_BW.
REACHED = Cases(0.9, 0.8, 0.6)
"""Share of a link's printed bandwidth that collectives reach."""

# Latency of a step in rings and in trees, protocol "Simple", and of the launch.
# Source: NCCL, src/graph/tuning.cc, baseLat and hwLat.
LAUNCH_S = 8.4e-6
INSIDE_S, BETWEEN_S = 3.4e-6, 14e-6
_TREE_INSIDE_S = 4e-6
_TREE_SHARE = 0.92  # share of the bandwidth that a tree reaches; the same file


@dataclass(frozen=True, slots=True)
class Link:
    """A way between devices."""

    bytes_per_s: float  # rate of sending while as much is received, as printed [byte/s]
    latency_s: float  # latency of a step from one device to the next [s]


@dataclass(frozen=True, slots=True)
class Links:
    """Links that join devices."""

    inside: Link  # link of a device to its node
    between: Link  # a device's share of the link to other nodes
    per_node: int  # devices of a node
    source: str  # source of these numbers, a sentence
    host_bytes_per_s: float = HOST_BYTES_PER_S  # rate to the host's memory, one way, as printed [byte/s]

    @classmethod
    def of_device(
        cls,
        device: Device,
        *,
        link_bytes_per_s: float | None = None,
        network_bytes_per_s: float | None = None,
        per_node: int | None = None,
    ) -> "Links":
        """Take the links of a device from the table, or as they are given.

        Args:
            device: of the table.
            link_bytes_per_s: to the other devices of its node, one way, instead of the table's [byte/s].
            network_bytes_per_s: its share of the network, one way, instead of the table's [byte/s].
            per_node: devices of a node, instead of the table's.
        """
        options = [link_bytes_per_s, network_bytes_per_s, per_node]
        inside, between = link_bytes_per_s or device.link_bytes_per_s, network_bytes_per_s or device.network_bytes_per_s
        joined = per_node or device.devices_per_node
        source = f"links as given for {device.title}"
        if all(value is None for value in options):
            source = f"printed links of {device.title} (`headway devices` has their source)"
        if device.assumed_links is not None and None in options:
            source += f"; no source has all of them, so {device.assumed_links} are taken where none is given"
        return cls(Link(inside, INSIDE_S), Link(between, BETWEEN_S), joined, source, device.host_bytes_per_s)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that exchange something."""

    size: int  # ranks
    per_node: int  # ranks of a node

    @classmethod
    def of(cls, size: int, stride: int, links: Links) -> "RankGroup":
        """Make a group of every `stride`-th rank of neighbours."""
        return cls(size, max(1, min(size, links.per_node // stride)))

    @property
    def nodes(self) -> int:
        """Nodes that they are on."""
        return -(-self.size // self.per_node)


def collective_s(kind: Kind, num_bytes: float, group: RankGroup, links: Links) -> Cases:
    """Predict the time of a collective.

    Args:
        kind: which one. All-reduce runs in a ring or in trees, whichever takes less, the others in a ring or from each
            to each, as in NCCL.
        num_bytes: of the whole array, which all-gather makes and reduce-scatter takes on each rank; of what each rank
            sends to all, itself included, in an all-to-all.
        group: the ranks.
        links: between them.

    Source: bytes that a rank's link carries: NCCL tests, doc/PERFORMANCE.md, "bus bandwidth". Latency: NCCL,
        src/graph/tuning.cc, ncclTopoTuneModel.
    """
    if group.size == 1:
        return Cases.exact(0.0)
    between_s = links.between.latency_s if group.nodes > 1 else 0.0
    if kind == "all-to-all":
        latency = LAUNCH_S + max(links.inside.latency_s, between_s)
        return _after(latency, _all_to_all_s(num_bytes, group, links))
    share = (group.size - 1) / group.size
    one_way = num_bytes * share / bus_bytes_per_s(group, links)
    crossings = group.nodes - 1 if group.nodes > 1 else 0
    around = (group.size - 1 - crossings) * links.inside.latency_s + crossings * between_s
    if kind != "all-reduce":
        return _after(LAUNCH_S + around, one_way)
    ring = _after(LAUNCH_S + 2 * around, 2 * one_way)
    climb = (group.per_node - 1) * _TREE_INSIDE_S + log2(group.nodes) * between_s
    tree = _after(LAUNCH_S + 2 * climb, 2 * num_bytes / (_TREE_SHARE * bus_bytes_per_s(group, links)))
    return Cases(*map(min, ring, tree))


def bus_bytes_per_s(group: RankGroup, links: Links) -> float:
    """Printed bandwidth that limits a ring [byte/s]: a device's link, or the network of a node's ranks together."""
    if group.nodes == 1:
        return links.inside.bytes_per_s
    crossing = group.per_node * links.between.bytes_per_s
    return crossing if group.per_node == 1 else min(links.inside.bytes_per_s, crossing)


def _all_to_all_s(num_bytes: float, group: RankGroup, links: Links) -> float:
    """Time at the printed bandwidth: each rank sends to its node's ranks and, over its own share, to all others."""
    inside = num_bytes * (group.per_node - 1) / group.size / links.inside.bytes_per_s
    if group.nodes == 1:
        return inside
    return max(inside, num_bytes * (group.size - group.per_node) / group.size / links.between.bytes_per_s)


def _after(latency_s: float, at_printed_s: float) -> Cases:
    return Cases(*(latency_s + at_printed_s / share for share in REACHED))


class _Overlap(NamedTuple):
    """Exchanges of a pass, in seconds by case."""

    unhidden: NDArray[np.float64]  # before the first unit and after the last, shape (3,)
    by_unit: NDArray[np.float64]  # while each unit computes, shape (units, 3)
    by_part: NDArray[np.float64]  # while parts of blocks do, shape (parts, 3)
    part_shares: NDArray[np.float64]  # shares of these parts in forward's time, shape (parts, 1)


class _PackOverlap(NamedTuple):
    """Exchanges of a pack: exchanges that computing waits for [s], and exchanges beside each pass."""

    waits_s: Cases
    forward: _Overlap
    backward: _Overlap


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of one pack on each process."""

    kind: Kind  # collective
    unit: str  # unit that it is for; a block, or (vision), (embedding), (head) or (root)
    phase: Phase  # pass; recomputation belongs to backward
    num_bytes: int  # bytes, counted as in `collective_s`
    ranks: int  # ranks that take part
    stride: int = 1  # distance of neighbours in the order of ranks
    waits: bool = False  # true if computing waits for it, wherever it is
    concurrent_flops: float = 0.0  # FLOPs of forward that run meanwhile, if computing waits
    once: bool = False  # true if it happens after a step's last pack alone
    host_bytes: int = 0  # bytes that each process moves from or to its host's memory


@dataclass(frozen=True, eq=False)
class Exchanges:
    """All that a process exchanges for a pack."""

    all: tuple[Exchange, ...] = ()  # in no order
    order: tuple[str, ...] = ()  # units in the order of forward
    compute: Mapping[str, float] = field(default_factory=dict)  # FLOPs of each unit's forward; shares of its time
    copied_bytes: int = 0  # bytes read and written to lay gathered weights and gradients out

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
    timeline = _timeline_of(exchanges, links)
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
            sizes = exchange.num_bytes, exchange.host_bytes, exchange.ranks, exchange.stride
            took = _exchange_s(exchange.kind, *sizes, self._links)
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


_timeline_of = lru_cache(maxsize=64)(Timeline)


@lru_cache(maxsize=4096)  # blocks are alike
def _exchange_s(kind: Kind, num_bytes: int, host_bytes: int, ranks: int, stride: int, links: Links) -> Cases:
    copied = host_copy_s(host_bytes, links.host_bytes_per_s)
    return collective_s(kind, num_bytes, RankGroup.of(ranks, stride, links), links) + copied


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
