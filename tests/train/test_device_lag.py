"""The loop of `headway train` on a pretended device that runs behind its host: time has no gaps, nothing waits."""

from contextlib import contextmanager

import pytest

from headway.answer.evaluate import EvalSet
from headway.checkpoint.saver import CheckpointSaver
from headway.config import parse_config
from headway.data.feed import Feed
from headway.log import run_files
from headway.meter.goodput_report import read_goodput
from headway.models.head import ModelWithLoss
from headway.optim import Optimizer
from headway.train.run import train
from helpers.device import Device, HostMark, check_time
from helpers.runs import read_metrics

HOST_S, DEVICE_S, EVALUATION_S, SAVING_S = 0.010, 0.050, 0.4, 0.2


@contextmanager
def on(device, *, mark=None, load_s=0.0):
    """Let the loop's own work be done by a device: what it runs for real takes no time of the pretended clocks."""
    head = next(kind for kind in ModelWithLoss.__subclasses__() if kind.__name__ == "ChunkedLoss")
    with (
        device.stands_in(mark),
        device.working(head, "__call__", host_s=HOST_S, device_s=0.8 * DEVICE_S),
        device.working(Optimizer, "step", device_s=0.2 * DEVICE_S),
        device.working(Feed, "__next__", host_s=load_s),
        device.working(EvalSet, "evaluate", host_s=0.1, device_s=EVALUATION_S - HOST_S - 0.8 * DEVICE_S),
        device.working(CheckpointSaver, "save", host_s=SAVING_S),
    ):
        yield


def trained(raw, *, depth=1_000, resume=False, **options):
    """Train on a pretended device; returns it, the records of the steps and the process's time [s]."""
    device = Device(depth)
    with on(device, **options):
        start_ns = device.host_ns
        summary = train(parse_config(raw), resume=resume)
    steps = [one for one in read_metrics(summary.folder / "metrics.jsonl") if one["kind"] == "step"]
    return device, summary, steps, (device.host_ns - start_ns) / 1e9


def law(summary, steps, wall_s):
    seconds = read_goodput(summary.folder).seconds
    check_time([one["step_s"] for one in steps], seconds, wall_s)
    return seconds


@pytest.fixture
def busy(raw, digits):
    """A run that is stopped for evaluations and checkpoints at different steps."""
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"every": 3}
    raw["checkpoint"] = {"every": 4, "asynchronous": False}
    raw["optim"]["steps"] = 8
    return raw


@pytest.mark.parametrize(("depth", "load_s"), [(1, 0.0), (6, 0.03), (1_000, 0.0), (1_000, 0.2)])
def test_step_times_goodput_and_the_wall_clock_agree_however_far_the_device_lags(busy, depth, load_s):
    device, summary, steps, wall_s = trained(busy, depth=depth, load_s=load_s)
    seconds = law(summary, steps, wall_s)
    assert [one["step"] for one in steps] == list(range(1, 9))
    slowest_s = max(DEVICE_S, HOST_S + load_s)
    assert 0.99 < sum(one["step_s"] for one in steps) / (8 * slowest_s) < 1.5  # after each stop the queue is empty
    assert min(one["step_s"] for one in steps) >= 0.8 * DEVICE_S
    assert seconds["checkpoint"] == pytest.approx(2 * SAVING_S)
    assert seconds["evaluation"] >= 2 * EVALUATION_S
    use = summary.utilisation
    assert use.mfu <= use.flops.total / (8 * DEVICE_S) / use.peak.flops_per_s
    assert device.num_waits <= 2 * (2 + 2)  # before and after each of these


def test_nothing_waits_for_the_device_from_one_stop_to_the_next(raw):
    raw["optim"]["steps"] = 20
    device, summary, steps, wall_s = trained(raw)
    law(summary, steps, wall_s)
    assert device.num_waits == 1  # where the last checkpoint is saved
    assert summary.utilisation.step_s == pytest.approx(DEVICE_S, rel=0.03)


def test_a_wait_for_data_that_the_device_does_not_notice_is_none(raw):
    _, hidden, _, _ = trained(raw, load_s=0.5 * DEVICE_S)
    raw["run"]["folder"] += "-2"
    _, starved, _, _ = trained(raw, load_s=2 * DEVICE_S)
    assert hidden.utilisation.data_wait_share < 0.15  # the first step's
    assert read_goodput(hidden.folder).seconds["data wait"] == pytest.approx(hidden.utilisation.data_wait_s, abs=1e-3)
    assert starved.utilisation.data_wait_share > 0.4


def test_updates_that_are_left_out_take_the_time_that_they_took(raw):
    raw["optim"] |= {"steps": 6, "on_nonfinite": "skip", "lr": 1e30, "warmup_steps": 0}
    _, summary, steps, wall_s = trained(raw)
    assert any(one.get("skipped") for one in steps)
    law(summary, steps, wall_s)


def test_a_resumed_run_has_all_of_its_time(busy):
    busy["optim"] |= {"steps": 8, "schedule": "constant"}
    first, _, _, first_s = trained(busy)
    busy_again = busy | {"optim": busy["optim"] | {"steps": 16}}
    folder = parse_config(busy).run.folder
    written = folder / run_files.CONFIG
    written.write_text(written.read_text().replace("steps: 8", "steps: 16"))
    device = Device()
    device.host_ns = device.free_ns = first.host_ns
    with on(device):
        start_ns = device.host_ns
        summary = train(parse_config(busy_again), resume=True)
    steps = [one for one in read_metrics(folder / "metrics.jsonl") if one["kind"] == "step"]
    assert [one["step"] for one in steps] == list(range(1, 17))
    seconds = read_goodput(summary.folder).seconds
    idle_between_s = seconds["idle"]  # by the real wall clock, which nobody pretends
    wall_s = first_s + (device.host_ns - start_ns) / 1e9 + idle_between_s
    check_time([one["step_s"] for one in steps], seconds, wall_s)


def test_the_laws_catch_a_clock_that_stops_when_the_launch_returns(busy):
    """Put the old defect back: times that know nothing of the device print an MFU that it cannot reach."""
    _, summary, steps, _ = trained(busy, mark=HostMark)
    reachable = summary.utilisation.flops.total / (8 * DEVICE_S) / summary.utilisation.peak.flops_per_s
    assert summary.utilisation.mfu > 3 * reachable
    assert sum(one["step_s"] for one in steps) < 0.3 * 8 * DEVICE_S
