"""Reward models: their losses against TRL's trainer, and runs that train them, from their plan to what they export."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer
from typer.testing import CliRunner

from headway.answer.model_folder import find_model, open_model
from headway.cli.app import app
from headway.config import parse_config
from headway.data import Encoder
from headway.data.answers import Answers
from headway.errors import ConfigError, UnknownModelError
from headway.models.attention import use_attention
from headway.models.head import model_with_loss
from headway.models.load import load_model, load_model_config, load_processor
from headway.models.scores import scoring_config
from headway.models.video import normalised
from headway.objectives.preferences.losses import Preferring
from headway.objectives.preferences.settings import PreferenceConfig
from headway.tracing import trace
from headway.train.run import train
from helpers.folders import write_vlm
from helpers.processes import TRAIN, run_processes
from helpers.rollouts import (
    LIBRARY_WARNINGS,
    assert_same,
    our_loss,
    packed,
    their_loss,
    trainer_of,
    turn,
    write_pairs,
)
from helpers.runs import read_metrics

pytestmark = [pytest.mark.usefixtures("own_cache"), LIBRARY_WARNINGS]


@pytest.fixture
def words(pair_words):
    """Settings of a short run that trains a reward model, with held-out pairs."""
    pair_words["optim"]["steps"] = 4
    pair_words["preference"] = {"loss": "reward"}
    return pair_words


def scorer(folder):
    return load_model(str(folder), seed=3, scores=True)


def whole_answers(samples):
    """Each answer with its prompt, as TRL's collator takes it, last tokens of the template included."""
    rows = []
    for sample in samples:
        better, worse = (ids.tolist() for ids in sample.input_ids_S.split(sample.answers))
        rows.append({"chosen_ids": better, "rejected_ids": worse})
    return rows


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_the_loss_equals_trls(base, tmp_path, center):
    model, theirs = scorer(base), scorer(base)
    samples, batch = packed(base, write_pairs(tmp_path / "pairs.jsonl", 5), model)
    loss, grads, numbers = our_loss(model, batch, {"loss": "reward", "center": center})
    use_attention(theirs, "sdpa")
    options = {"center_rewards_coefficient": center or None}
    trainer = trainer_of(RewardTrainer, RewardConfig, tmp_path, theirs, load_processor(str(base)), options=options)
    assert_same((loss, grads), their_loss(trainer, theirs, trainer.data_collator(whole_answers(samples))))
    measured = trainer._metrics["train" if theirs.training else "eval"]
    better, worse = numbers.rewards_2P
    assert (better > worse).double().mean().item() == pytest.approx(measured["accuracy"][0])
    assert (better - worse).mean().item() == pytest.approx(measured["margin"][0], abs=1e-5)


def test_the_loss_on_pictures_equals_trls(tmp_path):
    """Of a family for which transformers has a class: the same tokens and pixels, a row for each answer, padded."""
    folder = write_vlm(tmp_path / "model", "qwen3_5_vl", weights=True)
    rng, lines = np.random.default_rng(0), []
    for number in range(3):
        noise = rng.integers(0, 256, (56, 40 + 16 * number, 3), dtype=np.uint8)  # of one colour, patches would be equal
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
        prompt = [{"role": "user", "content": [{"type": "image", "image": f"{number}.png"}, *text("What is it?")]}]
        right, wrong = turn("assistant", f"It is {number}."), turn("assistant", "It is none, and no other one")
        lines.append(json.dumps({"prompt": prompt, "chosen": right, "rejected": wrong}))
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(lines) + "\n")
    model, theirs = scorer(folder), scorer(folder)
    samples, batch = packed(folder, data, model)
    loss, grads, _ = our_loss(model, batch, {"loss": "reward"})

    use_attention(theirs, "sdpa")
    processor = load_processor(str(folder))
    trainer = trainer_of(RewardTrainer, RewardConfig, tmp_path, theirs, processor.tokenizer)
    inputs = trainer.data_collator(whole_answers(samples))
    scale = Encoder(processor).pixel_scale
    sizes = [sample.media["images"].sizes for sample in samples]
    pixels = [normalised(sample.media["images"].features, scale) for sample in samples]
    halves = [(x[: len(x) // 2], y[: len(y) // 2]) for x, y in zip(sizes, pixels, strict=True)] * 2
    inputs |= {
        "image_grid_thw": torch.cat([grids for grids, _ in halves]),
        "pixel_values": torch.cat([patches for _, patches in halves]),
        "mm_token_type_ids": (inputs["input_ids"] == theirs.config.image_token_id).int(),
    }
    assert_same((loss, grads), their_loss(trainer, theirs, inputs))


def text(words):
    return [{"type": "text", "text": words}]


def test_a_score_is_read_at_the_last_token_that_is_no_padding():
    answers = Answers(*map(torch.tensor, ([0, 4], [4, 7], [1, 1], [0], [0], [1], [0])), counts=(2,))
    ids_T = torch.tensor([5, 6, 7, 0, 5, 8, 9, 0, 0])
    of = {
        padding: Preferring(PreferenceConfig(loss="reward"), padding).of_slots(answers, ids_T).tolist()
        for padding in (None, 0)
    }
    assert of[None] == [2, 2, 2, 0, 2, 2, 1, 2, 2]
    assert of[0] == [2, 2, 0, 2, 2, 2, 1, 2, 2]


def steps_of(raw):
    records = read_metrics(Path(raw["run"]["folder"]) / "metrics.jsonl")
    return [record for record in records if record["kind"] == "step"]


_SCORES = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification
base, adapters, rows = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
if adapters:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, adapters)
    model.config.pad_token_id = 0
assert "headway" not in sys.modules
longest = max(map(len, rows))
ids = torch.tensor([row + [model.config.pad_token_id] * (longest - len(row)) for row in rows])
mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
with torch.no_grad():
    print(json.dumps(model.eval()(input_ids=ids, attention_mask=mask).logits[:, 0].tolist()))
"""


def plain_scores(base, rows, adapters=""):
    """Scores of rows of tokens, by transformers alone in a process of its own."""
    command = [sys.executable, "-c", _SCORES, str(base), str(adapters), json.dumps(rows)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@torch.no_grad()
def our_scores(folder, data):
    """The rows of tokens of a file's answers, and their scores in a pack."""
    location = find_model(str(folder))
    model = open_model(location, dtype=torch.float32, device=torch.device("cpu"), for_generation=False).model
    tokenizer = location.base or (location.path if location.kind == "model" else f"{location.path}/model")
    samples, batch = packed(tokenizer, data, model)
    rows = [ids for sample in whole_answers(samples) for ids in sample.values()]
    preferring = Preferring(PreferenceConfig(loss="reward"))
    losses = model_with_loss(model, chunk=8)(batch.model_inputs(), batch.labels_1T[0])
    of_T = preferring.of_slots(batch.answers, batch.input_ids_1T[0])
    return rows, batch.answers.log_probabilities(losses.loss_T, of_T, None).tolist()


def judged(*command):
    result = CliRunner().invoke(app, ["evaluate", *map(str, command), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_what_a_run_exports_scores_in_plain_transformers_as_here(words, base, lora):
    words["model"]["lora"] = lora
    words["eval"] = {"at_end": True}
    summary = train(parse_config(words))
    folder, held_out = Path(words["run"]["folder"]), words["data"]["eval"]
    rows, scores = our_scores(summary.model, held_out)
    plain = plain_scores(base, rows, summary.model) if lora else plain_scores(summary.model, rows)
    assert plain == pytest.approx(scores, abs=1e-5)
    # it was trained, head and body, and its checkpoint holds the same
    assert our_scores(sorted((folder / "checkpoints").iterdir())[-1], held_out)[1] == pytest.approx(scores, abs=1e-6)
    first = load_model(str(base), seed=0, scores=True)
    trained = AutoModelForSequenceClassification.from_pretrained(summary.model if not lora else base, num_labels=1)
    if not lora:
        assert not torch.equal(first.score.weight, trained.score.weight)
    card = (summary.model / "README.md").read_text()
    assert "reward-model" in card
    assert "of 7 pairs right" in card
    # held-out pairs are judged in the run as afterwards, by the run and by what it exported
    records = read_metrics(folder / "metrics.jsonl")
    (in_run,) = [record for record in records if record["kind"] == "evaluation"]
    for after in (judged(folder, held_out), judged(summary.model, held_out)):
        assert after["judged_by"]["loss"] == "reward"
        assert after["accuracy"] == in_run["accuracy"]
        assert after["loss"] == pytest.approx(in_run["loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="is a reward model, which scores answers"):
        open_model(find_model(str(folder)), dtype=torch.float32, device=torch.device("cpu"), for_generation=True)


def test_pairs_are_learnt_and_recorded(words):
    words["optim"]["steps"] = 12
    train(parse_config(words))
    steps = steps_of(words)
    assert steps[-1]["preference"]["accuracy"] >= steps[0]["preference"]["accuracy"]
    assert steps[-1]["preference"]["margin"] > steps[0]["preference"]["margin"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    seen = steps[0]["preference"]
    assert seen.keys() == {"pairs", "accuracy", "margin", "reward_chosen", "reward_rejected"}
    assert seen["margin"] == pytest.approx(seen["reward_chosen"] - seen["reward_rejected"])


def test_the_head_is_billed_as_one_column(words, base):
    train(parse_config(words))
    record = steps_of(words)[0]
    writer = trace(load_model(str(base)))
    reader = trace(scorer(base))
    (head,) = [row for row in reader.rows if row.component == "language.head"]
    assert (head.forward, head.driver) == (2 * 32, "tokens")
    assert not record["flops"]["recompute"]
    assert reader.params.total == writer.params.total - (writer_head(writer) - 32)


def writer_head(cost_model):
    return next(p.numel for p in cost_model.parameters if p.name == "lm_head.weight")


def test_a_resumed_run_is_the_same_to_the_bit(words):
    words["checkpoint"] = {"every": 2}
    whole = train(parse_config(words))
    records = steps_of(words)
    words["run"]["folder"] += "-again"
    words["optim"]["steps"] = 2
    train(parse_config(words))
    words["optim"]["steps"] = 4
    again = train(parse_config(words), resume=True)
    assert [record["loss"] for record in steps_of(words)] == [record["loss"] for record in records]
    states = (load_model(str(summary.model)).state_dict() for summary in (whole, again))
    for one, two in zip(*(state.values() for state in states), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "parallel"), [(3, {}), (2, {"sequence": 2})])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_several_ranks_have_the_losses_of_one(words, tmp_path, ranks, parallel, lora):
    words["model"]["lora"] = lora
    words["data"]["strategy"] = "first_fit"
    words["optim"]["accumulation"] = ranks
    train(parse_config(words))
    alone = steps_of(words)
    words["optim"]["accumulation"] = ranks if parallel else 1
    words["parallel"] = parallel
    words["run"]["folder"] += "-several"
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(words))
    run_processes([*TRAIN, path], ranks)
    for one, two in zip(alone, steps_of(words), strict=True):
        assert two["samples_digest"] == one["samples_digest"]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert two["flops"] == one["flops"]


def test_a_dry_run_plans_a_head_of_one_column(words, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(words))
    command = ["train", str(path), "--dry-run", "--device", "H100", "--json"]
    scored = json.loads(CliRunner().invoke(app, command).stdout)
    written = json.loads(CliRunner().invoke(app, [*command, "--set", "preference.loss=simpo"]).stdout)
    assert scored["params"]["total"] < written["params"]["total"]
    assert scored["flops"]["total"] < written["flops"]["total"]
    assert scored["memory"]["peak"] < written["memory"]["peak"]


@pytest.mark.parametrize(
    ("preference", "speed", "message"),
    [
        ({"loss": "reward", "beta": 0.2}, {}, "beta has no effect with loss 'reward'"),
        ({"loss": "reward", "sft": 0.2}, {}, "sft has no effect with loss 'reward'"),
        ({"loss": "reward", "reference": "stored"}, {}, "has no effect with loss 'reward'"),
        ({"loss": "sigmoid", "center": 0.1}, {}, "center has no effect with loss 'sigmoid'. Remove it, or use reward"),
        ({"loss": "reward"}, {"loss_chunk": 7}, "loss_chunk has no effect with preference.loss 'reward'"),
    ],
)
def test_settings_without_effect_are_refused(words, preference, speed, message):
    words["preference"], words["speed"] = preference, speed
    with pytest.raises(ConfigError, match=message):
        parse_config(words)


def test_a_family_without_a_class_is_refused(digits):
    with pytest.raises(UnknownModelError, match="no reward model of type 'qwen3_vl'"):
        scoring_config(load_model_config(digits / "model"))
