"""Loops in Python, in traces written by hand: over small products, parameters and numbers."""

import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, WrittenTrace, paced_steps, products_in_a_row, shapes, sidecar


def findings_of(tmp_path, trace, **beside):
    found = explain([read_trace(trace.write(tmp_path / "t.json", **beside))])
    return {one.id: one for one in found.findings}


def test_products_that_take_less_than_their_launch_are_found(tmp_path):
    found = findings_of(tmp_path, products_in_a_row([[1, 8], [8, 8]], count=20, us=2))["small-gemms"]
    assert found.ns == 40 * US
    assert "20 matrix products a step, 100% of them aten::addmm" in found.seen


@pytest.mark.parametrize("gap", [0, 2])
def test_large_products_are_not_small_where_the_step_ends_before_they_do(tmp_path, gap):
    """The device waits for the first product of the next step, of which nothing is within this one."""

    def step(trace, at, number):
        for i in range(4):
            launch = at + (1 + i) * US
            trace.operator("aten::mm", launch, US, **shapes([[512, 512], [512, 512]]))
            trace.launched("gemm", launch, at + (2 + gap + 20 * i) * US, 20 * US, number + i + 1)

    found = findings_of(tmp_path, paced_steps(step))
    assert "small-gemms" not in found
    assert found["largest-loss"].share == pytest.approx(0.2, abs=0.03) if gap == 0 else "largest-loss" in found


def test_products_are_judged_by_their_flops_where_a_peak_is_known(tmp_path):
    trace = products_in_a_row([[512, 64], [64, 64]], count=4, us=20)
    for peak, is_small in ((1e12, True), (1e11, False)):
        beside = {"headway": sidecar(peak_flops_per_s=peak, ceiling_flops_per_s=None)}
        assert ("small-gemms" in findings_of(tmp_path, trace, **beside)) == is_small


def optimizer_findings(tmp_path, operators, *, average=""):
    """Findings of steps with a product, and so many operators of the optimizer, of 100 ns each; an average before."""

    def step(trace, at, number):
        trace.launched("gemm", at, at + 1000 * US, 60 * US, number * 10 + 999, operator="aten::mm")
        if average:
            trace.launched("k", at + US, at + 1059 * US, US, number * 10 + 998, operator=average)
        trace.annotation("Optimizer.step#AdamW.step", at + 2 * US, 90 * US)
        for i, operator in enumerate(operators):
            launch = at + 3 * US + i * 100
            trace.operator(operator, launch, 90)
            trace.call("cudaLaunchKernel", launch, 80, number * 10 + i + 1)
            trace.kernel("k", at + 1060 * US + i * 100, 100, number * 10 + i + 1)

    return findings_of(tmp_path, paced_steps(step))


def test_an_optimizer_that_takes_tensors_one_by_one_is_found(tmp_path):
    found = optimizer_findings(tmp_path, ["aten::mul_"] * 400)["optimizer-loop"]
    assert found.ns == pytest.approx(40 * US * (1 - 7 / 20))  # fused it moves 7 tensors where the loop moves 20
    assert "400 operators a step" in found.seen


def test_an_optimizer_that_takes_all_at_once_is_no_finding(tmp_path):
    assert "optimizer-loop" not in optimizer_findings(tmp_path, ["aten::_foreach_mul_"] * 400)
    assert "optimizer-loop" not in optimizer_findings(tmp_path, ["aten::mul_"] * 90)


def test_an_optimizer_that_is_one_kernel_a_tensor_is_no_loop(tmp_path):
    kernels = ["bitsandbytes::optimizer_update_8bit_blockwise"] * 400
    assert "optimizer-loop" not in optimizer_findings(tmp_path, kernels)


def test_an_average_in_lists_leaves_a_loop_of_the_optimizer_a_finding(tmp_path):
    loop = ["aten::mul_", "aten::addcdiv_"] * 200
    assert "optimizer-loop" in optimizer_findings(tmp_path, loop, average="aten::_foreach_lerp_")


def on_a_cpu(*groups):
    """Steps of 1 ms: a forward of 500 us, then operators of 2 us with 1 us between them, as (name, number, sizes)."""
    trace = WrittenTrace()
    trace.steps(*(1000 * US + 1000 * US * i for i in range(4)))
    for i in range(3):
        at = 1000 * US + 1000 * US * i
        trace.annotation("phase:forward", at, 500 * US)
        trace.operator("aten::mm", at + US, 490 * US, **shapes([[64, 64], [64, 64]]))
        moment = at + 501 * US
        for name, number, sizes in groups:
            for k in range(number):
                trace.operator(name, moment, 2 * US, **shapes([[sizes[k % len(sizes)]]]))
                moment += 3 * US
        trace.annotation("phase:forward", at + 998 * US, US)
        trace.operator("aten::mm", at + 998 * US, US, **shapes([[64, 64], [64, 64]]))
    return trace


MANY, FEW = [100, 200, 300, 400, 500], [100]


@pytest.mark.parametrize(("number", "sizes", "is_found"), [(120, MANY, True), (50, MANY, False), (120, FEW, False)])
def test_a_loop_over_tensors_beside_the_model_is_found_by_their_sizes(tmp_path, number, sizes, is_found):
    found = findings_of(tmp_path, on_a_cpu(("aten::mul_", number, sizes)))
    assert ("parameter-loop" in found) == is_found
    if is_found:
        assert found["parameter-loop"].ns == pytest.approx(3 * number * US, rel=0.05)


@pytest.mark.parametrize(("number", "is_found"), [(60, True), (10, False)])
def test_numbers_that_are_read_anywhere_in_the_step_are_found_with_what_makes_them(tmp_path, number, is_found):
    found = findings_of(tmp_path, on_a_cpu(("aten::norm", number, MANY), ("aten::item", number, FEW)))
    assert ("read-back" in found) == is_found
    assert "parameter-loop" not in found
    if is_found:
        assert found["read-back"].ns == pytest.approx(6 * number * US, rel=0.05)
        assert "60 numbers a step" in found["read-back"].seen


def test_anomaly_mode_reads_numbers_that_the_loop_does_not(tmp_path):
    trace = on_a_cpu(("aten::norm", 60, MANY), ("aten::item", 60, FEW))
    assert "read-back" not in findings_of(tmp_path, trace, headway=sidecar(host={"anomaly_mode": True}))


@pytest.mark.parametrize(("frames", "rule"), [(["measure (mine/train.py:7)"], "parameter-loop"), (None, "host-pause")])
def test_a_long_gap_at_the_line_of_a_loop_over_tensors_is_the_loops(tmp_path, frames, rule):
    """150 tensors in steps of 20 ms: 20 us of other code before each, and 8 ms of it before the largest."""
    trace, begins, runs = WrittenTrace(), {}, []
    trace.steps(*(1000 * US + 20_000 * US * i for i in range(4)))
    for i in range(3):
        at = 1000 * US + 20_000 * US * i
        begins[str(i + 1)] = at
        trace.annotation("phase:forward", at, 500 * US)
        trace.operator("aten::mm", at + US, 490 * US, **shapes([[64, 64], [64, 64]]))
        moment = at + 501 * US
        for k in range(150):
            moment += 8000 * US if k == 75 else 250 * US if k % 10 == 0 else 20 * US
            trace.operator("aten::detach", moment, 2 * US, **shapes([[100 + k % 7]]))
            moment += 2 * US
        runs.append([at + 501 * US, moment, 0])
        trace.annotation("phase:forward", at + 19_998 * US, US)
        trace.operator("aten::mm", at + 19_900 * US, 99 * US, **shapes([[64, 64], [64, 64]]))
    host = {"step_ns": begins, "stacks": [frames or []], "runs": runs if frames else [], "preempted": []}
    found = findings_of(tmp_path, trace, headway=sidecar(host=host))
    # without a look at the stack nobody knows that the long gap is the loop's
    assert found[rule].ns >= 8000 * US
    loop_ns = (8000 if frames else 0) * US + (150 * 2 + 15 * 250 + 134 * 20) * US
    assert found["parameter-loop"].ns == pytest.approx(loop_ns, rel=0.05)
