"""Expected goodput against an event-by-event simulation, and best checkpoint intervals against published values."""

import random

import pytest

from headway.errors import PlanError
from headway.predict.failures import Interruptions, Reliability, best_interval_s, goodput

HOUR, MINUTE = 3600.0, 60.0


def simulated(interval_s, reliability, mtbf_s, work_s, seed=0):
    """Share of the time that lasts, of a job that fails at random moments, event by event.

    A checkpoint begins after each interval of training, stands still for a while, and is whole some time later.
    """
    draw = random.Random(seed)
    fails_at, now = draw.expovariate(1 / mtbf_s), 0.0
    safe = 0.0  # training that a checkpoint holds
    while safe < work_s:
        saved_at = now + interval_s + reliability.save_s
        if fails_at >= saved_at:
            safe, now = safe + interval_s, saved_at
            continue
        now = fails_at
        while True:  # starting again fails too
            fails_at = now + draw.expovariate(1 / mtbf_s)
            if fails_at >= now + reliability.restart_s:
                now += reliability.restart_s
                break
            now = fails_at
    return safe / now


@pytest.mark.parametrize(
    ("mtbf_s", "reliability"),
    [
        (24 * HOUR, Reliability(1, 5 * MINUTE, 10 * MINUTE)),
        (3 * HOUR, Reliability(1, MINUTE, 5 * MINUTE)),
        (30 * MINUTE, Reliability(1, MINUTE, 5 * MINUTE)),
        (15 * MINUTE, Reliability(1, 5 * MINUTE, 10 * MINUTE)),  # most of the time is lost
    ],
)
def test_goodput_is_that_of_a_simulation(mtbf_s, reliability):
    interval_s = best_interval_s(reliability.save_s, mtbf_s)
    found = simulated(interval_s, reliability, mtbf_s, work_s=4000 * mtbf_s)
    assert goodput(interval_s, reliability, mtbf_s) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize("mtbf_s", [24 * HOUR, 3 * HOUR, 30 * MINUTE])
def test_no_other_interval_is_better(mtbf_s):
    reliability = Reliability(1, MINUTE, 5 * MINUTE)
    best = best_interval_s(MINUTE, mtbf_s)
    of = {factor: goodput(factor * best, reliability, mtbf_s) for factor in (0.5, 0.8, 1, 1.25, 2)}
    assert max(of, key=of.get) == 1


@pytest.mark.parametrize(
    ("mtbf_s", "minutes"),
    [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)],
)
def test_the_best_intervals_are_those_that_daly_prints(mtbf_s, minutes):
    """Daly 2006, figures 3 to 5: a dump of 5 minutes, restarts of 10."""
    assert best_interval_s(5 * MINUTE, mtbf_s) / MINUTE == pytest.approx(minutes, rel=0.01)


def test_a_save_that_takes_longer_than_a_job_lives_is_made_as_rarely_as_it_fails():
    assert best_interval_s(10 * HOUR, HOUR) == HOUR


def test_failures_of_devices_add_up():
    """Llama 3: 419 failures in 54 days on 16,384 devices, and more than 90 % of the time effective."""
    mtbf_s = 16_384 * 54 * 24 * HOUR / 419
    found = Interruptions.of(Reliability(mtbf_s, save_s=MINUTE, restart_s=5 * MINUTE), 16_384)
    assert found.per_day * 54 == pytest.approx(419)
    assert found.mtbf_s == pytest.approx(3.09 * HOUR, rel=1e-3)
    assert found.goodput == pytest.approx(0.87, abs=0.01)
    assert Interruptions.of(Reliability(mtbf_s, 10.0, 5 * MINUTE), 16_384).goodput > 0.9


def test_a_job_that_never_lives_long_enough_makes_no_progress():
    assert goodput(HOUR, Reliability(1, MINUTE, MINUTE), mtbf_s=1.0) == 0


@pytest.mark.parametrize("numbers", [{"mtbf_s": 0.0}, {"mtbf_s": -1.0}, {"save_s": 0.0}, {"restart_s": -1.0}])
def test_times_that_are_none_are_refused(numbers):
    with pytest.raises(PlanError, match=next(iter(numbers))):
        Reliability(**{"mtbf_s": HOUR, "save_s": 1.0, "restart_s": 1.0, **numbers})
