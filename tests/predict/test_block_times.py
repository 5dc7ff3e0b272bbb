"""First blocks of real small models, timed on this CPU in milliseconds."""

import pytest
import torch

from fake_cuda.moments import small_config
from headway.devices.measure import TimeBudget
from headway.predict import block_times
from headway.predict.block_times import LAYERS, timed_blocks
from headway.predict.blocks import with_blocks
from headway.predict.speeds import Cases, Speeds

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
