"""What a run is warned of while it goes, from records as the engine writes them."""

import random
import re
import time

import pytest

from headway.config import parse_config
from headway.train.progress import Progress
from headway.train.run import RunWarnings, train


def record(step, *, wall_s=1.0, waits_s=0.0, tokens=1000, slots=1000):
    flops = {"total": 90 * tokens, "recompute": 0}
    return {
        "kind": "step", "step": step, "wall_s": wall_s, "data_wait_s": waits_s, "tokens": tokens, "slots": slots,
        "flops": flops, "flops_by_component": {"language.mlp": 90 * tokens}, "peak_flops_per_s": 3e5,
        "flops_per_s_per_device": 90 * tokens / wall_s, "away_s": 0.0, "recompiles": 0,
    }  # fmt: skip


def warned(records):
    told = []
    warnings = RunWarnings(told.append)
    for one in records:
        warnings.add(one)
    return told


def test_a_steady_run_is_warned_of_nothing():
    assert not warned(record(step) for step in range(1, 500))


def test_each_cause_is_told_once_with_what_to_try():
    (told,) = warned(record(step, waits_s=0.3) for step in range(1, 500))
    assert told.startswith("warning: the step waited for data 30.0 % of the time")
    assert "here: more data.workers and a larger data.prefetch_bytes" in told


def test_little_is_not_worth_a_warning():
    assert not warned(record(step, waits_s=0.08) for step in range(1, 200))  # `headway explain` tells it


def test_a_rate_that_falls_is_told_when_it_has_fallen():
    told = warned(record(step, wall_s=1.0 + step / 400) for step in range(1, 400))
    assert len(told) == 1
    assert "the rate of the work fell by" in told[0]


def test_a_rate_that_falls_slowly_is_told_against_the_run_s_own_median():
    told = warned(record(step, wall_s=1.0 + step / 5000) for step in range(1, 3000))
    assert len(told) == 1
    now, below, usual = map(
        float, re.search(r"is ([\d.]+) %, ([\d.]+) % below .* median of ([\d.]+) %", told[0]).groups()
    )
    assert 10 <= below < 12  # told as soon as it is a tenth
    assert now == pytest.approx(usual * (1 - below / 100), rel=0.01)


def test_a_rate_that_falls_at_once_is_told_and_one_that_waits_for_data_is_not_called_so():
    (told,) = warned(record(step, wall_s=1.0 if step <= 1000 else 1.3) for step in range(1, 1100))
    assert "MFU of the last 50 steps is 23.1 %, 23.1 % below the run's own median of 30.0 %" in told
    (told,) = warned(
        record(step, wall_s=1.0 if step <= 1000 else 1.3, waits_s=0.0 if step <= 1000 else 0.3)
        for step in range(1, 1400)
    )
    assert "waited for data" in told


def test_a_rate_that_always_varies_is_not_told():
    noise = random.Random(0)
    assert not any(
        "own median" in one for one in warned(record(step, wall_s=noise.uniform(0.6, 1.8)) for step in range(1, 3000))
    )


def test_padding_is_told():
    (told,) = warned(record(step, tokens=500) for step in range(1, 60))
    assert "padding" in told


@pytest.mark.parametrize("quiet", [False, True])
def test_the_first_rank_alone_is_warned(quiet, capsys):
    with Progress(100, done=0, log_every=1000, quiet=quiet) as progress:
        progress.observer = RunWarnings(progress.note).add
        for step in range(1, 100):
            progress.step(record(step, waits_s=0.3))
    assert capsys.readouterr().err.count("waited for data") == (not quiet)


def test_a_real_run_whose_packs_come_late_is_warned(raw, monkeypatch, capsys):
    """The loop's own records; each pack is held back for as long as the step before it took, on any machine."""
    from headway.data.feed import make

    encode, done_s = make.PackMaker.__call__, time.monotonic()

    def late(self, pieces):
        nonlocal done_s
        time.sleep(max(0.05, time.monotonic() - done_s))
        pack = encode(self, pieces)
        done_s = time.monotonic()
        return pack

    monkeypatch.setattr(make.PackMaker, "__call__", late)
    monkeypatch.setattr("headway.train.run._EVERY", 8)
    raw["optim"]["steps"] = 10
    train(parse_config(raw))
    told = capsys.readouterr().err
    assert told.count("warning: the step waited for data") == 1
    assert "  left " in told  # off a terminal, lines say how long it goes on
