"""Traces written by hand, in which the host is to blame: the first finding says so, with the share that is known."""

import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, WrittenTrace, paced_steps, sidecar


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


PAGEABLE, PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"


@pytest.mark.parametrize(
    ("name", "size", "gb_per_s", "device", "words"),
    [
        (PAGEABLE, 50e6, 6, "NVIDIA H100 80GB HBM3", "memory is pageable"),
        ("Memcpy DtoH (Device -> Pageable)", 50e6, 3, "NVIDIA H100 80GB HBM3", "memory is pageable"),
        # nsys-ai's h100_2gpu_1s.sqlite: weights of an offloaded model
        (PINNED, 114e6, 27.7, "NVIDIA H100 80GB HBM3", "more bytes are moved"),
        (PINNED, 114e6, 27.7, "a device of no table", "more bytes are moved"),
        (PINNED, 114e6, 27.7, "NVIDIA A100-SXM4-80GB", "more bytes are moved"),
        (PINNED, 114e6, 6.2, "NVIDIA H100 80GB HBM3", "far below its rate"),
        (PINNED, 512, 0.1, "NVIDIA H100 80GB HBM3", "many small copies"),
        ("Memcpy DtoD (Device -> Device)", 2e8, 900, "NVIDIA H100 80GB HBM3", "on the device itself"),
        # HTA's trace_diff
        ("Memcpy DtoD (Device -> Device)", 7.38e6, 326, "Tesla V100-SXM2-32GB", "on the device itself"),
        ("Memcpy PtoP (Device -> Device)", 2e8, 300, "NVIDIA H100 80GB HBM3", "on the device itself"),
        ("Memcpy HtoD (Host -> Device)", 50e6, 20, "AMD Instinct MI250X", "not hidden behind work"),  # ROCm's
        ("Memcpy HtoD", None, 20, "NVIDIA H100 80GB HBM3", "not hidden behind work"),
    ],
)
def test_what_is_said_of_copies_is_in_their_own_fields(tmp_path, name, size, gb_per_s, device, words):
    duration = max(1, round((size or 1e6) / gb_per_s))  # [ns]
    trace, at = WrittenTrace(), 10**9
    for i in range(4):
        beside = {} if size is None else {"bytes": round(size)}
        trace.launched(name, at, at + US, duration, i + 1, operator="aten::to", category="gpu_memcpy", **beside)
        trace.launched("k", at + 2 * US, at + duration + US, duration, i + 9, operator="aten::add")
        at += 2 * duration + US
    found = findings_of(tmp_path, trace, deviceProperties=[{"name": device}])["blocking-copy"]
    assert words in found.cause
    assert ("pin_memory" in found.next) == (words in ("memory is pageable", "not hidden behind work"))
    assert name in found.seen
    if size is not None and size > 1e6:
        assert f"at {gb_per_s:.3g} GB/s" in found.seen
        crosses_the_link = "HtoD" in name or "DtoH" in name  # to or from the host
        assert ("of the link's" in found.seen) == (crosses_the_link and device != "a device of no table")


@pytest.mark.parametrize("call", ["hipMemcpyWithStream", "cudaMemcpyAsync", "cudaMemcpy"])
@pytest.mark.parametrize("has_steps", [True, False])
def test_a_long_copy_that_the_host_is_in_is_a_wait(tmp_path, call, has_steps):
    """SGLang's in a trace of TraceLens: 493 ms in aten::copy_ (hipMemcpyWithStream), which begins in the gap."""

    def step(trace, at, number):
        trace.launched("k", at, at + US, 3000 * US, number + 1, operator="aten::add")
        trace.operator("aten::copy_", at + 3100 * US, 5000 * US)
        trace.call(call, at + 3110 * US, 4900 * US, number + 2)
        trace.kernel(PAGEABLE, at + 8000 * US, US, number + 2, category="gpu_memcpy", bytes=64)
        trace.launched("k", at + 8200 * US, at + 8201 * US, 1000 * US, number + 3, operator="aten::add")

    trace = WrittenTrace()
    if has_steps:
        trace.steps(*(10**9 + 10_000 * US * i for i in range(4)))
    for i in range(3):
        step(trace, 10**9 + 10_000 * US * i, 10 * i)
    found = findings_of(tmp_path, trace)
    assert next(iter(found)) == "blocking-copy"
    assert f"aten::copy_ ({call})" in found["blocking-copy"].seen
    assert "memory is pageable" in found["blocking-copy"].cause


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
