"""What ends a run by an error of its own leaves the last complete step; what only observes it ends nothing."""

import json
import signal
import sys

import pytest
import yaml

from headway.checkpoint import latest_checkpoint
from headway.config import parse_config
from headway.errors import DataError, HeadwayError, NotFiniteError, OutOfMemoryError
from headway.log import sinks
from headway.log.sink import Sink
from headway.meter import step_meter
from headway.meter.goodput_report import read_goodput
from headway.meter.profile import ProfiledSteps
from headway.train import loop, recorder
from headway.train import run as run_module
from headway.train.record import MetricsLog
from headway.train.run import train
from helpers.processes import run_processes
from helpers.runs import read_metrics

BAD_STEP = 4


def steps_of(config):
    records = read_metrics(config.run.folder / "metrics.jsonl")
    return [(r["step"], r["loss"], r["grad_norm"], r["samples_digest"]) for r in records if r["kind"] == "step"]


def fail_at(monkeypatch, owner, name, error, number):
    """Let a call of a function fail: the one of this number."""
    plain, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            raise error
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.fixture
def whole(raw, tmp_path):
    raw["run"]["folder"] = str(tmp_path / "whole")
    config = parse_config(raw)
    train(config)
    raw["run"]["folder"] = str(tmp_path / "run")
    return steps_of(config)


FAILURES = {
    "data": ("_next_packs", DataError("row 7 is gone"), DataError),
    "memory in the forward": ("transfer_ahead", MemoryError("no room"), OutOfMemoryError),
    "gradients": ("reduce_gradients", RuntimeError("a kernel failed"), RuntimeError),
    "schedule": ("learning_rate", ZeroDivisionError("steps"), ZeroDivisionError),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_between_two_updates_leaves_the_last_complete_step(raw, whole, monkeypatch, capfd, failure):
    name, error, kind = FAILURES[failure]
    config = parse_config(raw)
    with monkeypatch.context() as patched:
        if name == "_next_packs":
            plain, asked = loop._next_packs, []
            patched.setattr(
                loop, name, lambda steps: ([], error) if asked.append(1) or len(asked) == BAD_STEP else plain(steps)
            )
        else:
            fail_at(patched, loop, name, error, BAD_STEP)
        with pytest.raises(kind):
            train(config)
    assert latest_checkpoint(config.run.folder / "checkpoints").step == BAD_STEP - 1
    assert "step 3, the last complete one, is saved in" in capfd.readouterr().err
    assert train(config, resume=True).is_complete
    assert steps_of(config) == whole, "the continuation is to repeat the run that nobody interrupted"
    assert read_goodput(config.run.folder).warnings == ()


def test_an_error_of_an_evaluation_leaves_the_step_before_it(raw, digits, monkeypatch):
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"every": BAD_STEP}
    config = parse_config(raw)
    fail_at(monkeypatch, loop, "_judge", ValueError("no such answer"), 1)
    with pytest.raises(ValueError, match="no such answer"):
        train(config)
    assert latest_checkpoint(config.run.folder / "checkpoints").step == BAD_STEP


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(loop, "take_step", RuntimeError("amid the update")), (loop, "exchange_step", KeyboardInterrupt())],
)
def test_weights_of_no_step_are_not_saved_nor_is_anything_after_a_second_interrupt(
    raw, monkeypatch, owner, name, error
):
    config = parse_config(raw)
    fail_at(monkeypatch, owner, name, error, BAD_STEP)
    with pytest.raises(type(error)):
        train(config)
    assert latest_checkpoint(config.run.folder / "checkpoints") is None


def test_numbers_that_are_not_finite_are_not_saved_by_another_error_either(raw, monkeypatch, capfd):
    config = parse_config(raw)
    write = recorder.StepRecorder._write

    def diverged(self, window, pending, copy):
        if window.step == BAD_STEP - 1:
            raise NotFiniteError("step 3 has loss nan")
        write(self, window, pending, copy)

    monkeypatch.setattr(recorder.StepRecorder, "_write", diverged)
    fail_at(monkeypatch, loop, "transfer_ahead", RuntimeError("a kernel failed"), BAD_STEP)
    with pytest.raises(HeadwayError, match="step 3 has loss nan"):
        train(config)
    assert latest_checkpoint(config.run.folder / "checkpoints") is None


class BrokenSink(Sink):
    def write(self, record):  # noqa: ARG002 - as sinks have it
        raise LookupError("the service is down")

    def close(self):
        raise LookupError("still down")


OBSERVERS = {
    "tracker": (sinks, "open_sink", lambda *_, **__: BrokenSink(), None),
    "profile": (ProfiledSteps, "_close", lambda *_: 1 / 0, "The profile"),
    "memory": (step_meter, "largest_memory", lambda _: 1 / 0, "The peak of this rank's memory"),
    "record": (recorder.StepRecorder, "_record", lambda *_, **__: 1 / 0, "Records of steps"),
    "bill": (
        run_module,
        "billed_by_conventions",
        lambda *_, **__: 1 / 0,
        "The bill of the last step by other tools' rules",
    ),
    "summary": (run_module, "write_json", lambda *_: 1 / 0, "The summary in the run folder"),
    "disk": (MetricsLog, "_flush", lambda *_: 1 / 0, "Records in"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("observer", OBSERVERS)
def test_an_observer_that_fails_ends_no_run_and_the_summary_tells(raw, monkeypatch, observer):
    owner, name, broken, lost = OBSERVERS[observer]
    raw["run"] |= {"trackers": ["jsonl:unused.jsonl"] if observer == "tracker" else []}
    raw["run"] |= {"profile": {"start": 2, "steps": 1}} if observer == "profile" else {}
    config = parse_config(raw)
    monkeypatch.setattr(owner, name, broken)
    summary = train(config)
    assert summary.is_complete
    assert latest_checkpoint(config.run.folder / "checkpoints").step == 6
    told = " ".join(summary.to_dict()["not_recorded"])
    assert (lost or "") in told
    assert summary.missing_records == (6 if observer == "disk" else 0)
    assert ("not recorded" in summary.as_table()) == (lost is not None)


@pytest.mark.parametrize("damage", ["cut", "gone", "other bytes", "no manifest", "no JSON", "a link"])
def test_a_run_that_restarts_by_itself_goes_on_from_the_newest_sound_checkpoint(raw, whole, capfd, damage):
    raw["checkpoint"] = {"every": 2}
    raw["optim"]["steps"] = BAD_STEP
    config = parse_config(raw)
    train(config)
    newest = config.run.folder / "checkpoints/step-000004"
    weights, manifest = newest / "__0_0.distcp", newest / "manifest.json"
    content = weights.read_bytes()
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "no JSON":
        manifest.write_text("{")
    elif damage == "a link":
        (newest / "link").symlink_to("/etc/hostname")
    else:
        weights.unlink()
        if damage != "gone":
            weights.write_bytes(content[:-9] if damage == "cut" else content[:-9] + b"otherwise")
    raw["optim"]["steps"] = 6
    config = parse_config(raw)
    with pytest.raises(HeadwayError, match="step-000002"):
        train(config, resume=True)
    summary = train(config, resume=None)
    assert summary.is_complete
    assert "Headway sets the checkpoint aside and repeats the steps since." in capfd.readouterr().err
    (resumed,) = map(json.loads, (config.run.folder / "resumes.jsonl").read_text().splitlines())
    assert (resumed["step"], [lost["step"] for lost in resumed["lost"]]) == (2, [3, 4])
    assert "step-000004" in resumed["damaged"][0]
    assert [step for step, *_ in steps_of(config)] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (config.run.folder / "checkpoints").iterdir()) == [
        "damaged-step-000004",
        "step-000004",
        "step-000006",
    ]
    report = read_goodput(config.run.folder)
    assert (report.warnings, report.lost_ns > 0) == ((), True)


def test_the_hidden_folder_of_a_killed_export_goes_with_the_next_run(raw):
    raw["optim"]["steps"] = 2
    train(parse_config(raw))
    raw["optim"]["steps"] = 3
    config = parse_config(raw)
    for part in ("checkpoints", "export"):
        (config.run.folder / part / ".step-000009.writing").mkdir()
    train(config, resume=True)
    assert not list(config.run.folder.glob("*/.step-*"))


KILLED_AFTER_PUBLISHING = """
import os, signal
from headway.cli.app import main
from headway.checkpoint import saver
publish = saver.publish
def publish_and_die(temporary, folder, *rest):
    publish(temporary, folder, *rest)
    if folder.name == "step-000004":
        os.kill(os.getpid(), signal.SIGKILL)
saver.publish = publish_and_die
main()
"""


def test_a_kill_right_after_a_checkpoint_is_whole_loses_none_of_its_steps(raw, tmp_path):
    raw["checkpoint"] = {"every": 2, "asynchronous": False}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    (killed,) = run_processes([sys.executable, "-c", KILLED_AFTER_PUBLISHING, "train", path], 1, check=False)
    assert killed.returncode == -signal.SIGKILL
    config = parse_config(raw)
    assert train(config, resume=True).is_complete
    report = read_goodput(config.run.folder)
    assert (report.restarts, report.lost_ns, report.warnings) == (1, 0, ())


FAILING_ALONE = """
import os, sys
from headway.cli.app import main
from headway.errors import DataError
from headway.train import loop
from headway.train import run as run_module
where, at, calls = sys.argv.pop(1), int(sys.argv.pop(1)), []
plain = getattr(loop, where)
def failing(*args, **kwargs):
    calls.append(1)
    if len(calls) == at and os.environ["RANK"] == "1":
        if where == "_next_packs":
            return [], DataError("row 7 is gone")
        raise ValueError("a kernel failed")
    return plain(*args, **kwargs)
setattr(loop, where, failing)
main()
"""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("where", ["_next_packs", "transfer_ahead"])
def test_one_rank_that_fails_alone_ends_all_and_what_all_know_of_is_saved(raw, tmp_path, ranks, where):
    raw["checkpoint"] = {"every": 2}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    program = [sys.executable, "-c", FAILING_ALONE, where, BAD_STEP, "train", path]
    ended = run_processes(program, ranks, check=False)
    assert all(process.returncode for process in ended), "none may hang, and none may end well"
    saved = latest_checkpoint(parse_config(raw).run.folder / "checkpoints").step
    if where == "_next_packs":
        assert saved == BAD_STEP - 1
        assert all("row 7 is gone" in process.stderr for process in ended)
        assert "rank 1: row 7 is gone" in ended[0].stderr
    else:  # within collectives, which the others cannot leave: the checkpoint before stands
        assert saved == 2
        assert "a kernel failed" in ended[1].stderr
    again = run_processes([sys.executable, "-m", "headway", "train", path, "--resume-if-any"], ranks)
    assert f"resumed from {parse_config(raw).run.folder}/checkpoints/step-{saved:06d}" in again[0].stderr
