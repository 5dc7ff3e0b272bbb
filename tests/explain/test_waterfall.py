import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import BACKWARD_THREAD, US, WrittenTrace, sidecar, two_kernels_a_step


def explained(trace, tmp_path, beside=None, **options):
    beside = {} if beside is None else {"headway": beside}
    return explain([read_trace(trace.write(tmp_path / "t.json", **beside))], **options)


def lines_of(waterfall):
    """Time of each line that has some [us], by key."""
    assert sum(line.ns for line in waterfall.lines) == waterfall.duration_ns
    return {line.key: line.ns / US for line in waterfall.lines if line.ns}


def test_a_step_begins_when_what_was_launched_before_has_ended_and_edges_are_left_out(tmp_path):
    found = explained(two_kernels_a_step(5), tmp_path)
    assert [(one.step, one.duration_ns) for one in found.steps] == [(2, 100 * US), (3, 100 * US), (4, 100 * US)]
    for one in found.steps:
        assert lines_of(one) == {"matmul": 60, "memory": 30, "idle.other": 10}


def test_an_edge_can_be_asked_for(tmp_path):
    (found,) = explained(two_kernels_a_step(4), tmp_path, step=4).steps
    assert (found.is_edge, found.duration_ns) == (True, 100 * US)
    assert lines_of(found) == {"matmul": 60, "memory": 30, "idle.other": 10}


def test_a_trace_of_one_step_shows_it_and_says_what_is_less_sure(tmp_path):
    found = explained(two_kernels_a_step(1), tmp_path)
    (step,) = found.steps
    assert lines_of(step) == {"matmul": 60, "memory": 30, "idle.launch": 1000}
    (note,) = (note for note in found.notes if note.startswith("step 1 is the first or the last of the trace"))
    assert "it lasted 0.05 ms on the host and 0.09 ms on the device." in note


def test_overlapping_streams_are_counted_once_and_what_is_hidden_is_not_exposed(tmp_path):
    trace = WrittenTrace()
    trace.launched("gemm", 10 * US, 100 * US, 50 * US, 1, operator="aten::mm")
    trace.launched("ncclDevKernel_AllReduce", 12 * US, 120 * US, 50 * US, 2, stream=20)
    trace.launched("Memcpy HtoD", 14 * US, 110 * US, 80 * US, 3, stream=30, category="gpu_memcpy")
    (found,) = explained(trace, tmp_path, as_one_step=True).steps
    assert lines_of(found) == {"matmul": 50, "communication": 20, "copies": 20}


def gap_of(tmp_path, during_gap=None, launch=150 * US):
    """A kernel from 100 to 110 us, a gap, and a kernel at 200 us; the host does something in between."""
    trace = WrittenTrace()
    trace.launched("first", 90 * US, 100 * US, 10 * US, 1, operator="aten::add")
    if during_gap is not None:
        during_gap(trace)
    trace.launched("second", launch, 200 * US, 10 * US, 2, operator="aten::add")
    (found,) = explained(trace, tmp_path, as_one_step=True).steps
    idle = lines_of(found)
    assert idle.pop("memory") == 20
    return idle, {line.key: line.parts for line in found.lines}


def test_idle_time_before_a_late_launch_is_the_hosts(tmp_path):
    assert gap_of(tmp_path)[0] == {"idle.launch": 90}


def test_idle_time_before_an_event_that_was_launched_in_time_is_the_devices(tmp_path):
    assert gap_of(tmp_path, launch=95 * US)[0] == {"idle.other": 90}


def test_idle_time_in_which_the_host_waited_for_data_is_waiting_for_data(tmp_path):
    def wait(trace):
        trace.annotation("phase:data_wait", 105 * US, 35 * US)  # 30 of them after the kernel's end

    assert gap_of(tmp_path, wait)[0] == {"idle.data": 30, "idle.launch": 60}


def test_the_innermost_phase_counts(tmp_path):
    def evaluate(trace):
        trace.annotation("phase:evaluation", 112 * US, 30 * US)
        trace.annotation("phase:data_wait", 115 * US, 10 * US)

    idle, parts = gap_of(tmp_path, evaluate)
    assert idle == {"idle.data": 10, "aside": 20, "idle.launch": 60}
    assert parts["aside"] == {"evaluation, idle": 20 * US}


def test_idle_time_after_a_synchronisation_names_the_operator_that_waited(tmp_path):
    def wait(trace):
        trace.annotation("module:loss", 90 * US, 50 * US)
        trace.operator("aten::_local_scalar_dense", 92 * US, 25 * US)
        trace.call("cudaStreamSynchronize", 93 * US, 20 * US, 50)

    idle, parts = gap_of(tmp_path, wait)
    assert idle == {"idle.sync": 90}
    assert parts["idle.sync"] == {"aten::_local_scalar_dense (cudaStreamSynchronize) in loss": 90 * US}


def test_a_synchronisation_that_returned_before_the_device_was_idle_is_not_to_blame(tmp_path):
    assert gap_of(tmp_path, lambda trace: trace.call("cudaEventSynchronize", 93 * US, 5 * US, 50))[0] == {
        "idle.launch": 90
    }


def test_kernels_without_a_launch_count_and_the_phases_have_their_lines(tmp_path):
    trace = two_kernels_a_step(3)
    trace.kernel("mystery", 2190 * US, 4 * US, 999)
    trace.annotation("phase:optimizer", 1090 * US, 4 * US)
    trace.launched("multi_tensor_apply", 1091 * US, 2194 * US, 3 * US, 100, operator="aten::_foreach_add")
    trace.annotation("phase:logging", 1095 * US, 4 * US)
    trace.launched("sums", 1096 * US, 2197 * US, 1 * US, 101, operator="aten::sum")
    (found,) = explained(trace, tmp_path).steps
    assert lines_of(found) == {
        "matmul": 60, "memory": 30, "optimizer": 3, "aside": 1, "unexplained": 4, "idle.other": 10,
    }  # fmt: skip


def test_a_cpus_operators_take_the_place_of_kernels(tmp_path):
    trace = WrittenTrace()
    trace.steps(0, 1000 * US, 2000 * US, first=5)
    for at in (0, 1000 * US):
        trace.annotation("phase:data_wait", at + 10 * US, 40 * US)
        trace.operator("aten::stack", at + 20 * US, 10 * US)
        trace.operator("aten::linear", at + 100 * US, 300 * US)
        trace.operator("aten::addmm", at + 110 * US, 200 * US)
        trace.operator("aten::copy_", at + 120 * US, 50 * US)
        trace.operator("MmBackward0", at + 500 * US, 100 * US, sequence=1, forward_thread=1)
        trace.operator("aten::mm", at + 510 * US, 80 * US)
        trace.operator("Mine", at + 610 * US, 20 * US)
        trace.annotation("gloo:all_reduce", at + 590 * US, 100 * US, tid=BACKWARD_THREAD)
        trace.operator("aten::mul", at + 640 * US, 30 * US, tid=BACKWARD_THREAD)  # no thread of the step
    found = explained(trace, tmp_path)
    assert [(one.step, one.duration_ns) for one in found.steps] == [(5, 1000 * US), (6, 1000 * US)]
    for one in found.steps:
        assert lines_of(one) == {
            "matmul": 300 - 50 + 80, "memory": 50, "idle.data": 40, "communication": 80, "unexplained": 20,
            "idle.launch": 1000 - 330 - 50 - 40 - 80 - 20,
        }  # fmt: skip


def with_modules():
    """Three steps; of each product of 60 us, 45 in blocks.0.mlp and 15 in head; 10 us of nothing."""
    trace = WrittenTrace()
    trace.steps(*(1000 * US + 50 * US * i for i in range(4)))
    spans = (("blocks.0.mlp", 0, 45), ("head", 45, 15), ("blocks.0.norm", 60, 30))
    for i in range(3):
        host, device = 1000 * US + 50 * US * i, 2000 * US + 100 * US * i
        for j, (module, begin, duration) in enumerate(spans):
            trace.annotation(f"module:{module}", host + (2 + 5 * j) * US, 4 * US)
            operator = "aten::native_layer_norm" if module.endswith("norm") else "aten::mm"
            launch = host + (3 + 5 * j) * US
            trace.launched("k", launch, device + begin * US, duration * US, 3 * i + j + 1, operator=operator)
    return trace


def test_with_a_workload_the_products_are_split_by_what_was_needed(tmp_path):
    (found,) = explained(with_modules(), tmp_path, sidecar()).steps
    # useful 30,000 FLOPs at 1e9/s; at 0.8e9/s 37.5 us; 7,000 again and 3,000 of padding (2:1) at 0.8e9/s
    slower_mlp = 45 - 20 - 5 - 8.75 - 2.5
    slower_head = 15 - 10 - 2.5 - 1.25
    assert lines_of(found) == {
        "useful": 30, "ceiling": 7.5, "recomputation": 8.75, "padding": 3.75,
        "slow.mlp": slower_mlp, "slow.head": slower_head, "memory": 30, "idle.other": 10,
    }  # fmt: skip
    assert found.mfu == pytest.approx(0.3)
    by_key = {line.key: line for line in found.lines}
    assert (by_key["memory"].mfu_from, by_key["memory"].mfu_to) == pytest.approx((0.3, 0.3 * 100 / 70))
    assert by_key["useful"].mfu_to is None


def test_a_component_that_beats_the_ceiling_has_a_line_below_zero(tmp_path):
    (found,) = explained(with_modules(), tmp_path, sidecar(ceiling_flops_per_s=0.5e9)).steps
    assert lines_of(found)["slow.head"] == 15 - 20 - 2
    assert next(line for line in found.lines if line.key == "slow.head").mfu_to is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"profiler_overhead_s": 0.0925}, "92 ms of each step is the profiler's"),
        ({"peak_flops_per_s": None}, "state its dense rate"),
        ({"ceiling_flops_per_s": None}, "taken as the peak"),
    ],
)
def test_what_is_not_known_of_the_device_is_said(tmp_path, changes, said):
    found = explained(with_modules(), tmp_path, sidecar(**changes))
    assert any(said in note for note in found.notes)
    assert ("matmul" in lines_of(found.steps[0])) == ("peak_flops_per_s" in changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema_version": 2}, "is of version 2, this Headway reads version 1"),
        ({"components": 3}, "cannot be read"),
        ({"peak_flops_per_s": -1.0}, "peak -1.0"),
        ({"steps": {"2": {"useful_flops": {"mlp": {"forward": "many"}}}}}, "cannot be read"),
    ],
)
def test_a_damaged_sidecar_is_an_error(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        explained(with_modules(), tmp_path, sidecar(**changes))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": 9}, "step=9: .* has the steps 1, 2, 3, 4"),
        ({"rank": 3}, "rank=3: the traces are of ranks 0"),
    ],
)
def test_a_step_or_rank_that_is_not_there_is_an_error(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        explained(two_kernels_a_step(), tmp_path, **options)


def test_a_trace_without_steps_is_taken_whole_and_one_whose_steps_do_nothing_is_an_error(tmp_path):
    trace = WrittenTrace()
    trace.launched("gemm", 0, 10, 10, 1)
    found = explained(trace, tmp_path)
    assert [(step.step, step.duration_ns) for step in found.steps] == [(0, 10)]
    assert any(note.startswith("the trace has no steps, so all of it is taken as one") for note in found.notes)
    idle = two_kernels_a_step(0)
    idle.steps(0, 10, 20)
    idle.kernel("gemm", 5, 10, 1)
    with pytest.raises(ConfigError, match="none of its 2 steps launched anything"):
        explained(idle, tmp_path)
    nothing = WrittenTrace()
    nothing.annotation("ProfilerStep#1", 5, 0)
    with pytest.raises(ConfigError, match="nothing that takes time"):
        explained(nothing, tmp_path)


def of_rank(tmp_path, rank, collective_us):
    """Two collectives a step of so many us that end together, in a step of 100 us."""
    trace = two_kernels_a_step(3)
    for i in range(3):
        host, end = 1000 * US + 50 * US * i + 10 * US, 2000 * US + 100 * US * i + 100 * US
        said = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 10}
        trace.launched("nccl", host, end - collective_us * US, collective_us * US, 50 + i, stream=20, **said)
    return read_trace(trace.write(tmp_path / f"{rank}.json", distributedInfo={"rank": rank, "world_size": 2}))


def test_collectives_of_two_ranks_tell_transfer_from_waiting(tmp_path):
    traces = [of_rank(tmp_path, 0, 8), of_rank(tmp_path, 1, 3)]
    first, second = explain(traces).steps
    assert (first.rank, second.rank) == (0, 1)
    assert lines_of(first) == {
        "matmul": 60, "memory": 30, "communication.transfer": 3, "communication.waiting": 5, "idle.other": 2,
    }  # fmt: skip
    assert lines_of(second) == {"matmul": 60, "memory": 30, "communication.transfer": 3, "idle.other": 7}
    assert [one.rank for one in explain(traces, rank=1).steps] == [1]
    said = (
        "traces of 1 of the job's 2 processes are here, so how long collectives waited for the other processes is not "
        "known. One of those may be the slowest."
    )
    assert [said in explain(given).notes for given in (traces, traces[:1])] == [False, True]


def test_two_traces_of_one_rank_are_an_error(tmp_path):
    trace = of_rank(tmp_path, 0, 8)
    with pytest.raises(ConfigError, match="both are of rank 0"):
        explain([trace, read_trace(trace.path)])


KERNELS = st.lists(
    st.tuples(
        st.sampled_from(["gemm", "ncclKernel", "adds", "what", "Memcpy"]),
        st.integers(0, 5000),  # launch
        st.integers(0, 4000),  # from launch to beginning
        st.integers(0, 900),
        st.sampled_from([7, 20, 30]),
    ),
    min_size=1,
    max_size=15,
)
HOST = st.lists(
    st.tuples(
        st.sampled_from(["phase:data_wait", "phase:optimizer", "module:blocks.1", "module:head", "aten::mm",
                         "aten::add", "phase:logging", "cudaStreamSynchronize", "Mm Backward0", "gloo:all_reduce"]),
        st.integers(0, 5000),
        st.integers(0, 2000),
        st.sampled_from([100, 101]),
    ),
    max_size=12,
)  # fmt: skip


@given(kernels=KERNELS, host=HOST, on_cpu=st.booleans(), told=st.booleans(), whole=st.booleans())
def test_the_lines_add_up_to_the_step_exactly(tmp_path_factory, kernels, host, on_cpu, told, whole):
    trace = WrittenTrace()
    trace.steps(0, 1500, 3001, 4000, 5100)
    for name, start, duration, tid in host:
        if name.startswith("cuda"):
            trace.call(name, start, duration, 1000, tid=tid)
        elif "::" in name or "Backward" in name:
            trace.operator(name, start, duration, tid=tid, sequence=start % 3, forward_thread=start % 2)
        else:
            trace.annotation(name, start, duration, tid=tid)
    for i, (name, launch, delay, duration, stream) in enumerate([] if on_cpu else kernels, start=1):
        if i % 5:
            trace.call("cudaLaunchKernel", launch, 10, i)
        category = "gpu_memcpy" if name == "Memcpy" else "kernel"
        trace.kernel(name, launch + delay, duration, i, stream=stream, category=category)
    if not on_cpu:
        trace.launched("gemm", 20, 30, 900, 500)  # so that there is a step
    found = explained(trace, tmp_path_factory.mktemp("t"), sidecar() if told else None, as_one_step=whole)
    assert found.steps
    for one in found.steps:
        lines_of(one)
        measured = one.measured[1]
        idle = measured.idle
        assert all(owned.ns > 0 for owned in measured.owned)
        assert (
            sum(owned.ns for owned in measured.owned)
            + sum(idle.by_phase.values())
            + sum(idle.by_wait.values())
            + idle.host_late_ns
            + idle.other_ns
            == one.duration_ns
        )
