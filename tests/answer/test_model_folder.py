"""A model by its path: whatever form it has, it says and scores what it did in training."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headway.answer.model_folder import find_model
from headway.cli.app import app
from headway.config import parse_config
from headway.errors import CheckpointError, ConfigError, HeadwayError
from headway.models.load import load_model
from headway.train.run import train
from helpers.runs import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def judged(*arguments):
    return json.loads(command("evaluate", *arguments, "--device", "cpu", "--json"))


def said_in_training(folder):
    """The last evaluation's numbers, and the answers in words."""
    found = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "evaluation"][-1]
    answers = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return found, {(one["where"], one["answer"], one["exact"]) for one in answers if one["step"] == found["step"]}


def answered(model, data, *more):
    """What `headway generate` answers, by JSON lines."""
    lines = command("generate", model, "--input", data, "--max-new-tokens", 4, "--device", "cpu", *more).splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def evaluated(raw, digits):
    """A configuration that is evaluated after its last step."""
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"at_end": True, "generate": 12, "max_new_tokens": 4}
    raw["optim"] |= {"steps": 8, "lr": 5e-3}
    return raw


def test_a_run_its_export_and_its_checkpoint_score_and_say_what_training_printed(evaluated, tmp_path):
    summary = train(parse_config(evaluated))
    in_training, answers = said_in_training(summary.folder)
    data = evaluated["data"]["eval"]
    for model in (summary.folder, summary.model, summary.checkpoint):
        found = judged(model, data, "--generate", 12, "--max-new-tokens", 4)
        assert found["loss"] == pytest.approx(in_training["loss"], rel=1e-6)
        assert (found["samples"], found["exact"]) == (in_training["samples"], in_training["exact"])
        assert found["perplexity"] == pytest.approx(2.718281828459045 ** found["loss"])
        (source,) = found["sources"]
        assert {(one["where"], one["answer"], one["exact"]) for one in source["answers"]} == answers
    alone, together = answered(summary.model, data, "--batch", 1), answered(summary.checkpoint, data, "--batch", 12)
    assert together == alone  # the padding on the left changes nothing
    assert {(one["where"], one["answer"]) for one in alone} == {(where, answer) for where, answer, _ in answers}
    shutil.copytree(summary.folder, tmp_path / "moved")
    assert find_model(str(tmp_path / "moved")).path == str(tmp_path / "moved/export/step-000008")
    shutil.rmtree(tmp_path / "moved/export")
    assert find_model(str(tmp_path / "moved")).kind == "checkpoint"
    assert judged(summary.folder)["loss"] == pytest.approx(in_training["loss"], rel=1e-6)  # on the run's own data.eval


def test_adapters_are_put_on_the_model_that_they_name_from_any_folder(evaluated, digits, tmp_path, monkeypatch):
    shutil.copytree(digits / "model", tmp_path / "base")
    torch.manual_seed(5)
    load_model(str(tmp_path / "base"), random_init=True).save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    evaluated["model"] = {"path": "base", "lora": {"rank": 4, "alpha": 16, "targets": ["q_proj", "down_proj"]}}
    summary = train(parse_config(evaluated))
    assert f"adapters           {summary.model}" in summary.as_table()
    config = json.loads((summary.model / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    in_training, answers = said_in_training(summary.folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for model in (summary.folder, summary.model, summary.checkpoint):
        found = judged(model, evaluated["data"]["eval"])
        assert found["kind"] == ("checkpoint" if model == summary.checkpoint else "adapters")
        assert found["loss"] == pytest.approx(in_training["loss"], rel=1e-6)
    said = answered(summary.model, evaluated["data"]["eval"])
    assert {(one["where"], one["answer"]) for one in said} == {(where, answer) for where, answer, _ in answers}

    (tmp_path / "base").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"belong to the model .*/base, which is no longer there.*base=MODEL"):
        find_model(str(summary.model))
    assert find_model(str(summary.model), base=str(tmp_path / "away")).base == str(tmp_path / "away")
    with pytest.raises(ConfigError, match=r"base='away' has no effect: .* is a whole model"):
        find_model(str(tmp_path / "away"), base="away")
    weights = summary.model / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors cannot be read"):
        judged(summary.model, evaluated["data"]["eval"], "--base", tmp_path / "away")


@pytest.mark.slow
def test_several_datasets_have_a_row_each_and_one_for_all(evaluated, digits):
    evaluated["optim"]["steps"] = 3
    summary = train(parse_config(evaluated))
    data = [digits / "data/eval.jsonl", digits / "data/train.jsonl"]
    found = judged(summary.model, *data, "--max-samples", 5)
    assert [source["data"] for source in found["sources"]] == [str(path) for path in data]
    assert found["samples"] == sum(source["samples"] for source in found["sources"]) == 10
    summed = sum(source["loss"] * source["tokens"] for source in found["sources"])
    assert found["loss"] == pytest.approx(summed / found["tokens"])
    table = command("evaluate", summary.model, *data, "--max-samples", 5, "--generate", 1)
    assert [line.split()[1] for line in table.splitlines() if line.startswith("all ")] == ["10"]
    assert " -> " in table.splitlines()[-1]


def test_what_cannot_be_judged_is_one_clear_error(tmp_path, digits):
    torch.manual_seed(5)
    shutil.copytree(digits / "model", tmp_path / "model")
    load_model(str(tmp_path / "model"), random_init=True).save_pretrained(tmp_path / "model")
    evaluate = ["evaluate", str(tmp_path / "model"), "--device", "cpu"]
    data = str(digits / "data/eval.jsonl")
    for arguments, message in (
        ([], "There is nothing to evaluate on, because this model has no data.eval. Give DATA"),
        (
            [data, "--generate", "2", "--max-new-tokens", "90000"],
            r"\(--max-new-tokens\) need .* raise --packing-length",
        ),
        ([data, "--packing-length", "9"], "more than a pack's budget of 9 tokens"),
    ):
        with pytest.raises(HeadwayError, match=message):
            app([*evaluate, *arguments], standalone_mode=False)


def test_the_answers_are_shown_a_few_of_them_and_short(evaluated, capsys):
    evaluated["optim"]["steps"] = 3
    train(parse_config(evaluated))
    lines = capsys.readouterr().err.splitlines()
    shown = [line for line in lines if " -> " in line]
    assert len(shown) == 3
    assert all(len(line) < 220 for line in shown)
    assert lines[lines.index(shown[0]) - 1].startswith("evaluation after step 3")


def test_of_several_processes_the_first_one_speaks(config, monkeypatch, capsys):
    from headway.cli.train import print_summary

    summary = train(config)
    capsys.readouterr()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    print_summary(summary, as_json=True)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    print_summary(summary, as_json=True)
    assert json.loads(capsys.readouterr().out)["folder"] == str(Path(summary.folder))
