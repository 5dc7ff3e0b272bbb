from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.explain.measurement import measure
from headway.explain.text import as_text
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.explain.windows import step_windows
from helpers.traces import BACKWARD_THREAD, US, WrittenTrace, two_kernels_a_step


def measured(trace, tmp_path, **options):
    return measure(read_trace(trace.write(tmp_path / "t.json")), **options)


def lines_of(waterfall):
    assert sum(line.ns for line in waterfall.lines) == waterfall.duration_ns
    return {line.key: line.ns / US for line in waterfall.lines if line.ns}


def one_step(tail_us=0):
    """A host step of 1,000 us: 600 us of waiting for data, 100 us of collating, a copy, and two kernels at its end."""
    trace = WrittenTrace()
    trace.steps(5000 * US, 6000 * US, first=18)
    trace.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 5010 * US, 600 * US)
    trace.launched("Memcpy HtoD", 5710 * US, 5720 * US, 30 * US, 1, operator="aten::copy_", category="gpu_memcpy")
    trace.launched("gemm", 5760 * US, 5770 * US, 150 * US, 2, operator="aten::mm")
    trace.launched("adds", 5800 * US, 5920 * US, (60 + tail_us) * US, 3, operator="aten::add")
    return trace


def test_what_precedes_the_first_kernel_of_a_single_step_has_lines_by_its_causes(tmp_path):
    (step,) = explain([read_trace(one_step().write(tmp_path / "t.json"))]).steps
    assert step.duration_ns == 1000 * US
    assert lines_of(step) == {
        "idle.data": 600, "copies": 30, "matmul": 150, "memory": 60,
        "idle.launch": 10 + 110 + 20 + 20,  # before the batch, from it to the copy, before the product, after all
    }  # fmt: skip


def test_a_step_ends_with_its_last_kernel_where_that_ends_after_the_host(tmp_path):
    explanation = explain([read_trace(one_step(tail_us=70).write(tmp_path / "t.json"))])
    (step,) = explanation.steps
    assert step.duration_ns == 1050 * US
    assert lines_of(step) == {"idle.data": 600, "copies": 30, "matmul": 150, "memory": 130, "idle.launch": 140}
    assert any("it lasted 1.00 ms on the host and 0.33 ms on the device" in note for note in explanation.notes)
    assert "Step 18 of rank 0 on unknown device: 1.05 ms (1.00 ms on the host)" in as_text(explanation)
    record = step.to_dict()
    assert (record["duration_ns"], record["host_ns"], record["device_ns"]) == (1050 * US, 1000 * US, 330 * US)


def test_kernels_of_the_step_before_that_still_run_are_not_the_steps_own(tmp_path):
    trace = one_step()
    for i in range(30):  # launched before the trace began: it has no launch of them
        trace.kernel("gemm", 4990 * US + 10 * US * i, 10 * US, 900 + i)
    (window,) = (step.window for step in measured(trace, tmp_path).steps)
    assert (window.start_ns, window.end_ns) == (5290 * US, 6000 * US)
    assert (window.host_ns, window.device_ns) == (1000 * US, 260 * US)


def test_a_copy_ahead_on_a_stream_of_its_own_begins_no_step(tmp_path):
    """The batch after next is copied while the device still computes the step before."""
    trace = two_kernels_a_step(4)
    for i in range(4):
        host = 1000 * US + 50 * US * i
        trace.launched("Memcpy HtoD", host + 12 * US, host + 20 * US, 5 * US, 90 + i, stream=30, category="gpu_memcpy")
    windows = [step.window for step in measured(trace, tmp_path).steps]
    assert [window.ns / US for window in windows] == [1090, 100, 100, 100]


def test_a_step_that_the_profiler_opens_and_closes_at_once_is_none(tmp_path):
    trace = two_kernels_a_step(3)
    trace.annotation("ProfilerStep#4", 1150 * US, 2 * US)
    assert [step.window.step for step in measured(trace, tmp_path).steps] == [1, 2, 3]
    on_cpu = WrittenTrace()
    on_cpu.steps(0, 100 * US, 200 * US, 201 * US)
    for begin in (10, 110):
        on_cpu.operator("aten::mm", begin * US, 50 * US)
    windows = [step.window for step in measured(on_cpu, tmp_path).steps]
    assert [(window.step, window.ns / US) for window in windows] == [(1, 100), (2, 100)]


def test_a_step_without_kernels_lasts_as_long_as_nothing_else_runs(tmp_path):
    trace = WrittenTrace()
    trace.steps(0, 100 * US, 200 * US, 300 * US)
    trace.launched("gemm", 10 * US, 20 * US, 110 * US, 1, operator="aten::mm")
    trace.launched("gemm", 210 * US, 220 * US, 70 * US, 2, operator="aten::mm")
    first, second, third = measured(trace, tmp_path).steps
    assert [step.window.ns / US for step in (first, second, third)] == [130, 70, 100]
    assert not second.owned


def test_time_between_steps_that_do_not_follow_on_each_other_is_no_steps(tmp_path):
    trace = WrittenTrace()
    trace.steps(0, 100 * US, first=3)
    trace.steps(900 * US, 1000 * US, first=40)
    for begin, number in ((10, 1), (910, 2)):
        trace.launched("gemm", begin * US, (begin + 10) * US, 20 * US, number, operator="aten::mm")
    windows = [step.window for step in measured(trace, tmp_path).steps]
    assert [(window.start_ns / US, window.end_ns / US) for window in windows] == [(0, 100), (900, 1000)]


def test_a_whole_trace_is_the_devices_and_says_how_long_the_host_worked(tmp_path):
    trace = WrittenTrace()
    trace.operator("aten::normal_", 0, 500 * US)
    trace.launched("gemm", 600 * US, 610 * US, 50 * US, 1, operator="aten::mm")
    trace.call("cudaDeviceSynchronize", 602 * US, 60 * US, 2)
    explanation = explain([read_trace(trace.write(tmp_path / "t.json"))])
    assert [step.duration_ns for step in explanation.steps] == [50 * US]
    assert any("to its last, 0.05 ms. The host's events span 0.66 ms" in note for note in explanation.notes)


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 5000),  # launch
        st.integers(0, 3000),  # from launch to beginning
        st.integers(1, 900),
        st.sampled_from([7, 20]),  # stream
        st.booleans(),  # whether the trace has the launch
    ),
    min_size=1,
    max_size=20,
)
BOUNDS = st.lists(st.integers(0, 5000), min_size=2, max_size=6, unique=True).map(sorted)


@given(events=EVENTS, bounds=BOUNDS)
def test_windows_follow_on_each_other_and_hold_what_their_step_launched(tmp_path_factory, events, bounds):
    """Of steps in a row: no gaps, no overlaps, none begins before its host, and the last holds all of its kernels."""
    trace = WrittenTrace()
    trace.steps(*bounds)
    for number, (launch, delay, duration, stream, has_launch) in enumerate(events, start=1):
        if has_launch:
            trace.call("cudaLaunchKernel", launch, 5, number, tid=MAIN_OR_BACKWARD[number % 2])
        trace.kernel("gemm", launch + delay, duration, number, stream=stream)
    trace.call("cudaLaunchKernel", bounds[-2], 5, 999)  # so that there is a step
    trace.kernel("gemm", 9000, 5, 999, stream=7)
    read = read_trace(trace.write(tmp_path_factory.mktemp("t") / "t.json"))
    steps = measure(read).steps
    windows = [step.window for step in steps]
    host = {number: start for number, start, _ in read.steps}
    assert all(window.start_ns >= host[window.step] and window.ns > 0 for window in windows)
    assert all(before.end_ns == window.start_ns for before, window in pairwise(windows))
    assert [window.step for window in windows] == sorted({window.step for window in windows})
    for step in steps:
        assert (
            sum(owned.ns for owned in step.owned)
            + sum(step.idle.by_phase.values())
            + sum(step.idle.by_wait.values())
            + step.idle.host_late_ns
            + step.idle.other_ns
            == step.window.ns
        )


MAIN_OR_BACKWARD = (100, BACKWARD_THREAD)


@pytest.mark.parametrize("as_one_step", [False, True])
def test_events_that_count_alone_make_a_window(tmp_path, as_one_step):
    """Of two devices the events of the other one move no bound."""
    trace = two_kernels_a_step(3)
    trace.kernel("gemm", 10, 5000 * US, 7777, device=1)
    read = read_trace(trace.write(tmp_path / "t.json"))
    device_0 = np.flatnonzero(read.device.device == 0)
    launch = np.array([0 if i in device_0 else -1 for i in range(len(read.device))])
    windows = step_windows(read, launch, [True] * len(read.device), device_0, as_one_step=as_one_step)
    assert windows[0].end_ns <= 2300 * US
