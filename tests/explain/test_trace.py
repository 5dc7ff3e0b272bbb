import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.explain import trace as trace_module
from headway.explain.events import NONE, Kind
from headway.explain.trace import nanoseconds, read_trace
from helpers.traces import MAIN, WrittenTrace

EPOCH_NS = 1712195495519689204  # more digits than a float has


@given(ns=st.integers(0, 2**63 - 1), decimals=st.integers(0, 3))
def test_a_timestamp_of_up_to_three_decimals_is_exact(ns, decimals):
    ns -= ns % 10 ** (3 - decimals)
    whole, fraction = divmod(ns, 1000)
    text = f"{whole}.{fraction:03d}"[: len(str(whole)) + 1 + decimals] if decimals else str(whole)
    assert nanoseconds(text) == ns
    assert nanoseconds(whole) == whole * 1000


@pytest.mark.parametrize(("text", "ns"), [("1.0004", 1), ("1.0006", 2), ("1e3", 1_000_000), ("-0.5", -500)])
def test_other_numbers_are_rounded_to_nanoseconds(text, ns):
    assert nanoseconds(text) == {1: 1000, 2: 1001}.get(ns, ns)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "no_suffix"])
def test_columns_hold_what_was_written(tmp_path, name):
    trace = WrittenTrace()
    trace.steps(EPOCH_NS, EPOCH_NS + 5000, first=12)
    trace.operator("aten::mm", EPOCH_NS + 1, 2001, sequence=7, forward_thread=2)
    trace.operator("AccumulateGrad", EPOCH_NS + 3000, 10, sequence=2**64 - 1)
    trace.call("cuLaunchKernel", EPOCH_NS + 5, 10, 33, category="cuda_driver")
    trace.kernel("gemm", EPOCH_NS + 100, 77, 33, stream=20, device=3)
    trace.kernel("Memcpy HtoD", EPOCH_NS + 50, 5, 34, category="gpu_memcpy", device=3)
    trace.event("ac2g", "ac2g", EPOCH_NS, 1)
    beside = {"distributedInfo": {"rank": 5, "world_size": 8}, "deviceProperties": [{"name": "H100"}, {"name": "H100"}]}
    found = read_trace(trace.write(tmp_path / name, **beside))
    assert found.steps == ((12, EPOCH_NS, EPOCH_NS + 5000),)
    assert (found.rank, found.world_size, found.device_name, found.headway) == (5, 8, "H100", None)
    device, host = found.device, found.host
    assert [found.names[i] for i in device.name] == ["Memcpy HtoD", "gemm"]
    assert device.kind.tolist() == [Kind.MEMCPY, Kind.KERNEL]
    assert (device.start_ns[1] - EPOCH_NS, device.end_ns[1] - EPOCH_NS) == (100, 177)
    assert (device.correlation.tolist(), device.device.tolist()) == ([34, 33], [3, 3])
    assert host.kind.tolist() == [Kind.ANNOTATION, Kind.OPERATOR, Kind.LAUNCH, Kind.OPERATOR]
    assert host.sequence.tolist() == [NONE, 7, NONE, NONE]
    assert host.forward_thread.tolist() == [NONE, 2, NONE, 0]
    assert not found.is_cpu_only


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_file_reads_the_same_in_pieces_of_any_size(tmp_path, monkeypatch, chunk):
    trace = WrittenTrace()
    for i in range(20):
        trace.operator('say "]}," \\ \u00e9', 10 * i, 5, **{"Input Dims": [[2, 3], []]})
    monkeypatch.setattr(trace_module, "_CHUNK", chunk)
    events = []
    beside = trace_module.read_json(trace.write(tmp_path / "t.json", deviceProperties=[]), events.append)
    assert [event["name"] for event in events] == [event["name"] for event in trace.events]
    assert beside == {"schemaVersion": 1, "deviceProperties": [], "traceName": "written"}


def test_a_bare_list_of_events_is_a_trace(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": MAIN, "ts": 1, "dur": 2}]))
    assert read_trace(path).host.end_ns.tolist() == [3000]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is cut off"),
        (b"loss: 2.3", "does not begin with { or ["),
        (b'{"steps": 3, "a": 1.5}', "no list traceEvents, only the keys: a, steps"),
        (b'{"traceEvents": [{"ph": "X"', "no JSON, or the file is cut off"),
        (b'{"traceEvents": [{"ph": "M"}', "the file is cut off"),
        (b'{"traceEvents": [3]}', "an event of it is '3', not an object"),
        (b'{"traceEvents": [{} {}]}', "'{' stands where a comma should"),
        (b'{"traceEvents": []}', "holds no operator, kernel or annotation"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1}]}', "event without a name"),
        (b'{"traceEvents": ' + b"[" * 100_000, "no whole trace"),
        (gzip.compress(b'{"traceEvents": [' + b'{"ph": "M"},' * 1000, mtime=0)[:40], "cut off or damaged"),
        (b"\x1f\x8bnonsense", "cut off or damaged"),
    ],
)
def test_what_is_no_whole_trace_is_refused_in_a_sentence(tmp_path, content, said):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_a_trace_of_too_many_events_is_refused_with_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "MAX_EVENTS", 3)
    trace = WrittenTrace()
    for i in range(4):
        trace.operator("aten::mm", i, 1)
    with pytest.raises(ConfigError, match=r"t\.json \(0 MB\) holds more than 3 events.*Profile fewer steps"):
        read_trace(trace.write(tmp_path / "t.json"))
