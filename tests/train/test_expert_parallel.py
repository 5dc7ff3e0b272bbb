"""Runs whose experts are spread over processes train as one process does, and save what it saves."""

import pytest
import torch
import yaml
from safetensors.torch import load_file

from headway.config import load_config
from headway.train.run import train
from helpers.processes import TRAIN, run_processes
from helpers.runs import read_metrics

STEPS = 4


def steps(folder):
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "step"]


def weights(folder):
    saved = folder / f"checkpoints/step-{STEPS:06d}"
    return {name: tensor for file in saved.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.dist
def test_a_run_is_that_of_one_process(raw, mixture, tmp_path):
    raw["model"]["path"] = str(mixture)
    raw["data"]["strategy"] = "best_fit"  # the others mind how many processes there are
    raw["optim"] |= {"steps": STEPS, "accumulation": 4, "clip": 0.5}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    train(load_config(path))
    folder = tmp_path / "spread"
    changes = [f"run.folder={folder}", "optim.accumulation=1", "parallel.expert=2"]
    run_processes([*TRAIN, path, *(part for change in changes for part in ("--set", change))], 4)
    alone, spread = steps(tmp_path / "run"), steps(folder)
    assert len(alone) == len(spread) == STEPS
    for one, many in zip(alone, spread, strict=True):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert many["router"] == pytest.approx(one["router"], rel=1e-6)
        assert many["flops"] == one["flops"]
    found = weights(folder)
    for name, tensor in weights(tmp_path / "run").items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.dist
@pytest.mark.slow
def test_experts_that_do_not_divide_and_models_without_any_are_refused(raw, mixture, digits, tmp_path):
    raw["model"]["path"] = str(mixture)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    ended = run_processes([*TRAIN, path, "--set", "parallel.expert=3"], 3, check=False)
    assert {process.returncode for process in ended} == {2}
    assert (
        "parallel.expert 3 does not divide the 8 experts of model.language_model.layers.0.mlp.experts"
        in ended[0].stderr
    )
    raw["model"]["path"] = str(digits / "model")
    path.write_text(yaml.safe_dump(raw))
    ended = run_processes([*TRAIN, path, "--set", "parallel.expert=2"], 2, check=False)
    assert {process.returncode for process in ended} == {2}
    assert "Qwen3VLForConditionalGeneration has no experts to spread over processes" in ended[0].stderr
