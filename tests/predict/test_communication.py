"""What no computing hides: timelines written out by hand."""

import pytest

from headway.predict.collectives import LAUNCH_S, REACHED, Link, Links
from headway.predict.communication import Exchange, Exchanges, exposed_s
from headway.predict.speeds import Cases

LINKS = Links(Link(1 / REACHED.expected, -LAUNCH_S), None, 2, "card", "")  # a byte a second, and no latency
COMPUTE = {"a": 1.0, "b": 1.0, "c": 2.0}


def gather(unit, seconds, phase="forward", **more):
    return Exchange("all-gather", unit, phase, 2 * seconds, 2, **more)


def summed(unit, seconds, **more):
    return Exchange("reduce-scatter", unit, "backward", 2 * seconds, 2, **more)


def exposed(*found, forward=8.0, backward=16.0, packs=1):
    exchanges = Exchanges(found, ("a", "b", "c"), COMPUTE)
    return exposed_s(exchanges, packs, Cases.exact(forward), Cases.exact(backward), LINKS).expected


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
