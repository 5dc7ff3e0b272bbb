"""The numbers that another library's loop logs of a window."""

import pytest

from headway import Workload, trace
from headway.errors import UsageError
from headway.integrations.loops import logged
from headway.meter import Meter
from helpers.loops import PEAK, tiny


def test_numbers_of_phases_are_picked_by_paths_within_the_record():
    other = tiny()
    ledger = trace(other)
    meter = Meter(tiny(), peak=PEAK, log_every=1, others=[(other, ledger)], memory_bytes_per_s=1e12)
    meter.count(Workload([5]))
    with meter.phase("score", forward_only=True):
        meter.count(Workload([7]), cost_model=ledger)
    window = meter.step()
    # with its module a ledger tells bytes
    assert window.phases["score"].flops.total == ledger.count(Workload([7]), forward_only=True).total
    assert window.phases["score"].bytes_moved > 0
    numbers = logged(window, ("mfu", "phases/score/flops/total", "phases/*/wall_s"), "h")
    assert set(numbers) == {"h/mfu", "h/phases/score/flops/total", "h/phases/score/wall_s", "h/phases/rest/wall_s"}
    assert numbers["h/phases/score/flops/total"] == window.phases["score"].flops.total
    assert logged(window, ("phases/rollout/mfu",)) == {}  # a phase that this window has not
    with pytest.raises(UsageError, match="a window has no phase/score/mfu to log"):
        logged(window, ("phase/score/mfu",))
    with pytest.raises(UsageError, match=r"cost_model=Qwen3ForCausalLM.*counted by itself"):
        meter.count(Workload([7]), cost_model=other)
