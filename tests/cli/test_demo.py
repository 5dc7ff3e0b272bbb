"""`headway demo` and `headway train` from the command line, as a user starts them."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from headway.config import load_config
from headway.log.records import read_records
from headway.version import install_command
from helpers.processes import ROOT, run_processes

RECIPE = ROOT / "recipes" / "digits.yaml"


def headway(*arguments, cwd):
    (done,) = run_processes([sys.executable, "-m", "headway", *arguments], 1, cwd=cwd, check=False)
    return done


def test_the_recipe_in_the_repository_is_the_one_in_the_package():
    assert RECIPE.read_text() == (ROOT / "src/headway/synthetic/digits.yaml").read_text()
    load_config(RECIPE)


@pytest.mark.own_peak
@pytest.mark.slow
@pytest.mark.long
def test_the_demo_and_the_recipe_are_one_path(tmp_path):
    few = ["--set", "checkpoint.every=2", "--set", "eval.every=2", "--set", "eval.max_samples=20"]
    few += ["--set", "optim.warmup_steps=1", "--set", "optim.steps=3", "--set", "run.threads=1"]
    demo = headway("demo", *few, "--steps", "3", "--json", cwd=tmp_path)
    assert demo.returncode == 0, demo.stderr
    result = json.loads(demo.stdout)
    assert result["schema_version"] == 1
    assert result["complete"]
    assert result["evaluation"]["samples"] == 20
    assert 0 < result["mfu"] < 1
    assert 0 < result["vision_share"] < 1
    assert result["fill"] > 0.9
    assert result["peak_source"].startswith("measured at start")
    assert "held out" in demo.stderr

    train = headway("train", str(RECIPE), *few, "--set", "run.folder=again", cwd=tmp_path)
    assert train.returncode == 0, train.stderr
    assert [line.split("  ")[0] for line in train.stdout.splitlines()][:3] == ["steps", "loss", "exact match"]

    def losses(folder):
        return [record["loss"] for record in read_records(tmp_path / folder / "metrics.jsonl")]

    assert losses("again") == losses("runs/digits/run")

    second = headway("demo", *few, cwd=tmp_path)
    assert second.returncode == 2
    assert second.stdout == ""
    assert second.stderr.startswith("Error: ")
    assert "already holds a run" in " ".join(second.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nothing.yaml"], "cannot read the configuration nothing.yaml"),
        (["train", str(RECIPE), "--set", "optim.lrr=1"], "unknown key 'optim.lrr', did you mean 'lr'?"),
        (["train", str(RECIPE)], "runs/digits"),
        (["demo", "--set", "data.strategi=x"], "did you mean 'strategy'?"),
        (["demo", "data", "--steps", "3"], "demo data trains nothing"),
    ],
)
def test_a_mistake_is_one_paragraph_and_no_traceback(tmp_path, arguments, message):
    result = headway(*arguments, cwd=tmp_path)
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stderr.count("Error: ") == 1


@pytest.mark.slow
def test_a_bad_line_in_the_data_is_named_by_file_and_line(tmp_path, headway, monkeypatch):
    from headway.synthetic.digits import write_reader

    write_reader(tmp_path / "model")
    (tmp_path / "bad.jsonl").write_text('{"messages": [\n')
    raw = {
        "model": {"path": "model", "random_init": True},
        "data": {"train": [{"path": "bad.jsonl"}], "tokens_per_pack": 128, "workers": 0},
        "optim": {"steps": 2, "lr": 0.001},
        "run": {"folder": "run"},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
    monkeypatch.chdir(tmp_path)
    result = headway("train", "c.yaml")
    assert result.code == 1
    assert "bad.jsonl, line 1: not valid JSON" in " ".join(result.err.split())
    assert "Traceback" not in result.err
    corrected = headway("train", "c.yaml")
    assert "already holds a run" not in corrected.err, "a run that never began must not block the next one"


@pytest.mark.parametrize("arguments", [["train", str(RECIPE)], ["demo"]])
def test_without_torch_the_error_says_how_to_install_it(tmp_path, arguments, monkeypatch):
    without = "import sys; sys.modules['torch'] = None; from headway.cli.app import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", without, *arguments]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "training needs torch, which is not installed" in " ".join(result.stderr.split())
    monkeypatch.chdir(tmp_path)  # the command names the folder that it was installed from as seen from where one is
    assert install_command("train") in " ".join(result.stderr.split())
