import json

import pytest

from headway.meter.goodput_report import FILE_NAME, read_goodput

LINES = [
    {"kind": "start", "schema_version": 1, "wall_s": 0.0, "pid": 1, "host": "node"},
    {"kind": "spans", "wall_s": 100.0, "ns": {"set-up": 10 * 10**9, "step": 80 * 10**9, "data wait": 10 * 10**9}},
    {"kind": "checkpoint", "step": 20},
    {"kind": "spans", "wall_s": 105.0, "ns": {"step": 5 * 10**9}},
    {"kind": "start", "schema_version": 1, "wall_s": 125.0, "pid": 2, "host": "node"},
    {"kind": "resumed", "step": 20},
    {"kind": "spans", "wall_s": 200.0, "ns": {"recovery": 15 * 10**9, "step": 60 * 10**9}},
]


@pytest.fixture
def run(tmp_path):
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


def test_the_table_of_a_run_folder(headway, run):
    assert headway("goodput", run) == (
        0,
        "bucket            time    share\n"
        "----------  ----------  -------\n"
        "set-up         10.00 s    5.0 %\n"
        "compile            0 s    0.0 %\n"
        "data wait      10.00 s    5.0 %\n"
        "step        2 min 20 s   70.0 %\n"
        "evaluation         0 s    0.0 %\n"
        "checkpoint         0 s    0.0 %\n"
        "recovery       20.00 s   10.0 %\n"
        "idle           20.00 s   10.0 %\n"
        "----------  ----------  -------\n"
        "wall time   3 min 20 s  100.0 %\n"
        "\n"
        "goodput        70.0 %\n"
        "restarts       1\n"
        "lost progress  5.00 s of steps were done again, in recovery\n",
        "",
    )


def test_json_is_the_reports_record(headway, run):
    result = headway("goodput", run / FILE_NAME, "--json")
    assert (result.code, result.err) == (0, "")
    record = json.loads(result.out)
    assert record == read_goodput(run).to_dict()
    assert record["schema_version"] == 1
    assert sum(record["seconds"].values()) == record["wall_s"] == 200.0
    assert record["seconds"]["data wait"] == 10.0
    assert (record["goodput"], record["lost_s"], record["restarts"]) == (0.7, 5.0, 1)


def test_a_warning_goes_to_stderr(headway, tmp_path):
    lines = [LINES[0], {**LINES[1], "wall_s": 500.0}, LINES[4]]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = headway("goodput", tmp_path / "other.jsonl", "--json")
    assert (result.code, json.loads(result.out)["seconds"]["idle"]) == (0, 0)
    assert result.err.startswith("Warning: the wall clock was 6 min 15 s further")


def test_a_folder_without_a_ledger_is_told(headway, tmp_path):
    result = headway("goodput", tmp_path)
    assert (result.code, result.out) == (2, "")
    assert "goodput.jsonl cannot be read: No such file or directory." in " ".join(result.err.split())
