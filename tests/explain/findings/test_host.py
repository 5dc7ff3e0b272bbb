"""Traces written by hand, in which the host is to blame: the first finding says so, with the share that is known."""

import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, paced_steps, sidecar


def findings_of(tmp_path, trace, **beside):
    found = explain([read_trace(trace.write(tmp_path / "t.json", **beside))])
    return {one.id: one for one in found.findings}


def first_finding(tmp_path, step, **beside):
    beside.setdefault("headway", sidecar(loop="headway train"))
    return next(iter(findings_of(tmp_path, paced_steps(step), **beside).values()))


def two_kernels(trace, at, number, *, second=60, operator="aten::add"):
    """From 3 to 33 us and from `second` + 1 us to the step's end + 3 us, each launched 1 us before it begins."""
    trace.launched("k", at + 2 * US, at + 3 * US, 30 * US, number + 1, operator=operator)
    trace.launched("k", at + second * US, at + (second + 1) * US, (102 - second) * US, number + 2, operator=operator)


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
    beside = sidecar(loop="headway train")
    beside["steps"] = {number: {**step, "making_s": making_s} for number, step in beside["steps"].items()}
    trace = read_trace(paced_steps(waits_for_data).write(tmp_path / "t.json", headway=beside))
    first = explain([trace]).findings[0]
    assert first.id == rule
    assert first.ns == 40 * US
    assert first.mfu_to == pytest.approx(first.mfu_from / 0.6)
    assert setting in first.next
