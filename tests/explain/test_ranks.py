import sys
from pathlib import Path

import pytest

from headway.explain.ranks import RankStep, waited_for
from headway.explain.text import as_text
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.processes import run_processes
from helpers.traces import US, WrittenTrace, sidecar

MS = 1_000_000
SCRIPT = Path(__file__).with_name("awaited_ranks.py")


def rank_step(rank, busy_ms, *, flops=None, waits=None, **lines_ms):
    spent = {"matmul": busy_ms * MS, **{key.replace("_", "."): ms * MS for key, ms in lines_ms.items()}}
    return RankStep(rank, spent, flops, {other: ms * MS for other, ms in (waits or {}).items()})


@pytest.mark.parametrize(
    ("slow", "flops", "cause", "said"),
    [
        (rank_step(3, 90, flops=18 * 10**11), 10**12, "work", "it had 1.8x the work (1.8 TFLOP against 1.0 TFLOP)"),
        (
            rank_step(3, 90, flops=10**12),
            10**12,
            "speed",
            "it computed 0.56x as fast (11.1 TFLOP/s against 20.0 TFLOP/s) with the same work",
        ),
        (rank_step(3, 90), None, "busy", "it computed 40.00 ms longer; whether on more work"),
        (rank_step(3, 50, flops=10**12, idle_data=38), 10**12, "idle.data", "it waited 38.00 ms longer for data"),
        (rank_step(3, 50, flops=10**12, idle_launch=38), 10**12, "idle.launch", "its host came 38.00 ms later"),
        (rank_step(3, 50, flops=10**12, aside=38), 10**12, "aside", "it logged, evaluated, wrote a checkpoint"),
        (rank_step(3, 52, flops=10**12), 10**12, "unknown", "nothing that its trace shows took that much longer"),
    ],
)
def test_the_rank_that_was_waited_for_has_a_cause(slow, flops, cause, said):
    others = [rank_step(rank, 50, flops=flops, waits={3: 40 + rank}) for rank in range(3)]
    found = waited_for(7, [*others, slow])
    assert (found.step, found.rank, found.wait_ns, found.cause) == (7, 3, 41 * MS, cause)
    assert found.sentence().startswith(f"rank 3 made the others wait 41.00 ms: {said}")
    assert found.to_dict()["cause_ns"] == found.cause_ns


def test_a_rank_that_waits_itself_is_not_what_others_wait_for():
    """Rank 1 waits for rank 0, which the broadcast's tree has waiting for rank 2: who waits least holds all up."""
    first = rank_step(0, 50, waits={1: 610, 2: 5})
    second = rank_step(1, 50, waits={0: 640, 2: 40})
    late = rank_step(2, 50, waits={1: 15}, idle_data=600)
    found = waited_for(1, [first, second, late])
    assert (found.rank, found.cause) == (2, "idle.data")
    assert found.cost_ns == (615 - 15) * MS  # what the first one would still wait then is of another cause


def test_where_none_waited_there_is_none():
    assert waited_for(1, [rank_step(0, 50, waits={1: 0}), rank_step(1, 50, waits={0: 0})]) is None


def of_rank(tmp_path, rank, *, product_us, flops):
    """Steps of 100 us: a product, and a collective that ends with the step on every rank."""
    trace = WrittenTrace()
    trace.steps(*(1000 * US + 50 * US * i for i in range(4)))
    for i in range(3):
        host, device = 1000 * US + 50 * US * i, 2000 * US + 100 * US * i
        trace.launched("gemm", host + 2 * US, device, product_us * US, 2 * i + 1, operator="aten::mm")
        said = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 10}
        rest = (100 - product_us) * US
        trace.launched("nccl", host + 6 * US, device + product_us * US, rest, 2 * i + 2, stream=20, **said)
    step = {**sidecar()["steps"]["0"], "useful_flops": {"mlp": {"forward": flops, "backward": 0}}}
    beside = sidecar(rank=rank, world_size=3, steps={"2": step})
    return read_trace(trace.write(tmp_path / f"{rank}.json", headway=beside))


@pytest.mark.parametrize(("flops", "said"), [(60_000, "it had 1.5x the work"), (40_000, "it computed 0.67x as fast")])
def test_ranks_tell_more_work_from_a_slower_device(tmp_path, flops, said):
    traces = [of_rank(tmp_path, rank, product_us=60, flops=40_000) for rank in (0, 2)]
    traces.append(of_rank(tmp_path, 1, product_us=90, flops=flops))
    found = explain(traces)
    (one,) = found.waited_for
    assert (one.step, one.rank, one.wait_ns) == (2, 1, 30 * US)
    waiting = {step.rank: {line.key: line.ns for line in step.lines}["communication.waiting"] for step in found.steps}
    assert waiting == {0: 30 * US, 1: 0, 2: 30 * US}
    assert f"rank 1 made the others wait 0.03 ms: {said}" in as_text(found)
    assert explain(traces, rank=0).waited_for == found.waited_for
    assert not any("another one" in note for note in found.notes)
    notes = explain(traces[:2]).notes
    assert any("traces of 2 of the job's 3 processes" in note and "may be the slowest" in note for note in notes)


@pytest.mark.long  # whether the sleep is the dearest depends on what else runs
def test_a_rank_that_sleeps_in_a_real_job_is_found_beside_the_work_that_it_had(tmp_path):
    run_processes([sys.executable, SCRIPT, tmp_path, "0.5"], 2)
    found = explain([read_trace(path) for path in sorted(tmp_path.iterdir())])
    assert {one.step for one in found.waited_for} == {2, 3, 4}
    asleep = [one for one in found.waited_for if (one.rank, one.cause) == (1, "idle.launch")]
    assert asleep  # in all steps, but that another process may have taken the processor from rank 0 for half a second
    assert (asleep[0].flops, asleep[0].flops_of_others) == tuple(90 * tokens for tokens in (12, 4))
