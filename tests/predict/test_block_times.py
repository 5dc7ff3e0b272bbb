"""First blocks of real small models, timed on this CPU in milliseconds, and what is read off times made by hand."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch

from fake_cuda.moments import small_config
from headway.count import Workload, load_cost_model
from headway.count.activations import shipped_activations
from headway.devices.measure import TimeBudget
from headway.predict import block_times
from headway.predict.block_times import LAYERS, TimedBlocks, timed_blocks, with_blocks
from headway.predict.recipe import State
from headway.predict.speeds import Cases, Speeds
from headway.predict.step_time import StepTimes, StepWork

CPU = torch.device("cpu")
SPEEDS = Speeds("mine", 1e14, Cases.exact(1e10), "", {(64, 256, 256): 1e14}, {16: (1e14, 1e14)}, runs_ahead=False)


@pytest.fixture(autouse=True)
def _short(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(block_times, "_SLOTS", {"cpu": (16, 48)})
    monkeypatch.setattr(block_times, "_SEGMENT", {"cpu": 16})
    monkeypatch.setattr(block_times, "_BUDGET", TimeBudget(0.0, 60.0, 2))


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("little experts", "little video", "tied")]


@pytest.mark.parametrize("kind", ["little text", "little image", *SLOW])
def test_first_blocks_of_a_language_model_are_timed_and_kept(kind):
    config, warned = small_config(kind), []
    first = timed_blocks(config, CPU, "fp32", warn=warned.append)
    assert not warned
    assert [sum(segments) for segments in first.seconds] == [16, 48]
    assert min(first.seconds.values()) > 0
    assert {row.component.partition(".")[0] for row in first.cost_model.rows} == {"language"}
    assert len({row.block for row in first.cost_model.rows}) == LAYERS
    again = timed_blocks(config, CPU, "fp32")
    assert (first.is_cached, again.is_cached) == (False, True)
    assert again.seconds == first.seconds
    speeds = with_blocks(SPEEDS, first)
    assert speeds.elementwise_s + speeds.host_s > 0  # products cost nothing here
    assert config.to_dict() == small_config(kind).to_dict()  # nothing is left on it


def test_other_sizes_are_measured_anew():
    timed_blocks(small_config("little text"), CPU, "fp32")
    wider = small_config("little text")
    wider.intermediate_size += 8
    assert not timed_blocks(wider, CPU, "fp32").is_cached


def test_blocks_that_do_not_fit_are_told(monkeypatch):
    monkeypatch.setattr(block_times, "_room", lambda _: 2**20)
    warned = []
    assert timed_blocks(small_config("little text"), CPU, "fp32", warn=warned.append) is None
    assert "take 0.0 GiB, too much of this memory" in warned[0]
    assert "the memory's bandwidth" in warned[0]


def test_a_pass_goes_through_every_block_and_no_further():
    model = block_times._shallow_model(small_config("tied"), CPU, torch.float32)
    run, slots = block_times._pass(model, (48, 16))
    to_input, *to_weights = run()
    assert (slots, to_input.shape) == (48, (1, 48, 512))
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    untouched = {name for name, gradient in zip(names, to_weights, strict=True) if gradient is None}
    assert untouched == {"model.embed_tokens.weight"}
    assert all(bool(one.isfinite().all()) for one in (to_input, *to_weights) if one is not None)


PACKS = ((30, 34), (300, 212), (900, 1148))
MINE = Speeds("mine", 1e11, Cases.exact(1e10), "", {(512, 1024, 1024): 8e10}, {64: (1e10, 2e10)}, runs_ahead=False)
STATE = State(weight_bytes=4, compute_bytes=4)


def blocks(per_byte, per_launch, *, at_most=False, noise=(1.0, 1.0, 1.0)):
    """Two blocks of Qwen3-0.6B, on which each byte and each module takes so long [s]."""
    whole = load_cost_model("qwen3-0.6b")
    names = ("model.layers.0", "model.layers.1")
    rows = tuple(row for row in whole.rows if row.block in names)
    cost_model = replace(whole, rows=rows)
    saved = shipped_activations("qwen3-0.6b", "float32")
    saved = replace(saved, blocks={name: saved.blocks[name] for name in names})
    times, seconds = StepTimes(cost_model, saved, MINE), {}
    for segments, factor in zip(PACKS, noise, strict=True):
        pack = Workload(list(segments))
        work = StepWork(cost_model.count(pack), pack, packs=1, tokens=pack.tokens)
        device = sum(one.expected for one in times.computed_s(work, STATE).values())
        device += per_byte * times.moved_bytes(work, STATE)
        host = per_launch * times.launches(STATE, pack.slots, pack.num_segments)
        seconds[segments] = factor * (max(device, host) if at_most else device + host)
    return TimedBlocks(cost_model, saved, 4, seconds, datetime(2026, 11, 23, tzinfo=UTC), is_cached=False)


def test_both_are_found_again():
    found = with_blocks(MINE, blocks(2e-10, 2e-6))
    assert (found.elementwise_s, found.host_s) == pytest.approx((2e-10, 2e-6))


def test_passes_that_lie_on_no_line_are_met_as_closely_as_they_were_moved():
    moved, plain = blocks(2e-10, 2e-6, noise=(1.02, 0.98, 1.02)), blocks(2e-10, 2e-6)
    found = with_blocks(MINE, moved)
    fitted = blocks(found.elementwise_s, found.host_s)
    assert [*fitted.seconds.values()] == pytest.approx([*plain.seconds.values()], rel=0.02)


def test_neither_is_ever_negative():
    assert with_blocks(MINE, blocks(0.0, 2e-6, noise=(1, 1, 0.9))).elementwise_s == 0
    assert with_blocks(MINE, blocks(2e-10, 0.0, noise=(0.8, 1, 1))).host_s == 0


def test_a_host_that_runs_ahead_is_seen_where_packs_are_short():
    found = with_blocks(replace(MINE, runs_ahead=True), blocks(2e-10, 1e-3, at_most=True))
    assert (found.elementwise_s, found.host_s) == pytest.approx((2e-10, 1e-3))


def test_json_has_every_pass():
    found = blocks(2e-10, 2e-6).to_dict()
    assert [tuple(one["segments"]) for one in found["passes"]] == [*PACKS]
    assert found["cached"] is False
