"""Traces of several ranks, written by hand."""

import gzip
import re

import pytest

from headway.explain.explanation import StepWaterfall
from headway.explain.findings.evidence import StepEvidence
from headway.explain.findings.rules import find
from headway.explain.ranks import RankStep, WaitedFor, waited_for
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import PUBLISHED, US, WrittenTrace, paced_steps, sidecar


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
        assert found[rule].ns == 50 * US  # rank 0 waits 50 us of each step; without that, both end so much earlier
        assert "waited for rank 1" in found[rule].seen


@pytest.mark.parametrize(("ranks", "is_found"), [((1, 1, 1), True), ((0, 1, 1), False), ((0, 1, 0), False)])
def test_a_slow_rank_is_always_the_same(ranks, is_found):
    steps = [
        StepWaterfall(number, rank, 100 * US, None, (), is_edge=False, device_name="A device")
        for number in (1, 2, 3)
        for rank in (0, 1)
    ]
    waits = [
        WaitedFor(number, rank, 10 * US, "idle.launch", 10 * US, cost_ns=10 * US)
        for number, rank in enumerate(ranks, start=1)
    ]
    found = {finding.id: finding for finding in find(StepEvidence(steps, waits=waits))}
    assert ("slow-rank" in found) == is_found
    if is_found:
        assert found["slow-rank"].ns == 10 * US


@pytest.mark.parametrize(
    ("core_waits_us", "ns"),
    [((15, 15), 10 * US), ((30, 30), None), ((0, 10), None), ((0, 2), 8 * US), ((10, 0), 10 * US)],
)
def test_a_delay_that_waits_for_cores_cover_is_no_slow_rank(tmp_path, core_waits_us, ns):
    """On a CPU rank 1 takes 10 us longer of 100; ranks wait for a core meanwhile, alike or one of them alone."""
    traces = []
    for rank, busy_us in ((0, 60), (1, 70)):
        trace = WrittenTrace()
        trace.steps(*(1000 * US + 100 * US * i for i in range(4)))
        for at in (1000 * US + 100 * US * i for i in range(3)):
            trace.operator("aten::mm", at, busy_us * US)
            trace.operator("gloo:all_reduce", at + busy_us * US, (100 - busy_us) * US)
        host = {"core_wait_ns": {str(n): n * core_waits_us[rank] * US for n in range(1, 5)}}
        steps = {n: facts for n, facts in sidecar()["steps"].items() if n in "123"}
        beside = sidecar(rank=rank, world_size=2, host=host, steps=steps)
        traces.append(read_trace(trace.write(tmp_path / f"{rank}.json", headway=beside)))
    found = {finding.id: finding for finding in explain(traces).findings}
    assert (found["slow-rank"].ns if "slow-rank" in found else None) == ns


def test_without_the_slowest_rank_a_step_lasts_until_the_next_one_comes(tmp_path):
    busy_us = {0: 40, 1: 70, 2: 90}
    traces = [rank_of(tmp_path, rank, us, flops=30_000) for rank, us in busy_us.items()]
    found = {finding.id: finding for finding in explain(traces).findings}["slow-rank"]
    assert found.ns == 20 * US  # rank 1 comes 20 us before rank 2


def test_a_reason_that_covers_a_part_of_a_wait_is_told_as_that_part():
    others = [RankStep(rank, {"matmul": 50_000}, None, {2: 40_000}) for rank in range(2)]
    slow = RankStep(2, {"matmul": 50_000, "idle.data": 12_000}, None, {})
    wait = waited_for(1, [*others, slow])
    assert (wait.cause, wait.cost_ns, wait.explained) == ("idle.data", 40_000, 0.3)
    assert wait.why() == "it waited 0.01 ms longer for data, which explains 30.0 % of it"


@pytest.mark.parametrize(
    ("kind", "beside", "rule"),
    [
        ("AllGather", "FSDP::all_gather", "exposed-gathers"),
        ("AllGather", "aten::add", "exposed-communication"),  # nothing says that weights are sharded
        ("AllReduce", "FSDP::all_reduce", "exposed-communication"),
    ],
)
def test_communication_that_nothing_hides_is_found_by_its_kind(tmp_path, kind, beside, rule):
    def step(trace, at, number):
        trace.annotation(beside, at, 5 * US)
        trace.launched("gemm", at, at + 1000 * US, 60 * US, number + 1, operator="aten::mm")
        trace.launched(f"ncclDevKernel_{kind}_RING", at + 2 * US, at + 1060 * US, 40 * US, number + 2, stream=20)

    (first, *_) = explain([read_trace(paced_steps(step).write(tmp_path / "t.json"))]).findings
    assert (first.id, first.ns) == (rule, 40 * US)
    assert ("next block's weights" in first.cause) == (rule == "exposed-gathers")


# Names as NCCL, RCCL, Gloo and c10d write them, and what a collective says of itself; its cause, how many a step.
SENDS = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
COLLECTIVES = {
    "gloo:broadcast": ("broadcast_buffers", "", 1),
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("broadcast_buffers", "", 1),
    "c10d::barrier": ("barrier", "", 1),
    "nccl:all_reduce": ("sums over the ranks", "", 1),
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("sums over the ranks", "", 1),
    "gloo:all_reduce": ("many small tensors", "", 40),
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("results of all ranks", "", 1),
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("sums over the ranks", "", 1),
    SENDS: ("stages of a pipeline", "send 0 1024", 1),
    f"{SENDS} 1": ("tokens to their experts", "all_to_allv 0 1024", 1),
    f"{SENDS} 40": ("many small tensors", "send 0 1024", 40),
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (
        "sums over the ranks",
        "allreduce 0 6553600",  # buckets of 25 MB are many, and not small
        40,
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_told_by_its_name_and_ddp_gathers_no_weights(tmp_path, name):
    cause, said, number = COLLECTIVES[name]
    fields = dict(zip(("Collective name", "Process Group Name", "In msg nelems"), said.split(), strict=False))

    def step(trace, at, serial):
        trace.operator("torch.distributed.ddp.reducer::copy_bucket_to_grad", at, US)
        for i in range(number):
            offset = 40 * US // number * i
            if name.startswith("nccl"):
                start = at + 1000 * US + offset
                trace.launched(name, at + US + i, start, 40 * US // number, serial + i + 1, **fields)
            else:  # on a CPU
                trace.operator(name, at + US + offset, 40 * US // number)
        if name.startswith("nccl"):
            trace.launched("gemm", at + 50 * US, at + 1040 * US, 60 * US, serial + 90, operator="aten::mm")

    trace = read_trace(paced_steps(step).write(tmp_path / "t.json"))
    found = {finding.id: finding for finding in explain([trace]).findings}
    assert "exposed-gathers" not in found
    assert cause in found["exposed-communication"].cause


OF_CAUSES = {"buffers": "broadcast", "barrier": "barrier", "results of all": "gather", "part to every": "all_?to_?all"}
OF_CAUSES |= {"sums over": "reduce", "stages of a pipeline": "send|recv", "sharded weights": "gather"}


@pytest.mark.parametrize("path", PUBLISHED)
def test_the_cause_of_a_published_exchange_is_one_that_its_events_name(path):
    text = gzip.decompress(path.read_bytes()).decode()
    for finding in explain([read_trace(path)]).findings:
        names = [names for words, names in OF_CAUSES.items() if words in finding.cause]
        assert all(re.search(f'"[^"]*{words}[^"]*"', text, re.IGNORECASE) for words in names)
        assert "weights" not in finding.cause or re.search("FSDP|FullySharded|reduce_?scatter", text, re.IGNORECASE)


@pytest.mark.parametrize("path", PUBLISHED)
def test_no_published_ddp_trace_gathers_sharded_weights(path):
    trace = read_trace(path)
    is_ddp = any("ddp.reducer" in name or name.startswith("DistributedDataParallel") for name in trace.names)
    found = {finding.id for finding in explain([trace]).findings}
    assert not is_ddp or "exposed-gathers" not in found
