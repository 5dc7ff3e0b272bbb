"""How long a run is, said by epochs, and a run that its data end."""

import json
import re
import shutil

import pytest

from headway.checkpoint import latest_checkpoint
from headway.config import parse_config, with_overrides
from headway.errors import ConfigError, RunCompleteError
from headway.train.run import train
from helpers.runs import read_metrics


def steps_of(config):
    return [one for one in read_metrics(config.run.folder / "metrics.jsonl") if one["kind"] == "step"]


def by_mathematics(records):
    return [(one["step"], one["epoch"], one["loss"], one["lr"], one["samples_digest"]) for one in records]


@pytest.fixture
def by_epochs(raw):
    """Three times through 80 samples, whose last step is a partial one."""
    raw["data"] |= {"strategy": "best_fit", "tokens_per_pack": 1000}
    raw["optim"] |= {"steps": None, "epochs": 3, "accumulation": 2}
    raw["checkpoint"] = {"every": 1, "keep": 100}
    return raw


def test_a_run_of_epochs_resumed_in_the_second_is_the_uninterrupted_one(by_epochs, killed_before, capfd):
    config = parse_config(by_epochs)
    summary = train(config)
    whole = steps_of(config)
    assert summary.report.samples.total("used").samples == 3 * 80
    assert (summary.steps, summary.planned_steps) == (len(whole), len(whole))
    assert whole[-1]["epoch"] == 3.0
    assert whole[-1]["lr"] == pytest.approx(0.1 * 2e-3)  # the schedule ends with them
    shown = capfd.readouterr().err
    assert f"3 epochs are {len(whole)} steps" in shown
    assert f"step {len(whole)}/{len(whole)}  epoch 3.00/3" in shown

    by_epochs["run"]["folder"] += "-again"
    config = parse_config(by_epochs)
    middle = next(one["step"] for one in whole if one["epoch"] > 1.2)
    assert whole[middle - 1]["epoch"] < 1.9
    killed_before(config, middle + 1)
    train(config, resume=True)
    assert by_mathematics(steps_of(config)) == by_mathematics(whole)


@pytest.mark.slow
def test_a_finished_run_goes_on_for_more_epochs_with_the_same_steps_behind_it(by_epochs):
    by_epochs["optim"]["epochs"] = 1.5
    config = parse_config(by_epochs)
    train(config)
    first = steps_of(config)
    with pytest.raises(ConfigError, match=r"Raise optim.steps or optim.epochs to go on, or start another run from its"):
        train(config, resume=True)

    by_epochs["optim"]["epochs"] = 3
    summary = train(parse_config(by_epochs), resume=True)
    assert summary.report.samples.total("used").samples == 3 * 80
    assert by_mathematics(steps_of(config))[: len(first)] == by_mathematics(first)
    assert steps_of(config)[-1]["epoch"] == 3.0

    by_epochs["optim"]["epochs"] = 2
    with pytest.raises(ConfigError, match=r"began with 3 epochs or more and cannot go on with optim.epochs 2"):
        train(parse_config(by_epochs), resume=True)


@pytest.mark.slow
def test_what_does_not_change_the_mathematics_may_change_on_resume(raw):
    raw["checkpoint"] = {"every": 3}
    config = parse_config(raw)
    train(config)
    whole = [(one["loss"], one["samples_digest"]) for one in steps_of(config)]
    shutil.rmtree(config.run.folder / "checkpoints/step-000006")
    raw["run"] |= {"threads": None, "log_every": 5}
    raw["speed"] = {"recompute": "full"}
    raw["data"]["workers"] = 1
    raw["checkpoint"] = {"every": 2}
    raw["optim"]["steps"] = 8
    summary = train(parse_config(raw), resume=True)
    assert summary.steps == 8
    assert [(one["loss"], one["samples_digest"]) for one in steps_of(config)][:3] == whole[:3]
    assert [one["samples_digest"] for one in steps_of(config)][:6] == [digest for _, digest in whole]


def test_a_run_whose_data_end_before_its_steps_says_so_and_finishes(by_epochs, capfd):
    by_epochs["data"]["train"] = by_epochs["data"]["train"][0] | {"epochs": 1}
    by_epochs["optim"] |= {"steps": 1000, "epochs": None, "warmup_steps": 0}
    config = parse_config(by_epochs)
    summary = train(config)
    assert summary.is_complete
    assert summary.model.exists()
    assert json.loads((config.run.folder / "summary.json").read_text())["steps"] == summary.steps
    assert latest_checkpoint(config.run.folder / "checkpoints").step == summary.steps
    assert steps_of(config)[-1]["lr"] == pytest.approx(0.1 * 2e-3)
    assert f"warning: the data end after {summary.steps} of 1,000 steps" in capfd.readouterr().err


def test_a_stream_that_ends_before_its_steps_finishes_with_all_that_a_run_leaves(raw, digits, capfd):
    raw["data"] |= {"train": {"path": str(digits / "data/train.jsonl"), "epochs": 1}, "stream": {"lanes": 2}}
    raw["data"] |= {"eval": str(digits / "data/eval.jsonl"), "tokens_per_pack": 1000}
    raw["eval"] = {"at_end": True, "max_samples": 2}
    raw["optim"]["steps"] = 1000
    config = parse_config(raw)
    summary = train(config)
    assert (summary.is_complete, summary.evaluation.samples) == (True, 2)
    assert summary.report.samples.total("used").samples == 80
    assert summary.model.exists()
    assert f"the data ended after step {summary.steps} of 1000, so the run ends" in capfd.readouterr().err
    for resume in (True, None):
        shutil.rmtree(summary.model)  # as if the run had been killed while it wrote it
        with pytest.raises(RunCompleteError, match="there is nothing to train on"):
            train(config, resume=resume)
        assert summary.model.exists()


@pytest.mark.slow
def test_a_list_of_files_is_a_mixture_of_all_their_samples_or_by_weight(raw, digits):
    paths = {name: str(digits / f"data/{name}.jsonl") for name in ("train", "eval")}  # 80 and 12 samples
    raw["data"] |= {"tokens_per_pack": 2000, "strategy": "first_fit"}
    raw["optim"] |= {"steps": None, "epochs": 2, "warmup_steps": 0}
    raw["checkpoint"] = {"export": "never"}
    parts = [{"path": path, "weight": weight} for path, weight in zip(paths.values(), (3, 1), strict=True)]
    for train_on, expected in (
        (list(paths.values()), {"train": 160, "eval": 24}),
        (parts, {"train": 159, "eval": 54}),  # of 2 x 80 x 4/3 draws the 213 whole ones, every fourth from the second
    ):
        raw["data"] |= {"train": train_on}
        raw["run"]["folder"] += "-next"
        counted = train(parse_config(raw)).to_dict()["data"]["samples"]
        assert {name: counted[name]["used"]["samples"] for name in paths} == expected


@pytest.mark.slow
def test_another_run_begins_with_the_weights_as_a_refusal_says(raw):
    raw["optim"]["steps"] = 2
    summary = train(parse_config(raw))
    raw["optim"] |= {"lr": 1e-4, "warmup_steps": 0}
    with pytest.raises(ConfigError) as refused:
        train(parse_config(raw), resume=True)
    settings = re.findall(r"(\w+\.\w+)=(\S+?)\.?(?= |$)", str(refused.value))
    said = dict(settings) | {"run.folder": raw["run"]["folder"] + "-next"}
    assert said["model.path"] == str(summary.model)
    config = with_overrides(raw, tuple(f"{name}={value}" for name, value in said.items()))
    assert train(config).first_loss < summary.first_loss
