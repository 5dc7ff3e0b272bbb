"""The meter against a hand-made cost model: one linear layer of 3 x 5, so 30 FLOPs per token and phase."""

import json

import pytest

from headway.count import Workload
from headway.errors import UsageError
from headway.meter import StepMeter
from one_linear import COST_MODEL, PEAK, Clock


def metered(clock=None, **options):
    return StepMeter(COST_MODEL, PEAK, clock=clock or Clock(), **options)


def step(meter, clock, wall_s, workload, data_wait_s=0.0):
    meter.start_step()
    meter.data_wait(data_wait_s)
    meter.add(workload)
    clock.now_s += wall_s
    return meter.end_step()


def test_mfu_is_flops_over_time_and_peak():
    clock = Clock()
    # 10 tokens x 30 x 3 phases = 900 FLOP in 2 s of a 1000 FLOP/s device
    result = step(metered(clock), clock, 2.0, Workload([7, 3]))
    assert result.flops.total == 900
    assert result.step_s == 2.0
    assert result.mfu == result.hfu == pytest.approx(0.45)
    assert result.flops_per_s == pytest.approx(450)
    assert result.tokens_per_s == pytest.approx(5)
    assert result.convention == "useful/1"
    assert result.peak is PEAK
    assert result.warnings == ()


def test_recompute_counts_in_hfu_and_not_in_mfu():
    clock = Clock()
    result = step(metered(clock, recompute="full"), clock, 2.0, Workload([10]))
    assert result.mfu == pytest.approx(0.45)
    assert result.hfu == pytest.approx(0.60)  # 300 FLOP more


def test_padding_is_waste_and_not_flops():
    clock = Clock()
    result = step(metered(clock), clock, 1.0, Workload([6], slots=8))
    assert result.flops.total == 540
    assert result.padding_share == pytest.approx(0.25)
    assert (result.tokens_per_s, result.slots_per_s) == (6, 8)


def test_micro_batches_of_a_step_add_up():
    clock = Clock()
    meter = metered(clock)
    meter.start_step()
    for workload in (Workload([4]), Workload([6], slots=10)):
        meter.data_wait(0.25)
        meter.add(workload)
    clock.now_s += 1.0
    result = meter.end_step()
    assert (result.tokens, result.slots, result.flops.total) == (10, 14, 900)
    assert result.data_wait_s == 0.5
    assert result.data_wait_share == pytest.approx(0.5)


def test_world_size_multiplies_the_peak():
    clock = Clock()
    result = step(metered(clock, world_size=4), clock, 1.0, Workload([40]))
    assert result.mfu == pytest.approx(3600 / (1.0 * 1000 * 4))
    assert result.peak_flops_per_s == 4000


def test_the_run_is_the_total_over_the_total_and_not_the_mean_of_ratios():
    clock = Clock()
    meter = metered(clock)
    steps = [step(meter, clock, 1.0, Workload([10])), step(meter, clock, 9.0, Workload([10]))]
    summary = meter.summary()
    assert summary.mfu == pytest.approx(1800 / (10 * 1000))
    assert summary.mfu != pytest.approx(sum(s.mfu for s in steps) / 2)  # 0.5, the wrong answer
    assert (summary.num_steps, summary.num_warmup_steps) == (2, 0)
    assert summary.as_record()["wall_s"] == 10.0
    assert summary.flops.rows == (steps[0].flops + steps[1].flops).rows


def test_warm_up_steps_are_measured_but_left_out_of_the_run():
    clock = Clock()
    meter = metered(clock, num_warmup_steps=1)
    slow = step(meter, clock, 100.0, Workload([10]))
    assert slow.mfu == pytest.approx(0.009)
    with pytest.raises(UsageError, match="1 steps were measured and the first 1 are left out"):
        meter.summary()
    step(meter, clock, 2.0, Workload([10]))
    summary = meter.summary()
    assert summary.wall_s == 2.0
    assert summary.mfu == pytest.approx(0.45)
    assert (summary.num_steps, summary.num_warmup_steps) == (1, 1)


def test_an_impossible_mfu_is_reported_with_its_causes_and_not_clipped():
    clock = Clock()
    result = step(metered(clock), clock, 0.5, Workload([10]))
    assert result.mfu == pytest.approx(1.8)
    (warning,) = result.warnings
    assert warning.startswith("MFU of 180.0% is above 100 %")
    assert "made up for a test" in warning
    assert "world_size=1" in warning


def test_an_impossible_hfu_is_reported_too():
    clock = Clock()
    result = step(metered(clock, recompute="full"), clock, 1.0, Workload([10]))
    assert result.mfu == pytest.approx(0.9)
    assert result.warnings[0].startswith("HFU of 120.0%")


def test_a_record_is_json_with_fractions_and_the_peak_source():
    clock = Clock()
    record = json.loads(json.dumps(step(metered(clock), clock, 2.0, Workload([7, 3])).as_record()))
    assert record["step_s"] == 2.0
    assert record["mfu"] == pytest.approx(0.45)
    assert record["flops"] == {"total": 900, "forward": 300, "dgrad": 300, "wgrad": 300, "recompute": 0}
    assert record["flops_by_component"] == {"language.mlp": 900}
    assert record["peak_source"] == "made up for a test"
    assert record["convention"] == "useful/1"


def test_frozen_weights_cost_no_wgrad():
    clock = Clock()
    meter = StepMeter(COST_MODEL.freeze(["language"]), PEAK, clock=clock)
    assert step(meter, clock, 1.0, Workload([10])).flops.total == 300


@pytest.mark.parametrize("call", ["add", "data_wait", "end_step"])
def test_calls_outside_a_step_are_refused(call):
    arguments = {"add": [Workload([1])], "data_wait": [0.1], "end_step": []}[call]
    with pytest.raises(UsageError, match=r"call start_step\(\) first"):
        getattr(metered(), call)(*arguments)


def test_a_step_that_was_not_ended_is_refused():
    meter = metered()
    meter.start_step()
    with pytest.raises(UsageError, match="called twice"):
        meter.start_step()


def test_a_step_without_a_workload_is_refused():
    meter = metered()
    meter.start_step()
    with pytest.raises(UsageError, match="without a workload"):
        meter.end_step()


def test_waiting_longer_than_the_step_is_refused():
    clock = Clock()
    with pytest.raises(UsageError, match=r"Call start_step\(\) before asking the loader"):
        step(metered(clock), clock, 1.0, Workload([1]), data_wait_s=2.0)


@pytest.mark.parametrize("seconds", [-0.1, float("nan")])
def test_a_wait_that_is_no_duration_is_refused(seconds):
    meter = metered()
    meter.start_step()
    with pytest.raises(UsageError, match="not a duration"):
        meter.data_wait(seconds)


@pytest.mark.parametrize(("option", "value"), [("world_size", 0), ("num_warmup_steps", -1)])
def test_settings_that_make_no_sense_are_refused(option, value):
    with pytest.raises(UsageError, match=option):
        metered(**{option: value})


def test_the_meter_and_devices_need_no_torch():
    import subprocess
    import sys

    code = "import sys, headway, headway.meter, headway.devices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
