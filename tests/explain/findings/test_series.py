"""Runs made up of their steps in a row, each with one fault."""

import pytest

from headway.explain.findings.evidence import RunEvidence, RunStep
from headway.explain.findings.rules import find

SECOND = 10**9


def rated(rates, **more):
    """Steps of one second at rates of work."""
    return [RunStep(number, SECOND, rate=rate, **more) for number, rate in enumerate(rates, start=1)]


@pytest.mark.parametrize(
    ("steps", "beside", "wanted"),
    [
        (rated([1.0] * 30), {}, None),  # nothing
        (rated([1.0, 0.99, 1.01] * 10), {"evaluation": SECOND}, None),
        (rated([1.0, 0.9, 0.7, 0.98, 0.85, 0.68, 0.95, 0.8, 0.66, 0.93, 0.78, 0.65]), {}, None),  # falls in its scatter
        (rated([1.0, 0.4, 1.0, 0.5, 1.0, 0.6]), {}, "unstable-steps"),
        (rated([1.0] * 19 + [0.2] + [1.0] * 20), {}, "slow-steps"),
        (rated([1.0 - 0.004 * n for n in range(15)]), {}, "falling-rate"),
        (rated([1.0] * 15, imbalance=0.2), {}, "heavy-pack"),
        (rated([1.0] * 15, slowest_rank=3, slowest_speed=0.7), {}, "slow-rank"),
        (rated([1.0] * 15, memory_share=0.97), {}, "memory-limit"),
        (rated([1.0] * 15, mfu=0.01), {}, "not-compute-bound"),
        (rated([1.0] * 15, mfu=0.01, waited_ns=SECOND), {}, None),  # the wait has a line of its own
        (rated([1.0] * 15, has_compiled_again=True), {"compile": 5 * SECOND}, "recompilation"),
        (rated([1.0] * 15), {"compile": 5 * SECOND}, "compiling"),
        (rated([1.0] * 15), {"checkpoint": 5 * SECOND}, "beside-training"),
        ([RunStep(0, 60 * SECOND), *rated([1.0] * 15)], {}, "first-steps"),
        ([RunStep(0, 60 * SECOND), *rated([1.0] * 2000)], {}, None),  # a long run makes up for it
    ],
)
def test_each_rule_speaks_of_its_fault_and_of_nothing_else(steps, beside, wanted):
    found = find(run=RunEvidence(steps, beside))
    assert [one.id for one in found] == ([] if wanted is None else [wanted])


def test_a_finding_says_what_it_costs():
    steps = [RunStep(n, SECOND * (1 + (n == 1) * 9), mfu=0.4 / (1 + (n == 1) * 9)) for n in range(1, 11)]
    (found,) = find(run=RunEvidence(steps))
    assert (found.id, found.ns) == ("first-steps", 900_000_000)  # 9 of 19 seconds, over 10 steps
    assert found.share == pytest.approx(9 / 19)
    assert (found.mfu_from, found.mfu_to) == (pytest.approx(4 / 19), pytest.approx(0.4))


def test_slow_steps_that_come_at_a_stride_are_told_with_it():
    (found,) = find(run=RunEvidence(rated([0.2 if n % 25 == 24 else 1.0 for n in range(100)])))
    assert "4 of 100 steps took more than twice the usual time for their work, every 25 steps: 25, 50," in found.seen
