"""Traces of several ranks, written by hand."""

import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, paced_steps, sidecar


def rank_of(tmp_path, rank, busy_us, *, flops=None, kind="AllReduce"):
    """A product, and a collective that lasts until the step's end."""
    said = {"Collective name": kind.lower(), "Process Group Name": "0", "In msg nelems": 10}

    def step(trace, at, number):
        trace.launched("gemm", at, at + 1000 * US, busy_us * US, number + 1, operator="aten::mm")
        start = at + (1000 + busy_us) * US
        name = f"ncclDevKernel_{kind}_RING"
        trace.launched(name, at + 2 * US, start, (100 - busy_us) * US, number + 2, stream=20, **said)

    beside = {"distributedInfo": {"rank": rank, "world_size": 2}}
    if flops is not None:
        facts = sidecar(rank=rank, world_size=2)
        useful = {"mlp": {"forward": flops // 3, "backward": flops - flops // 3}}
        facts["steps"] = {n: {**one, "useful_flops": useful, "slots": 100} for n, one in facts["steps"].items()}
        beside["headway"] = facts
    return read_trace(paced_steps(step).write(tmp_path / f"{rank}.json", **beside))


@pytest.mark.parametrize(
    ("flops", "rule"), [((30_000, 60_000), "heavy-pack"), ((30_000, 30_000), "slow-rank"), ((None, None), None)]
)
def test_who_is_waited_for_has_more_work_or_is_slower(tmp_path, flops, rule):
    traces = [rank_of(tmp_path, 0, 40, flops=flops[0]), rank_of(tmp_path, 1, 90, flops=flops[1])]
    found = {one.id: one for one in explain(traces).findings}
    assert {"heavy-pack", "slow-rank"} & found.keys() == ({rule} if rule else set())
    if rule:
        assert found[rule].ns == 25 * US  # of a step and rank: rank 0 waits 50 us of each step, rank 1 not at all
        assert "mostly for rank 1" in found[rule].seen


@pytest.mark.parametrize(("kind", "rule"), [("AllGather", "exposed-gathers"), ("AllReduce", "exposed-communication")])
def test_communication_that_nothing_hides_is_found_by_its_kind(tmp_path, kind, rule):
    (first, *_) = explain([rank_of(tmp_path, 0, 60, kind=kind)]).findings
    assert (first.id, first.ns) == (rule, 40 * US)
    assert "data.tokens_per_pack" in first.next
