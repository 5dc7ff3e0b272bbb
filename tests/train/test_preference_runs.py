"""What is told of a run on preferences after it: evaluations of its model, and that no pair was lost or repeated."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from headway.cli.app import app
from headway.config import parse_config
from headway.data import Encoder, read_samples
from headway.models.load import load_processor
from headway.train.check import check_run
from headway.train.run import train
from helpers.processes import TRAIN, run_processes, start_processes
from helpers.rollouts import ids_of, pair, write_pairs
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
    assert checked.checkpoints == 3
    assert CliRunner().invoke(app, ["check", str(folder)]).exit_code == 0
    again = read_metrics(folder / "metrics.jsonl")
    assert [record["loss"] for record in again] == [record["loss"] for record in before]
    # a step whose pairs are others is found out
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace(again[1]["samples_digest"], "0" * 16))
    assert check_run(folder).faults


def simpo_of(model, row):
    """Loss of a pair, alone in transformers' own forward, with Headway's defaults of beta and gamma.

    Source: Meng et al. 2024, arXiv:2405.14734, equation 6.
    """
    means = []
    for side in ("chosen_ids", "rejected_ids"):
        ids = torch.tensor([row["prompt_ids"] + row[side]])
        log_p_TV = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        log_p_T = log_p_TV.gather(1, ids[0, 1:, None])[:, 0]
        means.append(log_p_T[-len(row[side]) :].mean())
    return -torch.nn.functional.logsigmoid(2.0 * (means[0] - means[1]) - 0.5).item()


@pytest.mark.dist
def test_three_ranks_tell_the_loss_of_each_source_of_a_mixture_of_pairs(words, base, tmp_path):
    """One step has all pairs of both sources, so that the initial weights say what its record must hold."""
    numbers = {"even": range(0, 10, 2), "odd": range(1, 19, 2)}
    paths = {
        name: write_pairs(tmp_path / f"{name}.jsonl", len(rows), lambda place, rows=rows: pair(rows[place]))
        for name, rows in numbers.items()
    }
    words["data"] |= {"train": [{"path": str(path), "name": name} for name, path in paths.items()], "workers": 0}
    words["data"]["tokens_per_pack"] = 150
    words["optim"] = {"epochs": 1, "lr": 1e-3, "schedule": "constant", "accumulation": 6}
    words["preference"], words["eval"] = {"loss": "simpo"}, {}
    del words["data"]["eval"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(words))
    run_processes([*TRAIN, recipe], 3)

    (step,) = [r for r in read_metrics(Path(words["run"]["folder"]) / "metrics.jsonl") if r["kind"] == "step"]
    assert step["world_size"] == 3
    model, encoder = AutoModelForCausalLM.from_pretrained(base).eval(), Encoder(load_processor(str(base)))
    for name, path in paths.items():
        with torch.no_grad():
            losses = [simpo_of(model, row) for row in ids_of([encoder.encode(row) for row in read_samples(path)])]
        source = step["sources"][name]
        assert source["units"] == len(losses) == len(numbers[name])
        assert source["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


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
