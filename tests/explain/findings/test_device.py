import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.written_traces import US, sidecar, two_kernels_a_step


@pytest.mark.parametrize(
    ("clocks", "lost_us"),
    [
        ({"sm_mhz": 1000, "most_sm_mhz": 2000}, 30),
        ({"sm_mhz": 1900, "most_sm_mhz": 2000}, None),
        (None, None),
        ({"sm_mhz": "none"}, None),
    ],
)
def test_a_clock_below_its_highest_costs_what_computes(tmp_path, clocks, lost_us):
    trace = read_trace(two_kernels_a_step().write(tmp_path / "t.json", headway=sidecar(clocks=clocks)))
    found = {one.id: one.ns for one in explain([trace]).findings}
    assert found.get("throttled-clocks") == (None if lost_us is None else lost_us * US)
