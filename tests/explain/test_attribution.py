import pytest

from headway.explain.attribution import Phase, attribute
from headway.explain.events import NONE
from headway.explain.kernels import Work
from headway.explain.trace import read_trace
from helpers.traces import BACKWARD_THREAD, MAIN, US, WrittenTrace


def attributed(trace, tmp_path):
    """Phase, module, class and operator of each device event, by name."""
    found = read_trace(trace.write(tmp_path / "t.json"))
    attribution = attribute(found)
    columns = zip(attribution.phase, attribution.module, attribution.work, attribution.operator, strict=True)
    return dict(zip((found.names[i] for i in found.device.name), columns, strict=True))


def forward_and_backward(trace):
    """Layers 0 and 1 forward on the main thread, and layer 0's product backward on another, as its number says."""
    for i in (0, 1):
        trace.annotation(f"module:layers.{i}", 100 * i, 90)
        trace.operator("aten::linear", 100 * i + 10, 50, sequence=40 + i)
        trace.operator("aten::addmm", 100 * i + 12, 40, sequence=40 + i)
        trace.call("cudaLaunchKernel", 100 * i + 15, 10, i + 1)
        trace.kernel(f"forward {i}", 1000 + 100 * i, 50, i + 1)
    node = "autograd::engine::evaluate_function: AddmmBackward0"
    trace.operator(node, 300, 100, sequence=40, forward_thread=1, tid=BACKWARD_THREAD)
    trace.operator("AddmmBackward0", 305, 90, sequence=40, forward_thread=1, tid=BACKWARD_THREAD)


def test_a_backward_kernel_belongs_to_the_module_of_the_forward_with_its_number(tmp_path):
    trace = WrittenTrace(US)
    forward_and_backward(trace)
    trace.operator("aten::mm", 310, 50, tid=BACKWARD_THREAD)
    trace.call("cudaLaunchKernel", 315, 10, 9, tid=BACKWARD_THREAD)
    trace.kernel("backward 0", 2000, 50, 9)
    assert attributed(trace, tmp_path) == {
        "forward 0": (Phase.FORWARD, "layers.0", Work.MATMUL, "aten::addmm"),
        "forward 1": (Phase.FORWARD, "layers.1", Work.MATMUL, "aten::addmm"),
        "backward 0": (Phase.BACKWARD, "layers.0", Work.MATMUL, "aten::mm"),
    }


def test_numbers_of_another_forward_thread_are_not_taken_for_those_of_this_one(tmp_path):
    trace = WrittenTrace(US)
    trace.annotation("module:other", 0, 90, tid=77)
    trace.operator("aten::mul", 10, 20, sequence=40, tid=77)  # the same number, on a thread that has but this one
    forward_and_backward(trace)
    trace.operator("AddmmBackward0", 500, 20, sequence=41, forward_thread=1, tid=BACKWARD_THREAD)
    trace.call("cudaLaunchKernel", 320, 10, 9, tid=BACKWARD_THREAD)
    trace.kernel("backward 0", 2000, 50, 9)
    assert attributed(trace, tmp_path)["backward 0"][1] == "layers.0"


@pytest.mark.parametrize("has_modules", [True, False])
def test_what_runs_forward_within_backward_is_recomputed(tmp_path, has_modules):
    trace = WrittenTrace(US)
    forward_and_backward(trace)
    if has_modules:
        trace.annotation("module:layers.0.mlp", 310, 40, tid=BACKWARD_THREAD)
    trace.operator("aten::mm", 312, 30, sequence=5, tid=BACKWARD_THREAD)
    trace.call("cudaLaunchKernel", 315, 10, 9, tid=BACKWARD_THREAD)
    trace.kernel("again", 2000, 50, 9)
    module = "layers.0.mlp" if has_modules else "layers.0"  # of the block that is recomputed
    assert attributed(trace, tmp_path)["again"] == (Phase.RECOMPUTED, module, Work.MATMUL, "aten::mm")


def test_an_annotation_that_an_exception_left_open_ends_with_what_lies_around_it(tmp_path):
    trace = WrittenTrace(US)
    forward_and_backward(trace)
    trace.annotation("module:layers.0.mlp", 310, 5000, tid=BACKWARD_THREAD)  # recomputation stopped early
    trace.call("cudaLaunchKernel", 315, 10, 9, tid=BACKWARD_THREAD)
    trace.kernel("again", 2000, 50, 9)
    trace.operator("aten::add", 6000, 30, tid=BACKWARD_THREAD)
    trace.operator("AddBackward0", 450, 100, sequence=41, forward_thread=1, tid=BACKWARD_THREAD)
    trace.call("cudaLaunchKernel", 460, 10, 10, tid=BACKWARD_THREAD)
    trace.kernel("after", 2100, 50, 10)
    found = attributed(trace, tmp_path)
    assert found["again"][:2] == (Phase.RECOMPUTED, "layers.0.mlp")
    assert found["after"][:2] == (Phase.BACKWARD, "layers.1")


def test_layers_of_python_stacks_are_modules_too(tmp_path):
    trace = WrittenTrace(US)
    trace.event("python_function", "nn.Module: Net_0", 0, 500)
    trace.event("python_function", "torch/autograd/profiler.py(1): __enter__", 5, 10)
    trace.annotation("Optimizer.step#SGD.step", 10, 100)  # begins within the function that begins it
    trace.launched("update", 20, 1000, 50, 1)
    trace.event("python_function", "nn.Module: Linear_3", 200, 100)
    trace.launched("gemm", 210, 2000, 50, 2)
    found = attributed(trace, tmp_path)
    assert found["update"][:2] == (Phase.OPTIMIZER, "Net_0")
    assert found["gemm"][:2] == (Phase.FORWARD, "Net_0.Linear_3")


@pytest.mark.parametrize(
    ("annotation", "phase"),
    [
        ("Optimizer.step#AdamW.step", Phase.OPTIMIZER),
        ("Optimizer.zero_grad#AdamW.zero_grad", Phase.OPTIMIZER),
        ("phase:optimizer", Phase.OPTIMIZER),
        ("phase:evaluation", Phase.EVALUATION),
        ("phase:backward", Phase.BACKWARD),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Phase.DATA_WAIT),
        ("compile_fx_inner (dynamo_timed)", Phase.COMPILE),
        ("phase:something of mine", Phase.FORWARD),
        ("my region", Phase.FORWARD),
    ],
)
def test_annotations_of_the_host_tell_the_phase(tmp_path, annotation, phase):
    trace = WrittenTrace(US)
    trace.annotation(annotation, 0, 5000)
    trace.launched("kernel", 100, 3000, 50, 1)
    assert attributed(trace, tmp_path)["kernel"][0] is phase


def test_a_kernel_launched_before_the_trace_has_no_phase_and_is_classed_by_its_name(tmp_path):
    trace = WrittenTrace(US)
    trace.operator("aten::mm", 0, 10)
    trace.kernel("ampere_sgemm_64x64", 100, 50, 77)
    found = read_trace(trace.write(tmp_path / "t.json"))
    assert attribute(found).launch.tolist() == [NONE]
    assert attributed(trace, tmp_path)["ampere_sgemm_64x64"] == (Phase.UNKNOWN, "", Work.MATMUL, "")


def test_an_operator_that_whole_microseconds_put_into_its_predecessor_is_not_within_it(tmp_path):
    trace = WrittenTrace(US)
    trace.annotation("module:a", 0, 10)
    trace.annotation("module:b", 9, 10)
    trace.operator("aten::mm", 10, 5)
    trace.call("cudaLaunchKernel", 12, 1, 1, tid=MAIN)
    trace.kernel("gemm", 30, 50, 1)
    assert attributed(trace, tmp_path)["gemm"][1] == "b"


def test_forward_backward_and_recomputation_belong_to_the_pass_of_the_whole_model_that_they_are_of(tmp_path):
    trace = WrittenTrace(US)
    trace.annotation("phase:forward", 0, 95)
    trace.annotation("phase:forward", 100, 95)
    trace.annotation("phase:of mine", 105, 80)  # no pass of its own
    forward_and_backward(trace)
    trace.annotation("module:layers.0.mlp", 310, 40, tid=BACKWARD_THREAD)
    trace.operator("aten::mm", 312, 30, sequence=60, tid=BACKWARD_THREAD)
    trace.call("cudaLaunchKernel", 315, 10, 9, tid=BACKWARD_THREAD)
    trace.kernel("again", 2000, 50, 9)
    trace.operator("MmBackward0", 360, 30, sequence=60, forward_thread=2, tid=BACKWARD_THREAD)  # of what ran again
    trace.call("cudaLaunchKernel", 365, 10, 10, tid=BACKWARD_THREAD)
    trace.kernel("backward of it", 2100, 50, 10)
    trace.operator("AddmmBackward0", 500, 20, sequence=41, forward_thread=1, tid=BACKWARD_THREAD)
    trace.call("cudaLaunchKernel", 505, 10, 11, tid=BACKWARD_THREAD)
    trace.kernel("backward 1", 2200, 50, 11)
    found = read_trace(trace.write(tmp_path / "t.json"))
    passes = dict(zip((found.names[i] for i in found.device.name), attribute(found).passes, strict=True))
    starts = {name: int(found.host.start_ns[at]) // US for name, at in passes.items()}
    assert starts == {"forward 0": 0, "again": 0, "backward of it": 0, "forward 1": 100, "backward 1": 100}
