"""No sample is lost or repeated by a run that is killed without a warning, or goes on with fewer ranks: real processes.

What a run trains on shows in its metrics: with losses equal to the last bit, every step had the same samples as the
run that nobody killed. Where the number of ranks changes, every sample is a source of its own, and each step's record
says by name which it had.
"""

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from headway.checkpoint import latest_checkpoint
from headway.config import load_config
from headway.train.check import check_run
from headway.train.run import train
from helpers.processes import TRAIN, run_processes, start_processes
from helpers.runs import read_metrics

STEPS = 24
STREAM = {"lanes": 4, "shuffle": 16, "open_packs": 3}


def kill_after(process, metrics, steps):
    """Kill a run without a warning as soon as it has recorded so many steps."""
    deadline_s = time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count('"kind": "step"') >= steps):
        assert process.poll() is None, process.err.read_text()
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL, "the run ended before it could be killed"


def what_was_trained(folder):
    """Everything that the data decide, of every step."""
    kept = ("step", "loss", "grad_norm", "tokens", "slots", "flops", "samples", "sources")
    return [{name: record.get(name) for name in kept} for record in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("stream", "kills"), [(None, [(8, 20)]), pytest.param(STREAM, [(6, 10), (12, 20)], marks=pytest.mark.long)]
)
def test_a_run_killed_at_random_trains_on_the_samples_of_one_that_was_not(raw, digits, tmp_path, stream, kills):
    raw["data"] = {
        "stages": [
            {"path": str(digits / "data/one_digit.jsonl"), "epochs": 1, "limit": 40},
            {"mix": [{"path": str(digits / f"data/{name}.jsonl"), "weight": 1} for name in ("train", "eval")]},
        ],
        "tokens_per_pack": 160,
        "stream": stream,
        "workers": 1,
        "prefetch_bytes": 2_000_000,
    }
    raw["optim"] |= {"steps": STEPS, "accumulation": 2}
    raw["checkpoint"] = {"every": 5}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    config = load_config(path)
    whole = train(config)

    rng = random.Random(11 if stream else 5)
    folder = tmp_path / "killed"
    for number, (first, last) in enumerate(kills):
        command = [*TRAIN, path, "--set", f"run.folder={folder}", *["--resume"] * (number > 0)]
        (process,) = start_processes(command, 1, tmp_path)
        kill_after(process, folder / "metrics.jsonl", rng.randint(first, last))
    assert 0 < latest_checkpoint(folder / "checkpoints").step < STEPS
    summary = train(load_config(path, (f"run.folder={folder}",)), resume=True)
    assert what_was_trained(folder) == what_was_trained(config.run.folder)
    assert summary.report == whole.report
    found = check_run(folder, config.run.folder)
    assert (found.steps, found.others, found.resumes, found.faults) == (STEPS, STEPS, len(kills), ())
    assert found.redone + len(found.unwitnessed) > 0
    assert found.checkpoints > 0


@pytest.mark.dist
@pytest.mark.slow
def test_four_ranks_stop_and_two_go_on_to_the_end_of_the_data(raw, digits, tmp_path):
    lines = (digits / "data/train.jsonl").read_text().splitlines()[:36]
    names = [f"sample_{number}" for number in range(len(lines))]
    for name, line in zip(names, lines, strict=True):
        (digits / f"data/{name}.jsonl").write_text(line)
    parts = [{"path": str(digits / f"data/{name}.jsonl"), "epochs": 1} for name in names]
    raw["data"] |= {"train": [{"mix": parts}], "strategy": "first_fit", "tokens_per_pack": 90}
    raw["optim"] |= {"steps": 1000, "warmup_steps": 0, "schedule": "constant"}
    raw["checkpoint"] = {"every": 2}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    folder = Path(raw["run"]["folder"])
    ended = run_processes([*TRAIN, path], 4, check=False)
    assert {process.returncode for process in ended} == {0}, ended
    assert "the data end after" in ended[0].stderr
    whole = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "step"]
    assert len(whole) >= 3

    for later in (folder / "checkpoints").iterdir():
        if later.name != "step-000002":
            later.rename(tmp_path / later.name)
    ended = run_processes([*TRAIN, path, "--resume"], 2, check=False)
    assert {process.returncode for process in ended} == {0}, ended
    assert "the data end after" in ended[0].stderr
    steps = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "step"]
    assert steps[:2] == whole[:2]
    assert [step["world_size"] for step in steps] == [4, 4] + [2] * (len(steps) - 2)
    assert len(steps) > len(whole)

    def trained(records):
        found = Counter()
        for record in records:
            found.update({name: part["tokens"] for name, part in record["sources"].items() if part["tokens"]})
        return found

    assert trained(steps) == trained(whole)
    times = Counter(name for step in steps for name, part in step["sources"].items() if part["tokens"])
    assert times == dict.fromkeys(names, 1)
    counted = latest_checkpoint(folder / "checkpoints").position()["report"]["samples"]
    assert {name: counted[name]["used"]["samples"] for name in names} == dict.fromkeys(names, 1)
