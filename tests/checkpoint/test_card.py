"""The model card: numbers are those of the records, hubs read its front matter, and it names no path."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from headway.checkpoint.export import export, find_checkpoint_in
from headway.config import parse_config
from headway.models.load import load_model
from headway.train.run import train
from helpers.runs import read_metrics


@pytest.fixture
def run(raw, digits):
    """A run folder with two checkpoints, of two sources, one of which has a name that is no plain word."""
    part = {"path": str(digits / "data/one_digit.jsonl"), "name": "<b>|`x`", "weight": 1}
    raw["data"]["train"] = [{"mix": [{"path": str(digits / "data/train.jsonl"), "name": "digits", "weight": 1}, part]}]
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"every": 3}
    raw["checkpoint"] = {"every": 3, "keep": 2, "export": "never"}
    train(parse_config(raw))
    return Path(raw["run"]["folder"])


def card_of(checkpoint, folder):
    export(find_checkpoint_in(Path(checkpoint)), folder)
    return folder / "README.md"


def steps_of(run):
    records = read_metrics(run / "metrics.jsonl")
    return [one for one in records if one["kind"] == "step"]


def test_its_numbers_are_those_of_the_records(run, tmp_path):
    card = ModelCard.load(card_of(run, tmp_path / "model"))
    steps = steps_of(run)
    flops, tokens = sum(one["flops"]["total"] for one in steps), sum(one["tokens"] for one in steps)
    mfu = flops / sum(one["wall_s"] * one["peak_flops_per_s"] for one in steps)
    assert f"on {tokens:,} tokens" in card.text
    assert f"| FLOPs | {flops:.4g} of the model, convention `useful/1` |" in card.text
    assert f"| MFU | {100 * mfu:.1f} % over all steps |" in card.text
    assert f"{steps[0]['loss']:.4f} first" in card.text
    assert "of 12), loss" in card.text
    assert "after step 6 |" in card.text  # the last evaluation
    for name in ("digits", "<b>|`x`"):
        read = sum(one["sources"].get(name, {"tokens": 0})["tokens"] for one in steps)
        assert f"{read:,} | " in card.text
    settings = yaml.safe_load(card.text.partition("````yaml\n")[2].partition("````")[0])
    assert settings["optim"]["lr"] == 2e-3
    assert settings["data"]["tokens_per_pack"] == 160


def test_hubs_read_its_front_matter(run, tmp_path):
    data = ModelCard.load(card_of(run, tmp_path / "model")).data.to_dict()
    assert data == {"library_name": "transformers", "pipeline_tag": "image-text-to-text", "tags": ["headway"]}


def test_datasets_of_the_hub_are_named(run, tmp_path):
    config = run / "config.yaml"
    raw = yaml.safe_load(config.read_text())
    for part, path in zip(
        raw["data"]["train"][0]["mix"], ("someone/digits@main/x.jsonl", "someone/more/x.jsonl"), strict=True
    ):
        part["path"] = f"hf://datasets/{path}"
    config.write_text(yaml.safe_dump(raw))
    data = ModelCard.load(card_of(run, tmp_path / "model")).data.to_dict()
    assert data["datasets"] == ["someone/digits", "someone/more"]


def test_it_names_no_path_and_keeps_tables_whole(run, raw, tmp_path):
    text = card_of(run, tmp_path / "model").read_text()
    for path in (str(tmp_path), raw["model"]["path"], raw["data"]["eval"], str(Path.home())):
        assert path not in text
    (row,) = (line for line in text.splitlines() if "&lt;b>" in line)
    assert row.replace("\\|", "").count("|") == 4
    assert row.startswith("| &lt;b>")  # markup stays text


def test_an_earlier_checkpoint_has_the_steps_up_to_it(run, tmp_path):
    text = card_of(run / "checkpoints/step-000003", tmp_path / "model").read_text()
    assert "after 3 steps" in text
    assert f"on {sum(one['tokens'] for one in steps_of(run)[:3]):,} tokens" in text


def test_a_torn_last_line_is_left_out_and_a_lost_record_leaves_no_card(run, tmp_path):
    whole = card_of(run, tmp_path / "whole").read_text()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    assert card_of(run, tmp_path / "torn").read_text() == whole
    odd = run / "run.json"
    whole_machine, machine = odd.read_text(), json.loads(odd.read_text())
    odd.write_text(json.dumps(machine | {"model": {"class": "x"}}))  # as nobody wrote it
    assert not card_of(run, tmp_path / "odd").exists()
    odd.write_text(whole_machine)
    (run / "metrics.jsonl").unlink()
    assert not card_of(run, tmp_path / "none").exists()
    assert (tmp_path / "none/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("held", "advice"), [(None, ""), ("nf4", "load_in_4bit=True"), ("int8", "beside a base in 8 bits")]
)
def test_adapters_name_their_base_and_how_it_was_held(raw, digits, tmp_path, held, advice):
    base = tmp_path / "some/model"
    shutil.copytree(digits / "model", base)
    load_model(str(base), random_init=True).save_pretrained(base)
    raw["model"] = {"path": str(base), "lora": {"rank": 2, "targets": ["q_proj"]}, "base": held}
    raw["optim"]["steps"] = 2
    train(parse_config(raw))
    config = Path(raw["run"]["folder"]) / "config.yaml"
    config.write_text(config.read_text().replace(str(base), "some/model"))  # as it is on the Hub
    card = ModelCard.load(card_of(raw["run"]["folder"], tmp_path / "model"))
    assert ("--merge-lora" in card.text) == bool(held)
    assert advice in card.text
    assert card.data.to_dict() == {
        "base_model": "some/model",
        "library_name": "peft",
        "pipeline_tag": "image-text-to-text",
        "tags": ["headway", "lora"],
    }
