"""Time of collectives between devices, by the size of a message, the ranks of a group and the links between them.

A time is a latency for each step of the algorithm and the bytes over the bandwidth of the slowest link. Inside a node
that is a device's link to its neighbours; between nodes it is the network, of which every device of a node that is in
the group brings its share.
"""

from dataclasses import dataclass
from math import log2
from typing import Literal

from headway.devices import Device
from headway.errors import PlanError
from headway.predict.speeds import HOST_BYTES_PER_S, Cases
from headway.words import Argument

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]

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
    """A way between devices.

    Attributes:
        bytes_per_s: that a device sends over it while it receives as many [byte/s], as printed.
        latency_s: of a step from one device to the next [s].
    """

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Links:
    """Links that join devices.

    Attributes:
        inside: of a device to the others of its node.
        between: of a device to other nodes, its share; None where it is not known.
        per_node: devices of a node.
        device: name of the device, for errors.
        source: where these numbers are from, as a sentence.
        host_bytes_per_s: of a device to its host's memory, one way, as printed [byte/s].
    """

    inside: Link
    between: Link | None
    per_node: int
    device: str
    source: str
    host_bytes_per_s: float = HOST_BYTES_PER_S

    @classmethod
    def of_device(
        cls,
        device: Device,
        *,
        link_bytes_per_s: float | None = None,
        network_bytes_per_s: float | None = None,
        per_node: int | None = None,
    ) -> "Links | None":
        """Take the links of a device from the table, or as they are given.

        Args:
            device: of the table.
            link_bytes_per_s: to the other devices of its node, one way, instead of the table's [byte/s].
            network_bytes_per_s: its share of the network, one way, instead of the table's [byte/s].
            per_node: devices of a node, instead of the table's.

        Returns:
            None where neither says how fast the link is, or how many devices it joins.
        """
        options = [link_bytes_per_s, network_bytes_per_s, per_node]
        inside, between = link_bytes_per_s or device.link_bytes_per_s, network_bytes_per_s or device.network_bytes_per_s
        joined = per_node or device.devices_per_node
        if inside is None or joined is None:
            return None
        source = f"links as given for {device.title}"
        if all(value is None for value in options):
            source = f"printed links of {device.title} (`headway devices` has their source)"
        network = None if between is None else Link(between, BETWEEN_S)
        host = device.host_bytes_per_s or HOST_BYTES_PER_S
        return cls(Link(inside, INSIDE_S), network, joined, device.title, source, host)

    def reaches(self, devices: int) -> bool:
        """Tell whether the links that so many devices need are known."""
        return devices <= self.per_node or self.between is not None

    def require(self, devices: int) -> None:
        """Check that the links reach so many devices.

        Raises:
            PlanError: they are on several nodes, and nothing is known of the network between these.
        """
        if not self.reaches(devices):
            raise PlanError(
                f"{devices:,} devices are {-(-devices // self.per_node):,} nodes of {self.per_node}, and the network "
                f"between nodes of {self.device} is not known. Give each device's share with {Argument('network')}, "
                "in GB/s, or put network_gb_per_s into your own table ($HEADWAY_PEAKS; docs/devices.md)."
            )


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that exchange something.

    Attributes:
        size: of them.
        per_node: of them that are in one node.
    """

    size: int
    per_node: int

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

    Raises:
        PlanError: the group is on several nodes, and their network is not known.

    Source: bytes that a rank's link carries: NCCL tests, doc/PERFORMANCE.md, "bus bandwidth". Latency: NCCL,
        src/graph/tuning.cc, ncclTopoTuneModel.
    """
    if group.size == 1:
        return Cases.exact(0.0)
    if group.nodes > 1:
        links.require(links.per_node + 1)
    between_s = links.between.latency_s if links.between is not None and group.nodes > 1 else 0.0
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


def host_copy_s(num_bytes: int, links: Links) -> Cases:
    """Predict the time in which a device moves so many bytes from or to its host's memory [s]."""
    return Cases(*(num_bytes / (share * links.host_bytes_per_s) for share in REACHED))


def bus_bytes_per_s(group: RankGroup, links: Links) -> float:
    """Printed bandwidth that limits a ring [byte/s]: a device's link, or the network of a node's ranks together."""
    if group.nodes == 1 or links.between is None:
        return links.inside.bytes_per_s
    crossing = group.per_node * links.between.bytes_per_s
    return crossing if group.per_node == 1 else min(links.inside.bytes_per_s, crossing)


def _all_to_all_s(num_bytes: float, group: RankGroup, links: Links) -> float:
    """Time at the printed bandwidth: each rank sends to its node's ranks and, over its own share, to all others."""
    inside = num_bytes * (group.per_node - 1) / group.size / links.inside.bytes_per_s
    if group.nodes == 1 or links.between is None:
        return inside
    return max(inside, num_bytes * (group.size - group.per_node) / group.size / links.between.bytes_per_s)


def _after(latency_s: float, at_printed_s: float) -> Cases:
    return Cases(*(latency_s + at_printed_s / share for share in REACHED))
