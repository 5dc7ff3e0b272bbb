"""Phases of a step: their sums, on a device of one's own and on a CPU, and what they leave behind."""

import copy
import gc
import io
import logging
import pickle
import sys
import threading
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import optimizer as torch_optimizers
from torch.utils.checkpoint import checkpoint

from headway import Meter, Peak, Workload
from headway.log.boundary import ErrorBoundary
from headway.meter import pauses
from headway.meter.clock import ForwardTimer
from headway.meter.pauses import CollectionTimer, PlaceSampler
from headway.meter.phases import PHASES, PhaseTimer, update_of
from headway.meter.tally import late_rank
from helpers.device import COST_MODEL, Clock, Device
from helpers.processes import run_processes
from helpers.runs import read_metrics

PEAK = Peak("a test", 1e15, "fp32", "made up")


class OnDevice(torch.autograd.Function):
    """A number of seconds of work in forward and in backward, on a pretended device."""

    @staticmethod
    def forward(ctx, x, device, forward_s, backward_s):
        ctx.device, ctx.backward_s = device, backward_s
        device.launch(forward_s)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.launch(ctx.backward_s)
        return gradient, None, None, None


class Model(nn.Module):
    """A model whose work is a pretended device's."""

    def __init__(self, device, forward_s=0.3, backward_s=0.6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.device, self.seconds = device, (forward_s, backward_s)

    def forward(self, x):
        return {"loss": OnDevice.apply(x * self.weight, self.device, *self.seconds).sum()}


def optimizer_of(model, device, seconds):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: device.launch(seconds))
    return optimizer


def test_phases_are_the_devices_and_nothing_waits_for_it():
    device, windows = Device(), []
    with device.stands_in(), patch("headway.meter.phases._LONG_S", 0.001):
        model = Model(device)
        optimizer = optimizer_of(model, device, 0.1)
        with Meter(model, cost_model=COST_MODEL, peak=PEAK, log_every=1, on_window=windows.append) as meter:
            waits = device.num_waits
            for _ in range(5):
                meter.await_data()
                device.work(0.01)  # the device computes meanwhile
                meter.got_data()
                meter.count(Workload([100]))
                loss = model(torch.ones(4))["loss"]
                device.launch(0.05)
                loss.backward()
                device.launch(0.07)  # clips
                optimizer.step()
                optimizer.zero_grad()
                meter.step()
                assert device.num_waits == waits
        whole = meter.close()
    seconds = whole.entries["phases_s"]
    assert whole.entries["num_sampled"] == 5
    assert {name: round(value, 6) for name, value in seconds.items() if value} == {
        "data": 0.002,  # of the first step, whose device had nothing to do yet
        "forward": 0.3, "loss": 0.05, "backward": 0.6, "gradients": 0.07, "optimizer": 0.1,
    }  # fmt: skip
    assert sum(seconds.values()) == pytest.approx(whole.step_s)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model, num_batches, *, phases, recomputed=False, steps=6, optimizer=None):
    """Train some steps of so many micro-batches; returns the meter and the losses."""
    torch.manual_seed(1)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with Meter(model, cost_model=COST_MODEL, peak=PEAK, phases=phases) as meter:
        for _ in range(steps):
            for _ in range(num_batches):
                meter.count(Workload([10]))
                x = torch.randn(3, 8)
                results = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
                loss = results.square().mean()
                loss.backward()
                losses.append(loss.item())
            if num_batches:
                optimizer.step()
                optimizer.zero_grad()
            else:
                meter.count(Workload())
            meter.step()
    return meter, losses


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_losses_are_the_same_to_the_bit_and_phases_add_up_to_the_step(num_batches, recomputed):
    plain, timed = small_model(), small_model()
    _, losses = train(plain, num_batches, phases=False, recomputed=recomputed)
    meter, timed_losses = train(timed, num_batches, phases=True, recomputed=recomputed)
    assert timed_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), timed.parameters(), strict=True))
    run = meter.close()
    assert meter.boundary.lost == {}
    assert run.entries["num_sampled"] >= 1
    for phase in ("forward", "backward", "optimizer"):
        assert run.entries["phases_s"][phase] > 0
    if run.entries["num_sampled"] == run.num_steps:
        assert sum(run.entries["phases_s"].values()) == pytest.approx(run.step_s, abs=1e-6)


def test_steps_without_a_forward_have_no_phases():
    meter, _ = train(small_model(), 0, phases=True)
    record = meter.close().to_dict()
    assert (record["num_sampled"], record["phases_s"]) == (0, None)
    assert record["num_steps"] == 6
    assert meter.boundary.lost == {}


EVENTS = ("await", "got", "forward", "backward", "update", "leave", "back", "step")


@given(events=st.lists(st.sampled_from(EVENTS), max_size=40))
@settings(deadline=None)
def test_phases_add_up_to_each_step_whatever_the_order_of_events(events):
    device = Device()
    with device.stands_in():
        model = Model(device)
        optimizer = optimizer_of(model, device, 0.1)
        windows, loss = [], None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps without a batch
            meter = Meter(model, cost_model=COST_MODEL, peak=PEAK, log_every=1, on_window=windows.append)
            meter.start()
            with patch("headway.meter.phases._LONG_S", -1.0):  # every step is sampled
                for event in [*events, "forward", "backward", "step"]:
                    device.work(0.001)
                    if event == "await":
                        meter.await_data()
                    elif event == "got":
                        meter.got_data()
                    elif event == "forward":
                        loss = model(torch.ones(4))["loss"]
                    elif event == "backward" and loss is not None:
                        loss.backward()
                        loss = None
                    elif event == "update":
                        optimizer.step()
                    elif event == "leave":
                        meter.leave()
                    elif event == "back":
                        meter.back()
                    elif event == "step":
                        meter.step()
                        device.wait()
            meter.close()
    assert meter.boundary.lost == {}
    for window in windows:
        if window.entries["num_sampled"] and window.num_steps == 1:
            assert sum(window.entries["phases_s"].values()) == pytest.approx(window.wall_s, abs=1e-6)
            assert set(window.entries["phases_s"]) == set(PHASES)


def test_everything_is_taken_away_at_the_end():
    model = small_model()
    tables = (
        model._forward_hooks, model._forward_pre_hooks, torch_optimizers._global_optimizer_pre_hooks,
        torch_optimizers._global_optimizer_post_hooks, gc.callbacks,
    )  # fmt: skip
    sizes = [len(table) for table in tables]
    threads = {*threading.enumerate()}
    train(model, 2, phases=True)
    assert [len(table) for table in tables] == sizes
    meter = Meter(model, cost_model=COST_MODEL, peak=PEAK)
    meter.start()
    meter.abandon()  # as after an error
    assert [len(table) for table in tables] == sizes
    assert all(_ends(thread) for thread in {*threading.enumerate()} - threads if thread.name == "headway places")


def test_looks_end_with_a_meter_that_nobody_closes():
    threads = {*threading.enumerate()}
    model = small_model()
    meter = Meter(model, cost_model=COST_MODEL, peak=PEAK)
    meter.start()
    (thread,) = {*threading.enumerate()} - threads
    del meter, model
    gc.collect()
    assert _ends(thread)


def _ends(thread):
    thread.join(10)
    return not thread.is_alive()


def test_a_metered_model_and_its_results_can_be_copied_and_written():
    model = small_model()
    with Meter(model, cost_model=COST_MODEL, peak=PEAK) as meter, warnings.catch_warnings():
        warnings.simplefilter("error")
        meter.count(Workload([1]))
        results = model(torch.ones(2, 8))
        torch.save(results, io.BytesIO())
        copy.deepcopy(model)
        pickle.dumps(model)
        results.sum().backward()
        meter.step()


def test_what_fails_in_them_is_a_warning_and_the_loop_goes_on():
    def fails(*_):
        raise OSError("no such engine")

    with (
        patch("headway.meter.phases._with_gradient", fails),
        pytest.warns(RuntimeWarning, match="The phases of this loop's steps: OSError: no such engine"),
    ):
        meter, losses = train(small_model(), 1, phases=True)
    assert len(losses) == 6
    assert meter.close().to_dict()["phases_s"] is None


def test_a_compiled_model_trains_as_without():
    torch._dynamo.reset()
    model = small_model()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Meter(model, cost_model=COST_MODEL, peak=PEAK) as meter:
        for _ in range(4):
            meter.count(Workload([10]))
            compiled(torch.ones(3, 8)).sum().backward()
            optimizer.step()
            meter.step()
    run = meter.close()
    assert (run.num_left_out, run.num_steps) == (1, 3)  # the phases' hooks compile nothing again
    assert meter.boundary.lost == {}


def test_the_host_is_ahead_of_a_device_by_what_is_in_its_queue():
    device = Device()
    with device.stands_in():
        model = Model(device, forward_s=0.5, backward_s=0.5)
        forwards = ForwardTimer(model, device.mark, pytest.fail)
        timer = PhaseTimer(forwards, device.mark, ErrorBoundary(), has_queue=True)
        leads = []
        timer.next_step(1, device.mark(), 1.0)
        for number in (2, 3):
            device.work(0.01)
            model(torch.ones(4))["loss"].backward()
            phases = timer.next_step(number, device.mark(), 1.0)
            device.wait()
            leads.append(phases.lead(phases.even)[0])
        timer.close()
        forwards.close()
    assert leads == [pytest.approx(1.0), pytest.approx(1.0)]


def test_on_a_cpu_no_lead_is_told():
    meter, _ = train(small_model(), 1, phases=True)
    assert meter.close().to_dict()["host_lead_s"] is None


@pytest.mark.parametrize(
    ("options", "mode"),
    [({"fused": True}, "fused"), ({"foreach": True}, "foreach"), ({"foreach": False}, "loop"), ({}, "loop")],
)
def test_how_an_optimizer_updates_is_read_off_it(options, mode):
    update = update_of(torch.optim.AdamW(small_model().parameters(), **options))
    assert update == {"name": "AdamW", "num_tensors": 4, "mode": mode}


def test_collections_are_timed_and_charged_to_their_step():
    clock = Clock()

    class Garbage:
        def __del__(self):
            clock.now_s += 2.0

    timer = CollectionTimer(clock)
    timer.start()
    garbage = Garbage()
    garbage.itself = garbage
    del garbage
    gc.collect()
    timer.close()
    assert timer.take() == pytest.approx(2.0)
    assert timer.take() == 0
    gc.collect()
    assert timer.take() == 0


def places_of(path, code, **names):
    """Run the function f of a file, and return the places at which it calls `here()`."""
    path.write_text(code)
    sampler, places = PlaceSampler(_Gap(), ErrorBoundary()), []
    names["here"] = lambda: places.append(sampler._place(sys._getframe(1)))
    exec(compile(code, str(path), "exec"), names)
    names["f"]()
    sampler.close()
    return places


@pytest.mark.parametrize(
    ("code", "purpose"),
    [
        ("def f():\n    here()\n", ""),
        ("def f():\n    for p in model.parameters():\n        here()\n", "parameter-loop"),
        ("def f():\n    x = (here(), loss.item())\n", "read-back"),
        ("def f():\n    for p in model.parameters():\n        pass\n    here()\n", ""),
    ],
)
def test_a_line_of_code_says_what_a_pause_is_for(tmp_path, code, purpose):
    model, loss = small_model(), torch.ones(())
    place = places_of(tmp_path / "train.py", code, model=model, loss=loss)[0]
    assert place.purpose == purpose
    assert place.code.startswith("train.py:")
    assert place.code.endswith(" in f")


@pytest.mark.parametrize("path", ["bin/tool", "train.py"])
def test_the_entry_of_an_installed_command_is_not_named_as_code_of_the_loop(tmp_path, path):
    """pip writes an entry without an extension: the code around it is named then, and of a script the script."""
    (tmp_path / "bin").mkdir()
    entry = compile("here()", str(tmp_path / path), "exec")
    place = places_of(tmp_path / path, "def f():\n    exec(entry)\n", entry=entry)
    assert place[0].code.endswith(" in f" if path == "bin/tool" else " in <module>")


class _Gap:
    border, is_over = " optimizer", False


def test_a_library_under_way_says_what_a_pause_is_for():
    sampler, places = PlaceSampler(_Gap(), ErrorBoundary()), []

    class Handler(logging.Handler):
        def emit(self, _record):  # looked at from logging itself, as while a handler of a library waits
            places.append(sampler._place(sys._getframe(1)))

    logger = logging.Logger("a test")
    logger.addHandler(Handler())
    logger.warning("slow")
    sampler.close()
    (place,) = places
    assert place.purpose == "logging"
    assert "test_phases.py" in place.code


def test_looks_are_charged_to_the_gap_that_they_fell_into():
    with patch.object(pauses, "_LOOK_S", 1e6):
        sampler = PlaceSampler(_Gap(), ErrorBoundary())
    place = pauses.CodePlace("train.py:3 in f", "logging")
    sampler._samples.extend([(" optimizer", place, 0.4), (" data", place, 0.2)])
    sampler._gap_ended(" optimizer", "after")
    assert sampler.take(2, 1.0) == [{"phase": "after", "code": "train.py:3 in f", "purpose": "logging", "s": 0.2}]
    assert sampler.take(2, 1.0) == []
    sampler.close()


def phases_of(*seconds):
    by_rank = tuple(dict(zip(("data", "input", "forward", "loss"), row, strict=True)) for row in seconds)
    return (*late_rank(by_rank).values(),)


def test_the_late_rank_is_the_last_at_its_backward():
    assert phases_of((0.1, 0, 1, 0)) == (None,) * 3
    assert phases_of((0.1, 0, 1, 0), (0.1, 0.7, 1, 0)) == (1, pytest.approx(0.7), "input")
    assert phases_of((2.1, 0, 1, 0), (0.1, 0.7, 1, 0), (0, 0, 1, 0)) == (0, pytest.approx(1.3), "data")
    assert phases_of((0.1, 0, 1, 0), (float("nan"), 0.7, 1, 0)) == (None,) * 3


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_tell_together_which_of_them_is_late(tmp_path, num_ranks):
    path = tmp_path / "metrics.jsonl"
    script = Path(__file__).with_name("phased_ranks.py")
    run_processes([sys.executable, script, f"jsonl:{path}"], num_ranks)
    records = read_metrics(path)
    assert len(records) == 10
    for number, record in enumerate(records):
        num_batches = 1 if number % 2 else 3
        own_s = 2.0 if num_ranks == 1 else 0.25
        seconds = {name: round(value, 6) for name, value in record["phases_s"].items() if value}
        # A log's exchanges lie behind the step that they tell of, and are no pause of the loop's.
        exchanged = {"exchange": 2 * 0.125} if number else {}
        own = {"data": 0.5 * num_batches, "input": own_s * num_batches, "loss": 1.0 * num_batches, "after": 0.0625}
        assert seconds == {**own, **exchanged}
        assert sum(seconds.values()) == pytest.approx(record["step_s"])
        late = [record.get(name) for name in ("late_rank", "late_rank_s", "late_rank_phase")]
        expected = [None] * 3 if num_ranks == 1 else [num_ranks - 1, pytest.approx(1.75 * num_batches), "input"]
        assert late == expected
