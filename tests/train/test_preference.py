"""Runs that train on preferences: their records, their reference, resume, adapters, ranks."""

import itertools
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image, ImageOps
from trl import DPOConfig, DPOTrainer
from typer.testing import CliRunner

from headway.cli.app import app
from headway.config import parse_config
from headway.data import Encoder, read_samples
from headway.errors import CheckpointError, ConfigError
from headway.models.load import load_model, load_processor
from headway.models.parallel.ranks import Ranks
from headway.tracing import trace
from headway.train.data import open_feed
from headway.train.run import train
from helpers.processes import TRAIN, run_processes
from helpers.rollouts import ids_of, pair, trainer_of, turn, write_pairs, write_pictured_pairs
from helpers.runs import read_metrics, write_model

pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::UserWarning", "ignore:.is_gradient_checkpointing.:FutureWarning"
    ),
]


FAST = [(True, None, "q_proj", False), (True, "int8", "lm_head", False)]  # cells of a table that run at each change


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return write_model(folder / "model", "qwen3"), write_pairs(folder / "pairs.jsonl", 24)


@pytest.fixture
def words(raw, text):
    """A configuration of text, as plain types."""
    raw["model"]["path"], raw["data"]["train"] = str(text[0]), str(text[1])
    raw["data"]["tokens_per_pack"] = 300
    raw["optim"] = {"steps": 3, "lr": 5e-3, "schedule": "constant", "accumulation": 2, "clip": None}
    raw["preference"] = {"loss": "sigmoid"}
    return raw


@pytest.fixture
def pictures(raw, digits):
    """A configuration of pictures of digits: the right reading is better than a wrong one."""
    path = write_pictured_pairs(digits, digits / "data" / "preferences.jsonl")  # beside the pictures
    raw["data"]["train"] = str(path)
    raw["data"]["tokens_per_pack"] = 400
    raw["preference"] = {"loss": "sigmoid", "sft": 0.1}
    raw["optim"] |= {"steps": 4, "schedule": "constant"}
    return raw


def steps_of(raw):
    records = read_metrics(Path(raw["run"]["folder"]) / "metrics.jsonl")
    return [record for record in records if record["kind"] == "step"]


@pytest.mark.parametrize("shares", [True, False], ids=["shared prompts", "apart"])
def test_a_run_equals_trls_trainer_step_by_step(words, text, tmp_path, shares):
    words["preference"]["shared_prompts"] = shares
    config = parse_config(words)
    train(config)

    torch.manual_seed(0)
    model, reference = (load_model(str(text[0]), random_init=True, attention="sdpa") for _ in range(2))
    reference.load_state_dict(model.state_dict())
    tokenizer = load_processor(str(text[0]))
    encoder, packing = Encoder(tokenizer), Encoder(tokenizer)
    packing.shares_prompts = shares
    by_place = {sample.where: sample for sample in read_samples(text[1])}
    feed = open_feed(config, packing, model, trace(model).with_splits(), Ranks(0, 1), pin_memory=False)
    trainer = trainer_of(
        DPOTrainer, DPOConfig, tmp_path / "trl", model, tokenizer, ref_model=reference, options={"beta": 0.1}
    )
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, betas=config.optim.betas, eps=1e-8)
    for record in steps_of(words):
        samples = [encoder.encode(by_place[where]) for batch in next(feed) for where in batch.sources]
        trainer._metrics["train"].clear()
        loss = trainer.compute_loss(model, trainer.data_collator(ids_of(samples)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-4)
        pairs, theirs = record["preference"], trainer._metrics["train"]
        assert pairs["pairs"] == len(samples)
        assert pairs["accuracy"] == pytest.approx(theirs["rewards/accuracies"][0])
        for ours, their in (("margin", "rewards/margins"), ("reward_chosen", "rewards/chosen")):
            assert pairs[ours] == pytest.approx(theirs[their][0], rel=1e-3, abs=1e-5)
        for side in ("chosen", "rejected"):
            assert pairs[f"log_p_{side}"] == pytest.approx(theirs[f"logps/{side}"][0], rel=1e-4)


def test_a_step_bills_the_second_pass_of_its_head_as_recomputation(words, text):
    train(parse_config(words))
    model = load_model(str(text[0]), random_init=True)
    rows = {row.name: row for row in trace(model).count(_workload(steps_of(words)[0])).rows}
    record = steps_of(words)[0]
    assert record["flops"]["recompute"] == rows["language.head"].forward > 0
    assert record["hfu"] > record["mfu"]


def _workload(record):
    from headway import Workload

    # of the head alone, which runs on labelled tokens
    return Workload([record["tokens"]], logits=record["supervised"])


def test_a_resumed_run_reads_the_copy_of_its_reference(words, tmp_path):
    words["checkpoint"] = {"every": 2}
    words["optim"]["steps"] = 4
    whole = train(parse_config(words))
    records = steps_of(words)
    words["run"]["folder"] += "-again"
    words["optim"]["steps"] = 2
    train(parse_config(words))
    shutil.rmtree(tmp_path / "cache")
    words["optim"]["steps"] = 4
    again = train(parse_config(words), resume=True)
    assert [r["loss"] for r in steps_of(words)] == [r["loss"] for r in records]
    assert [r["preference"] for r in steps_of(words)] == [r["preference"] for r in records]
    weights = (load_model(str(summary.model)).state_dict() for summary in (whole, again))
    for one, two in zip(*(state.values() for state in weights), strict=True):
        assert torch.equal(one, two)
    shutil.rmtree(Path(words["run"]["folder"]) / "reference")
    words["optim"]["steps"] = 6
    with pytest.raises(CheckpointError, match="reference"):
        train(parse_config(words), resume=True)


def test_the_reference_is_computed_once_for_a_model_and_its_rows(words, text, capsys):
    train(parse_config(words))
    assert "log-probabilities of 24 rows took" in capsys.readouterr().err
    first = steps_of(words)
    words["run"]["folder"] += "-again"
    train(parse_config(words))
    assert "were computed before" in capsys.readouterr().err
    assert [r["loss"] for r in steps_of(words)] == [r["loss"] for r in first]
    words["run"] |= {"folder": words["run"]["folder"] + "-other", "seed": 5}  # other weights
    train(parse_config(words))
    assert "log-probabilities of 24 rows took" in capsys.readouterr().err


def test_rows_whose_pictures_were_replaced_are_computed_again_and_no_others(raw, digits, tmp_path, capsys):
    """The policy is the reference at step 1, so its loss is ln 2 whatever pictures show: Rafailov 2023, equation 7."""
    shutil.copytree(digits / "data", tmp_path / "data")
    torch.manual_seed(5)
    load_model(str(digits / "model"), random_init=True).save_pretrained(tmp_path / "model")
    for file in (digits / "model").iterdir():
        if file.name != "config.json":
            shutil.copy(file, tmp_path / "model")
    rows = write_pictured_pairs(digits, tmp_path / "data/pairs.jsonl")
    raw["model"] = {"path": str(tmp_path / "model")}
    raw["data"] |= {"train": str(rows), "tokens_per_pack": 400}
    raw["preference"] = {"loss": "sigmoid"}
    raw["optim"]["steps"] = 1

    def first_loss():
        raw["run"]["folder"] += "x"
        train(parse_config(raw))
        return steps_of(raw)[0]["loss"], capsys.readouterr().err

    assert first_loss()[0] == pytest.approx(math.log(2), abs=1e-6)
    # Nothing but times and places of files has changed.
    pictures = sorted((tmp_path / "data/images").iterdir())
    for picture in pictures:
        picture.touch()
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    raw["model"]["path"] = str(tmp_path / "copy")
    assert "were computed before" in first_loss()[1]
    # The same name and time with other content.
    lines = rows.read_text().splitlines()
    picture = next(picture for picture in pictures if picture.name in lines[0])
    status = picture.stat()
    ImageOps.mirror(Image.open(picture)).save(picture)
    os.utime(picture, ns=(status.st_atime_ns, status.st_mtime_ns))
    loss, told = first_loss()
    assert loss == pytest.approx(math.log(2), abs=1e-6)
    assert f"log-probabilities of {sum(picture.name in line for line in lines)} rows took" in told


def test_an_interrupted_reference_goes_on(words, tmp_path, monkeypatch, capsys):
    """Rows that are in the table are not computed again, and those that are missing are."""
    import numpy as np

    train(parse_config(words))
    (path,) = (tmp_path / "cache").rglob("reference-*.npy")
    table = np.load(path)
    capsys.readouterr()
    half = table.copy()
    half[10:] = np.nan
    np.save(path, half)
    words["run"]["folder"] += "-again"
    train(parse_config(words))
    assert "log-probabilities of 14 rows took" in capsys.readouterr().err
    np.testing.assert_allclose(np.load(path), table, rtol=1e-6)


def test_adapters_that_are_off_are_the_stored_reference(words, text, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(text[0], base)
    torch.manual_seed(5)
    load_model(str(base), random_init=True).save_pretrained(base)
    words["model"] = {"path": str(base), "lora": {"rank": 4, "targets": ["q_proj", "down_proj", "lm_head"]}}
    words["optim"]["lr"] = 0.05
    train(parse_config(words))
    stored = steps_of(words)
    words["run"]["folder"] += "-off"
    words["preference"]["reference"] = "adapters-off"
    train(parse_config(words))
    off = steps_of(words)
    for one, two in zip(stored, off, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert stored[-1]["loss"] < stored[0]["loss"]
    # the forward without adapters is work of a phase of its own
    plain = trace(load_model(str(base)))
    phase = off[0]["phases"]["reference"]
    work = off[0]["flops"]["total"] - stored[0]["flops"]["total"]
    assert phase["flops"]["total"] == work > 0
    assert work < stored[0]["flops"]["forward"]
    assert plain.params.total < load_count(words)


@pytest.mark.parametrize(
    ("tokens", "base", "targets", "tied"),
    [
        pytest.param(*cell, id="-".join(map(str, cell)), marks=[] if cell in FAST else pytest.mark.slow)
        for cell in itertools.product((True, False), (None, "nf4", "int8"), ("q_proj", "lm_head"), (True, False))
        if cell[2:] != ("lm_head", True)  # refused: see tests/models/test_lora.py
    ],
)
def test_references_agree_whatever_learns_and_however_the_base_is_held(words, tmp_path, tokens, base, targets, tied):
    """With adapters off, a model is the one that a stored reference ran: new rows have their first values again."""
    folder = write_model(tmp_path / "base", "qwen3", tie_word_embeddings=tied)
    torch.manual_seed(5)
    load_model(str(folder), random_init=True).save_pretrained(folder)
    pairs = write_pairs(
        tmp_path / "marked.jsonl",
        8,
        lambda number: {
            name: turn(value[0]["role"], f"<pt> {value[0]['content']}") for name, value in pair(number).items()
        },
    )
    words["data"]["train"] = str(pairs)
    words["model"] = {"path": str(folder), "base": base, "lora": {"rank": 4, "targets": [targets, "down_proj"]}}
    words["model"] |= {"new_tokens": ["<pt>"]} if tokens else {}
    words["optim"] |= {"lr": 0.05, "steps": 2, "accumulation": 1}
    losses = {}
    for reference in ("stored", "adapters-off"):
        words["preference"]["reference"] = reference
        words["run"]["folder"] = str(tmp_path / reference)
        train(parse_config(words))
        losses[reference] = [record["loss"] for record in steps_of(words)]
    assert losses["stored"][0] == pytest.approx(math.log(2), abs=1e-6)  # -log sigmoid(0): the policy is the reference
    assert losses["stored"][1] < 0.69
    assert losses["adapters-off"] == pytest.approx(losses["stored"], rel=1e-5)


def load_count(raw):
    return json.loads((Path(raw["run"]["folder"]) / "run.json").read_text())["model"]["parameters"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(3, {}), (2, {"sequence": 2})])
def test_several_ranks_have_the_losses_of_one(pictures, tmp_path, ranks, parallel):
    pictures["optim"]["accumulation"] = ranks
    train(parse_config(pictures))
    alone = steps_of(pictures)
    pictures["optim"]["accumulation"] = ranks if parallel else 1
    pictures["parallel"] = parallel
    pictures["run"]["folder"] += "-several"
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(pictures))
    shutil.rmtree(tmp_path / "cache")
    run_processes([*TRAIN, path], ranks)
    for one, two in zip(alone, steps_of(pictures), strict=True):
        assert two["samples_digest"] == one["samples_digest"]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert two["preference"] == pytest.approx(one["preference"], rel=1e-3, abs=1e-5)
        assert two["flops"] == one["flops"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "dpo"}, "give one of sigmoid, robust"),
        ({"gamma": 0.1}, "gamma has no effect with loss 'sigmoid'. Remove it, or use simpo"),
        ({"loss": "orpo", "reference": "stored"}, "has no effect with loss 'orpo'"),
        ({"reference": "adapters-off"}, "needs adapters to switch off. Set model.lora"),
        ({"loss": "robust", "label_smoothing": 0.5}, "must be below 0.5"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(words, changes, message):
    words["preference"] = changes
    with pytest.raises(ConfigError, match=message):
        parse_config(words)


def test_rows_of_another_kind_are_refused(words, digits, tmp_path):
    words["data"]["stream"] = {}
    with pytest.raises(ConfigError, match="stored' needs the rows of an index"):
        parse_config(words)
    del words["data"]["stream"]
    del words["preference"]
    with pytest.raises(
        ConfigError, match=r"Headway cannot train on the first rows .*a run without the section preference"
    ):
        train(parse_config(words))
    words["preference"] = {}
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [*turn("user", "a"), *turn("assistant", "b")]}) + "\n")
    words["data"]["train"] = str(path)
    with pytest.raises(ConfigError, match=r"line 1: the row is no preference, but the run trains on preferences"):
        train(parse_config(words))


def test_preferences_come_without_an_index_where_nothing_is_stored(words):
    words["data"]["stream"] = {"lanes": 1}
    words["preference"] = {"loss": "simpo"}
    words["optim"]["steps"] = 2
    train(parse_config(words))
    assert all(record["preference"]["pairs"] > 0 for record in steps_of(words))


@pytest.mark.parametrize("reference", ["stored", "adapters-off", "none"])
def test_held_out_pairs_are_judged_as_the_next_step_sees_them(words, text, tmp_path, reference):
    """Of a run whose steps and evaluations are of the same few rows, the weights after a step are those of the next."""
    path = write_pairs(tmp_path / "few.jsonl", 4)
    words["data"] |= {"train": str(path), "eval": str(path), "tokens_per_pack": 600, "samples_per_pack": 4, "window": 4}
    words["optim"] |= {"accumulation": 1, "steps": 3}
    words["eval"] = {"every": 1}
    words["checkpoint"] = {"every": 1, "keep": 3}
    words["preference"] = {"loss": "ipo", "reference": reference}
    if reference == "adapters-off":
        words["model"]["lora"] = {"rank": 2, "targets": ["q_proj"]}
    train(parse_config(words))
    records = read_metrics(Path(words["run"]["folder"]) / "metrics.jsonl")
    judged = {record["step"]: record for record in records if record["kind"] == "evaluation"}
    steps = {record["step"]: record for record in records if record["kind"] == "step"}
    for step in (1, 2):
        seen, following = judged[step], steps[step + 1]
        assert (seen["pairs"], seen["samples"]) == (4, 4)
        assert seen["loss"] == pytest.approx(following["loss"], rel=1e-5)
        assert seen["accuracy"] == following["preference"]["accuracy"]
        assert seen["margin"] == pytest.approx(following["preference"]["margin"], rel=1e-4, abs=1e-6)
    # a continuation compares with the same reference
    words["optim"]["steps"] = 4
    train(parse_config(words), resume=True)
    again = read_metrics(Path(words["run"]["folder"]) / "metrics.jsonl")
    last = next(record for record in again if record["kind"] == "step" and record["step"] == 4)
    assert judged[3]["loss"] == pytest.approx(last["loss"], rel=1e-5)


def test_evaluate_says_how_many_pairs_are_right(words, text):
    train(parse_config(words))
    command = ["evaluate", words["run"]["folder"], str(text[1])]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    judged = json.loads(result.stdout)
    assert (judged["pairs"], judged["samples"]) == (24, 24)
    assert 0.0 <= judged["accuracy"] <= 1.0
    assert "pairs right" in CliRunner().invoke(app, command).stdout


def test_held_out_samples_of_another_kind_are_refused(words, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [*turn("user", "Which"), *turn("assistant", "picture")]}) + "\n")
    words["data"]["eval"] = str(path)
    words["eval"] = {"at_end": True}
    with pytest.raises(
        ConfigError, match=r"data\.eval holds samples that are no preferences, but the run trains on preferences"
    ):
        train(parse_config(words))
