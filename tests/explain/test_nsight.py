"""Exports of Nsight Systems by the schema that NVIDIA documents, with the columns that every version has."""

import sqlite3

import pytest

from headway.errors import ConfigError
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, nsight_export


@pytest.mark.parametrize("step_name", ["iteration {}", "step_{}", "ProfilerStep#{}", "Train Iter: {}"])
def test_an_export_is_explained_like_a_trace(tmp_path, step_name):
    path = tmp_path / "report.sqlite"
    database = nsight_export(path, step_name=step_name)
    # Another process with numbers of its own, and fewer kernels.
    database.execute(
        f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({10**15}, {10**15 + 50 * US}, 1, 1, 7, 1, {78 * 2**24}, 0, 0)"
    )
    database.commit()
    explanation = explain([read_trace(path)])
    (step,) = explanation.steps  # the first and the last are left out
    assert (step.step, step.duration_ns, step.device_name) == (8, 100 * US, "NVIDIA H200")
    lines = {line.key: line.ns / US for line in step.lines if line.ns}
    assert lines == {"matmul": 30, "unexplained": 20, "copies": 10, "idle.launch": 40}
    assert any("holds 2 processes with kernels" in note for note in explanation.notes)


def test_an_export_without_named_steps_is_taken_whole(tmp_path):
    path = tmp_path / "report.sqlite"
    nsight_export(path, step_name="forward pass {}").commit()
    explanation = explain([read_trace(path)])
    assert [step.duration_ns for step in explanation.steps] == [260 * US]
    assert any(note.startswith("the trace has no steps") for note in explanation.notes)


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ("CREATE TABLE t (a INT)", "without kernels of Nsight Systems"),
        # A view that would never end.
        (
            "CREATE TABLE StringIds (id INT, value TEXT); CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE "
            "n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT start, start AS end FROM n",
            "without kernels of Nsight Systems",
        ),
        ("CREATE TABLE StringIds (id INT); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT)", "cannot be read as"),
    ],
)
def test_another_database_is_refused_by_what_it_lacks(tmp_path, statements, message):
    path = tmp_path / "other.sqlite"
    sqlite3.connect(path).executescript(statements)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_damaged_database_is_refused(tmp_path):
    path = tmp_path / "report.sqlite"
    path.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    with pytest.raises(ConfigError, match="cannot be read as an export of Nsight Systems"):
        read_trace(path)
