"""No row, setting, option or table of lengths ends a command in a traceback, however it is spoilt."""

import csv
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from helpers.cases import ODD, damaged, mutated
from helpers.folders import QUESTIONS, picture, picture_reader

QUESTION = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": QUESTIONS[0]}]}
ANSWER = {"role": "assistant", "content": "two"}
# one honest row of each form that docs/data-formats.md names
ROWS = [
    {"messages": [QUESTION, ANSWER]},
    {"messages": [{"role": "user", "content": QUESTIONS[0]}, ANSWER, QUESTION, {**ANSWER, "weight": 0}], "tools": []},
    {"messages": [{"role": "user", "content": "<image>" + QUESTIONS[0]}, ANSWER], "images": ["a.png"]},
    {"conversations": [{"from": "human", "value": "<image>Hi"}, {"from": "gpt", "value": "two"}], "image": "a.png"},
    {"texts": [{"user": QUESTIONS[0], "assistant": "two"}], "images": [{"path": "a.png", "bytes": None}]},
    {"question": QUESTIONS[0], "answer": 2, "image": "a.png"},
    {"instruction": QUESTIONS[0], "input": "", "output": "two", "history": [["a", "b"]]},
    {"prompt": [{"role": "user", "content": "Hi"}], "completion": [ANSWER]},
    {"query": QUESTIONS[0], "response": "two", "system": "Be brief.", "label": True},
    {"text": "some words of a document"},
    {"input_ids": [1, 2, 3]},
]
COMMANDS = (["look"], ["index"], ["look", "--packing-length", "64", "--overlong", "split"])
CONFIG = {
    "model": {"path": "MODEL", "random_init": True, "freeze": ["vision"], "lora": {"rank": 2, "targets": None}},
    "data": {
        "train": [{"mix": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 2}]}],
        "tokens_per_pack": 64, "overlong": "drop", "bad": {"policy": "skip", "fraction": 0.1}, "stream": None,
    },
    "optim": {"steps": 3, "lr": 1e-3, "accumulation": 2, "betas": [0.9, 0.99], "ema": {"decay": 0.9}},
    "speed": {"recompute": "none", "loss_chunk": 64}, "parallel": {"shard": 2},
    "run": {"folder": "run", "device": "cpu", "dtype": "float32", "trackers": ["jsonl:x.jsonl"]},
    "plan": {"mix": "chats", "devices": 2, "device": "H100"},
}  # fmt: skip
WORDS = [
    "1", "0", "-1", "4096*3,512", "4096*", "1x32x48", "1024x768px", "x", "1e999", "nan", "-inf", "1_000", "32k", "40%",
    "$2.5", "0.5s", "1:2:3", "*", ",", "..", "{}", "[1]", "a=b", "=", "\x1b[2J", "\u202e", "é", "9" * 400, "", " ",
    "H100", "bf16", "full", "every:0", "vision:full", "model.layers.*", "2,2,2", "1e30", "0x10", "٣",
]  # fmt: skip
GRAMMAR = [
    "flops qwen3-vl-2b --segments W --images W", "flops qwen3-0.6b --segments W --lora W", "mfu --mfu W --chips W",
    "flops qwen3-0.6b --segments 8 --freeze W --recompute W",
    "compare qwen3-0.6b --segments W --device W --step-time W",
    "flops qwen3-vl-2b --segments 4096 --videos W --past W", "mfu --total-tokens W --tokens-per-s W --device W",
    "plan qwen3-0.6b --device W --devices W --tokens W --price W", "plan qwen3-0.6b --device H100 --set W --scale W",
    "tune qwen3-0.6b --device H100 --devices W --memory W", "pack chats --packing-length W --ranks W --strategy W",
    "look --model W W", "models W", "devices W", "config W --set W",
    "plan qwen3-0.6b --device H100 --samples W --segments W",
    "flops W --segments W --convention W", "train W --set W", "audit W --model W --dtype W",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return picture_reader(tmp_path_factory.mktemp("hostile") / "model")


def _rows(dice, folder):
    """Write a file of spoilt rows, in one of the formats."""
    rows = [mutated(dice.choice(ROWS), dice, 0.06) for _ in range(4)]
    form = dice.choice(["jsonl", "json", "csv", "tsv", "parquet"])
    path = folder / f"rows.{form}"
    if form == "jsonl":
        text = "".join(damaged(row, dice) + "\n" for row in rows)
    elif form == "json":
        text = damaged(rows, dice)
    elif form == "parquet":
        columns = {str(key) for row in rows if isinstance(row, dict) for key in row} or {"text"}
        values = {
            name: [json.dumps(row.get(name)) if isinstance(row, dict) else None for row in rows] for name in columns
        }
        pq.write_table(pa.table(values), path)
        return path
    else:
        file = io.StringIO()
        writer = csv.writer(file, delimiter="," if form == "csv" else "\t")
        names = [*dict.fromkeys(str(key) for row in rows if isinstance(row, dict) for key in row)]
        writer.writerow(names)
        for row in rows:
            writer.writerow([json.dumps(row.get(name)) if isinstance(row, dict) else row for name in names])
        text = file.getvalue()
        place = dice.randrange(len(text) + 1)
        text = (
            text if dice.random() < 0.7 else text[:place] + dice.choice(['"', "\r", "\x00", ",,,", "\t"]) + text[place:]
        )
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


def _spoil_rows(run, model, folder, dice):
    command = dice.choice(COMMANDS)
    run([command[0], _rows(dice, folder), "--model", model, *command[1:]])


def _spoil_configuration(run, model, folder, dice):
    path = folder / "train.yaml"
    text = yaml.safe_dump(json.loads(json.dumps(mutated(CONFIG, dice, 0.03)).replace("MODEL", str(model))))
    if dice.random() < 0.2:
        place = dice.randrange(len(text) + 1)
        text = text[:place] + dice.choice(["{", ": ", "\t", "&a", "*a", "!!python/name:os.system", "- "]) + text[place:]
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    run([*dice.choice([["train", path, "--dry-run"], ["plan", path], ["look", path]])])


def _spoil_options(run, _model, _folder, dice):
    words = dice.choice(GRAMMAR).split()
    run([dice.choice(WORDS) if word == "W" else word for word in words])


def _spoil_lengths(run, _model, folder, dice):
    """Tables of lengths, as `pack` and `plan --lengths` read them."""
    path = folder / f"lengths.{dice.choice(['csv', 'json', 'jsonl'])}"
    numbers = [dice.choice([1, 7, 64, 4000, *ODD]) for _ in range(6)]
    if path.suffix == ".csv":
        text = "tokens,patches\n" + "".join(f"{number},{dice.choice(numbers)}\n" for number in numbers)
    else:
        text = damaged([{"tokens": number, "patches": dice.choice(numbers)} for number in numbers], dice)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    run(
        dice.choice(
            [
                ["pack", path, "--packing-length", "64"],
                ["pack", path, "--packing-length", "64", "--overlong", "split", "--json"],
                ["plan", "qwen3-0.6b", "--device", "H100", "--lengths", path],
            ]
        )
    )


SPOILERS = {
    "rows": _spoil_rows, "configuration": _spoil_configuration, "options": _spoil_options, "lengths": _spoil_lengths,
}  # fmt: skip


def _fuzz(run, model, folder, kind, seed, number):
    picture(folder / "a.png")
    dice = random.Random(f"{kind} {seed}")
    for _ in range(number):
        SPOILERS[kind](run, model, folder, dice)


@pytest.mark.parametrize("kind", [pytest.param("rows", marks=pytest.mark.slow), *list(SPOILERS)[1:]])
def test_no_spoilt_value_ends_in_a_traceback(run, model, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    _fuzz(run, model, tmp_path, kind, seed=1, number=12)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("kind", SPOILERS)
def test_none_of_many_spoilt_values_ends_in_a_traceback(run, model, tmp_path, monkeypatch, kind, seed):
    monkeypatch.chdir(tmp_path)
    _fuzz(run, model, tmp_path, kind, seed, number=80)


@pytest.mark.slow
def test_honest_values_are_taken(run, model, tmp_path, monkeypatch):
    """What is spoilt above is otherwise read to its end."""
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "a.png")
    for number, row in enumerate(ROWS[:-1]):
        path = tmp_path / f"row-{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        assert run(["look", path, "--model", model]) == 0
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    config = json.loads(json.dumps(CONFIG).replace("MODEL", str(model)))
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    assert run(["train", tmp_path / "train.yaml", "--dry-run"]) in (0, 1)
