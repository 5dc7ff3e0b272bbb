"""Exports of Nsight Systems written by hand, by the schema that NVIDIA documents."""

import sqlite3

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
