"""A run folder has one owner, from before the first write, and its configuration is there whole or as it was."""

import errno
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headway.checkpoint import saver
from headway.config import parse_config
from headway.errors import ConfigError
from headway.log.jsonl import LineFile, lock
from headway.log.run_files import METRICS, RUN
from headway.train import loop
from headway.train import run as run_module
from headway.train.run_folder import LOCK, RunFolder
from helpers.cases import a_full_disk
from helpers.processes import running


def begin(config):
    """A folder in which a run has taken its first step."""
    with RunFolder(config.run.folder) as folder:
        assert not folder.open(config, resume=None)
        (folder.path / METRICS).write_text('{"kind": "step", "step": 1}\n')


def go_on(config):
    """Take the folder of an interrupted run, and let go of it."""
    with RunFolder(config.run.folder) as folder:
        return folder.open(config, resume=True)


def contents(folder):
    """All that is in a folder, but for the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


def test_the_second_of_two_processes_is_refused_before_it_changes_anything(config):
    begin(config)
    unfinished = config.run.folder / "checkpoints/.step-000008.writing"  # of the first one, in flight
    with RunFolder(config.run.folder) as first:
        assert first.open(config, resume=True)
        unfinished.mkdir()
        before = contents(config.run.folder)
        with pytest.raises(ConfigError, match=r"belongs to a process that is still running \(process \d+ on .+\)"):
            run_module.train(config, resume=None)
        assert contents(config.run.folder) == before
        assert unfinished.is_dir()
    assert go_on(config), "its owner has closed it"


def test_a_killed_owner_leaves_the_folder_free(config):
    begin(config)
    program = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), 2); print(1, flush=True); input()"
    command = [sys.executable, "-c", program, config.run.folder / LOCK]
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.read(1) == b"1"
        with pytest.raises(ConfigError, match="still running"):
            go_on(config)
    assert go_on(config)


def test_a_file_system_without_locks_is_a_warning_and_no_obstacle(config, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(
        RuntimeWarning, match=r"without locks \(No locks available\), so Headway would not notice a second process"
    ):
        begin(config)
    with pytest.warns(RuntimeWarning, match="goodput.jsonl lies on a file system without locks") as warned:
        LineFile(config.run.folder / "goodput.jsonl", exclusive=True).close()
    assert warned[0].filename == __file__  # who opens it, not how


def test_a_folder_without_a_run_is_not_made_for_one_that_is_to_go_on(config):
    with pytest.raises(ConfigError, match="there is no run to resume"):
        go_on(config)
    assert not config.run.folder.exists()


def test_a_refused_write_at_resume_leaves_the_configuration_as_it_was(config):
    begin(config)
    before = contents(config.run.folder)
    with a_full_disk(0), pytest.raises(ConfigError, match=r"cannot be written: File too large\. Make room"):
        go_on(config)
    assert contents(config.run.folder) == before
    assert go_on(config)


@pytest.mark.parametrize("damaged", [None, "", "\0\0", "model: [1", "[" * 5000, f"run: {'9' * 5000}"])
def test_a_lost_configuration_says_how_to_put_it_back(config, damaged):
    begin(config)
    path = config.run.folder / "config.yaml"
    whole = path.read_text()
    path.unlink()
    if damaged is not None:
        path.write_text(damaged)
    with pytest.raises(ConfigError, match=r"config.yaml is missing or damaged.*cp CONFIG .*config.yaml"):
        go_on(config)
    path.write_text(whole)
    assert go_on(config)


def test_a_full_disk_at_the_start_is_one_paragraph(config, monkeypatch):
    """Whichever file of the set-up it meets."""

    def full(path, _content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("headway.train.prepare.write_json", full)
    with pytest.raises(loop.TrainingError, match=r"run.json could not be .*No space left on device\. Make room"):
        run_module.train(config)
    assert not Path(config.run.folder / METRICS).exists()


def test_the_folder_is_owned_until_the_checkpoint_of_an_interrupted_run_is_written(raw, monkeypatch):
    """As in a notebook, where the process goes on: neither another process nor the next run meets a half-done one."""
    config = parse_config(raw | {"checkpoint": {"every": 1}})
    may_go_on, publish, rate = threading.Event(), saver.publish, loop.learning_rate

    def publish_late(*paths):
        may_go_on.wait(60)
        publish(*paths)

    def killed_at_the_second_step(step, *settings):
        if step == 2:
            raise KeyboardInterrupt
        return rate(step, *settings)

    monkeypatch.setattr(saver, "publish", publish_late)
    monkeypatch.setattr(loop, "learning_rate", killed_at_the_second_step)
    with pytest.raises(KeyboardInterrupt):
        run_module.train(config)
    monkeypatch.setattr(loop, "learning_rate", rate)

    path = config.run.folder
    with pytest.raises(BlockingIOError), (path / LOCK).open("ab") as file:  # as another process would try
        lock(file, path)
    threading.Timer(0.5, may_go_on.set).start()
    run_module.train(config, resume=True)
    assert json.loads((path / RUN).read_text())["resumed_from"].endswith("step-000001")
    with (path / LOCK).open("ab") as file:
        lock(file, path)
