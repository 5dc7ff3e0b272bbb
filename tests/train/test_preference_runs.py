"""What is told of a run on preferences after it: evaluations of its model, and that no pair was lost or repeated."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headway.cli.app import app
from headway.config import parse_config
from headway.train.check import check_run
from headway.train.run import train
from helpers.processes import TRAIN, run_processes, start_processes
from helpers.runs import read_metrics

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def words(pair_words):
    """Settings of a short run that evaluates held-out pairs after its last step."""
    pair_words["eval"] = {"at_end": True}
    return pair_words


def judged(*command):
    result = CliRunner().invoke(app, ["evaluate", *map(str, command), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


LORA = {"rank": 4, "targets": ["q_proj", "lm_head"]}


@pytest.mark.parametrize(
    ("preference", "changes", "note"),
    [
        ({"loss": "ipo"}, {}, "loss ipo beside the initial weights"),
        ({"loss": "sigmoid", "reference": "adapters-off"}, {"lora": LORA}, "beside the model without its adapters"),
        ({"loss": "simpo"}, {}, "loss simpo, which has no reference"),
    ],
)
def test_pairs_are_judged_as_at_the_end_of_the_run(words, preference, changes, note):
    words["preference"] = preference
    words["model"] |= changes
    train(parse_config(words))
    folder = Path(words["run"]["folder"])
    (in_run,) = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "evaluation"]
    after = judged(folder, words["data"]["eval"])
    assert note in after["judged_by"]["note"]
    assert after["judged_by"]["loss"] == preference["loss"]
    for name in ("pairs", "accuracy"):
        assert after[name] == in_run[name]
    for name in ("loss", "margin"):
        assert after[name] == pytest.approx(in_run[name], rel=1e-5)


def test_without_the_initial_weights_log_probabilities_are_compared(words, base, tmp_path):
    words["preference"] = {"loss": "ipo"}
    words["model"]["path"] = str(shutil.copytree(base, tmp_path / "moved"))
    train(parse_config(words))
    shutil.rmtree(tmp_path / "moved")
    run = Path(words["run"]["folder"])
    after = judged(run, words["data"]["eval"])
    assert after["judged_by"]["loss"] is None
    assert "the run's reference cannot be computed" in after["judged_by"]["note"]
    assert after["accuracy"] == judged(run / "export/step-000003", words["data"]["eval"])["accuracy"]
    assert "judged by" in CliRunner().invoke(app, ["evaluate", str(run), words["data"]["eval"]]).stdout


def test_steps_that_were_lost_are_taken_again_with_the_same_pairs(words):
    words["preference"] = {"loss": "sigmoid"}
    words["checkpoint"] = {"every": 2, "keep": 3}
    words["optim"]["steps"] = 5
    train(parse_config(words))
    folder = Path(words["run"]["folder"])
    before = read_metrics(folder / "metrics.jsonl")
    for step in (4, 5):
        shutil.rmtree(folder / f"checkpoints/step-{step:06d}")
    train(parse_config(words), resume=True)
    checked = check_run(folder)
    assert (checked.faults, checked.steps, checked.redone) == ((), 5, 3)
    assert checked.chains == checked.checkpoints == 3
    assert CliRunner().invoke(app, ["check", str(folder)]).exit_code == 0
    again = read_metrics(folder / "metrics.jsonl")
    assert [record["loss"] for record in again] == [record["loss"] for record in before]
    # a step whose pairs are others is found out
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace(again[1]["samples_digest"], "0" * 16))
    assert check_run(folder).faults


@pytest.mark.slow
@pytest.mark.dist
def test_a_killed_run_goes_on_with_another_number_of_ranks(words, tmp_path):
    """A run of one process is killed without a warning, and two go on with the same pairs and the same losses."""
    words["preference"] = {"loss": "sigmoid"}
    words["checkpoint"] = {"every": 2}
    words["optim"]["steps"] = 12
    words["eval"] = {}
    whole = parse_config(words)
    train(whole)
    folder = tmp_path / "killed"
    words["run"]["folder"] = str(folder)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(words))
    (process,) = start_processes([*TRAIN, path], 1, tmp_path)
    metrics, deadline_s = folder / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count('"kind": "step"') >= 5):
        assert process.poll() is None, process.err.read_text()
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    words["optim"]["accumulation"] = 1
    path.write_text(yaml.safe_dump(words))
    run_processes([*TRAIN, path, "--resume"], 2)
    checked = check_run(folder, whole.run.folder)
    assert (checked.faults, checked.steps, checked.others, checked.resumes) == ((), 12, 12, 1)
    pairs = zip(*(read_metrics(each / "metrics.jsonl") for each in (whole.run.folder, folder)), strict=True)
    for one, two in pairs:
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert two["preference"]["pairs"] == one["preference"]["pairs"]
