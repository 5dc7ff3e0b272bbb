"""What a run is warned of while it goes, from records as the engine writes them."""

import pytest

from headway.train.config import parse_config
from headway.train.loop import train
from headway.train.progress import Progress
from headway.train.warnings import RunWarnings


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
    assert "Try: more data.workers" in told


def test_little_is_not_worth_a_warning():
    assert not warned(record(step, waits_s=0.08) for step in range(1, 200))  # `headway explain` tells it


def test_a_rate_that_falls_is_told_when_it_has_fallen():
    told = warned(record(step, wall_s=1.0 + step / 400) for step in range(1, 400))
    assert len(told) == 1
    assert "the rate of the work fell by" in told[0]


def test_padding_is_told():
    (told,) = warned(record(step, tokens=500) for step in range(1, 60))
    assert "padding" in told


@pytest.mark.parametrize("quiet", [False, True])
def test_the_first_rank_alone_is_warned(quiet, capsys):
    with Progress(100, done=0, log_every=1000, quiet=quiet) as progress:
        for step in range(1, 100):
            progress.step(record(step, waits_s=0.3))
    assert capsys.readouterr().err.count("waited for data") == (not quiet)


def test_a_real_run_whose_packs_come_late_is_warned(raw, monkeypatch, capsys):
    """The loop's own records; each pack is held back for as long as a step of this model takes many times."""
    from headway.data.feed import make

    encode = make.PackMaker.__call__

    def late(self, pieces):
        import time

        time.sleep(0.05)
        return encode(self, pieces)

    monkeypatch.setattr(make.PackMaker, "__call__", late)
    monkeypatch.setattr("headway.train.warnings._EVERY", 8)
    raw["optim"]["steps"] = 10
    train(parse_config(raw))
    told = capsys.readouterr().err
    assert told.count("warning: the step waited for data") == 1
    assert "  left " in told  # off a terminal, lines say how long it goes on
