import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headway.data import transfer
from headway.data.pool import Job, Pool, _Group, worker_context
from headway.errors import ConfigError, DataError


@dataclass(frozen=True)
class Square:
    """Squares a number, as a tensor and as it is; may note who did it, fail, or be killed on the way."""

    notes: Path | None = None
    kill_at: int | None = None
    always: bool = False

    def __call__(self, number):
        if number == self.kill_at:
            mark = self.notes / f"killed-{number}"
            if self.always or not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if number < 0:
            raise DataError(f"{number} is below 0")
        if self.notes is not None:
            (self.notes / f"{number}-{os.getpid()}").touch()
        return {"square": torch.tensor([number * number]), "threads": torch.get_num_threads(), "number": number}


def tasks(numbers, size_bytes=1):
    return (Job(number, size_bytes) for number in numbers)


@pytest.mark.parametrize("workers", [0, 2])
def test_results_come_in_order_and_each_once(workers):
    pool = Pool(Square(), workers=workers, prefetch_bytes=5)
    results = list(pool.run(tasks(range(30))))
    assert [int(result["square"]) for result in results] == [n * n for n in range(30)]
    assert {result["threads"] for result in results} == ({1} if workers else {torch.get_num_threads()})
    assert [int(result["square"]) for result in pool.run(tasks([4]))] == [16]
    pool.close()


@pytest.mark.parametrize(("prefetch_bytes", "ahead"), [(0, 1), (2, 1), (6, 3), (7, 3)])
def test_it_runs_ahead_by_bytes(prefetch_bytes, ahead):
    drawn = []

    def noted():
        for number in range(10):
            drawn.append(number)
            yield Job(number, 2)

    pool = Pool(Square(), workers=0, prefetch_bytes=prefetch_bytes)
    results = pool.run(noted())
    next(results)
    assert len(drawn) == ahead + 1  # one more task is known than could be begun
    pool.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_work_reaches_the_one_who_asks_and_in_its_turn(workers):
    pool = Pool(Square(), workers=workers, prefetch_bytes=9)
    results = pool.run(tasks([1, -2, 3]))
    assert next(results)["number"] == 1
    with pytest.raises(DataError, match="-2 is below 0"):
        next(results)
    pool.close()


def test_a_killed_worker_loses_and_repeats_nothing(tmp_path):
    pool = Pool(Square(tmp_path, kill_at=7), workers=2, prefetch_bytes=4)
    with pytest.warns(RuntimeWarning, match="killed"):
        numbers = [result["number"] for result in pool.run(tasks(range(20)))]
    assert numbers == list(range(20))
    assert pool.replaced == 1
    pool.close()


def test_jobs_of_one_key_are_done_by_one_process_and_only_that_one_is_replaced(tmp_path):
    pool = Pool(Square(tmp_path, kill_at=7), workers=2, prefetch_bytes=6, keyed=True)
    jobs = (Job(number, 1, key=number % 4) for number in range(20))
    with pytest.warns(RuntimeWarning, match="killed"):
        assert [result["number"] for result in pool.run(jobs)] == list(range(20))
    pool.close()
    done_by = {number: {note.name.split("-")[1] for note in tmp_path.glob(f"{number}-*")} for number in range(20)}
    even = set().union(*(done_by[number] for number in range(0, 20, 2)))
    odd = set().union(*(done_by[number] for number in range(1, 20, 2)))
    assert len(even) == 1
    assert len(odd) == 2
    assert not even & odd


def test_a_worker_that_is_always_killed_is_one_clear_error(tmp_path):
    pool = Pool(Square(tmp_path, kill_at=2, always=True), workers=2, prefetch_bytes=1)
    results = pool.run(tasks(range(5)))
    assert [next(results)["number"], next(results)["number"]] == [0, 1]
    with (
        pytest.raises(DataError, match="killed 3 times in a row while"),
        pytest.warns(RuntimeWarning),
    ):
        next(results)


def ignore_terminate(begun):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begun.touch()
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize("begins", ["list(pool.run([Job(i, 0) for i in range(3)]))", "index()"])
def test_a_script_that_begins_its_work_where_it_is_imported_is_told_so(tmp_path, begins):
    """Python's own word for it is in the documentation of multiprocessing: "Safe importing of main module"."""
    from helpers.processes import PYTHONPATH  # here, as scripts of these tests import this file alone
    from helpers.runs import write_model

    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 600)
    model = write_model(tmp_path / "model", "qwen3")
    script = tmp_path / "my_script.py"
    script.write_text(f"""
from math import sqrt
from headway.data import pool as module
from headway.data.pool import Job, Pool

module.PRELOAD = ("headway.data.pool",)  # no transformers, which these tasks do not need

def index():
    from headway.data.encoders import open_encoder
    from headway.data.index import build_index
    from headway.data.sources import open_source

    build_index(open_source({str(tmp_path / "rows.jsonl")!r}), open_encoder({str(model)!r}), workers=2)

pool = Pool(sqrt, workers=2, prefetch_bytes=2**20)
{begins}
""")
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "HEADWAY_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, script]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("headway.errors.ConfigError: The data workers ended with exit code 65 as they began."), last
    assert f"Each imports {script} first" in last
    assert 'if __name__ == "__main__":' in last


def test_what_is_left_of_a_group_that_lost_a_process_is_killed(tmp_path):
    """An executor waits for a process that began as it lost another; such a one is not asked to end."""
    executor = ProcessPoolExecutor(1, mp_context=worker_context())
    executor.submit(ignore_terminate, tmp_path / "begun")
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    executor._broken = "as where another one was killed"
    (process,) = executor._processes.values()
    _Group(executor, None).shut_down(wait=True)
    assert process.exitcode == -signal.SIGKILL


def test_a_task_that_kills_is_told_from_those_beside_it(tmp_path):
    pool = Pool(
        Square(tmp_path, kill_at=5, always=True),
        workers=3,
        prefetch_bytes=6,
        explain=lambda number, times: f"number {number} has killed {times}",
    )
    numbers = []
    with pytest.raises(DataError, match="number 5 has killed 3"), pytest.warns(RuntimeWarning, match="killed"):
        numbers.extend(result["number"] for result in pool.run(tasks(range(9))))
    assert numbers == [0, 1, 2, 3, 4][: len(numbers)]  # those beside it may not have been handed out when it is found


def test_closing_ends_the_processes(tmp_path):
    pool = Pool(Square(tmp_path), workers=2, prefetch_bytes=8)
    results = pool.run(tasks(range(100)))
    next(results)
    pool.close()
    workers = {int(note.name.split("-")[1]) for note in tmp_path.iterdir()}
    assert workers
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


_TRAINER = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from test_pool import Square, tasks
from headway.data import pool as module
from headway.data.pool import Pool

module.PRELOAD = ("headway.data.pool",)  # no transformers, which these tasks do not need

if __name__ == "__main__":
    pool = Pool(Square(Path({notes!r})), workers=2, prefetch_bytes=4)
    results = pool.run(tasks(range(10**9)))
    for _ in range(5):
        next(results)
    print("running", flush=True)
    {then}
"""


@contextmanager
def _running_trainer(notes, then):
    from helpers.processes import running  # here, as scripts of these tests import this file alone

    script = notes / "trainer.py"
    script.write_text(_TRAINER.format(folder=str(Path(__file__).parent), notes=str(notes), then=then))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running([sys.executable, script], text=True, **pipes) as trainer:
        assert trainer.stdout.readline() == "running\n"
        yield trainer


def _workers_gone(notes, within_s=120.0):
    workers = {int(note.name.split("-")[1]) for note in notes.glob("[0-9]*-*")}
    assert workers
    end = time.monotonic() + within_s
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    "end_by",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_workers_go_when_the_trainer_is_killed_or_interrupted(tmp_path, end_by):
    with _running_trainer(tmp_path, "import time; time.sleep(600)") as trainer:
        trainer.send_signal(end_by)
        trainer.communicate(timeout=120)
        assert _workers_gone(tmp_path)


_INTERRUPTED = """
import os, signal, sys, threading
sys.path.insert(0, {folder!r})
from test_pool import Square, tasks
from headway.data import pool as module
from headway.data.pool import Pool

module.PRELOAD = ("headway.data.pool",)  # no transformers, which these tasks do not need

def press(done):
    while not done.wait(0.01):  # from before the workers' server is started until they have done their work
        os.killpg(0, signal.SIGINT)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # as a training that ends after its step
    done = threading.Event()
    threading.Thread(target=press, args=[done], daemon=True).start()  # it ends where this fails, too
    pool = Pool(Square(), workers=2, prefetch_bytes=4)
    print([int(result["square"]) for result in pool.run(tasks(range(3)))])
    pool.close()
    done.set()
"""


@pytest.mark.slow
def test_ctrl_c_while_workers_start_neither_stops_them_nor_prints_anything(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(_INTERRUPTED.format(folder=str(Path(__file__).parent)))
    trainer = [sys.executable, str(script)]
    done = subprocess.run(trainer, check=False, capture_output=True, text=True, start_new_session=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[0, 1, 4]\n", 0)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_workers_go_when_the_trainer_fails(tmp_path):
    with _running_trainer(tmp_path, "raise RuntimeError('the trainer failed')") as trainer:
        _, said = trainer.communicate(timeout=120)
        assert "the trainer failed" in said
        assert _workers_gone(tmp_path)


def test_work_that_cannot_be_sent_is_told_at_once():
    with pytest.raises(ConfigError, match="cannot be sent to worker processes"):
        Pool(lambda number: number, workers=1, prefetch_bytes=0)


def test_numbers_below_zero_are_refused():
    with pytest.raises(ConfigError, match="workers=-1"):
        Pool(Square(), workers=-1, prefetch_bytes=0)


@pytest.fixture
def pinned(monkeypatch):
    """The blocks of page-locked memory that are made; ordinary memory here, where no device is."""
    blocks = []

    def new_block(num_bytes):
        blocks.append((torch.zeros(num_bytes, dtype=torch.uint8), threading.current_thread().name))
        return blocks[-1][0]

    monkeypatch.setattr(transfer, "pinned_block", new_block)
    return blocks


def lies_in(tensor, blocks):
    return any(tensor.untyped_storage().data_ptr() == block.untyped_storage().data_ptr() for block, _ in blocks)


@pytest.mark.parametrize("workers", [0, 2])
def test_results_are_pinned_ahead_and_by_another_thread(workers, pinned):
    pool = Pool(Square(), workers=workers, prefetch_bytes=5, pin_memory=True)
    results = pool.run(tasks(range(30)))
    squares = [int(next(results)["square"])]
    while len(pinned) < 5:  # those that wait to be asked for, too
        time.sleep(0.01)
    for result in results:
        assert lies_in(result["square"], pinned)
        squares.append(int(result["square"]))
    assert squares == [n * n for n in range(30)]
    assert len(pinned) == 30  # one block for all tensors of a result
    assert {name.rsplit("_")[0] for _, name in pinned} == {"headway-pin"}
    pool.close()
    assert not any(thread.name.startswith("headway-pin") for thread in threading.enumerate())


def test_a_killed_worker_loses_and_repeats_nothing_that_is_pinned(tmp_path, pinned):
    pool = Pool(Square(tmp_path, kill_at=7), workers=2, prefetch_bytes=4, pin_memory=True)
    with pytest.warns(RuntimeWarning, match="killed"):
        results = list(pool.run(tasks(range(20))))
    assert [result["number"] for result in results] == list(range(20))
    assert all(lies_in(result["square"], pinned) for result in results)
    pool.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_comes_in_its_turn_and_closing_ends_what_is_pinned_ahead(workers, pinned):
    pool = Pool(Square(), workers=workers, prefetch_bytes=9, pin_memory=True)
    results = pool.run(tasks([1, -2, 3]))
    assert next(results)["number"] == 1
    with pytest.raises(DataError, match="-2 is below 0"):
        next(results)
    pool.close()
    assert not any(thread.name.startswith("headway-pin") for thread in threading.enumerate())
    assert [result["number"] for result in pool.run(tasks([4]))] == [4]
    pool.close()
