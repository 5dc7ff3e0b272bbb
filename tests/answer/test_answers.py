"""Answers in words: they agree with what exact match says of the same model, and with transformers' own generation."""

import base64
import json
from copy import deepcopy
from io import BytesIO
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from headway.answer.answers import GenerationEval, _question
from headway.answer.evaluate import EvalSet
from headway.config import parse_config
from headway.config.advice import warnings
from headway.data import Encoder, read_samples
from headway.data.collate import Collator
from headway.data.samples import Chat, Message, Origin, TextPart
from headway.errors import ConfigError
from headway.models.head import model_with_loss
from headway.models.load import load_model, load_processor, rope_index
from headway.models.parallel.ranks import Ranks
from headway.packing.budget import Budget
from headway.train.run import train
from helpers.processes import TRAIN, run_processes
from helpers.runs import read_metrics

CPU, BUDGET, ALONE = torch.device("cpu"), Budget(160, None), Ranks(0, 1)


@pytest.fixture(scope="module")
def reader(digits):
    torch.manual_seed(0)
    model = load_model(str(digits / "model"), random_init=True)
    encoder = Encoder(load_processor(str(digits / "model")), rope_index(model))
    return model, encoder, read_samples(digits / "data/eval.jsonl")


def questions(encoder, samples, **settings):
    collator = Collator(pixel_scale=encoder.pixel_scale)
    return GenerationEval(samples, encoder, BUDGET, collator, ALONE, **{"count": 100, "max_new_tokens": 12} | settings)


def test_answers_are_those_of_transformers_generate(reader):
    """Which uses a cache, one prompt at a time, and its own attention and positions."""
    model, encoder, samples = reader
    witness = load_model(deepcopy(model.config), random_init=True, attention="sdpa")
    witness.load_state_dict(model.state_dict())
    answers = questions(encoder, samples).answer(model, CPU)
    assert len(answers) == len(samples) == 12
    for sample, answer in zip(samples, answers, strict=True):
        prompt = encoder.encode_prompt(sample)
        batch = Collator(pixel_scale=encoder.pixel_scale)([prompt]).model_inputs()
        inputs = {k: batch[k] for k in ("input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids")}
        closing = [int(encoder.encode(sample).labels_S[-1]), encoder.tokenizer.eos_token_id]
        ids = witness.eval().generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=closing)
        words = encoder.tokenizer.decode(ids[0, prompt.tokens :], skip_special_tokens=True)
        assert answer.answer == words.strip()
        assert answer.where == sample.where


def test_answers_are_exact_where_exact_match_says_so(reader):
    """On a model that was made to know some answers: its head is trained on half of the samples."""
    model, encoder, samples = reader
    known = EvalSet(samples[:6], encoder, BUDGET, ALONE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(60):
        for batch in known.packs:
            logits = model(**batch.model_inputs()).logits[0]
            torch.nn.functional.cross_entropy(logits, batch.labels_1T[0], ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = EvalSet(samples, encoder, BUDGET, ALONE).evaluate(model_with_loss(model, chunk=64), CPU)
    answers = questions(encoder, samples).answer(model, CPU)
    assert 0 < found.exact <= 12
    assert sum(answer.is_exact for answer in answers) == found.exact
    for answer in answers:
        assert answer.is_exact == (answer.answer == answer.gold)
    assert model.training


def test_a_run_writes_answers_beside_its_records(raw, digits):
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"every": 3, "generate": 2, "max_new_tokens": 4}
    config = parse_config(raw)
    train(config)
    records = [json.loads(line) for line in (config.run.folder / "samples.jsonl").read_text().splitlines()]
    assert [(record["step"], record["where"]) for record in records] == [
        (step, f"{digits}/data/eval.jsonl, line {line}") for step in (3, 6) for line in (1, 2)
    ]
    gold = json.loads((digits / "data/eval.jsonl").read_text().splitlines()[0])
    assert records[0]["gold"] in json.dumps(gold)
    words = [part.get("text", "[image]") for part in gold["messages"][0]["content"]]
    assert records[0]["prompt"] == " ".join(words)  # and none of the template's own, such as "user"
    # what the model was shown, small, with the first answers to a sample and not again
    small = [Image.open(BytesIO(base64.b64decode(record["picture"]))) for record in records[:2]]
    assert [(one.format, max(one.size) <= 96) for one in small] == [("JPEG", True)] * 2
    assert not any("picture" in record for record in records[2:])
    summaries = [r for r in read_metrics(config.run.folder / "metrics.jsonl") if r["kind"] == "answers"]
    assert [(r["step"], r["samples"], len(r["answers"])) for r in summaries] == [(3, 2, 2), (6, 2, 2)]


@pytest.mark.dist
def test_processes_that_share_packs_give_the_answers_of_one(raw, digits, tmp_path):
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"at_end": True, "generate": 4, "max_new_tokens": 6}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    train(parse_config(raw))
    run_processes([*TRAIN, path, "--set", f"run.folder={tmp_path}/two", "--set", "parallel.sequence=2"], 2)
    one, two = (Path(folder, "samples.jsonl").read_text() for folder in (raw["run"]["folder"], tmp_path / "two"))
    assert one.count("\n") == 4
    assert two == one


def test_an_answer_that_cannot_fit_is_an_error(reader):
    _, encoder, samples = reader
    with pytest.raises(
        ConfigError, match=r"and an answer of 150 tokens \(eval.max_new_tokens\) need .* more than a pa"
    ):
        questions(encoder, samples, max_new_tokens=150)


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        ({"generate": 2}, "eval.generate has no effect without eval.every or eval.at_end"),
        ({"max_new_tokens": 2}, "eval.max_new_tokens has no effect without eval.generate"),
    ],
)
def test_settings_without_effect_are_told(raw, judged, said):
    assert said in warnings(parse_config(raw | {"eval": judged}), raw["optim"]["steps"])


def test_a_question_among_several_turns_is_shown_with_their_roles():
    turns = [("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4"), ("user", "3 + 3?"), ("assistant", "6")]
    chat = Chat(tuple(Message(role, (TextPart(words),)) for role, words in turns), Origin("", "rows.jsonl", 0, "line"))
    assert _question(chat) == "system: Be brief.\nuser: 2 + 2?\nassistant: 4\nuser: 3 + 3?"
