"""Runs that are killed without a warning go on as if nothing had happened: real processes, real SIGKILL."""

import json
import signal
import sys

import pytest

from headway.checkpoint import latest_checkpoint
from headway.config import load_config
from headway.meter.goodput_report import read_goodput
from headway.train.run import train
from helpers.processes import start_processes
from helpers.runs import read_metrics

STEPS = 20
# What a resumed run must repeat exactly; times and rates differ from run to run.
EXACT = (
    "kind",
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "slots",
    "flops",
    "flops_by_component",
    "exact",
    "samples",
)
SIGNALLED = """
import os, sys
from headway.cli.app import main
from headway.train import loop
number, at = int(sys.argv.pop(1)), int(sys.argv.pop(1))
original = loop.learning_rate
def rate(step, *settings):
    if step == at:
        os.kill(os.getpid(), number)
    return original(step, *settings)
loop.learning_rate = rate
main()
"""
KILL_WHILE_SAVING = """
import os, signal
from headway.cli.app import main
from headway.checkpoint import saver
saved = []
def seal_or_die(folder, facts, files, seal=saver.seal):
    saved.append(facts["step"])
    if len(saved) == 3:
        (folder / "__0_0.distcp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    seal(folder, facts, files)
saver.seal = seal_or_die
main()
"""


def start(folder, recipe, *arguments, program=("-m", "headway")):
    command = [sys.executable, *program, "train", recipe, "--set", f"run.folder={folder}", *arguments]
    (process,) = start_processes(command, 1, folder.parent)
    return process


def exact_records(folder):
    records = read_metrics(folder / "metrics.jsonl")
    return [{name: record[name] for name in EXACT if name in record} for record in records]


@pytest.fixture(scope="module")
def recipe(digits, tmp_path_factory):
    """A configuration that reads ahead, accumulates, evaluates and saves every 5 steps."""
    path = tmp_path_factory.mktemp("resume") / "recipe.yaml"
    raw = {
        "model": {"path": str(digits / "model"), "random_init": True},
        "data": {
            "stages": [
                {"path": str(digits / "data/one_digit.jsonl"), "epochs": 1},
                {"path": str(digits / "data/train.jsonl")},
            ],
            "eval": str(digits / "data/eval.jsonl"),
            "tokens_per_pack": 300,
            "workers": 0,
        },
        "optim": {"steps": STEPS, "lr": 2e-3, "warmup_steps": 5, "accumulation": 2},
        "eval": {"every": 15, "at_end": True},
        "checkpoint": {"every": 5},
        "run": {"folder": str(path.parent / "whole"), "device": "cpu", "threads": 1},
    }
    path.write_text(json.dumps(raw))  # JSON is YAML
    return path


@pytest.fixture(scope="module")
def whole(recipe):
    """The records of a run that nobody interrupted."""
    config = load_config(recipe)
    train(config)
    records = exact_records(config.run.folder)
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, STEPS + 1))
    return records


def test_a_run_killed_between_checkpoints_repeats_the_same_losses(recipe, whole, tmp_path):
    folder = tmp_path / "killed"
    process = start(folder, recipe, program=("-c", SIGNALLED, int(signal.SIGKILL), 13))
    assert process.wait(timeout=240) == -signal.SIGKILL, process.err.read_text()
    saved = latest_checkpoint(folder / "checkpoints").step
    assert saved in (5, 10)

    process = start(folder, recipe, "--resume")
    assert process.wait(timeout=240) == 0, process.err.read_text()
    out, err = process.out.read_text(), process.err.read_text()
    assert f"resumed from {folder / 'checkpoints' / f'step-{saved:06d}'}" in err
    assert f"{STEPS} of {STEPS}, the last {STEPS - saved} measured here" in out
    assert exact_records(folder) == whole
    report = read_goodput(folder)
    assert report.restarts == 1
    # what the kill took was younger than a heartbeat, so it may be idle rather than lost
    assert all(report.ns[bucket] for bucket in ("set-up", "data wait", "step", "checkpoint", "recovery", "idle"))
    assert report.warnings == ()


@pytest.mark.slow
def test_a_run_killed_while_saving_goes_on_from_the_checkpoint_before(recipe, whole, tmp_path):
    folder = tmp_path / "killed"
    process = start(folder, recipe, program=("-c", KILL_WHILE_SAVING))
    assert process.wait(timeout=240) == -signal.SIGKILL, process.err.read_text()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        ".step-000015.writing",
        "step-000005",
        "step-000010",
    ]
    train(load_config(recipe, (f"run.folder={folder}",)), resume=True)
    assert exact_records(folder) == whole


@pytest.mark.slow
def test_a_run_stopped_by_ctrl_c_goes_on(recipe, whole, tmp_path):
    folder = tmp_path / "stopped"
    process = start(folder, recipe, program=("-c", SIGNALLED, int(signal.SIGINT), 8))
    code, err = process.wait(timeout=240), process.err.read_text()
    assert code == 130, err
    assert "stopped by Ctrl-C" in err
    assert "Traceback" not in err
    train(load_config(recipe, (f"run.folder={folder}",)), resume=True)
    assert exact_records(folder) == whole


def test_a_run_killed_before_its_first_checkpoint_begins_again(raw):
    from headway.config import parse_config

    config = parse_config(raw)
    train(config)
    first = exact_records(config.run.folder)
    for folder in (config.run.folder / "checkpoints").iterdir():
        folder.rename(config.run.folder / "lost")
    train(config, resume=True)
    assert exact_records(config.run.folder) == first
