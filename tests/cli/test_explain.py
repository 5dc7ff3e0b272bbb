import json

import pytest

from helpers.written_traces import sidecar, two_kernels_a_step


@pytest.fixture
def trace(tmp_path):
    return two_kernels_a_step(5).write(tmp_path / "t.json.gz", headway=sidecar())


def test_json_has_the_schema_and_adds_up(headway, trace):
    code, out, err = headway("explain", trace, "--json", "--by", "module")
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert (record["schema_version"], record["findings"]) == (1, [])
    assert [(step["step"], step["rank"], step["duration_ns"]) for step in record["steps"]] == [
        (2, 0, 100_000),
        (3, 0, 100_000),
        (4, 0, 100_000),
    ]
    for step in record["steps"]:
        assert sum(line["ns"] for line in step["lines"]) == step["duration_ns"]
        assert all({"name", "ns", "share", "key", "mfu_from", "mfu_to", "parts"} == {*line} for line in step["lines"])
        assert sum(row["ns"] for row in step["by"]["rows"]) == step["duration_ns"]


def test_a_step_as_markdown(headway, trace):
    code, out, _ = headway("explain", trace, "--step", "1", "--rank", "0", "--md")
    assert code == 0
    assert out.startswith("**Step 1 of rank 0 on A device: 0.10 ms, MFU 30.0 %**\n\n| where the time went |")


def test_two_outputs_at_once_are_a_wrong_use(headway, trace):
    code, _, err = headway("explain", trace, "--md", "--json")
    assert (code, err) == (2, "Error: --json and --md are two outputs; give one of them.\n")


def test_a_file_that_is_no_trace_is_one_sentence(headway, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    code, out, err = headway("explain", path)
    assert (code, out) == (2, "")
    assert "is no whole trace of PyTorch's profiler" in " ".join(err.split())
    assert len(err.strip().splitlines()) <= 4
