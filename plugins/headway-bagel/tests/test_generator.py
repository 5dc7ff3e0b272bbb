"""Words from models that draw: with a cache as without one, alone as together, in a run's evaluation too."""

import json

import pytest
import torch
import yaml

from bagels import VAE, WORDS, chat, image, write_data, write_model
from headway.answer.answers import GenerationEval
from headway.answer.generate import Decoding
from headway.answer.model_folder import ModelLocation, OpenedModel, make_encoder
from headway.config import parse_config
from headway.data import Budget, read_samples
from headway.data.encoders import collator_of
from headway.data.samples import Chat, Document, Message, Origin, TextPart
from headway.models.load import load_model, load_processor
from headway.models.parallel.ranks import Ranks
from headway.train.run import train
from headway_bagel.generator import PackedGenerator
from helpers.processes import TRAIN, run_processes
from helpers.runs import configuration, ledgers, one_thread, read_metrics  # noqa: F401 - two of them are fixtures

CPU = torch.device("cpu")
NEW = 7


@pytest.fixture(scope="module", params=[None, VAE], ids=["pixels", "vae"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    write_model(folder / "model", request.param)
    write_data(folder / "data", samples=9)
    # a picture that was drawn, then asked about: read, and given as clean latents too
    row = chat(WORDS[0], [image("0-0.png")])
    row["messages"] += chat(WORDS[2], WORDS[3])["messages"]
    with (folder / "data" / "all.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def opened(folder):
    torch.manual_seed(3)
    model = load_model(folder / "model", random_init=True, device=CPU).eval()
    for weight in model.language_model.model.layers.parameters():  # so that what is before decides what comes next
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.4)
    return OpenedModel(ModelLocation(str(folder / "model"), "model"), model, load_processor(folder / "model"))


@pytest.fixture(scope="module")
def questions(folder):
    return [sample for sample in read_samples(folder / "data" / "all.jsonl") if sample.answer]


def asked(samples):
    return [Chat(sample.messages[:-1], sample.origin) for sample in samples]


def anew(opened, prompt, steps):
    """Greedy tokens, each from the whole text so far, without a cache, under a mask of booleans."""
    encoder = make_encoder(opened.processor, opened.model)
    start, end = encoder.text_ids("")
    ids, sample = [], encoder.encode_prompt(prompt)
    for _ in range(steps):
        given = collator_of(encoder)([sample]).noised(0, 0).model_inputs()
        given["input_ids"] = torch.cat([sample.input_ids_S, torch.tensor(ids, dtype=torch.long)])[None]
        grown = sample.tokens + len(ids)
        last = sample.position_ids_RS[0, -1].item()
        given["position_ids"] = torch.cat([sample.position_ids_RS[0], last + 1 + torch.arange(len(ids))])[None]
        given["understood_slots"] = torch.cat([given["understood_slots"], torch.arange(sample.tokens, grown)])
        mask = torch.ones(grown, grown, dtype=torch.bool).tril()
        before = given["attention_mask"].dense()[0, 0]
        mask[: sample.tokens, : sample.tokens] = before
        given["attention_mask"] = mask[None, None]
        given["logits_to_keep"] = torch.tensor([grown - 1])
        ids.append(opened.model(**given).logits[0].argmax().item())
        if ids[-1] == end:
            break
    assert start in sample.input_ids_S[-1:]
    return ids


def test_answers_with_a_cache_are_those_of_the_whole_text_computed_anew(opened, questions):
    generator = PackedGenerator(opened, CPU)
    found = list(generator.answer(asked(questions), Decoding(max_new_tokens=NEW), batch=1))
    with torch.no_grad():
        for sample, answer in zip(questions, found, strict=True):
            ids = anew(opened, sample, NEW)
            assert answer.tokens == len(ids)
            assert answer.text == generator.tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert len({answer.text for answer in found}) > 1


def test_answers_do_not_depend_on_what_is_answered_beside_them(opened, questions):
    generator = PackedGenerator(opened, CPU)
    document = Document("a sq", Origin("", "a file", 0, "line 1"))
    prompts = [*asked(questions), document, Chat((Message("user", (TextPart(WORDS[1]),)),), document.origin)]
    alone, together = (list(generator.answer(prompts, Decoding(NEW), batch=batch)) for batch in (1, 6))
    assert alone == together


def test_training_answers_the_same_without_a_cache(opened, questions):
    encoder = make_encoder(opened.processor, opened.model)
    collator, budget = collator_of(encoder), Budget(200)
    judged = GenerationEval(questions, encoder, budget, collator, Ranks(0, 1), count=9, max_new_tokens=NEW)
    answers = judged.answer(opened.model, CPU)
    found = PackedGenerator(opened, CPU).answer(asked(questions), Decoding(NEW), batch=3)
    assert [one.answer for one in answers] == [one.text for one in found]
    assert [one.gold for one in answers] == [sample.answer for sample in questions]


def test_draws_repeat_with_their_seed(opened, questions):
    generator = PackedGenerator(opened, CPU)

    def drawn(seed, **how):
        decoding = Decoding(NEW, temperature=1.5, seed=seed, **how)
        return [one.text for one in generator.answer(asked(questions), decoding, batch=2)]

    assert drawn(1) == drawn(1) != drawn(2)
    likeliest = [one.text for one in generator.answer(asked(questions), Decoding(NEW))]
    assert drawn(1, top_k=1) == likeliest
    assert drawn(1, top_p=1e-6) == likeliest


def judged_config(folder, run, processes=1):
    """A run that answers held-out questions at its end; as many processes as there are share its packs."""
    data = {"path": str(folder / "data" / "all.jsonl"), "name": "all"}
    overrides = {
        "data": {"tokens_per_pack": 96, "overlong": "error", "eval": data},
        "parallel": {"sequence": processes},
        "eval": {"at_end": True, "generate": 3, "max_new_tokens": 4},
    }
    return configuration(folder / "model", [data], run, processes=processes, overrides=overrides)


@pytest.mark.dist
@pytest.mark.slow
def test_processes_that_share_packs_judge_and_answer_as_one_does(folder, tmp_path):
    for processes in (1, 2):
        path = tmp_path / f"{processes}.yaml"
        path.write_text(yaml.safe_dump(judged_config(folder, tmp_path / str(processes), processes)))
        run_processes([*TRAIN, path], processes)
    one, two = (tmp_path / name for name in "12")
    assert (two / "samples.jsonl").read_text() == (one / "samples.jsonl").read_text() != ""
    found = [[r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "evaluation"][-1] for run in (one, two)]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
    assert [(r["samples"], r["exact"]) for r in found[:1]] == [(r["samples"], r["exact"]) for r in found[1:]]


def test_a_run_writes_answers_to_those_that_are_in_words(folder, tmp_path):
    train(parse_config(judged_config(folder, tmp_path / "run")))
    (record,) = [one for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if one["kind"] == "answers"]
    assert record["samples"] == 3
