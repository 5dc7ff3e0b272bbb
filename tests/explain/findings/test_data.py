import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.written_traces import US, paced_steps, sidecar


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
