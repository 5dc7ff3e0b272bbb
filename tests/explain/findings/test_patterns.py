"""Patterns of operators, in traces written by hand: each is found, and what only looks like it is not."""

import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, WrittenTrace, paced_steps, shapes, sidecar


def findings_of(tmp_path, trace, **beside):
    result = explain([read_trace(trace.write(tmp_path / "t.json", **beside))])
    return {finding.id: finding for finding in result.findings}


def in_a_row(*operators, module=None):
    """Steps of kernels of operators, each (name, duration in us, sizes, type); the device is never idle."""

    def step(trace, at, number):
        start = at + 1000 * US
        if module is not None:
            trace.annotation(f"module:{module}", at, 90 * US)
        for i, (name, us, sizes, kind) in enumerate(operators):
            launch = at + (1 + i) * US
            trace.operator(name, launch, US, **shapes(sizes, kind))
            kernel = "gemm" if name.endswith("mm") else "k"
            trace.launched(kernel, launch, start, us * US, number + i + 1)
            start += us * US

    return paced_steps(step)


SCORES = [[8, 64, 64]]
QK = [[8, 64, 32], [8, 32, 64]]
PV = [[8, 64, 64], [8, 64, 32]]
LINEAR = [[64, 256], [256, 256]]


@pytest.mark.parametrize(
    ("operators", "passes_us"),
    [
        (
            [("aten::mm", 20, LINEAR, "float"), ("aten::bmm", 15, QK, "float"), ("aten::add", 10, SCORES, "float"),
             ("aten::_softmax", 30, SCORES, "float"), ("aten::bmm", 25, PV, "float")],
            40,
        ),
        # a softmax over classes or experts has products with weights around it
        (
            [("aten::bmm", 20, QK, "float"), ("aten::mm", 20, LINEAR, "float"), ("aten::_softmax", 40, SCORES, "float"),
             ("aten::mm", 10, LINEAR, "float"), ("aten::bmm", 10, PV, "float")],
            None,
        ),
        # fused attention has no softmax of its own
        ([("aten::bmm", 50, QK, "float"), ("aten::add", 40, SCORES, "float"), ("aten::bmm", 10, PV, "float")], None),
    ],
)  # fmt: skip
def test_attention_that_is_written_out_is_products_around_a_softmax(tmp_path, operators, passes_us):
    found = findings_of(tmp_path, in_a_row(*operators, module="layers.0.attn"))
    assert ("eager-attention" in found) == (passes_us is not None)
    if passes_us is not None:
        assert found["eager-attention"].ns == passes_us * US
        assert "layers.0.attn" in found["eager-attention"].seen
        assert "sdpa" in found["eager-attention"].next


@pytest.mark.parametrize(
    ("vocabulary", "is_sum", "is_found"),
    [(50_000, False, True), (1000, False, False), (50_000, True, False)],  # a sum over 50,000 has few results
)
def test_a_head_that_dwarfs_the_width_is_found(tmp_path, vocabulary, is_sum, is_found):
    logits, weight = [[64, vocabulary]], [128, vocabulary]
    trace = in_a_row(
        ("aten::mm", 30, [[64, 128], [128, 128]], "float"),
        ("aten::mm", 40, [[64, vocabulary], weight[::-1]] if is_sum else [[64, 128], weight], "float"),
        ("aten::_log_softmax", 30, logits, "float"),
    )
    found = findings_of(tmp_path, trace)
    assert ("large-head" in found) == is_found
    if is_found:
        # from 4,096 tokens on a vocabulary is large, and the rest is charged
        assert found["large-head"].ns == pytest.approx(70 * US * (1 - 4096 / vocabulary), abs=1)
        assert f"{vocabulary:,} tokens from a width of 128" in found["large-head"].seen


@pytest.mark.parametrize(
    ("kind", "sizes", "is_found"),
    [("double", [[64, 256]], True), ("float", [[64, 256]], False), ("double", [[8]], False)],
)
def test_work_in_64_bits_is_found_by_its_operands(tmp_path, kind, sizes, is_found):
    trace = in_a_row(("aten::mm", 50, LINEAR, "float"), ("aten::exp", 50, sizes, kind))
    found = findings_of(tmp_path, trace)
    assert ("double-precision" in found) == is_found
    if is_found:
        assert found["double-precision"].ns == 25 * US  # half of what it took


def backward_with_checks(trace, at, number):
    trace.launched("gemm", at, at + 1000 * US, 60 * US, number + 1, operator="aten::mm")
    trace.operator("MmBackward0", at + 5 * US, 40 * US, sequence=number + 1, forward_thread=1)
    for i, name in enumerate(["ne", "any", "item"]):
        trace.launched(
            "k", at + (6 + 2 * i) * US, at + (1060 + 10 * i) * US, 10 * US, number + 2 + i, operator=f"aten::{name}"
        )


@pytest.mark.parametrize("is_on", [True, False])
def test_anomaly_mode_is_found_where_the_profile_says_that_it_was_on(tmp_path, is_on):
    beside = sidecar(host={"anomaly_mode": is_on})
    found = findings_of(tmp_path, paced_steps(backward_with_checks), headway=beside)
    assert ("anomaly-mode" in found) == is_on
    if is_on:
        assert found["anomaly-mode"].ns == 30 * US


@pytest.mark.parametrize(("elements", "is_found"), [(1000, True), (10**7, False)])
def test_memory_bound_kernels_are_held_against_the_bandwidth(tmp_path, elements, is_found):
    trace = in_a_row(
        ("aten::mm", 40, LINEAR, "float"), ("aten::add", 60, [[elements], [elements]], "float"), module="norm"
    )
    found = findings_of(tmp_path, trace, headway=sidecar(memory_bytes_per_s=2e12))
    assert ("memory-bound" in found) == is_found
    if is_found:
        assert "norm (60" in found["memory-bound"].seen


def test_the_largest_loss_is_told_without_a_cause_where_no_rule_knows_it(tmp_path):
    trace = in_a_row(("aten::mm", 40, LINEAR, "float"), ("aten::add", 60, [[100]], "float"), module="mixer.3.gate")
    found = findings_of(tmp_path, trace)
    assert list(found) == ["largest-loss"]
    assert "mixer.*.gate (60" in found["largest-loss"].seen
    assert found["largest-loss"].cause.startswith("not known")
    small = in_a_row(("aten::mm", 90, LINEAR, "float"), ("aten::add", 10, [[100]], "float"))
    assert findings_of(tmp_path, small) == {}


def test_a_gap_before_a_kernel_that_was_launched_is_told_with_its_launch(tmp_path):
    trace = WrittenTrace()
    trace.steps(*(1000 * US + 100 * US * i for i in range(4)))
    for i in range(3):
        at = 1000 * US + 100 * US * i
        trace.launched("a", at, at + 2 * US, 38 * US, 10 * i + 1, operator="aten::mm")
        trace.call("cudaGraphLaunch", at + 5 * US, US, 10 * i + 2)
        trace.kernel("replayed", at + 80 * US, 22 * US, 10 * i + 2)
    found = findings_of(tmp_path, trace)["largest-loss"]
    assert "before the kernel replayed, which cudaGraphLaunch had launched 0.07 ms before" in found.seen
    assert found.ns == 40 * US


def accumulating(passes, exchanges):
    """Steps of forwards, and of exchanges of gradients of one size that nothing hides."""
    said = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 10}

    def step(trace, at, number):
        start = at + 1000 * US
        for i in range(passes):
            trace.annotation("phase:forward", at + 4 * i * US, 2 * US)
            trace.launched("gemm", at + 4 * i * US, start, 10 * US, number + 2 * i, operator="aten::mm")
            start += 10 * US
            if i >= passes - exchanges:
                trace.launched(
                    "ncclDevKernel_AllReduce", at + (4 * i + 2) * US, start, 10 * US, number + 2 * i + 1, **said
                )
                start += 10 * US

    return paced_steps(step)


@pytest.mark.parametrize(("passes", "exchanges", "us"), [(4, 4, 30), (4, 1, None), (1, 1, None)])
def test_gradients_that_are_sent_after_each_pass_are_found(tmp_path, passes, exchanges, us):
    found = findings_of(tmp_path, accumulating(passes, exchanges))
    assert ("reduces-each-pass" in found) == (us is not None)
    if us is not None:
        assert found["reduces-each-pass"].ns == us * US
        assert "after each of 4 passes" in found["reduces-each-pass"].seen


def test_many_tokens_are_no_vocabulary(tmp_path):
    """The gradient of a weight is a product over tokens, which may be many times the width."""

    def step(trace, at, number):
        trace.launched("gemm", at, at + 1000 * US, 20 * US, number + 1, operator="aten::mm")
        trace.operator("MmBackward0", at + 5 * US, 40 * US, sequence=number + 1, forward_thread=1)
        weights = ([[128, 50_000], [50_000, 128]], "float")
        trace.launched("gemm", at + 6 * US, at + 1020 * US, 80 * US, number + 2, operator="aten::mm", operands=weights)

    assert "large-head" not in findings_of(tmp_path, paced_steps(step))


def test_on_a_cpu_stacks_cost_what_operators_take_that_compute_nothing(tmp_path):
    """Of 20 operators of forward that autograd notes, views take 100 us each, which is the stack's, products 300 us."""

    def host_step(trace, at, first):
        for i in range(20):
            name, us = ("aten::view", 100) if i % 2 else ("aten::mm", 300)
            trace.operator(name, at + 400 * US * i, us * US, sequence=first + i)
        trace.operator("aten::fill_", at + 8000 * US, 1000 * US)  # autograd notes nothing of it

    trace = WrittenTrace()
    trace.steps(*(1000 * US + 10_000 * US * i for i in range(4)))
    for i in range(3):
        host_step(trace, 1000 * US + 10_000 * US * i, 100 * i)
    found = findings_of(tmp_path, trace, headway=sidecar(host={"anomaly_mode": True}))
    assert found["anomaly-mode"].ns == 20 * 100 * US
