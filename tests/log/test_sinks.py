import json
import math
from pathlib import Path

import numpy as np
import pytest

from headway.errors import ConfigError, UsageError
from headway.log.jsonl import read_jsonl
from headway.log.sink import Sink, flatten
from headway.log.sinks import JsonlSink, Sinks, open_sink


class Memory(Sink):
    """Keeps records; fails from its `fails_at`-th write on, and on closing if asked."""

    def __init__(self, fails_at=None, failure=None, fails_on_close=False):
        self.records, self.fails_at, self.fails_on_close, self.num_closed = [], fails_at, fails_on_close, 0
        self.failure = failure or OSError("No space left on device")

    def write(self, record):
        if self.fails_at is not None and len(self.records) + 1 >= self.fails_at:
            raise self.failure
        self.records.append(record)

    def close(self):
        self.num_closed += 1
        if self.fails_on_close:
            raise RuntimeError("connection lost")


@pytest.mark.parametrize("record", [{"mfu": 0.4}, {"step": 1.0}, {"step": True}, {"step": "1"}])
def test_a_record_without_a_whole_step_is_refused(record):
    with pytest.raises(UsageError, match="needs an integer 'step'"):
        flatten(record)


@pytest.mark.parametrize("value", [np.float32(1), np.ones(2), {1, 2}, object()])
def test_a_value_that_json_cannot_hold_is_refused_by_its_name(tmp_path, value):
    with pytest.raises(UsageError, match=r"the record's flops/total is a (numpy|builtins)\.\w+, which"):
        flatten({"step": 1, "flops": {"total": value}})


def test_a_refused_record_leaves_no_trace(tmp_path):
    path = tmp_path / "records"
    with JsonlSink(path) as sink:
        sink.write({"step": 1})
        before = path.read_bytes()
        with pytest.raises(UsageError):
            sink.write({"step": 2, "x": object()})
        assert path.read_bytes() == before


def test_jsonl_holds_records_as_they_were_and_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [
        {"step": 1, "kind": "step", "mfu": 0.1 + 0.2, "flops": {"total": 2**70, "by": [1, 2]}, "energy": None},
        {"step": 2, "kind": "evaluation", "loss": np.float64(0.1), "done": True},
    ]
    sink = JsonlSink(path)
    for number, record in enumerate(records, start=1):
        sink.write(record)
        assert read_jsonl(path) == records[:number]
    sink.close()
    sink.close()


def test_what_is_not_finite_is_valid_json_and_reads_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path) as sink:
        sink.write({"step": 1, "a": [math.nan, {"b": -math.inf}], "c": math.inf})
    refuse = pytest.fail  # json calls it for a bare NaN or Infinity
    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "step": 1,
        "a": ["NaN", {"b": "-Infinity"}],
        "c": "Infinity",
    }
    assert float("-Infinity") == -math.inf


def test_a_resumed_jsonl_keeps_every_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in ([1, 2, 3], [3, 4]):
        with JsonlSink(path) as sink:
            for step in steps:
                sink.write({"step": step})
    assert [record["step"] for record in read_jsonl(path)] == [1, 2, 3, 3, 4]


def test_a_sink_that_fails_is_closed_with_one_warning_and_the_others_go_on():
    good, bad = Memory(), Memory(fails_at=2)
    sinks = Sinks([bad, good])
    sinks.write({"step": 1})
    with pytest.warns(
        RuntimeWarning, match=r"^Memory failed: OSError: No space left on device\. Headway closes this sink"
    ):
        sinks.write({"step": 2})
    sinks.write({"step": 3})  # warnings are errors here: there is no second one
    assert [record["step"] for record in good.records] == [1, 2, 3]
    assert bad.num_closed == 1
    sinks.close()
    assert (good.num_closed, bad.num_closed) == (1, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux' device that is always full")
def test_a_full_disk_does_not_end_the_training():
    good = Memory()
    with Sinks.open(["jsonl:/dev/full", good]) as sinks:
        with pytest.warns(RuntimeWarning, match="JsonlSink failed: OSError: .*No space left on device"):
            sinks.write({"step": 1})
        sinks.write({"step": 2})
    assert [record["step"] for record in good.records] == [1, 2]


def test_failing_to_close_is_a_warning_too():
    good, bad = Memory(), Memory(fails_on_close=True)
    with pytest.warns(RuntimeWarning, match=r"RuntimeError: connection lost\. Records that it still held may be lost"):
        Sinks([bad, good]).close()
    assert good.num_closed == 1


def test_a_wrong_record_is_the_callers_mistake_and_reaches_no_sink():
    memory = Memory()
    with pytest.raises(UsageError):
        Sinks([memory]).write({"mfu": 0.4})
    assert memory.records == []


def test_an_interrupt_passes_through():
    memory = Memory(fails_at=1, failure=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Sinks([memory]).write({"step": 1})


def test_a_sink_that_cannot_be_opened_closes_those_before_it(tmp_path):
    memory = Memory()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be opened for appending"):
        Sinks.open([memory, f"jsonl:{tmp_path}/file/metrics.jsonl"])
    assert memory.num_closed == 1


@pytest.mark.parametrize("spec", ["", "jsonl", "jsonl:", "tensorbord:x", "metrics.jsonl", "prometheus"])
def test_words_that_describe_no_sink_are_refused_with_those_that_do(spec):
    with pytest.raises(ConfigError, match=r"is not a place for records\. Give one of jsonl:FILE, .*\[HOST:\]PORT"):
        open_sink(spec)


@pytest.mark.parametrize("spec", ["csv:run/table.csv", Path("run/table.csv")])
def test_a_table_of_commas_is_refused_with_the_way_to_read_json_lines_as_one(spec):
    with pytest.raises(
        ConfigError,
        match=r"'csv:run/table.csv': .* jsonl:FILE, and read the table with pandas.read_json\(FILE, lines=True",
    ):
        open_sink(spec)
