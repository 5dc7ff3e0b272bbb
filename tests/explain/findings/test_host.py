"""Traces written by hand, in which the host is to blame: the first finding says so, with the share that is known."""

import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, paced_steps, products_in_a_row, shapes, sidecar


def findings_of(tmp_path, trace, **beside):
    found = explain([read_trace(trace.write(tmp_path / "t.json", **beside))])
    return {one.id: one for one in found.findings}


def first_finding(tmp_path, step, **beside):
    return next(iter(findings_of(tmp_path, paced_steps(step), **beside).values()))


def two_kernels(trace, at, number, *, second=60, operator="aten::add"):
    """From 3 to 33 us and from `second` + 1 us to the step's end + 3 us, each launched 1 us before it begins."""
    trace.launched("k", at + 2 * US, at + 3 * US, 30 * US, number + 1, operator=operator)
    trace.launched("k", at + second * US, at + (second + 1) * US, (102 - second) * US, number + 2, operator=operator)


def test_late_launches_are_the_hosts(tmp_path):
    found = first_finding(tmp_path, two_kernels)
    assert (found.id, found.ns, found.share) == ("host-bound", 28 * US, pytest.approx(0.28))
    assert "speed.compile: true" in found.next
    assert (found.mfu_from, found.mfu_to) == (None, None)


def test_what_the_profiler_adds_is_not_the_hosts_fault(tmp_path):
    beside = {"headway": sidecar(profiler_overhead_s=10e-6)}
    assert first_finding(tmp_path, two_kernels, **beside).ns == 18 * US


def test_waiting_on_a_synchronisation_names_what_waited(tmp_path):
    def step(trace, at, number):
        two_kernels(trace, at, number)
        trace.operator("aten::item", at + 5 * US, 45 * US)
        trace.call("cudaStreamSynchronize", at + 6 * US, 40 * US, number + 50)

    found = first_finding(tmp_path, step)
    assert (found.id, found.ns) == ("synchronisation", 28 * US)
    assert "28.0 % of the time" in found.seen
    assert "aten::item (cudaStreamSynchronize)" in found.seen


def test_a_copy_that_nothing_hides_is_found(tmp_path):
    def step(trace, at, number):
        trace.launched("k", at + 2 * US, at + 3 * US, 30 * US, number + 1, operator="aten::add")
        trace.launched(
            "Memcpy HtoD", at + 4 * US, at + 33 * US, 40 * US, number + 2, operator="aten::copy_", category="gpu_memcpy"
        )
        trace.launched("k", at + 6 * US, at + 73 * US, 30 * US, number + 3, operator="aten::add")

    found = first_finding(tmp_path, step)
    assert (found.id, found.ns) == ("blocking-copy", 40 * US)


def test_a_copy_that_the_host_waits_for_blocks(tmp_path):
    def step(trace, at, number):
        two_kernels(trace, at, number)
        trace.operator("aten::copy_", at + 5 * US, 45 * US)
        trace.call("cudaStreamSynchronize", at + 6 * US, 40 * US, number + 50)

    found = first_finding(tmp_path, step)
    assert (found.id, found.ns) == ("blocking-copy", 28 * US)


@pytest.mark.parametrize(
    ("phase", "rule", "setting"),
    [
        ("checkpoint", "checkpoint", "checkpoint.every"),
        ("logging", "logging", "run.log_every"),
        ("evaluation", "evaluation", "eval.every"),
    ],
)
def test_what_is_no_training_is_found_by_its_phase(tmp_path, phase, rule, setting):
    def step(trace, at, number):
        two_kernels(trace, at, number)
        trace.annotation(f"phase:{phase}", at + 30 * US, 29 * US)

    found = first_finding(tmp_path, step)
    assert (found.id, found.ns) == (rule, 26 * US)
    assert setting in found.next


@pytest.mark.parametrize("kind", ["annotation", "operator"])
def test_compiling_in_a_step_is_found(tmp_path, kind):
    def step(trace, at, number):
        two_kernels(trace, at, number)
        getattr(trace, kind)("_compile.compile_inner (dynamo_timed)", at + 30 * US, 29 * US)

    found = first_finding(tmp_path, step)
    assert (found.id, found.ns) == ("recompilation", 26 * US)


def waits_for_data(trace, at, number):
    trace.annotation("phase:data_wait", at + 2 * US, 40 * US)
    trace.launched("gemm", at + 43 * US, at + 45 * US, 55 * US, number + 1, operator="aten::mm")


@pytest.mark.parametrize(
    ("making_s", "rule", "setting"),
    [
        ({"read": 0.5, "decode": 0.1, "tokenise": 0.2}, "data-storage", "data.prefetch_bytes"),
        ({"read": 0.1, "decode": 0.5, "tokenise": 0.2}, "data-decoding", "data.workers"),
        ({"read": 0.1, "decode": 0.1, "tokenise": 0.2}, "data-tokenising", "data.train.N.format: tokens"),
        (None, "data-bound", "num_workers"),
        ({}, "data-bound", "num_workers"),
    ],
)
def test_waiting_for_data_names_what_its_making_took_longest_with(tmp_path, making_s, rule, setting):
    beside = sidecar()
    beside["steps"] = {number: {**step, "making_s": making_s} for number, step in beside["steps"].items()}
    trace = read_trace(paced_steps(waits_for_data).write(tmp_path / "t.json", headway=beside))
    first = explain([trace]).findings[0]
    assert first.id == rule
    assert first.ns == 40 * US
    assert first.mfu_to == pytest.approx(first.mfu_from / 0.6)
    assert setting in first.next


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
    assert found["host-bound"].share == pytest.approx(0.2, abs=0.03)


def test_products_are_judged_by_their_flops_where_a_peak_is_known(tmp_path):
    trace = products_in_a_row([[512, 64], [64, 64]], count=4, us=20)
    for peak, is_small in ((1e12, True), (1e11, False)):
        beside = {"headway": sidecar(peak_flops_per_s=peak, ceiling_flops_per_s=None)}
        assert ("small-gemms" in findings_of(tmp_path, trace, **beside)) == is_small


def optimizer_findings(tmp_path, operators):
    """Findings of steps with a product, and so many operators of the optimizer, of 100 ns each."""

    def step(trace, at, number):
        trace.launched("gemm", at, at + 1000 * US, 60 * US, number * 10 + 999, operator="aten::mm")
        trace.annotation("Optimizer.step#AdamW.step", at + 2 * US, 90 * US)
        for i, operator in enumerate(operators):
            launch = at + 3 * US + i * 100
            trace.operator(operator, launch, 90)
            trace.call("cudaLaunchKernel", launch, 80, number * 10 + i + 1)
            trace.kernel("k", at + 1060 * US + i * 100, 100, number * 10 + i + 1)

    return findings_of(tmp_path, paced_steps(step))


def test_an_optimizer_that_takes_tensors_one_by_one_is_found(tmp_path):
    found = optimizer_findings(tmp_path, ["aten::mul_"] * 400)["optimizer-loop"]
    assert found.ns == 40 * US
    assert "400 operators a step" in found.seen


def test_an_optimizer_that_takes_all_at_once_is_no_finding(tmp_path):
    assert "optimizer-loop" not in optimizer_findings(tmp_path, ["aten::_foreach_mul_"] * 400)
    assert "optimizer-loop" not in optimizer_findings(tmp_path, ["aten::mul_"] * 90)
