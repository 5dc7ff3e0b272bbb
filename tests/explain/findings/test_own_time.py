"""Own time of steps on a CPU, in traces written by hand: a profile that stretches a step changes no finding's size."""

import pytest

from headway.explain.findings.own_time import AddedCost
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, WrittenTrace, shapes, sidecar

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
