import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.explain import trace as trace_module
from headway.explain import trace_json
from headway.explain.events import NONE, Kind
from headway.explain.trace import nanoseconds, read_trace
from headway.explain.waterfall import explain
from helpers.traces import MAIN, WrittenTrace, two_kernels_a_step

EPOCH_NS = 1712195495519689204  # more digits than a float has


@given(ns=st.integers(0, 2**62 - 1), decimals=st.integers(0, 3))  # more bits are refused
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


@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"separators": (",", ":")}])
@pytest.mark.parametrize("chunk", [1, 7, 64, 300, 1000])
def test_a_file_reads_the_same_in_pieces_of_any_size(tmp_path, monkeypatch, chunk, layout):
    """Wherever an event seems to end: in a name, in a list of objects within it, in a list behind the events."""
    trace = WrittenTrace()
    for i in range(20):
        more = {"parts": [{"a": 1}, {"b": 2}]} if i % 3 else {}
        trace.operator('say "]}, {" \\ \u00e9', 10 * i, 5, **{"Input Dims": [[2, 3], []]}, **more)
    path = trace.write(tmp_path / "t.json", distributedInfo={"rank": 3}, others=[{"ph": "X"}, {"ph": "X"}])
    path.write_text(json.dumps(json.loads(path.read_text()), **layout))
    at_once = read_trace(path)
    monkeypatch.setattr(trace_json, "_CHUNK", chunk)
    in_pieces = read_trace(path)
    assert list(in_pieces.names) == list(at_once.names) == [trace.events[0]["name"]]
    assert in_pieces.host.start_ns.tolist() == at_once.host.start_ns.tolist() == [10 * i for i in range(20)]
    assert in_pieces.operands == at_once.operands
    assert in_pieces.rank == 3


def test_a_bare_list_of_events_is_a_trace(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": MAIN, "ts": 1, "dur": 2}]))
    assert read_trace(path).host.end_ns.tolist() == [3000]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty: a program that was killed"),
        (b"[", "the file is cut off in line 1"),
        (b"loss: 2.3", "does not begin with { or ["),
        (b'{"steps": 3, "a": 1.5}', "no list traceEvents, only the keys: a, steps"),
        (b'{"traceEvents": [{"ph": "X"', "the file is cut off in line 1, near"),
        (b'{"traceEvents": [{"ph": "M"}', "the file is cut off"),
        (b'{"traceEvents": [3]}', "an event of it is '3', not an object"),
        (b'{"traceEvents": [{} {}]}', "'{' stands where a comma should in line 1, near"),
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
    with pytest.raises(ConfigError, match=r"t\.json holds more than 3 events.*Profile fewer steps"):
        read_trace(trace.write(tmp_path / "t.json"))


def test_one_wrong_comma_is_told_by_its_line_however_long_the_file_is(tmp_path, monkeypatch):
    """And at once: the value in which it stands is not read to the end of the file for want of its own end."""
    monkeypatch.setattr(trace_json, "_CHUNK", 1000)
    lines = [json.dumps({"ph": "M", "name": f"event {i}"}) for i in range(5000)]
    lines[700] = lines[700].replace(", ", " ")
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [\n' + ",\n".join(lines) + "]}")
    with pytest.raises(ConfigError, match=r"Expecting ',' delimiter in line 702, near '.*\"M\" \"name\": \""):
        read_trace(path)


@given(cut=st.integers(2, 4000))
def test_a_list_of_events_without_its_end_is_read_as_far_as_it_is_whole(tmp_path_factory, cut):
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": i, "dur": 1} for i in range(30)
    ]
    text = json.dumps(events, indent=1)[:cut]
    path = tmp_path_factory.mktemp("t") / "t.json"
    path.write_text(text)
    num_whole = text.count("}")  # an object ends with its last brace, and none of these holds another
    if num_whole:
        trace = read_trace(path)
        assert len(trace.host) == num_whole
        has_end = text.endswith("]")
        assert [f"the {num_whole:,} that are whole are read" in note for note in trace.notes] == [True] * (not has_end)
    else:
        with pytest.raises(ConfigError, match="cut off"):
            read_trace(path)


def test_events_as_torch_1_wrote_them_are_read(tmp_path):
    """Categories, annotations among the operators, and backward without numbers: as in kineto's samples of 2021."""
    rows = [
        ("Operator", "ProfilerStep#5", 100, 200, {}),
        ("Operator", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 101, 50, {}),
        ("Operator", "autograd::engine::evaluate_function: AddmmBackward", 160, 40, {}),
        ("Operator", "aten::mm", 170, 10, {"Input Dims": [[8, 4], [4, 2]], "Input type": ["float", "float"]}),
        ("Runtime", "cudaLaunchKernel", 171, 2, {"correlation": 7}),
        ("Kernel", "volta_sgemm_128x64_nn", 180, 20, {"correlation": 7, "device": 0, "stream": 7}),
        ("Memcpy", "Memcpy HtoD (Pageable -> Device)", 205, 5, {"correlation": 8, "device": 0, "stream": 7}),
        ("Memset", "Memset (Device)", 215, 5, {"correlation": 9, "device": 0, "stream": 7}),
    ]
    events = [
        {"ph": "X", "cat": category, "name": name, "pid": 0 if "device" in more else 9, "tid": "stream 7", "ts": ts,
         "dur": dur, "args": more}
        for category, name, ts, dur, more in rows
    ]  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    (step,) = explain([read_trace(path)]).steps
    lines = {line.key: line.ns / 1000 for line in step.lines if line.ns}
    assert (step.step, step.duration_ns) == (5, 200_000)
    assert (lines["matmul"], lines["copies"], lines["idle.data"]) == (20, 10, 50)
    assert next(line.parts for line in step.lines if line.key == "matmul") == {"backward": 20_000}


def test_events_of_an_accelerator_that_is_not_known_are_no_cpus(tmp_path):
    trace = WrittenTrace()
    trace.operator("aten::mm", 0, 100)
    trace.event("user_flow", "mine", 0, 5)  # on the host's own process
    assert read_trace(trace.write(tmp_path / "host.json")).device_name == "CPU"
    for i in range(1500):
        trace.event("mtia_ccp_events", "fused", 10 * i, 8, pid=17)
    with pytest.raises(ConfigError, match="1,500 events of category 'mtia_ccp_events' of an accelerator that Headway"):
        read_trace(trace.write(tmp_path / "t.json"))
    trace.kernel("gemm", 0, 10)
    (note,) = read_trace(trace.write(tmp_path / "t.json")).notes
    assert note.startswith("1,500 events of category 'mtia_ccp_events' are of a device that Headway does not know")


def test_a_trace_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_json, "MOST_CHARACTERS", 5_000_000)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 20_000_000))
    with pytest.raises(ConfigError, match="longer than 5,000,000 characters"):
        read_trace(path)


def test_a_launch_and_its_kernel_may_share_an_external_id_alone(tmp_path):
    """TraceLens' unit tests have no correlation; operators have ids of their own, which may be the same numbers."""
    lines = []
    for is_linked in (True, False):
        trace = two_kernels_a_step()
        for number, event in enumerate(trace.events):
            arguments = event["args"]
            if not is_linked and arguments.get("correlation"):
                arguments["External id"] = arguments.pop("correlation")
            elif event["cat"] == "cpu_op":
                arguments["External id"] = number
        read = read_trace(trace.write(tmp_path / f"{is_linked}.json"))
        lines.append([[(line.key, line.ns) for line in step.lines] for step in explain([read]).steps])
    assert lines[0] == lines[1]
