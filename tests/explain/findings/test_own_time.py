"""Own time of steps on a CPU, in traces written by hand: a profile that stretches a step changes no finding's size."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.explain.findings.evidence import StepEvidence
from headway.explain.findings.own_time import AddedCost
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import PUBLISHED, US, WrittenTrace, shapes, sidecar

NUM_STEPS = 3
OPERATOR_US, MODULE_US = 2, 6  # that the profiler adds to a call


def stretched(*, operator_us, module_us, preempted_us=0):
    """Steps of a model of two modules and a loop over 150 tensors, each call preceded by what the profiler adds.

    Without that a step takes 200 us of products, 150 x (2 + 1) us of the loop and 1 us at its end. In the loop another
    process may have the core for some time.
    """
    trace = WrittenTrace()
    bounds, begins, waits = [1000 * US], {}, []
    for number in range(1, NUM_STEPS + 1):
        at = bounds[-1]
        begins[str(number)] = at
        trace.annotation("phase:forward", at, (202 + 2 * (operator_us + module_us)) * US)
        moment = at + US
        for path in ("first", "second"):
            trace.annotation(f"module:{path}", moment, (module_us + operator_us + 100) * US)
            moment += (module_us + operator_us) * US
            trace.operator("aten::mm", moment, 100 * US, **shapes([[64, 64], [64, 64]]))
            moment += 100 * US
        moment += US
        for k in range(150):
            moment += operator_us * US
            taken_us = preempted_us if k == 75 else 0
            if taken_us:
                waits.append([moment, moment + (2 + taken_us) * US, taken_us * US])
            trace.operator("aten::mul_", moment, (2 + taken_us) * US, **shapes([[100 + k % 7]]))
            moment += (3 + taken_us) * US
        bounds.append(moment + US)
    trace.steps(*bounds)
    return trace, begins, waits


def finding(tmp_path, *, operator_us=0, module_us=0, preempted_us=0, tells=True):
    trace, begins, waits = stretched(operator_us=operator_us, module_us=module_us, preempted_us=preempted_us)
    # the step's own annotation and that of its forward cost nothing here, so modules' costs are told for all of them
    added = {"operator_ns": operator_us * US, "module_ns": module_us * US * 2 / 4, "phases_ns": PHASES_NS}
    host = {"step_ns": begins, "stacks": [], "runs": [], "preempted": waits, "added_ns": added, "anomaly_mode": False}
    beside = {"headway": sidecar(host=host)} if tells else {}
    result = explain([read_trace(trace.write(tmp_path / "t.json", **beside))])
    return {finding.id: finding for finding in result.findings}


# The phases took longer by less than their calls cost in a row: then a call costs what it costs in a row.
PHASES_NS = {"forward": 1, "after": 1}


@pytest.mark.parametrize(("operator_us", "module_us"), [(OPERATOR_US, MODULE_US), (1, 0), (5, 20)])
def test_what_a_profile_adds_to_calls_changes_no_size(tmp_path, operator_us, module_us):
    plain = finding(tmp_path)["parameter-loop"]
    profiled = finding(tmp_path, operator_us=operator_us, module_us=module_us)["parameter-loop"]
    assert plain.ns == pytest.approx(450 * US, rel=0.02)
    assert profiled.ns == pytest.approx(plain.ns, rel=0.03)
    assert profiled.share == pytest.approx(plain.share, rel=0.03)
    # a trace that does not tell is taken as it is
    raw = finding(tmp_path, operator_us=operator_us, module_us=module_us, tells=False)["parameter-loop"]
    assert raw.ns == pytest.approx((450 + 150 * operator_us) * US, rel=0.02)


def test_time_in_which_the_thread_had_no_core_is_no_operators(tmp_path):
    plain = finding(tmp_path)["parameter-loop"]
    contended = finding(tmp_path, preempted_us=600)
    assert contended["parameter-loop"].ns == pytest.approx(plain.ns, rel=0.02)
    assert contended["parameter-loop"].share == pytest.approx(plain.share, rel=0.02)


def assert_shares_are_of_one_clock(trace, waits, *, added=None):
    """Explain a trace whose thread waited for a core: begin, length and waited part of each, as fractions of a step."""
    numbers = [number for number, *_ in trace.steps]
    begins = {str(number): start for number, start, _ in trace.steps}
    (first, _, _), (_, last, _) = trace.steps[0], trace.steps[-1]
    step_ns = (trace.steps[-1][2] - trace.steps[0][1]) // len(numbers)
    rows = [
        [at, at + max(1, round(length * step_ns)), round(part * length * step_ns)]
        for where, length, part in waits
        for at in [trace.steps[0][1] + round(where * (last - trace.steps[0][1]))]
    ]
    sums = {str(number): sum(ns for at, _, ns in rows if at < start) for number, start, _ in trace.steps}
    sums[str(first + len(numbers))] = sum(ns for *_, ns in rows)
    host = {"step_ns": begins, "core_wait_ns": sums, "stacks": [], "runs": [], "preempted": rows,
            "added_ns": added or {}, "anomaly_mode": False}  # fmt: skip
    headway = {**(trace.headway or sidecar(steps={})), "host": host}
    result = explain([replace(trace, headway=headway)])
    evidence = StepEvidence(result.steps, waits=result.waited_for)
    if evidence.is_cpu:
        # What is told to be lost and what it is lost of are parts of the same time.
        assert sum(max(0, evidence.ns_of(key)) for key in evidence.keys) >= evidence.duration_ns
        assert sum(event.ns + event.late_ns for event in evidence.spent) <= evidence.duration_ns
    for found in result.findings:
        assert 0 <= found.share <= 1
        shares = re.findall(r"([\d,.]+) %", found.seen)
        assert all(float(share.replace(",", "")) <= 100 for share in shares), found.seen
    if evidence.is_crowded:
        assert not [found.seen for found in result.findings if "largest loss is slow" in found.seen]


# Samples of waits overlap, and one that ends late may be longer than the time between two of them.
WAITS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 3)), max_size=12)


@given(waits=WAITS, is_needed=st.booleans(), cost_us=st.integers(0, 4))
def test_no_share_is_over_all_of_the_time(tmp_path_factory, waits, is_needed, cost_us):
    written, _, _ = stretched(operator_us=2, module_us=6)
    steps = sidecar()["steps"] if is_needed else {}
    path = tmp_path_factory.mktemp("trace") / "t.json"
    trace = read_trace(written.write(path, headway=sidecar(steps=steps)))
    added = {"operator_ns": cost_us * US, "module_ns": 3 * US, "phases_ns": PHASES_NS}
    assert_shares_are_of_one_clock(trace, waits, added=added)


@pytest.mark.parametrize("path", PUBLISHED)
@pytest.mark.parametrize("waits", [[(0, 1, 0.9)] * 3, [(k / 9, 0.2, 2.0) for k in range(9)], [(0.4, 0.01, 1.0)]])
def test_no_share_of_a_published_trace_is_over_all_of_the_time(path, waits):
    trace = read_trace(path)
    if trace.steps:
        assert_shares_are_of_one_clock(trace, waits)


def test_gaps_between_phases_are_one(tmp_path):
    assert AddedCost(1, 1, {"input": 1000, "after": 3000}).times("between", 1000) == 4.0


def test_a_chore_takes_the_time_that_it_had_a_core(tmp_path):
    trace, bounds, begins, waits = WrittenTrace(), [1000 * US], {}, []
    for number in range(1, NUM_STEPS + 1):
        at = bounds[-1]
        begins[str(number)] = at
        trace.operator("aten::mm", at, 100 * US, **shapes([[64, 64], [64, 64]]))
        trace.annotation("phase:checkpoint", at + 100 * US, 400 * US)
        trace.operator("aten::copy_", at + 100 * US, 400 * US, **shapes([[100]]))
        waits.append([at + 100 * US, at + 500 * US, 300 * US])
        bounds.append(at + 500 * US)
    trace.steps(*bounds)
    host = {"step_ns": begins, "stacks": [], "runs": [], "preempted": waits, "added_ns": {}, "anomaly_mode": False}
    result = explain([read_trace(trace.write(tmp_path / "t.json", headway=sidecar(host=host)))])
    (found,) = (finding for finding in result.findings if finding.id == "checkpoint")
    assert found.ns == pytest.approx(100 * US, rel=0.02)
    assert found.share == pytest.approx(0.5, rel=0.02)
    assert "50.0 % of the time" in found.seen
