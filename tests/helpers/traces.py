"""Traces written by hand, whose every nanosecond is known: as torch.profiler's exporter writes them."""

import gzip
import json
import re
import sqlite3
from itertools import pairwise
from pathlib import Path

import pytest

from headway.explain.breakdown import Owners
from headway.explain.budget import NO_COMPONENT, NeededWork

MAIN, BACKWARD_THREAD = 100, 101


def beside_the_repository(pattern):
    """Files that others made, beside the repository: no copy of them is in it."""
    folders = Path(__file__).resolve().parents
    skipped = pytest.param(None, marks=pytest.mark.skip(f"no shared/{pattern} beside the repository"))
    return sorted(path for folder in folders for path in (folder / "shared").glob(pattern)) or [skipped]


PUBLISHED = beside_the_repository("traces/*.json.gz")  # profiler traces


class WrittenTrace:
    """Events of one process and its device; all times in whole units, of so many nanoseconds."""

    def __init__(self, unit=1):
        self.unit = unit
        self.events = []

    def event(self, category, name, start, duration, *, pid=1, tid=MAIN, **arguments):
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": f"@{start * self.unit}@",
             "dur": f"@{duration * self.unit}@",
             "args": arguments}
        )  # fmt: skip

    def steps(self, *bounds, first=1):
        """Host steps: from each bound to the next."""
        for number, (start, end) in enumerate(pairwise(bounds), start=first):
            self.annotation(f"ProfilerStep#{number}", start, end - start)

    def annotation(self, name, start, duration, **more):
        self.event("user_annotation", name, start, duration, **more)

    def operator(self, name, start, duration, *, sequence=None, forward_thread=0, **more):
        if sequence is not None:
            more |= {"Sequence number": sequence, "Fwd thread id": forward_thread}
        self.event("cpu_op", name, start, duration, **more)

    def call(self, name, start, duration, correlation=0, *, category="cuda_runtime", **more):
        self.event(category, name, start, duration, correlation=correlation, **more)

    def kernel(self, name, start, duration, correlation=0, *, stream=7, device=0, category="kernel", **more):
        self.event(
            category, name, start, duration, pid=device, tid=stream, device=device, stream=stream,
            correlation=correlation, **more,
        )  # fmt: skip

    def launched(self, name, launch, start, duration, correlation, *, operator=None, tid=MAIN, operands=None, **more):
        """A kernel with its launch, of 1 us, and the operator around that, called with operands of (sizes, type)."""
        if operator is not None:
            self.operator(
                operator, launch, 1000 // self.unit, tid=tid, **({} if operands is None else shapes(*operands))
            )
        self.call("cudaLaunchKernel", launch, 1000 // self.unit, correlation, tid=tid)
        self.kernel(name, start, duration, correlation, **more)

    def text(self, **beside):
        body = json.dumps({"schemaVersion": 1, **beside, "traceEvents": self.events, "traceName": "written"})
        return re.sub(r'"@(\d+)@"', lambda found: f"{int(found[1]) // 1000}.{int(found[1]) % 1000:03d}", body)

    def write(self, path, **beside):
        text = self.text(**beside).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


US = 1000


def shapes(sizes, kind="float"):
    """What record_shapes=True adds to an operator whose arguments are all tensors of one type."""
    return {"Input Dims": sizes, "Input type": [kind] * len(sizes)}


def two_kernels_a_step(num_steps=4):
    """Steps of 100 us on the device: a product of 60 us, an addition of 30 us, 10 us of nothing; the host is ahead.

    The host launches both at the beginning of its step of 50 us.
    """
    trace = WrittenTrace()
    trace.steps(*(1000 * US + 50 * US * i for i in range(num_steps + 1)))
    for i in range(num_steps):
        host, device = 1000 * US + 50 * US * i, 2000 * US + 100 * US * i
        trace.launched("gemm", host + 2 * US, device, 60 * US, 2 * i + 1, operator="aten::mm")
        trace.launched("adds", host + 6 * US, device + 60 * US, 30 * US, 2 * i + 2, operator="aten::add")
    return trace


def sidecar(**changes):
    """What Headway writes beside the events: 10 steps that need 30,000 FLOPs at a peak of 1e9 FLOP/s, so 30 us."""
    step = {
        "workload": {},
        "tokens": 100,
        "slots": 120,
        "useful_flops": {"mlp": {"forward": 7_000, "backward": 13_000}, "head": {"forward": 4_000, "backward": 6_000}},
        "recomputed_flops": {"mlp": 7_000},
        "padding_flops": 3_000,
    }
    return {
        "schema_version": 1, "rank": 0, "world_size": 1, "device": "A device", "versions": {}, "peak_flops_per_s": 1e9,
        "peak_source": "stated", "ceiling_flops_per_s": 0.8e9, "convention": "headway", "recompute": "full",
        "components": {"": "rest", "blocks": "mlp", "head": "head"}, "cost_model": {"name": "m", "digest": "d"},
        "profiler_overhead_s": None, "steps": {str(number): step for number in range(10)}, **changes,
    }  # fmt: skip


def paced_steps(step, num_steps=4):
    """Host steps of 100 us; `step` writes each one's events, given the trace, its beginning and a number of its own."""
    trace = WrittenTrace()
    trace.steps(*(1000 * US + 100 * US * i for i in range(num_steps + 1)))
    for i in range(num_steps):
        step(trace, 1000 * US + 100 * US * i, 100 * i)
    return trace


def products_in_a_row(sizes, *, count, us):
    """Steps of products one after the other, of so many microseconds each; the device is never idle."""

    def step(trace, at, number):
        begin = at + 1000 * US
        trace.launched("adds", at, begin, (100 - count * us) * US, number + 90, operator="aten::add")
        for i in range(count):
            launch = at + (1 + i) * US
            trace.operator("aten::addmm", launch, US, **shapes([[], *sizes]))
            start = begin + (100 - count * us + i * us) * US
            trace.launched("gemm", launch, start, us * US, number + i + 1)

    return paced_steps(step)


NSIGHT_PID = 77 * 2**24  # of process 77
NSIGHT_SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (name TEXT, id INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT, contextId INT,
    streamId INT, correlationId INT, globalPid INT, demangledName INT NOT NULL, shortName INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT NOT NULL, end INT NOT NULL, deviceId INT, contextId INT,
    streamId INT, correlationId INT, globalPid INT, bytes INT, copyKind INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, eventClass INT, globalTid INT,
    correlationId INT, nameId INT NOT NULL, returnValue INT);
CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, eventType INT, text TEXT, globalTid INT, textId INT);
"""
NSIGHT_NAMES = [
    "void cutlass::Kernel<gemm>(Params)",
    "adds",
    "cudaLaunchKernel_v7000",
    "cudaMemcpyAsync_v3020",
    "aten::mm, seq = 4",
]


def nsight_export(path, *, num_steps=3, step_name="iteration {}"):
    """Steps of 100 us: 40 us of nothing but Python, a copy of 10 us, a product of 30 us and an addition of 20 us."""
    database = sqlite3.connect(path)
    database.executescript(NSIGHT_SCHEMA)
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(NSIGHT_NAMES))
    database.execute("INSERT INTO TARGET_INFO_GPU VALUES ('NVIDIA H200', 0)")
    thread = NSIGHT_PID + 5

    def launch(at, number, name):
        row = (at, at + US, 0, thread, number, name, 0)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    for i in range(num_steps):
        begin, number = 10**15 + 100 * US * i, 10 * i
        text = step_name.format(i + 7)
        row = (begin, begin + 100 * US, 59, text, thread, None)
        database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
        row = (begin + 45 * US, begin + 50 * US, 59, None, thread, 4)
        database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
        launch(begin + 38 * US, number, 3)
        launch(begin + 46 * US, number + 1, 2)
        launch(begin + 55 * US, number + 2, 2)
        copy = (begin + 40 * US, begin + 50 * US, 0, 1, 7, number, NSIGHT_PID, 4096, 1)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", copy)
        for start, end, more, name in ((50, 80, 1, 0), (80, 100, 2, 1)):
            kernel = (begin + start * US, begin + end * US, 0, 1, 7, number + more, NSIGHT_PID, name, name)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", kernel)
    return database


def share_of_operators_with_an_owner(waterfall):
    """Share of the events of a step that go to a component or a named activity, by number: one may take any time."""
    measured, step = waterfall.measured
    owners = Owners(measured.attribution, NeededWork(measured.trace.headway, str(measured.trace.path)))
    names = [owners.of(event) for event in {owned.event for owned in step.owned}]
    return 1 - names.count(NO_COMPONENT) / len(names)
