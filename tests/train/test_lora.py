"""Runs that train adapters: the weights beside them stay, and what comes out opens in peft and transformers."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from headway.cli.app import app
from headway.config import load_config, parse_config
from headway.errors import ConfigError
from headway.models.load import load_model
from headway.train.run import train
from helpers.processes import TRAIN, run_processes
from helpers.runs import read_metrics


@pytest.fixture
def base(digits, tmp_path):
    """A model folder with weights."""
    folder = tmp_path / "base"
    shutil.copytree(digits / "model", folder)
    torch.manual_seed(5)
    load_model(str(folder), random_init=True).save_pretrained(folder)
    return folder


@pytest.fixture
def lora(raw, base):
    """A configuration that trains adapters, as plain types."""
    raw["model"] = {"path": str(base), "lora": {"rank": 4, "alpha": 16, "targets": ["q_proj", "down_proj", "qkv"]}}
    raw["optim"] |= {"lr": 0.02, "steps": 6}
    return raw


def losses(folder):
    return [record["loss"] for record in read_metrics(Path(folder) / "metrics.jsonl") if record["kind"] == "step"]


def tensors(folder):
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_adapters_learn_beside_weights_that_stay_to_the_bit(lora, base, tmp_path):
    summary = train(parse_config(lora))
    assert summary.last_loss < summary.first_loss
    billed = {one["name"]: one for one in summary.conventions}
    assert billed["maxtext"]["flops"] > 0, "formulas of sizes are not put off by what stands beside the modules"
    assert [name for name, one in billed.items() if "read off the configuration" in one["why"]] == []
    exported = tensors(summary.model)
    assert exported
    assert all(".lora_A." in name or ".lora_B." in name for name in exported)
    assert any(tensor.any() for name, tensor in exported.items() if ".lora_B." in name)

    run("export", lora["run"]["folder"], tmp_path / "merged", "--merge-lora")
    merged, before = tensors(tmp_path / "merged"), tensors(base)
    assert merged.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert changed == {name for name in before if name.endswith(("q_proj.weight", "down_proj.weight", "qkv.weight"))}

    ids = torch.tensor([[1, 20, 30, 25, 2]])
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    opened = AutoModelForImageTextToText.from_pretrained(summary.model)  # by transformers, base and adapters
    by_peft = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), str(summary.model))
    for other in (opened, by_peft):
        torch.testing.assert_close(other(input_ids=ids).logits, whole(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert whole.generate(input_ids=ids, max_new_tokens=3).shape == (1, 8)


def test_random_weights_are_exported_with_the_adapters_in_them(lora):
    lora["model"]["random_init"] = True
    summary = train(parse_config(lora))
    assert not [name for name in tensors(summary.model) if "lora" in name]
    AutoModelForImageTextToText.from_pretrained(summary.model)


def test_a_resumed_run_goes_on_with_its_adapters(lora, tmp_path):
    lora["checkpoint"] = {"every": 3, "keep": 3}
    train(parse_config(lora))
    whole = losses(lora["run"]["folder"])
    shutil.rmtree(Path(lora["run"]["folder"]) / "checkpoints" / "step-000006")
    train(parse_config(lora), resume=True)
    assert losses(lora["run"]["folder"]) == whole


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("random_init", [True, False])
def test_two_processes_train_adapters_as_one(lora, digits, tmp_path, random_init):
    lora["data"]["eval"] = str(digits / "data/eval.jsonl")
    lora["eval"] = {"every": 6, "generate": 3, "max_new_tokens": 3}
    lora["model"]["random_init"] = random_init
    lora["optim"] |= {"accumulation": 4, "name": "muon"}
    path = tmp_path / "lora.yaml"
    path.write_text(yaml.safe_dump(lora))
    train(load_config(path))
    one = losses(lora["run"]["folder"])
    two = tmp_path / "two"
    run_processes([*TRAIN, path, "--set", f"run.folder={two}", "--set", "optim.accumulation=2"], 2)
    assert losses(two) == pytest.approx(one, rel=1e-5)
    answers = Path(lora["run"]["folder"], "samples.jsonl").read_text()
    assert answers
    assert (two / "samples.jsonl").read_text() == answers


def test_a_target_that_matches_nothing_is_an_error(lora):
    lora["model"]["lora"]["targets"] = ["q_porj"]
    with pytest.raises(ConfigError, match=r"model.lora.targets: target 'q_porj' matches no linear module"):
        train(parse_config(lora))


def test_adapters_everywhere_but_in_what_is_frozen(lora, tmp_path):
    lora["model"] |= {"freeze": ["vision"], "lora": {"rank": 2}}
    exported = tensors(train(parse_config(lora)).model)
    assert exported
    assert not [name for name in exported if "visual" in name]
