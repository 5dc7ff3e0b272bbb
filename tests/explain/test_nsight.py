"""Exports of Nsight Systems by the schema that NVIDIA documents, with the columns that every version has."""

import sqlite3

import pytest

from headway.errors import ConfigError
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain

US = 1000
PID = 77 * 2**24  # of process 77
SCHEMA = """
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
NAMES = [
    "void cutlass::Kernel<gemm>(Params)",
    "adds",
    "cudaLaunchKernel_v7000",
    "cudaMemcpyAsync_v3020",
    "aten::mm, seq = 4",
]


def export(path, *, num_steps=3, step_name="iteration {}"):
    """Steps of 100 us: 40 us of nothing but Python, a copy of 10 us, a product of 30 us and an addition of 20 us."""
    database = sqlite3.connect(path)
    database.executescript(SCHEMA)
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(NAMES))
    database.execute("INSERT INTO TARGET_INFO_GPU VALUES ('NVIDIA H200', 0)")
    thread = PID + 5

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
        copy = (begin + 40 * US, begin + 50 * US, 0, 1, 7, number, PID, 4096, 1)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", copy)
        for start, end, more, name in ((50, 80, 1, 0), (80, 100, 2, 1)):
            kernel = (begin + start * US, begin + end * US, 0, 1, 7, number + more, PID, name, name)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", kernel)
    return database


@pytest.mark.parametrize("step_name", ["iteration {}", "step_{}", "ProfilerStep#{}", "Train Iter: {}"])
def test_an_export_is_explained_like_a_trace(tmp_path, step_name):
    path = tmp_path / "report.sqlite"
    database = export(path, step_name=step_name)
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
    export(path, step_name="forward pass {}").commit()
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
