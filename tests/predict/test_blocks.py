"""What elementwise operations and the host take, from passes whose times were made by hand."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from headway.count import Workload, load_cost_model
from headway.count.activations import shipped_activations
from headway.predict.blocks import TimedBlocks, with_blocks
from headway.predict.held import State
from headway.predict.speeds import Cases, Speeds
from headway.predict.step_time import StepTimes, StepWork

PACKS = ((30, 34), (300, 212), (900, 1148))
SPEEDS = Speeds("mine", 1e11, Cases.exact(1e10), "", {(512, 1024, 1024): 8e10}, {64: (1e10, 2e10)}, runs_ahead=False)
STATE = State(weight_bytes=4, compute_bytes=4)


def blocks(per_byte, per_launch, *, at_most=False, noise=(1.0, 1.0, 1.0)):
    """Two blocks of Qwen3-0.6B, on which each byte and each module takes so long [s]."""
    whole = load_cost_model("qwen3-0.6b")
    names = ("model.layers.0", "model.layers.1")
    rows = tuple(row for row in whole.rows if row.block in names)
    cost_model = replace(whole, rows=rows)
    saved = shipped_activations("qwen3-0.6b", "float32")
    saved = replace(saved, blocks={name: saved.blocks[name] for name in names})
    times, seconds = StepTimes(cost_model, saved, SPEEDS), {}
    for segments, factor in zip(PACKS, noise, strict=True):
        pack = Workload(list(segments))
        work = StepWork(cost_model.count(pack), pack, packs=1, tokens=pack.tokens)
        device = sum(one.expected for one in times.computed_s(work, STATE).values())
        device += per_byte * times.moved_bytes(work, STATE)
        host = per_launch * len(rows)
        seconds[segments] = factor * (max(device, host) if at_most else device + host)
    return TimedBlocks(cost_model, saved, 4, seconds, datetime(2026, 11, 23, tzinfo=UTC), is_cached=False)


def test_both_are_found_again():
    found = with_blocks(SPEEDS, blocks(2e-10, 7e-5))
    assert (found.elementwise_s, found.host_s) == pytest.approx((2e-10, 7e-5))


def test_passes_that_lie_on_no_line_are_met_as_closely_as_they_were_moved():
    moved, plain = blocks(2e-10, 7e-5, noise=(1.02, 0.98, 1.02)), blocks(2e-10, 7e-5)
    found = with_blocks(SPEEDS, moved)
    fitted = blocks(found.elementwise_s, found.host_s)
    assert [*fitted.seconds.values()] == pytest.approx([*plain.seconds.values()], rel=0.02)


def test_neither_is_ever_negative():
    assert with_blocks(SPEEDS, blocks(0.0, 7e-5, noise=(1, 1, 0.9))).elementwise_s == 0
    assert with_blocks(SPEEDS, blocks(2e-10, 0.0, noise=(0.8, 1, 1))).host_s == 0


def test_a_host_that_runs_ahead_is_seen_where_packs_are_short():
    found = with_blocks(replace(SPEEDS, runs_ahead=True), blocks(2e-10, 3e-2, at_most=True))
    assert (found.elementwise_s, found.host_s) == pytest.approx((2e-10, 3e-2))


def test_json_has_every_pass():
    found = blocks(2e-10, 7e-5).to_dict()
    assert [tuple(one["segments"]) for one in found["passes"]] == [*PACKS]
    assert found["cached"] is False
