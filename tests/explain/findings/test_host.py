"""Traces written by hand, in which the host is to blame: the first finding says so, with the share that is known."""

import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.written_traces import US, paced_steps, sidecar


def first_finding(tmp_path, step, **beside):
    found = explain([read_trace(paced_steps(step).write(tmp_path / "t.json", **beside))])
    assert found.findings
    return found.findings[0]


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
