"""Runs made up of their steps in a row, each with one fault."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.explain.findings.evidence import RunEvidence, RunStep
from headway.explain.findings.rules import find
from headway.log.losses import StepLoss

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
        (rated([1.0, 0.4, 1.0, 0.5, 1.0, 0.6], core_wait_ns=SECOND * 2 // 3), {}, "shared-cores"),
        (rated([1.0] * 19 + [0.2] + [1.0] * 20), {}, "slow-steps"),
        (rated([1.0 - 0.004 * n for n in range(15)]), {}, "falling-rate"),
        (rated([1.0] * 15, imbalance=0.2), {}, "heavy-pack"),
        (rated([1.0] * 15, slowest_rank=3, slowest_speed=0.7), {}, "slow-rank"),
        (rated([1.0] * 15, memory_share=0.97), {}, "memory-limit"),
        (rated([1.0] * 15, mfu=0.01), {}, "not-compute-bound"),
        (rated([1.0] * 15, mfu=0.01, waited_ns=SECOND), {}, None),  # the wait has a line of its own
        (rated([1.0] * 15, has_compiled_again=True), {"compile": 5 * SECOND}, "recompilation"),
        (rated([1.0] * 15), {"compile": 5 * SECOND}, "compiling"),
        (rated([1.0] * 15), {"checkpoint": 5 * SECOND}, "checkpoint"),
        (rated([1.0] * 15), {"evaluation": 5 * SECOND}, "evaluation"),
        (rated([1.0] * 15, padding_ns=SECOND // 2, empty_share=0.5), {}, "padding"),
        (rated([1.0] * 15, recomputed_ns=SECOND // 5), {}, "recomputation"),
        (rated([1.0] * 15, recomputed_ns=SECOND // 5, memory_share=0.9), {}, None),  # memory asks for it
        (rated([1.0, 0.9, 1.1] * 10 + [0.1, 0.09, 0.11] * 30), {}, "changed-speed"),
        (rated([0.1] * 30 + [1.0] * 30), {}, "first-steps"),  # what was slow is over
        (rated([1.0] * 6 + [0.1] * 1) + rated([1.0] * 6), {}, None),  # one slow step is no change
        (rated([0.3] * 8 + [1.0] * 5), {}, None),  # too few of one kind for a change, and none comes back
        (rated([1.0] * 10 + [0.3] * 10 + [1.0] * 10 + [0.3] * 10), {}, "unstable-steps"),  # it comes and goes
        (rated([1.0] * 20, stage=frozenset("a")) + rated([0.1] * 20, stage=frozenset("b")), {}, None),
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


def test_a_speed_that_changes_once_is_told_with_its_step_and_what_did_not_change():
    """The review's run: 400 steps at full speed, then other work came onto the machine for 1,150."""
    steps = [
        RunStep(n, SECOND if n <= 429 else 10 * SECOND, rate=1.0 if n <= 429 else 0.1, tokens=1024.0)
        for n in range(1, 1001)
    ]
    (found,) = find(run=RunEvidence(steps))
    assert found.id == "changed-speed"
    assert "since about step 430 (of 1 to 1000) steps take 10.0 times as long for the same work" in found.seen
    assert "lengths, data and compiling did not change" in found.seen
    assert found.share == pytest.approx(571 * 9 / (429 + 571 * 10))


def test_a_change_names_what_changed_with_it():
    before = [RunStep(n, SECOND, rate=1.0, tokens=1000.0) for n in range(1, 21)]
    after = [RunStep(n, 4 * SECOND, rate=0.4, tokens=1600.0, waited_ns=SECOND) for n in range(21, 41)]
    found = next(one for one in find(run=RunEvidence([*before, *after])) if one.id == "changed-speed")
    assert "lengths (1,000 and 1,600 tokens a step) and waiting for data (0.0 % and 25.0 % of the time)" in found.seen
    assert "compiling did not change" in found.seen


def test_a_change_names_the_phase_that_became_slower():
    before = [RunStep(n, 10, rate=1.0, phases_ns={"forward": 4, "optimizer": 6}) for n in range(1, 21)]
    after = [RunStep(n, 30, rate=0.33, phases_ns={"forward": 4, "optimizer": 26}) for n in range(21, 41)]
    assert "in the phase 'optimizer'" in find(run=RunEvidence([*before, *after]))[0].seen


@given(
    rates=st.lists(st.floats(0.9, 1.1), min_size=12, max_size=200),
    place=st.floats(0.2, 0.8),
    factor=st.floats(2.0, 50.0),
)
def test_a_change_is_found_at_its_step_and_nothing_else_is_said_of_it(rates, place, factor):
    at = max(6, min(len(rates) - 6, round(place * len(rates))))
    changed = [rate / factor if number >= at else rate for number, rate in enumerate(rates)]
    assert [one.id for one in find(run=RunEvidence(rated(rates)))] == []
    (found,) = find(run=RunEvidence(rated(changed)))
    assert found.id == "changed-speed"
    assert f"since about step {at + 1} (of" in found.seen


@pytest.mark.parametrize("number", [3, 8])
def test_a_list_of_steps_ends_in_one_full_stop(number):
    slow = {10 * (i + 1) for i in range(number)}
    (found, *_) = find(run=RunEvidence(rated([0.2 if n in slow else 1.0 for n in range(1, 101)])))
    assert found.id == "slow-steps"
    assert not found.seen.endswith("..")
    assert ("50 and 3 more" in found.seen) == (number == 8)


LOSSES = [10 - 0.08 * n for n in range(100)]


@pytest.mark.parametrize(
    ("losses", "norms", "skipped", "rules"),
    [
        (LOSSES, [2.0] * 100, {}, set()),
        ([*LOSSES[:50], LOSSES[50] + 4, *LOSSES[51:]], [2.0] * 50 + [300.0] + [2.0] * 49, {}, set()),  # one spike
        ([0.5 + 0.2 * (n % 2) for n in range(100)], [], {}, set()),  # a loss that scatters
        ([0.01 * (-1) ** n for n in range(100)], [], {}, set()),  # that of a policy's gradient
        ([*LOSSES[:80], *[9.0] * 20], [], {}, {"rising-loss"}),
        (LOSSES, [2.0] * 85 + [40.0] * 15, {}, {"unstable-gradients"}),
        (LOSSES, [2.0] * 85 + [math.inf] + [2.0] * 14, {}, {"unstable-gradients"}),
        ([*LOSSES[:90], *[math.nan] * 10], [2.0] * 90 + [math.nan] * 10, {}, {"loss-not-finite"}),
        ([math.nan if n == 40 else loss for n, loss in enumerate(LOSSES)], [], {}, {"loss-not-finite"}),
        (LOSSES, [], {3: 1}, set()),  # a loss scale that looks for its value
        (LOSSES, [], dict.fromkeys(range(50, 60), 1), {"skipped-updates"}),
        ([], [], {}, set()),
    ],
)
def test_a_run_that_does_not_learn_is_told_before_its_speed(losses, norms, skipped, rules):
    rows = [
        StepLoss(n + 1, loss, norms[n] if norms else None, num_skipped=skipped.get(n, 0))
        for n, loss in enumerate(losses)
    ]
    found = find(run=RunEvidence(rated([1.0] * 50 + [0.5] * 50), losses=rows))
    learning = {"rising-loss", "unstable-gradients", "loss-not-finite", "skipped-updates"}
    assert learning & {one.id for one in found} == rules
    assert [one.id for one in found] == [*rules, "changed-speed"]
    for one in found[:-1]:
        assert (one.ns, one.mfu_to) == (0, None)
        assert one.extent == one.when != ""
