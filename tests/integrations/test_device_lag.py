"""Every integration, in its real loop, on a pretended device that runs behind its host: time has no gaps."""

import pytest

from headway.compat.mfu_tracker import track
from headway.compat.mfu_tracker.integrations.hf_trainer import MFUCallback
from helpers.counter import SPEC
from helpers.device import DEVICE_S, HOST_S, Device, HostMark, measured
from helpers.loops import (
    LOGGING_S,
    SAVING_S,
    STEPS,
    collate,
    hugging_face,
    in_accelerate,
    in_lightning,
    in_megatron,
    tiny,
    work_of_a_step,
)

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*does not have many workers:UserWarning",
        "ignore:.*treespec, LeafSpec.* is deprecated:FutureWarning",  # Lightning asks torch for it by its old name
        "ignore:You're resuming from a checkpoint that ended before the epoch ended",
        "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
    ),
]
LOOPS = {
    "HeadwayCallback": hugging_face,
    "AccelerateMeter": in_accelerate,
    "HeadwayMonitor": in_lightning,
    "FlopsAccumulator": in_megatron,
}
loops = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
# launches that the queue holds, and the time that each row takes to load
lags = pytest.mark.parametrize(("depth", "load_s"), [(1, 0.0), (5, 0.2), (1_000, 0.0)])


def mfu_callback(folder, **options):
    return hugging_face(folder, callback=MFUCallback, **options)


@loops
@lags
def test_step_times_goodput_and_the_wall_clock_agree_however_far_the_device_lags(tmp_path, loop, depth, load_s):
    found = measured(loop(tmp_path, load_s=load_s), depth=depth)
    found.hold()
    assert found.num_steps == STEPS
    slowest_s = max(DEVICE_S, HOST_S + load_s)
    assert found.runs[0].step_s < 1.6 * slowest_s + LOGGING_S  # after each stop the queue is empty
    assert found.seconds["data wait"] <= (STEPS + 1) * load_s + 1e-6  # and no logging, saving or evaluating
    assert found.seconds["evaluation"] > 0.8 * DEVICE_S
    assert found.seconds["checkpoint"] == pytest.approx(2 * SAVING_S, abs=2 * LOGGING_S)
    # at the start and at the end, and before and after each of four stops at most
    assert found.device.num_waits <= 2 + 2 * 4


@loops
def test_the_laws_catch_a_clock_that_stops_when_the_launch_returns(tmp_path, loop):
    """Put the old defect back: no mark knows the device, and the MFU is one that it cannot reach."""
    found = measured(loop(tmp_path), mark=HostMark)
    with pytest.raises(AssertionError):
        found.hold()
    assert found.runs[0].wall_s < 0.9 * STEPS * DEVICE_S


def test_mfu_trackers_callback_keeps_the_laws(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e12")
    measured(mfu_callback(tmp_path, load_s=0.03)).hold()


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_on_start": True},
        {"save_strategy": "best", "metric_for_best_model": "loss"},
        {"gradient_accumulation_steps": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_whatever_a_trainer_does_between_steps_is_no_wait_for_data(tmp_path, settings):
    found = measured(hugging_face(tmp_path, **settings))
    found.hold()
    assert found.seconds["data wait"] == 0
    assert found.seconds["evaluation"] >= 2 * 0.8 * DEVICE_S
    assert found.seconds["checkpoint"] >= SAVING_S


@pytest.mark.parametrize("loop", [hugging_face, in_lightning], ids=["HeadwayCallback", "HeadwayMonitor"])
def test_a_resumed_run_keeps_the_laws_over_both_processes(tmp_path, loop):
    saved = {hugging_face: True, in_lightning: tmp_path / "last.ckpt"}[loop]
    found = measured(loop(tmp_path, steps=4, load_s=0.03), loop(tmp_path, steps=8, load_s=0.03, resume=saved))
    found.hold()
    assert [run.num_steps for run in found.runs] == [4, 4]
    assert found.runs[1].step == 8  # of the whole run
    assert found.seconds["recovery"] >= 0.3


def test_a_tracked_block_has_the_devices_time():
    model, device = tiny(), Device()
    with device.stands_in(), work_of_a_step(device):
        device.launch(0.5)  # of what came before
        for _ in range(STEPS):
            with track(model, dtype="fp32", spec=SPEC) as result:
                model(**collate([{"input_ids": [7] * 12}])).loss.backward()
            # the device waits for the first launch, and the host's 10 ms are not all that is seen
            assert 0.8 * DEVICE_S <= result.elapsed_sec <= 0.8 * DEVICE_S + HOST_S
            assert result.mfu == pytest.approx(result.flops / result.elapsed_sec / 1e15)


def test_a_tracked_block_by_the_hosts_clock_alone_would_be_too_fast():
    model, device = tiny(), Device()
    with device.stands_in(HostMark), work_of_a_step(device):
        with track(model, dtype="fp32", spec=SPEC) as result:
            model(**collate([{"input_ids": [7] * 12}])).loss.backward()
        assert result.mfu > 3 * result.flops / (0.8 * DEVICE_S) / 1e15
