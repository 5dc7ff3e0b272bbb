"""`headway generate`: one prompt as text, files of prompts as JSON lines, whatever the model takes."""

import json

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from headway.models.load import load_processor
from helpers.folders import QUESTIONS, picture, picture_reader, text_model

CPU = ("--device", "cpu", "--max-new-tokens", 6)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return picture_reader(tmp_path_factory.mktemp("generate") / "reader")


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("generate") / "writer")


def test_the_answer_to_a_prompt_is_what_transformers_alone_would_say(reader, headway, tmp_path):
    path = picture(tmp_path / "a.png")
    result = headway("generate", reader, "--prompt", QUESTIONS[0], "--image", path, *CPU, "--json")
    assert result.code == 0, result.err
    processor = load_processor(reader)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTIONS[0]}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=[Image.open(path)], return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(reader)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    record = json.loads(result.out)
    assert record["answer"] == processor.tokenizer.decode(ids, skip_special_tokens=True).strip() != ""
    assert record["prompt_tokens"] == inputs["input_ids"].shape[1]
    assert headway("generate", reader, "--prompt", QUESTIONS[0], "--image", path, *CPU).out == record["answer"] + "\n"


def test_of_preferences_the_best_answer_is_gold_and_a_bad_one_is_none(reader, headway, tmp_path):
    asked = {"role": "user", "content": QUESTIONS[1]}
    rows = [
        {"prompt": QUESTIONS[1], "output_1": "two", "output_2": "red", "preference": 2},
        {"messages": [asked, {"role": "assistant", "content": "two"}], "label": False},
        {"messages": [asked, {"role": "assistant", "content": "two"}], "label": True},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    result = headway("generate", reader, "--input", tmp_path / "rows.jsonl", *CPU)
    assert result.code == 0, result.err
    answers = [json.loads(line) for line in result.out.splitlines()]
    assert [answer.get("gold") for answer in answers] == ["red", None, "two"]
    assert len({answer["answer"] for answer in answers}) == 1


def test_preferences_are_judged_as_pairs_and_bad_answers_are_not_evaluated(reader, headway, tmp_path):
    pair = {"prompt": QUESTIONS[1], "chosen": "red", "rejected": "two"}
    bad = {"prompt": QUESTIONS[1], "completion": "red", "label": False}
    for name, row in (("pair", pair), ("bad", bad)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    result = headway("evaluate", reader, tmp_path / "pair.jsonl", "--device", "cpu", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["pairs"] == 1
    result = headway("evaluate", reader, tmp_path / "bad.jsonl", "--device", "cpu")
    assert (result.code, "graded as a bad one" in " ".join(result.err.split())) == (1, True)


def test_a_file_of_prompts_gives_a_line_for_each_in_its_order(reader, headway, tmp_path):
    picture(tmp_path / "b.png", (32, 64), "blue")
    shown = [{"type": "image", "image": "b.png"}, {"type": "text", "text": QUESTIONS[0]}]
    rows = [
        {"messages": [{"role": "user", "content": QUESTIONS[1]}, {"role": "assistant", "content": "two"}]},
        {"messages": [{"role": "user", "content": shown}]},
        {"messages": [{"role": "user", "content": shown}, {"role": "assistant", "content": "red"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    out = tmp_path / "answers.jsonl"
    result = headway("generate", reader, "--input", tmp_path / "rows.jsonl", "--output", out, *CPU)
    assert (result.code, result.out) == (0, "")
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["where"].rpartition(" ")[2] for answer in answers] == ["1", "2", "3"]
    assert [answer.get("gold") for answer in answers] == ["two", None, "red"]
    assert answers[1]["answer"] == answers[2]["answer"]  # of the same prompt
    again = headway("generate", reader, "--input", tmp_path / "rows.jsonl", "--output", out, *CPU)
    assert again.code == 2
    assert "exists already" in again.err


def test_lines_of_text_are_prompts_and_draws_repeat_with_their_seed(writer, headway, tmp_path):
    (tmp_path / "prompts.txt").write_text("w1 w2 w3\n\nw9\n")
    drawn = ("generate", writer, "--input", tmp_path / "prompts.txt", *CPU, "--temperature", "2")
    one, two, other = (headway(*drawn, "--seed", seed).out for seed in (1, 1, 2))
    assert one == two != other
    records = [json.loads(line) for line in one.splitlines()]
    assert [(record["prompt"], record["prompt_tokens"]) for record in records] == [("w1 w2 w3", 3), ("w9", 1)]
    greedy = headway("generate", writer, "--prompt", "w1 w2 w3", *CPU).out
    batch = headway("generate", writer, "--input", tmp_path / "prompts.txt", *CPU).out
    assert json.loads(batch.splitlines()[0])["answer"] + "\n" == greedy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Give either --prompt TEXT or --input FILE"),
        (("--prompt", "w1", "--input", "a.txt"), "Give either --prompt TEXT or --input FILE"),
        (("--input", "a.txt", "--image", "b.png"), "--image goes with --prompt"),
        (("--input", "nowhere.txt"), "The prompts in nowhere.txt cannot be read"),
        (("--prompt", "w1", "--top-p", "0.5"), "have no effect at temperature 0"),
        (("--prompt", "w1", "--temperature", "1", "--top-p", "5"), "top-p is 5, but must be above 0"),
        (("--prompt", "w1", "--image", "b.png"), "There is no image 'b.png'"),
        (("--prompt", "w1", "--image", __file__), "needs a chat template"),
        (("--prompt", "w1", "--device", "tpu"), "--device 'tpu' is no"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_error(writer, headway, arguments, message):
    result = headway("generate", writer, *arguments)
    assert result.code == 2
    assert message in " ".join(result.err.split())


def test_a_run_without_a_model_says_so(headway, tmp_path):
    (tmp_path / "config.yaml").write_text("")
    result = headway("generate", tmp_path, "--prompt", "Hi")
    assert result.code == 2
    assert "holds no checkpoint" in " ".join(result.err.split())
