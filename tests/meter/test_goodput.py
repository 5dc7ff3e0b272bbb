import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.errors import ConfigError, LogError, UsageError
from headway.log.jsonl import LineFile, read_jsonl
from headway.meter.goodput import Goodput
from headway.meter.goodput_report import BUCKETS, account, read_goodput
from helpers.processes import running

PROCESS = Path(__file__).parent / "goodput_process.py"
NEVER_S = 1e6  # a heartbeat that a test does not wait for


class Clock:
    """Both clocks of a machine, moved by a test; a restart does not reset them."""

    def __init__(self):
        self.now_s = 1000.0

    def ledger(self, path, **options):
        options = {"heartbeat_s": NEVER_S, "clock": self.monotonic_ns, "wall_clock": lambda: self.now_s, **options}
        return Goodput(path, **options)

    def monotonic_ns(self):
        return round(self.now_s * 1e9)

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "goodput.jsonl"


def spent(report):
    """Buckets that are not empty [s]."""
    return {bucket: seconds for bucket, seconds in report.seconds.items() if seconds}


def kill(ledger):
    """End a ledger as SIGKILL does: nothing more is written, and the system lets go of the file."""
    ledger._stop.set()
    ledger._thread.join()
    ledger._leave_to_parent()


# Within one process


def test_every_second_is_in_the_bucket_of_its_time(clock, path):
    with clock.ledger(path) as ledger:
        clock.sleep(1)
        ledger.switch("compile")
        clock.sleep(2)
        for _ in range(3):
            ledger.switch("data wait")
            clock.sleep(0.5)
            ledger.switch("step")
            clock.sleep(4)
        with ledger.bucket("evaluation"):
            clock.sleep(8)
        clock.sleep(0.25)  # back in step
        report = ledger.report()
    assert spent(report) == {"set-up": 1, "compile": 2, "data wait": 1.5, "step": 12.25, "evaluation": 8}
    assert list(report.seconds) == list(BUCKETS)
    assert report.wall_s == 24.75
    assert report.goodput == pytest.approx(12.25 / 24.75)
    assert (report.restarts, report.lost_ns, report.warnings) == (0, 0, ())
    assert read_goodput(path) == report  # closing added no time


def test_an_inner_block_wins_and_the_outer_goes_on_also_after_an_exception(clock, path):
    def evaluate_and_fail():
        with ledger.bucket("evaluation"):
            clock.sleep(1)
            with ledger.bucket("data wait"):
                clock.sleep(2)
            clock.sleep(4)
            ledger.switch("checkpoint")  # lasts until the block's end
            clock.sleep(8)
            raise KeyError

    with clock.ledger(path) as ledger:
        ledger.switch("step")
        with pytest.raises(KeyError):
            evaluate_and_fail()
        clock.sleep(16)
        assert spent(ledger.report()) == {"evaluation": 5, "data wait": 2, "checkpoint": 8, "step": 16}


def test_switching_writes_nothing_until_the_heartbeat(clock, path):
    with clock.ledger(path) as ledger:
        size = path.stat().st_size
        for _ in range(100):
            with ledger.bucket("evaluation"):
                clock.sleep(1)
        assert path.stat().st_size == size


def test_the_heartbeat_writes_while_nothing_is_switched(path):
    with Goodput(path, heartbeat_s=0.02) as ledger:
        ledger.switch("evaluation")
        deadline_s = time.monotonic() + 30
        while read_goodput(path).seconds["evaluation"] < 0.1 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert read_goodput(path).seconds["evaluation"] >= 0.1


def test_a_monotonic_clock_that_steps_back_gives_no_negative_span(path):
    readings = iter([10, 12, 5, 7])  # start, first line, set-up ends, report
    ledger = Goodput(path, heartbeat_s=NEVER_S, clock=lambda: next(readings) * 10**9, wall_clock=lambda: 0.0)
    ledger.switch("step")
    assert spent(ledger.report()) == {"set-up": 2, "step": 2}
    kill(ledger)


@pytest.mark.parametrize(
    "use", [lambda ledger: ledger.switch("training"), lambda ledger: ledger.bucket("x").__enter__()]
)
def test_a_bucket_that_does_not_exist_is_refused_with_those_that_do(clock, path, use):
    with (
        clock.ledger(path) as ledger,
        pytest.raises(UsageError, match="the buckets are set-up, compile, data wait, step"),
    ):
        use(ledger)


@pytest.mark.parametrize(
    "use",
    [
        lambda ledger: ledger.switch("step"),
        lambda ledger: ledger.checkpoint_saved(1),
        lambda ledger: ledger.resumed(1),
        lambda ledger: ledger.failed(OSError()),
    ],
)
def test_a_closed_ledger_takes_nothing(clock, path, use):
    ledger = clock.ledger(path)
    ledger.close()
    ledger.close()
    with pytest.raises(UsageError, match="is closed"):
        use(ledger)
    assert ledger.report().wall_s == 0


class WordlessError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (OSError("disk full"), "OSError: disk full"),
        (WordlessError(), "WordlessError: <exception str() failed>"),
        (UsageError("no such file"), "Error: no such file"),
        (KeyboardInterrupt(), ""),
    ],
)
def test_an_error_that_ends_a_block_ends_the_run_until_it_goes_on(clock, path, error, failure):
    with pytest.raises(type(error)), clock.ledger(path):
        raise error
    report = clock.ledger(path).report()
    assert (report.restarts, report.failure) == (1, "")
    lines = [line for line in read_jsonl(path) if line["kind"] != "spans"]
    assert account(lines[:-1], "ledger").failure == failure
    assert ("ended by" in account(lines[:-1], "ledger").as_table()) == bool(failure)


@pytest.mark.parametrize("heartbeat_s", [0, -1, float("nan")])
def test_a_heartbeat_needs_a_duration(path, heartbeat_s):
    with pytest.raises(UsageError, match="is not a duration"):
        Goodput(path, heartbeat_s=heartbeat_s)


# Across processes, told by hand


def test_time_between_processes_is_idle_and_lost_steps_are_recovery(clock, path):
    first = clock.ledger(path)
    clock.sleep(1)
    first.switch("step")
    clock.sleep(10)
    with first.bucket("checkpoint"):
        clock.sleep(2)
    first.checkpoint_saved(5)
    clock.sleep(3)  # two steps after the checkpoint
    first.report()  # writes, as a heartbeat does
    clock.sleep(0.5)  # and half a second that no heartbeat saw
    kill(first)
    clock.sleep(20)
    second = clock.ledger(path)
    clock.sleep(4)
    second.switch("set-up")
    clock.sleep(0.25)
    second.resumed(5)
    second.switch("step")
    clock.sleep(7)
    report = second.report()
    second.close()
    # recovery: 4.25 s until training went on, 3 s of steps done again
    assert spent(report) == {"set-up": 1, "step": 17, "checkpoint": 2, "recovery": 7.25, "idle": 20.5}
    assert report.lost_ns == 3 * 10**9
    assert report.restarts == 1
    assert report.wall_s == clock.now_s - 1000.0


def events(*items):
    """Lines of a ledger from ("step", seconds), ("checkpoint", step), ("resumed", step) and "start"."""
    lines, wall_s = [], 0.0
    for item in items:
        if item == "start":
            lines.append({"kind": "start", "schema_version": 1, "wall_s": wall_s})
        elif item[0] == "step":
            wall_s += item[1]
            lines.append({"kind": "spans", "wall_s": wall_s, "ns": {"step": item[1] * 10**9}})
        else:
            lines.append({"kind": item[0], "step": item[1]})
    return lines


@pytest.mark.parametrize(
    ("lines", "step_s", "lost_s"),
    [
        # Without a checkpoint all is lost.
        (events("start", ("step", 5), "start", ("resumed", 0), ("step", 7)), 7, 5),
        # Killed twice after the same checkpoint: both attempts are lost, each once.
        (
            events(
                *("start", ("step", 10), ("checkpoint", 4), ("step", 1)),
                *("start", ("resumed", 4), ("step", 2)),
                *("start", ("resumed", 4), ("step", 3)),
            ),
            13,
            3,
        ),
        # Back to the checkpoint before the last: what was between them is lost as well.
        (
            events(
                *("start", ("step", 10), ("checkpoint", 4), ("step", 20), ("checkpoint", 8), ("step", 1)),
                *("start", ("resumed", 4), ("step", 5), ("checkpoint", 6), ("step", 2)),
                *("start", ("resumed", 6)),
            ),
            15,
            23,
        ),
        # Stopped in order, right after its checkpoint: nothing is lost.
        (events("start", ("step", 10), ("checkpoint", 4), "start", ("resumed", 4), ("step", 2)), 12, 0),
        # The ledger is new, the run is not: nothing before it is known.
        (events("start", ("resumed", 100), ("step", 2)), 2, 0),
    ],
)
def test_lost_progress(lines, step_s, lost_s):
    report = account(lines, "ledger")
    assert report.seconds["step"] == step_s
    assert report.seconds["recovery"] == report.lost_ns / 1e9 == lost_s
    assert report.warnings == ()


def test_a_checkpoint_that_nobody_noted_is_warned_about():
    lines = events("start", ("step", 10), ("checkpoint", 4), ("step", 3), "start", ("resumed", 6))
    report = account(lines, "ledger")
    assert report.seconds["recovery"] == 3
    (warning,) = report.warnings
    assert "went on from step 6, of which the ledger knows no checkpoint; all steps since that of step 4" in warning


def test_a_wall_clock_that_steps_back_between_processes_is_clamped_with_a_warning(clock, path):
    with clock.ledger(path):
        clock.sleep(10)
    clock.now_s -= 3600
    with clock.ledger(path) as second:
        clock.sleep(5)
        report = second.report()
    assert spent(report) == {"set-up": 10, "recovery": 5}
    (warning,) = report.warnings
    assert "was 1 h 0 min further when one process ended than when the next began" in warning


def test_a_wall_clock_that_steps_back_within_a_process_changes_nothing():
    start = {"kind": "start", "schema_version": 1}
    report = account(
        [
            {**start, "wall_s": 5000.0},
            {"kind": "spans", "wall_s": 1401.0, "ns": {"step": 10**9}},  # set back by an hour
            {**start, "wall_s": 1403.0},
        ],
        "ledger",
    )
    assert spent(report) == {"step": 1, "idle": 2}
    assert report.warnings == ()


def test_a_torn_last_line_costs_no_more_than_its_own_time(clock, path):
    first = clock.ledger(path)
    first.switch("step")
    clock.sleep(6)
    first.report()
    kill(first)
    clock.sleep(2)
    with path.open("ab") as file:
        file.write(b'{"kind": "spans", "wall_s": 1008.0, "ns": {"st')
    assert spent(read_goodput(path)) == {"step": 6}
    with clock.ledger(path) as second:
        clock.sleep(1)
        assert spent(second.report()) == {"step": 6, "idle": 2, "recovery": 1}


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "spans", "wall_s": 1.0, "ns": {"coffee": 1}},
        {"kind": "spans", "wall_s": 1.0, "ns": {"step": -1}},
        {"kind": "spans", "wall_s": 1.0},
        {"kind": "spans", "wall_s": "soon", "ns": {}},
        {"kind": "lunch"},
        {"step": 1, "mfu": 0.4},
    ],
)
def test_a_line_of_something_else_is_named(tmp_path, damage):
    path = tmp_path / "goodput.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*events("start"), damage]))
    with pytest.raises(LogError, match="line 2 is not a line of a goodput ledger"):
        read_goodput(path)


def test_a_ledger_of_a_later_version_is_refused():
    with pytest.raises(LogError, match="is of version 2; this Headway reads version 1"):
        account([{"kind": "start", "schema_version": 2, "wall_s": 0.0}], "ledger")


def test_an_empty_file_is_no_ledger(path):
    path.touch()
    with pytest.raises(LogError, match="holds no line"):
        read_goodput(path)


# Where the file cannot be had


def test_a_second_process_on_the_same_file_is_an_error(path):
    code = "import sys; from headway.meter.goodput import Goodput; Goodput(sys.argv[1])"
    with Goodput(path):
        other = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
        assert "is open for writing already, in another process" in other.stderr
        with pytest.raises(ConfigError, match="or in another part of this one"):  # nor a second ledger of this one
            Goodput(path)
    Goodput(path).close()


def test_a_full_disk_costs_nothing_once_there_is_room_again(clock, path, monkeypatch):
    ledger = clock.ledger(path)
    ledger.switch("step")
    append = LineFile.append

    def fail(self, record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LineFile, "append", fail)
    clock.sleep(3)
    with pytest.warns(RuntimeWarning, match="cannot be written: No space left on device. Its lines are kept"):
        ledger.checkpoint_saved(1)
    clock.sleep(4)
    assert spent(ledger.report()) == {"step": 7}  # without a second warning
    monkeypatch.setattr(LineFile, "append", append)
    clock.sleep(1)
    ledger.close()
    kinds = [line["kind"] for line in read_jsonl(path)]
    assert kinds == ["start", "spans", "spans", "checkpoint", "spans"]
    assert spent(read_goodput(path)) == {"step": 8}


def test_a_forked_child_leaves_the_ledger_to_its_parent(path):
    def child(ledger, queue):
        try:
            ledger.switch("step")
        except UsageError as error:
            queue.put(str(error))
        ledger.close()

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with Goodput(path, heartbeat_s=NEVER_S) as ledger:
        process = context.Process(target=child, args=(ledger, queue))
        process.start()
        assert "belongs to the process that forked this one" in queue.get(timeout=120)
        process.join()
        with pytest.raises(ConfigError):  # the child's end has not let go of the parent's lock
            Goodput(path)
        ledger.switch("step")


def test_a_ledger_that_nobody_closes_is_written_when_the_interpreter_ends(path):
    code = "import sys, time; from headway.meter.goodput import Goodput; Goodput(sys.argv[1]); time.sleep(0.2)"
    subprocess.run([sys.executable, "-c", code, path], check=True)
    assert read_goodput(path).seconds["set-up"] >= 0.2


# Real processes


def step_ns_since_checkpoint(path):
    """Step time of the lines after the last checkpoint or start [ns]."""
    lines = read_jsonl(path)
    last = max(number for number, line in enumerate(lines) if line["kind"] in ("start", "checkpoint"))
    return sum(line["ns"].get("step", 0) for line in lines[last:] if line["kind"] == "spans")


def run(path, resume_from, num_steps, *, kill=False):
    """Run a process to its end, or until it hangs in a step and its ledger has 0.2 s of that, and then SIGKILL it.

    Returns:
        Its clock readings, and the step time in the ledger that its last checkpoint does not cover [ns].
    """
    command = [sys.executable, PROCESS, path, str(resume_from), str(num_steps), "-4" if kill else "4"]
    said = {}
    with running(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            word, value = line.split()
            said[word] = float(value)
            if kill and said.get("step") == num_steps:
                while process.poll() is None and step_ns_since_checkpoint(path) < 0.28e9:
                    time.sleep(0.01)
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
    assert process.returncode == (-signal.SIGKILL if kill else 0)
    return said, step_ns_since_checkpoint(path)


def test_buckets_sum_to_wall_time_over_a_run_killed_and_restarted_twice(path):
    first, first_lost_ns = run(path, 0, 6, kill=True)
    time.sleep(0.3)
    second, second_lost_ns = run(path, 4, 11, kill=True)
    third, _ = run(path, 8, 12)
    report = read_goodput(path)
    # One monotonic clock serves all processes (Linux, macOS). The ledger's time begins and ends within the calls that
    # open and close it, which take milliseconds on a busy machine.
    at_least_s, at_most_s = third["closing"] - first["open"], third["closed"] - first["opening"]
    assert at_least_s * 0.999 <= sum(report.seconds.values()) <= at_most_s * 1.001
    assert (report.restarts, report.warnings) == (2, ())
    assert "closing" not in {*first, *second}
    assert report.lost_ns == first_lost_ns + second_lost_ns
    # Steps 1 to 12 count once, of at least 40 ms each; three checkpoints of 50; two restarts of 100.
    assert report.seconds["step"] >= 12 * 0.04
    assert report.seconds["checkpoint"] >= 3 * 0.05
    assert report.seconds["recovery"] >= 2 * 0.1 + 2 * 0.28
    assert report.seconds["idle"] >= 0.3
