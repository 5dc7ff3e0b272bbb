"""The first steps of a recipe with everything that happens in it."""

import json

import pytest
import yaml

from headway.cli.train import train as command
from headway.config import load_config, parse_config
from headway.config.smoke import smoke_of
from headway.errors import ConfigError, DataError, UsageError
from headway.train.run import train
from helpers.runs import read_metrics


@pytest.fixture
def long(raw, digits):
    """A recipe for days."""
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["optim"] |= {"steps": None, "epochs": 500, "warmup_steps": 50, "ema": {"decay": 0.9, "every": 20}}
    raw["eval"] = {"every": 400, "max_samples": 2}
    raw["checkpoint"] = {"every": 250, "export": "never"}
    raw["run"] |= {"log_every": 50, "trackers": ["tensorboard:runs/tb"], "profile": {"start": 100}}
    return raw


def test_a_smoke_run_takes_its_steps_with_warm_up_and_cadences_within_them(long):
    config = smoke_of(parse_config(long), 4)
    assert (config.optim.steps, config.optim.epochs, config.optim.warmup_steps, config.optim.ema.every) == (
        4,
        None,
        1,
        4,
    )
    assert (config.eval.every, config.checkpoint.every, config.run.log_every, config.run.trackers) == (4, 4, 1, ())
    assert (config.run.profile.start, config.run.profile.last) == (2, 4)
    assert smoke_of(parse_config(long), 1).run.profile.last == 1
    assert config.data == parse_config(long).data
    assert smoke_of(parse_config(long | {"eval": {}}), 3).eval.max_samples is None


def test_what_a_smoke_run_changes_of_its_recipe_is_told(long, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(long))
    recipe = smoke_of(load_config(path, ("optim.lr=0.5", "run.seed=3")), 4).recipe
    assert recipe.path == str(path)
    said = dict(one.split("=", 1) for one in recipe.overridden)
    folder = long["run"]["folder"]
    expected = {"optim.lr": "0.002", "run.seed": "", "optim.steps": "null", "optim.epochs": "500"}
    expected |= {"optim.warmup_steps": "50", "eval.every": "400", "run.folder": f'"{folder}"', "run.log_every": "50"}
    assert {name: said[name] for name in expected} == expected
    assert "optim.ema.decay" not in said
    assert smoke_of(parse_config(long), 4).recipe.path == ""


@pytest.mark.slow
def test_a_smoke_run_takes_the_place_of_an_earlier_one_and_of_nothing_else(long, config_file, tmp_path, capsys):
    del long["run"]["profile"], long["optim"]["ema"]
    path = config_file()
    command(path, smoke=2, as_json=True)
    assert json.loads(capsys.readouterr().out)["evaluation"]["samples"] == 2
    command(path, settings=["optim.lr=1e-4"], smoke=1, as_json=True)
    steps = [one for one in read_metrics(tmp_path / "run-smoke/metrics.jsonl") if one["kind"] == "step"]
    assert [(one["step"], one["lr"]) for one in steps] == [(1, 1e-4)]
    (tmp_path / "run-smoke/.smoke").unlink()  # as in the folder of a run that happens to have the name
    with pytest.raises(ConfigError, match="already holds a run"):
        command(path, smoke=1)
    assert not (tmp_path / "run").exists()


def test_a_smoke_run_is_a_new_run(config_file):
    with pytest.raises(UsageError, match="--smoke takes the first steps of a new run"):
        command(config_file(), smoke=2, resume=True)


def test_errors_of_the_data_name_the_keys_of_the_configuration(raw, tmp_path):
    turns = [{"role": "user", "content": [{"type": "image", "image": "https://x.example/a.png"}]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [*turns, {"role": "assistant", "content": "7"}]}))
    raw["data"]["train"] = str(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="open the dataset with allow_remote: true beside its path in the data section"):
        train(parse_config(raw))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "word " * 30}))
    raw["data"]["max_characters"] = 100
    with pytest.raises(DataError, match=r"Split the text, or raise data\.max_characters"):
        train(parse_config(raw))
