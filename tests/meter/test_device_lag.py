"""Time has no gaps, whatever the device's lag: laws of the meter on a pretended device that runs behind its host."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.count import Workload
from headway.devices import Peak
from headway.log.jsonl import read_jsonl
from headway.meter import Goodput, Meter
from helpers.device import COST_MODEL, Device, HostMark, check_time

PEAK = Peak("test device", 1e6, "fp32", "made up for a test")
durations = st.floats(0.001, 0.2)
steps = st.lists(
    st.fixed_dictionaries(
        {
            "load_s": st.sampled_from([0.0, 0.02, 0.3]),
            "host_s": durations,
            "device_s": durations,
            "micro_batches": st.integers(1, 3),
            "skipped": st.booleans(),
            "then": st.sampled_from(["", "", "", "evaluation", "checkpoint", "evaluation and checkpoint"]),
        }
    ),
    min_size=1,
    max_size=12,
)


def run(script, *, depth, mark=None, **options):
    """Train by a script; returns the device, the records of all windows, the run, goodput's seconds and the time."""
    device, records = Device(depth), []
    with device.stands_in(mark), TemporaryDirectory() as folder, ledger_in(folder, device) as ledger:
        start_ns = device.host_ns
        device.work(1.5)  # set-up, and work that is queued before the first step
        device.launch(0.5)
        meter = Meter(COST_MODEL, peak=PEAK, goodput=ledger, on_window=lambda w: records.append(w.to_dict()), **options)
        for step in script:
            for _ in range(step["micro_batches"]):
                meter.await_data()
                device.work(step["load_s"])
                meter.got_data()
                meter.count(Workload([10]))
                device.work(step["host_s"])
                device.launch(step["device_s"])
            meter.step(skipped=step["skipped"])
            if "evaluation" in step["then"]:
                with meter.away():
                    device.work(0.3)
                    device.launch(0.7)
            if "checkpoint" in step["then"]:
                meter.leave("checkpoint")
                device.launch(0.2)
                device.work(0.4)
        whole = meter.close()
        return device, records, whole, ledger.report().seconds, (device.host_ns - start_ns) / 1e9


def ledger_in(folder, device):
    return Goodput(Path(folder, "goodput.jsonl"), wall_clock=device.now_s, heartbeat_s=1e6)


@given(script=steps, depth=st.sampled_from([1, 2, 8, 1_000]), log_every=st.sampled_from([1, 3, 100]))
def test_step_times_goodput_and_the_wall_clock_agree_however_far_the_device_lags(script, depth, log_every):
    _, records, whole, seconds, wall_s = run(script, depth=depth, log_every=log_every)
    check_time([whole.wall_s], seconds, wall_s)
    assert whole.num_steps == len(script)
    assert sum(record["wall_s"] for record in records) == pytest.approx(whole.wall_s)
    assert seconds["set-up"] == pytest.approx(1.5, abs=0.51)  # what was queued before the first step is no step's
    assert seconds["evaluation"] == pytest.approx(1.0 * sum("evaluation" in step["then"] for step in script))
    assert seconds["checkpoint"] == pytest.approx(0.4 * sum("checkpoint" in step["then"] for step in script))


@given(script=steps, depth=st.sampled_from([1, 8, 1_000]))
def test_a_wait_for_data_counts_where_the_device_was_idle_and_only_there(script, depth):
    _, records, whole, seconds, _ = run(script, depth=depth, log_every=1)
    loaded_s = sum(step["load_s"] * step["micro_batches"] for step in script)
    assert whole.data_wait_s <= loaded_s + 1e-9
    assert seconds["data wait"] == pytest.approx(whole.data_wait_s, abs=1e-6)
    device_s = sum(step["device_s"] * step["micro_batches"] for step in script)
    assert whole.wall_s >= device_s - 1e-6  # the device cannot have done its work in less
    assert all(record["data_wait_s"] <= record["wall_s"] + 1e-9 for record in records)


def test_nothing_waits_for_the_device_between_boundaries():
    script = [{"load_s": 0.0, "host_s": 0.01, "device_s": 0.05, "micro_batches": 1, "skipped": False, "then": ""}] * 40
    device, records, whole, _, wall_s = run(script, depth=1_000, log_every=1)
    assert device.num_waits == 2  # for what was queued before the first step, and at the end
    assert whole.step_s == pytest.approx(0.05, rel=0.02)
    assert whole.mfu == pytest.approx(90 * 10 / 0.05 / 1e6, rel=0.02)
    assert len(records) < len(script)  # the device had not passed them when they were logged
    assert wall_s == pytest.approx(2.0 + 40 * 0.05, rel=0.02)


@settings(max_examples=20)
@given(
    script=steps.filter(
        lambda script: sum(step["device_s"] * step["micro_batches"] for step in script) > 0.5 + 0.01 * len(script)
    )
)
def test_the_laws_catch_a_clock_that_stops_when_the_launch_returns(script):
    """Put the old defect back: no mark knows the device, so its lag at each boundary is charged to something else."""
    script = [step | {"host_s": 1e-3, "load_s": 0.0} for step in script]
    device, _, whole, _, _ = run(script, depth=1_000, mark=HostMark, log_every=1)
    steps_ns = sum(round(step["device_s"] * 1e9) * step["micro_batches"] for step in script)
    assert whole.wall_s * 1e9 < steps_ns < device.busy_ns  # faster than the device can be


@given(script=steps, depth=st.sampled_from([1, 8, 1_000]))
@settings(max_examples=20)
def test_a_step_that_is_left_out_leaves_its_time_behind(script, depth):
    script = [*script, script[0]]
    _, _, whole, seconds, wall_s = run(script, depth=depth, log_every=100, num_warmup_steps=1)
    assert (whole.num_left_out, whole.num_steps) == (1, len(script) - 1)
    check_time([whole.wall_s, whole.left_out_s], seconds, wall_s)


def test_a_ledger_that_wrote_a_wait_down_makes_up_for_it(tmp_path):
    """The file may have a wait that turns out to be the device's work: later waits are shorter by it."""
    device = Device()
    with device.stands_in(), ledger_in(tmp_path, device) as ledger:
        ledger.switch("data wait")
        device.work(2.0)
        ledger.report()  # writes
        ledger.move("data wait", "step", 1_500_000_000)
        device.work(1.0)
        assert ledger.report().seconds["data wait"] == 2.0
        device.work(1.0)
        seconds = ledger.report().seconds
    assert (seconds["data wait"], seconds["step"]) == (2.5, 1.5)
    assert all(ns >= 0 for line in read_jsonl(tmp_path / "goodput.jsonl") for ns in line.get("ns", {}).values())


def test_what_a_checkpoint_interrupts_goes_on_after_it(tmp_path):
    device = Device()
    with device.stands_in(), ledger_in(tmp_path, device) as ledger:
        meter = Meter(COST_MODEL, peak=PEAK, goodput=ledger)
        meter.await_data()
        device.work(0.1)
        with meter.away("checkpoint"):
            device.work(0.2)
        device.work(0.1)
        meter.got_data()
        meter.count(Workload([10]))
        meter.step()
        meter.leave("evaluation")
        device.work(0.1)
        with meter.away("checkpoint"):
            device.work(0.2)
        device.work(0.3)
        meter.back()
        device.work(0.5)  # after the last step
        whole = meter.close()
        seconds = ledger.report().seconds
    assert (whole.wall_s, whole.data_wait_s) == pytest.approx((0.2, 0.2))
    assert {bucket: s for bucket, s in seconds.items() if s} == pytest.approx(
        {"data wait": 0.2, "checkpoint": 0.4, "evaluation": 0.4, "idle": 0.5}
    )
