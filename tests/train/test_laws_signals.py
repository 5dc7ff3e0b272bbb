"""Whatever signal ends a run, wherever it falls, the next start goes on to the very weights of a run left in peace.

Each case waits for a step's record, holds the processes, looks whether they stand in a step, in the writing of a
checkpoint or in an export, and only then sends the signal; so none falls into the set-up. Step, ranks and the one that
is hit are drawn from SEED, so that a case can be repeated.
"""

import hashlib
import os
import random
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from headway.meter.goodput_report import read_goodput
from headway.train.check import check_run
from helpers.processes import ROOT, TRAIN, interrupt, run_processes, running, start_processes
from helpers.runs import recorded, trained

SEED, STEPS, EVERY = 30, 24, 2
SIGNALS = ("SIGKILL", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
MOMENTS = ("step", "checkpoint", "export", "last export")
CODES = {"SIGTERM": 0, "SIGUSR1": 0, "SIGHUP": 0, "SIGINT": 130}  # of a run that stops after its step
pytestmark = pytest.mark.dist


def is_writing(folder, kind):
    """Whether a run is writing a checkpoint ("checkpoints") or an exported folder ("export")."""
    return any(path.name.endswith(".writing") for path in (Path(folder) / kind).glob(".step-*"))


@pytest.fixture(scope="module")
def recipe(digits, tmp_path_factory):
    """Pictures and text; a checkpoint every other step, each exported where the case asks for it."""
    path = tmp_path_factory.mktemp("signals") / "recipe.yaml"
    mix = [{"path": str(digits / f"data/{name}.jsonl"), "weight": 1} for name in ("train", "one_digit")]
    raw = {
        "model": {"path": str(digits / "model"), "random_init": True},
        "data": {"train": [{"mix": mix}], "tokens_per_pack": 160, "workers": 0, "prefetch_bytes": 0},
        "optim": {"steps": STEPS, "lr": 2e-3, "warmup_steps": 2, "ema": {"decay": 0.9}},
        "checkpoint": {"every": EVERY, "keep": 2},
        "run": {"folder": str(path.parent / "peace"), "device": "cpu", "threads": 1, "watchdog_s": 200.0},
    }
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="module")
def peace(recipe, tmp_path_factory):
    """Folders of runs that nobody interrupted, by their ranks."""
    folders = {}

    def folder(ranks):
        if ranks not in folders:
            folders[ranks] = tmp_path_factory.mktemp("peace") / f"of-{ranks}"
            run_processes(arguments(recipe, folders[ranks]), ranks)
        return folders[ranks]

    return folder


def arguments(recipe, folder, *settings):
    parts = [part for setting in (f"run.folder={folder}", *settings) for part in ("--set", setting)]
    return [*TRAIN, recipe, *parts, "--resume-if-any"]


def weights(folder):
    """Names of a run's exported files and their contents, of the last step."""
    (export,) = (folder / "export").glob(f"step-{STEPS:06d}")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in export.glob("*.safetensors")}


def moment(name, folder, step):
    """What shows that a run stands in a moment, after the record of a step."""

    def is_there():
        if recorded(folder) < step:
            return False
        if name == "step":
            return not is_writing(folder, "checkpoints") and not (folder / "export").exists()
        return is_writing(folder, "checkpoints" if name == "checkpoint" else "export")

    return is_there


def assert_as_in_peace(folder, expected, restarts):
    """Assert that records, weights, proofs and seconds are those of a run that was left alone, but for its restarts."""
    assert trained(folder) == trained(expected)
    assert weights(folder) == weights(expected)
    check = check_run(folder, expected)
    assert (check.faults, check.steps, check.others, check.resumes) == ((), STEPS, STEPS, restarts)
    goodput = read_goodput(folder)
    assert (goodput.restarts, goodput.warnings) == (restarts, ())
    assert (folder / "summary.json").is_file()
    assert not [*folder.glob("checkpoints/.*"), *folder.glob("export/.*")], "a hidden folder stays"


def cases():
    drawn = []
    rng = random.Random(SEED)
    for name in MOMENTS:
        for number in SIGNALS:
            ranks = rng.choice((1, 3))
            hit = rng.choice((*range(ranks), None))  # None is all of them
            step = rng.randrange(3, STEPS - 6) if name != "last export" else STEPS - 1
            marks = {("checkpoint", "SIGKILL"): (), ("step", "SIGUSR1"): pytest.mark.slow}
            if name == "last export":
                hit = 0  # the others have ended, or end, without waiting for it
            drawn.append(
                pytest.param(
                    name,
                    number,
                    ranks,
                    hit,
                    step,
                    marks=marks.get((name, number), pytest.mark.long),
                    id=f"{number}-{name}-{ranks}",
                )
            )
    return drawn


@pytest.mark.parametrize(("name", "number", "ranks", "hit", "step"), cases())
def test_a_signal_in_any_moment_leaves_a_run_that_goes_on_to_the_same_weights(
    recipe, peace, tmp_path, name, number, ranks, hit, step
):
    folder = tmp_path / "run"
    settings = ["checkpoint.export=every"] if name == "export" else []
    running = start_processes(arguments(recipe, folder, *settings), ranks, tmp_path)
    hits = [running[hit].pid] if hit is not None else None
    watched = running if name != "last export" else running[:1]
    interrupt(watched, moment(name, folder, step), getattr(signal, number), hits)
    ends = [process.wait(timeout=300) for process in running]
    messages = [process.err.read_text() for process in running]
    assert not any("Traceback" in text for text in messages), messages
    if number != "SIGKILL" and name != "last export":
        assert set(ends) == {CODES[number]}, messages
        assert f"after step {recorded(folder)}" in messages[0]
    run_processes(arguments(recipe, folder, *settings), ranks)
    # A run that has taken its last step is not gone on with: its export is finished.
    assert_as_in_peace(folder, peace(ranks), restarts=0 if name == "last export" else 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "options", "code"),
    [
        *((number, (), 1) for number in ("SIGTERM", "SIGINT", "SIGHUP")),
        # as docs/many-gpus.md has it
        ("SIGUSR1", ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"), 1),
        ("SIGUSR1", (), -signal.SIGUSR1),
        ("SIGKILL", (), -signal.SIGKILL),
    ],
)
def test_a_signal_to_torchrun_itself_loses_nothing(recipe, peace, tmp_path, number, options, code):
    """torchrun hands some signals on to its ranks; by the others it dies, and the ranks go on without it."""
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", *options]
    command += ["--no-python", *map(str, arguments(recipe, folder))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with ExitStack() as until_end:
        with log.open("w") as file:
            agent = until_end.enter_context(running(command, env=environment, stdout=file, stderr=file))
        interrupt([agent], moment("step", folder, 5), getattr(signal, number))
        assert agent.wait(timeout=300) == code
    if code == 1:  # handed on: the ranks have stopped
        assert recorded(folder) < STEPS
        assert f"stopped by {number if number != 'SIGINT' else 'Ctrl-C'} after step" in log.read_text()
    # Ranks that outlive their torchrun hold the run's folder to their end.
    deadline_s = time.monotonic() + 300
    while (again := run_processes(arguments(recipe, folder), 3, check=False)) and again[0].returncode:
        assert "belongs to a process" in again[0].stderr, again[0].stderr
        assert time.monotonic() < deadline_s
    assert trained(folder) == trained(peace(3))
    assert weights(folder) == weights(peace(3))
    assert check_run(folder, peace(3)).faults == ()
