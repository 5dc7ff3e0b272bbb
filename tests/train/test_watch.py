"""A process that hangs ends, whatever the disk does; one that was only suspended goes on."""

import errno
import os
import sys
import threading
import time

import pytest

from headway.errors import RankLostError, TrainingError
from headway.train import watch
from headway.train.watch import LoopPhase, Watchdog, explain_errors


def hang(tmp_path, monkeypatch, path):
    """Let a watchdog find that nothing moves; the exit code that it ends the process with."""
    ended = threading.Event()
    codes, place = [], LoopPhase()

    def end(code):
        codes.append(code)
        place.at("the end", watched=False)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(watch, "_TELLING_S", 0.2)
    place.at("update", step=7)
    with Watchdog(place, 0.05, path, rank=3):
        assert ended.wait(60)
    return codes


def test_a_hung_process_leaves_its_traces_and_ends(tmp_path, monkeypatch, capsys):
    path = tmp_path / "hung.txt"
    assert hang(tmp_path, monkeypatch, path) == [watch.HUNG]
    assert "most recent call first" in path.read_text()
    said = capsys.readouterr().err
    assert "rank 3 has made no progress" in said
    assert "in step 7, update" in said
    assert f"are in {path}" in said


def test_a_hung_process_ends_although_its_folder_is_gone(tmp_path, monkeypatch, capsys):
    assert hang(tmp_path, monkeypatch, tmp_path / "gone" / "hung.txt") == [watch.HUNG]
    assert "could not be written" in capsys.readouterr().err


def test_a_hung_process_ends_although_the_disk_hangs_too(tmp_path, monkeypatch, capsys):
    path = tmp_path / "pipe"
    os.mkfifo(path)  # to open it waits for a reader, who never comes
    assert hang(tmp_path, monkeypatch, path) == [watch.HUNG]
    assert "could not be written" in capsys.readouterr().err


def test_a_hung_process_ends_although_nobody_takes_what_it_says(tmp_path, monkeypatch):
    class Full:
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    assert hang(tmp_path, monkeypatch, tmp_path / "hung.txt") == [watch.HUNG]


def test_time_in_which_the_process_was_suspended_is_not_counted(tmp_path, monkeypatch):
    """The clock leaps as it does for a process that was stopped; the watchdog looks on as before."""
    leap = [0.0]
    real = time.monotonic
    monkeypatch.setattr(watch.time, "monotonic", lambda: real() + leap[0])
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"ended with {code}"))
    place = LoopPhase()
    looks = []
    dog = Watchdog(place, 3600.0, tmp_path / "hung.txt", rank=0)
    wait = dog._over.wait

    def look(_):
        looks.append(1)
        leap[0] += 10_000.0 * (len(looks) == 2)
        return len(looks) > 4 or wait(0.001)

    monkeypatch.setattr(dog._over, "wait", look)
    with dog:
        dog._thread.join(60)
    assert len(looks) == 5


def test_what_may_take_long_is_not_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"ended with {code}"))
    place = LoopPhase()
    place.at("reading and measuring the data", watched=False)
    dog = Watchdog(place, 0.001, tmp_path / "hung.txt", rank=0)
    looks = []
    monkeypatch.setattr(dog._over, "wait", lambda _: looks.append(1) or time.sleep(0.002) or len(looks) > 5)
    with dog:
        dog._thread.join(60)
    assert not (tmp_path / "hung.txt").exists()


def test_a_full_disk_is_told_with_file_and_place():
    place = LoopPhase()
    place.at("opening the run folder", step=4)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a/run.json")
    with (
        pytest.raises(TrainingError, match=r"runs/a/run.json could not be .* in step 4, opening .*No space left.*Make"),
        explain_errors(place, str),
    ):
        raise full


def test_a_lost_connection_is_not_taken_for_a_disk():
    with pytest.raises(RankLostError), explain_errors(LoopPhase(), str):
        raise RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1")
    with pytest.raises(ConnectionResetError), explain_errors(LoopPhase(), str):
        raise ConnectionResetError(errno.ECONNRESET, "reset")


@pytest.mark.parametrize("error", [ValueError("boom"), RuntimeError("boom"), KeyError("boom")])
def test_an_error_that_nobody_foresaw_ends_with_the_rank_and_the_way_on(monkeypatch, error):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    phase = LoopPhase(step=7, name="backward")
    with pytest.raises(type(error)) as raised, explain_errors(phase, str), explain_errors(phase, str):
        raise error
    (note,) = raised.value.__notes__
    assert note.startswith("Error: rank 1 of 3 ended in step 7, backward by this error of its own, and the other ranks")
