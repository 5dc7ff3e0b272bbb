"""Runs that train adapters on a base in 4 or 8 bits: what stays, what resumes, what is exported and who opens it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.torch_version import TorchVersion
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from headway.checkpoint.export import find_checkpoint_in
from headway.checkpoint.restore import read_tensors, saved_tensors
from headway.checkpoint.state import WEIGHTS
from headway.cli.app import app
from headway.config import load_config, parse_config
from headway.errors import ConfigError
from headway.models.load import load_model
from headway.models.quantised import ByteLayout
from headway.train.run import train
from helpers.processes import TRAIN, run_processes
from helpers.runs import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture
def folder(digits, tmp_path):
    """A model folder with weights in bfloat16."""
    folder = tmp_path / "base"
    shutil.copytree(digits / "model", folder)
    torch.manual_seed(5)
    load_model(str(folder), random_init=True, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def on_base(raw, folder):
    """A configuration that trains adapters on it, as plain types."""
    raw["model"] = {"path": str(folder), "base": "nf4", "lora": {"rank": 4, "alpha": 16, "targets": ["q_proj", "qkv"]}}
    raw["optim"] |= {"lr": 0.02, "steps": 4}
    return raw


def losses(folder):
    return [record["loss"] for record in read_metrics(Path(folder) / "metrics.jsonl") if record["kind"] == "step"]


def tensors(folder):
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def in_checkpoint(folder):
    checkpoint = find_checkpoint_in(Path(folder))
    values = {name: torch.empty_like(t, device="cpu") for name, t in saved_tensors(checkpoint.folder).items()}
    read_tensors(checkpoint.folder, values)
    return {name.removeprefix(WEIGHTS): t for name, t in values.items() if name.startswith(WEIGHTS)}


_OPEN = """
import sys, warnings; warnings.simplefilter("ignore")
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText
base = AutoModelForImageTextToText.from_pretrained(sys.argv[1], dtype=torch.float32)
model = PeftModel.from_pretrained(base, sys.argv[2])
torch.save(model(input_ids=torch.tensor([[1, 20, 30, 25, 2]])).logits.detach(), sys.argv[3])
"""


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_base_stays_and_its_adapters_are_exported_alone_and_merged(on_base, folder, tmp_path, base):
    on_base["model"]["base"] = base
    summary = train(parse_config(on_base))
    assert summary.last_loss < summary.first_loss

    # the checkpoint holds the bytes of the folder's weights, as they were
    before, after = tensors(folder), in_checkpoint(on_base["run"]["folder"])
    held = {name: t for name, t in after.items() if t.dtype == torch.uint8}
    assert {name.split(".")[-2] for name in held} >= {"base_layer", "k_proj", "down_proj", "proj"}
    plain, dequantised = dict(before), {}
    for name, stored in held.items():
        own = name.replace(".base_layer", "")
        layout = ByteLayout(base, tuple(before[own].shape))
        assert torch.equal(layout.quantise(before[own]), stored)
        dequantised[own] = layout.dequantise(stored, torch.float32)

    # alone: opened by peft in a process of its own, beside the base in full precision
    exported = tensors(summary.model)
    assert exported
    assert all(".lora_A." in name or ".lora_B." in name for name in exported)
    script = [sys.executable, "-c", _OPEN, folder, summary.model, tmp_path / "logits.pt"]
    subprocess.run([str(word) for word in script], check=True, timeout=120)
    by_peft = torch.load(tmp_path / "logits.pt")

    # merged: the dequantised base and the adapters, rounded to bfloat16 once
    merged_folder = tmp_path / "merged"
    result = CliRunner().invoke(app, ["export", on_base["run"]["folder"], str(merged_folder), "--merge-lora"])
    assert result.exit_code == 0, result.output
    merged = tensors(merged_folder)
    assert merged.keys() == before.keys()
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    for name, tensor in merged.items():
        expected = dequantised.get(name, plain[name].float())
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in exported:
            expected = expected + exported[f"{key}.lora_B.weight"] @ exported[f"{key}.lora_A.weight"] * 4
        assert torch.equal(tensor, expected.to(torch.bfloat16)), name

    # transformers opens it; both answer nearly alike, for the base in full precision is not what was trained on
    opened = AutoModelForImageTextToText.from_pretrained(merged_folder, dtype=torch.float32)
    logits = opened(input_ids=torch.tensor([[1, 20, 30, 25, 2]])).logits
    assert 1e-5 < (logits - by_peft).abs().mean() / by_peft.abs().mean() < (0.3 if base == "nf4" else 0.03)


def test_a_resumed_run_goes_on_to_the_bit(on_base):
    on_base["checkpoint"] = {"every": 2, "keep": 3}
    train(parse_config(on_base))
    run = Path(on_base["run"]["folder"])
    whole, weights = losses(run), in_checkpoint(run)
    shutil.rmtree(run / "checkpoints" / "step-000004")
    train(parse_config(on_base), resume=True)
    assert losses(run) == whole
    again = in_checkpoint(run)
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


def test_random_weights_are_quantised_too_and_exported_whole(on_base):
    on_base["model"] |= {"random_init": True, "base": "int8"}
    summary = train(parse_config(on_base))
    assert not [name for name in tensors(summary.model) if "lora" in name]
    AutoModelForImageTextToText.from_pretrained(summary.model)


def test_the_meter_bills_what_it_bills_without(on_base, tmp_path):
    records = []
    for base in ("nf4", None):
        on_base["model"]["base"], on_base["run"]["folder"] = base, str(tmp_path / f"run-{base}")
        train(parse_config(on_base))
        records.append(
            [r["flops"] for r in read_metrics(tmp_path / f"run-{base}/metrics.jsonl") if r["kind"] == "step"]
        )
    assert records[0] == records[1]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("expert", [None, 2])
def test_two_processes_train_on_a_base_as_one(on_base, folder, mixture, tmp_path, expert):
    if expert is not None:
        torch.manual_seed(5)
        load_model(str(mixture), random_init=True).save_pretrained(tmp_path / "experts")
        for file in mixture.iterdir():
            if not (tmp_path / "experts" / file.name).exists():
                shutil.copy(file, tmp_path / "experts")
        on_base["model"]["path"] = str(tmp_path / "experts")
        on_base["model"]["lora"]["targets"] = ["q_proj"]
    on_base["optim"] |= {"accumulation": 4}
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(on_base))
    train(load_config(path))
    one = losses(on_base["run"]["folder"])
    two, more = tmp_path / "two", [] if expert is None else ["--set", f"parallel.expert={expert}"]
    command = [*TRAIN, path, "--set", f"run.folder={two}", "--set", "optim.accumulation=2", *more]
    if TorchVersion(torch.__version__) < "2.13":  # FSDP2 shards floats alone, which is said before anything is trained
        said = " ".join("".join(process.stderr for process in run_processes(command, 2, check=False)).split())
        assert "model.base among several processes needs torch 2.13 or later" in said
        return
    run_processes(command, 2)
    assert losses(two) == pytest.approx(one, rel=1e-5)
    single, spread = in_checkpoint(on_base["run"]["folder"]), in_checkpoint(two)
    held = [name for name, tensor in single.items() if tensor.dtype == torch.uint8]
    assert held
    assert all(torch.equal(single[name], spread[name]) for name in held)


def test_a_base_without_adapters_or_in_float8_is_an_error(on_base):
    del on_base["model"]["lora"]
    with pytest.raises(ConfigError, match=r"base 'nf4' holds weights that do not learn.* Set model.lora.rank=16"):
        parse_config(on_base)
    on_base["model"]["lora"] = 8
    on_base["run"]["dtype"] = "float8"
    with pytest.raises(ConfigError, match=r"model.base 'nf4' multiplies in bfloat16.* Take one of the two out"):
        parse_config(on_base)
