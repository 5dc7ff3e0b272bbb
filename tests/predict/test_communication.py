"""Times of collectives against the formulas that NCCL documents, and what computing hides of them, both by hand."""

import pytest

from headway.devices import named_device
from headway.devices.table import shipped_devices
from headway.predict.communication import (
    LAUNCH_S,
    REACHED,
    Exchange,
    Exchanges,
    Link,
    Links,
    RankGroup,
    bus_bytes_per_s,
    collective_s,
    exposed_s,
)
from headway.predict.speeds import Cases

LINKS = Links(Link(400.0, 0.0), Link(100.0, 0.0), 8, "")
GB = 10**9


def without_latency(kind, num_bytes, group, links=LINKS):
    """Expected time without the launch latency, as it would be at the full printed bandwidth."""
    launch = collective_s(kind, 0, group, links).expected
    return (collective_s(kind, num_bytes, group, links).expected - launch) * REACHED.expected


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all-gather", 7 / 8), ("reduce-scatter", 7 / 8), ("all-to-all", 7 / 8), ("all-reduce", 2 * 7 / 8)],
)
def test_inside_a_node_the_bus_bandwidth_is_that_of_the_link(kind, factor):
    """NCCL tests, doc/PERFORMANCE.md: bus bandwidth is size / time x (n - 1) / n, and twice that for all-reduce."""
    seconds = without_latency(kind, 1e6, RankGroup(8, 8))
    assert 1e6 / seconds * factor == pytest.approx(400.0)


def test_between_nodes_the_shares_of_a_node_add_up_until_the_link_is_slower():
    assert bus_bytes_per_s(RankGroup(32, 8), LINKS) == 400.0  # eight shares of 100
    assert bus_bytes_per_s(RankGroup(32, 2), LINKS) == 200.0
    assert bus_bytes_per_s(RankGroup(4, 1), LINKS) == 100.0  # four ranks in four nodes, one rank in each
    seconds = without_latency("all-gather", 1e6, RankGroup(16, 2))
    assert 1e6 / seconds * 15 / 16 == pytest.approx(200.0)


def test_an_all_to_all_sends_to_other_nodes_over_its_own_share():
    assert without_latency("all-to-all", 1600.0, RankGroup(16, 8)) == pytest.approx(1600 * 8 / 16 / 100)
    assert without_latency("all-to-all", 1600.0, RankGroup(2, 2)) == pytest.approx(1600 / 2 / 400)


def test_latency_grows_with_the_ring_and_in_trees_with_its_logarithm():
    """NCCL, ncclTopoTuneModel: a ring of n ranks has n - 1 steps, a tree climbs and descends log2(nodes)."""
    links = Links(Link(1.0, 1.0), Link(1.0, 10.0), 8, "")
    of = {kind: collective_s(kind, 0, RankGroup(32, 8), links).expected for kind in ("all-gather", "all-reduce")}
    assert of["all-gather"] == pytest.approx((31 - 3) * 1 + 3 * 10, rel=1e-4)
    assert of["all-reduce"] == pytest.approx(2 * (7 * 4e-6 + 2 * 10), rel=1e-4)
    big = collective_s("all-reduce", 1e9, RankGroup(32, 8), links).expected
    assert big == pytest.approx(2 * 1e9 * 31 / 32 / 0.8, rel=1e-2)  # in a ring, which sends less than a tree


def test_one_rank_exchanges_nothing():
    assert collective_s("all-reduce", 1e9, RankGroup(1, 1), LINKS).worst == 0


def test_groups_of_a_mesh_lie_as_ranks_are_numbered():
    assert RankGroup.of(32, 1, LINKS) == RankGroup(32, 8)  # shards
    assert RankGroup.of(4, 8, LINKS) == RankGroup(4, 1)  # copies of eight shards
    assert RankGroup.of(4, 2, LINKS) == RankGroup(4, 4)  # copies of two shards, all in a node
    assert RankGroup.of(4, 8, LINKS).nodes == 4


def test_links_come_from_the_table_or_are_given():
    links = Links.of_device(named_device("H100"))
    assert (links.inside.bytes_per_s, links.between.bytes_per_s, links.per_node) == (450 * GB, 50 * GB, 8)
    given = Links.of_device(named_device("A40"), link_bytes_per_s=56e9, per_node=2)
    assert (given.inside.bytes_per_s, given.between.bytes_per_s, given.per_node) == (56e9, 12.5e9 / 8, 2)
    assert "given" in given.source


@pytest.mark.parametrize("device", shipped_devices(), ids=lambda device: device.key)
def test_no_device_of_the_table_exchanges_for_nothing(device):
    links = Links.of_device(device)
    for nodes in (1, 2):  # 1 GB among all devices of a node, and of two
        size = max(2, nodes * links.per_node)
        group = RankGroup.of(size, 1, links)
        rate = bus_bytes_per_s(group, links)
        assert rate <= 900 * GB
        assert collective_s("all-gather", 1e9, group, links).best > 1e9 / 2 / rate


_ONE = Link(1 / REACHED.expected, -LAUNCH_S)
BYTE_A_SECOND = Links(_ONE, _ONE, 2, "")  # a byte a second, and no latency
COMPUTE = {"a": 1.0, "b": 1.0, "c": 2.0}


def gather(unit, seconds, phase="forward", **more):
    return Exchange("all-gather", unit, phase, 2 * seconds, 2, **more)


def summed(unit, seconds, **more):
    return Exchange("reduce-scatter", unit, "backward", 2 * seconds, 2, **more)


def exposed(*found, forward=8.0, backward=16.0, packs=1):
    exchanges = Exchanges(found, ("a", "b", "c"), COMPUTE)
    return exposed_s(exchanges, packs, Cases.exact(forward), Cases.exact(backward), BYTE_A_SECOND).expected


def test_a_gather_runs_while_the_unit_before_computes():
    assert exposed(gather("a", 5)) == pytest.approx(5)  # before it nothing computes
    assert exposed(gather("b", 5)) == pytest.approx(3)  # a computes 8 / 4
    assert exposed(gather("b", 2), gather("c", 1)) == pytest.approx(0)


def test_a_sum_runs_while_the_next_unit_computes_backward_beside_the_next_gather():
    assert exposed(summed("c", 3)) == pytest.approx(0)  # b computes 16 / 4 backward
    assert exposed(summed("c", 3), gather("a", 3, "backward")) == pytest.approx(2)  # both beside b
    assert exposed(summed("a", 3)) == pytest.approx(3)  # nothing is left to compute


def test_activations_are_waited_for():
    assert exposed(gather("b", 2, waits=True)) == pytest.approx(2)


def test_shared_experts_hide_the_exchanges_that_run_beside_them():
    def rows(seconds, phase="forward", unit="b"):
        return gather(unit, seconds, phase, waits=True, concurrent_flops=0.5)  # of 4 FLOPs: 1 s forward, 2 s backward

    assert exposed(rows(3)) == pytest.approx(2)
    assert exposed(rows(0.5)) == pytest.approx(0)
    assert exposed(rows(0.75), rows(0.75)) == pytest.approx(0.5)  # both beside the same
    assert exposed(rows(3), rows(3, unit="c")) == pytest.approx(4)
    assert exposed(rows(3, "backward")) == pytest.approx(1)
    assert exposed(rows(3), forward=0.0) == pytest.approx(3)


def test_what_happens_once_a_step_is_not_repeated_for_each_pack():
    assert exposed(gather("a", 5), summed("a", 3, once=True), packs=4, forward=32, backward=64) == pytest.approx(23)


def test_computing_nothing_hides_nothing():
    assert exposed(gather("b", 5), summed("c", 3), forward=0.0, backward=0.0) == pytest.approx(8)
