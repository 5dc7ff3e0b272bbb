import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from headway.cli.pack import _lengths
from headway.cli.resolve import resolve_cost_model
from headway.count import Workload
from headway.data import Encoder
from headway.data.collate import Collator
from headway.data.sources import open_source
from headway.models import load_processor
from headway.synthetic.digits import write_reader
from headway.synthetic.processor import write_processor

STRATEGIES = ["balanced", "best_fit", "first_fit", "next_fit", "none"]


@pytest.fixture
def lengths(tmp_path):
    """A table of 20,000 short chats, a third of them with a picture, in CSV."""
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(6, 0.8, 20_000), 16, 8_000).astype(int)
    patches = 4 * rng.integers(0, 300, 20_000) * (rng.random(20_000) < 0.33)
    path = tmp_path / "chats.csv"
    np.savetxt(
        path,
        np.stack([tokens + patches // 4, patches], 1),
        fmt="%d",
        delimiter=",",
        header="tokens,patches",
        comments="",
    )
    return path


def write(tmp_path, content, name="lengths.csv"):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    return path


def test_every_strategy_is_measured(headway, lengths):
    result = headway("pack", "--lengths", lengths, "--packing-length", 16_384, "--ranks", 8, "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert record["schema_version"] == 1
    assert (record["model"], record["model_given"]) == ("qwen2.5-vl-7b", False)
    assert record["sources"]["chats"]["read"] == 20_000
    assert list(record["strategies"]) == STRATEGIES
    for plan in record["strategies"].values():
        assert plan["samples"] == 20_000
        assert plan["packs"] <= 8 * plan["steps"]
        assert 0 < plan["balance"] <= 1
        assert 0 <= plan["straggler_loss"] < 1
        assert plan["us_per_sample"] > 0
    balanced, none = record["strategies"]["balanced"], record["strategies"]["none"]
    assert balanced["fill"] >= 0.99
    assert balanced["balance"] >= 0.985
    assert balanced["mixing"] <= 1.3
    assert none["packs"] == 20_000
    assert none["steps"] == 20_000 / 8


def test_the_table_names_the_model_and_explains_the_columns(headway, lengths):
    result = headway("pack", "--lengths", lengths, "--packing-length", 16_384, "--ranks", 8, "--strategy", "balanced")
    assert result.code == 0, result.err
    assert "FLOPs of  qwen2.5-vl-7b  (not given; name yours with --model)" in result.out
    assert "step      8 ranks x 1 packs" in result.out
    assert "balance: mean FLOPs of the ranks / FLOPs of the heaviest rank, as a mean over the steps." in result.out
    assert "best_fit" not in result.out
    assert "does not say which tokens have a label" in " ".join(result.out.split())


def test_a_step_costs_what_the_model_computes_for_it(headway, tmp_path):
    table = write(tmp_path, "tokens\n300\n20\n300\n20\n")
    result = headway("pack", "--lengths", table, "--packing-length", 320, "--ranks", 2, "--model", "gpt2", "--json",
                     "--strategy", "best_fit")  # fmt: skip
    counted = json.loads(headway("flops", "gpt2", "--segments", "300*2,20*2", "--json").out)["flops"]["total"]
    plan = json.loads(result.out)["strategies"]["best_fit"]
    assert plan["step_flops"] == pytest.approx(counted)
    assert (plan["steps"], plan["fill"], plan["balance"]) == (1, 1.0, 1.0)


def test_grids_and_accumulation(headway, tmp_path):
    table = write(tmp_path, "tokens,grids\n" + "400,1x32x32\n90,\n" * 50)
    result = headway("pack", "--lengths", table, "--packing-length", 1000, "--ranks", 2, "--accumulation", 3, "--json")
    record = json.loads(result.out)
    assert record["accumulation"] == 3
    assert record["strategies"]["balanced"]["steps"] >= (400 + 90) * 50 / 6000


@pytest.mark.parametrize(
    ("policy", "items", "dropped", "left_out"), [("drop", 1, 1, 21), ("truncate", 2, 0, 11), ("split", 3, 0, 1)]
)
def test_over_long_samples_and_tokens_left_out_are_counted(headway, tmp_path, policy, items, dropped, left_out):
    table = write(tmp_path, "tokens\n5\n21\n")  # the last piece of 21 at 10 is one token, which predicts nothing
    run = ("--packing-length", 10, "--overlong", policy, "--strategy", "none")
    source = json.loads(headway("pack", "--lengths", table, *run, "--json").out)["sources"]["lengths"]
    assert (source["items"], source["dropped"]) == (items, dropped)
    counted = {"drop": "1 dropped", "truncate": "1 truncated", "split": "1 split"}[policy]
    text = headway("pack", "--lengths", table, *run).out
    assert f"{counted}, {left_out} tokens left out" in " ".join(text.split())


@pytest.mark.slow
def test_a_plot_is_drawn_the_same_each_time(headway, lengths, tmp_path):
    paths = [tmp_path / "plot.svg", tmp_path / "again.svg"]
    for path in paths:
        result = headway("pack", "--lengths", lengths, "--packing-length", 16_384, "--plot", path)
        assert result.code == 0, result.err
    root = ElementTree.fromstring(paths[0].read_text())
    said = [text for one in root.iter("{http://www.w3.org/2000/svg}text") if (text := one.text)]
    assert "Share of packs by fill: at most so much of 16,384 tokens [%]" in said
    assert {"balanced", "best_fit", "first_fit", "next_fit", "none"} <= {*said}
    ends = re.findall(r"(\w+): [\d,]+ values over fill \[%\] 0 to 100, from [\d.]+ % to 100.0 %", paths[0].read_text())
    assert {*ends} == {"balanced", "best_fit", "first_fit", "next_fit", "none"}
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_data_are_measured_by_the_models_own_processor(headway, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    model = write_reader(tmp_path / "model")
    chats = [
        {"messages": [{"role": "user", "content": "Which? " * (1 + n % 5)}, {"role": "assistant", "content": "One."}]}
        for n in range(60)
    ]
    lines = [json.dumps(chat) for chat in chats] + ["{"]
    data = write(tmp_path, "\n".join(lines), "chats.jsonl")
    run = ("pack", data, "--model", model, "--packing-length", 256, "--ranks", 2, "--json")
    result = headway(*run)
    assert result.code == 0, result.err
    record = json.loads(result.out)
    source = record["sources"]["chats"]
    assert (source["read"], source["bad"], source["used"]) == (61, 1, 60)
    index = json.loads(headway("index", data, "--model", model, "--on-bad", "skip", "--json").out)
    assert source["tokens"] == index["indices"][0]["tokens"]
    assert record["strategies"]["balanced"]["tokens"] == source["tokens"]
    # a step of all costs what the run is billed for it: its head runs on the answers alone
    plan = json.loads(headway(*run[:-2], 60, "--strategy", "none", "--json").out)["strategies"]["none"]
    encoder = Encoder(load_processor(model))
    opened = open_source(write(tmp_path, "\n".join(lines[:-1]), "good.jsonl"))
    batches = [Collator()([encoder.encode(opened[row])]) for row in range(60)]
    work = Workload.total(batch.work(skips_unlabelled=True) for batch in batches)
    assert plan["step_flops"] == pytest.approx(resolve_cost_model(str(model)).count(work).total)
    # a bound on texts, as of the run: those of the longest questions are beyond it
    longest = max(len(load_processor(model).apply_chat_template(c["messages"], tokenize=False)) for c in chats)
    bounded = json.loads(headway(*run, "--max-characters", longest - 1).out)["sources"]["chats"]
    assert (bounded["bad"], bounded["used"]) == (1 + 12, 48)


def test_data_need_a_model_and_lengths_no_data(headway, tmp_path):
    table = write(tmp_path, TABLE)
    assert "DATA needs --model" in headway("pack", table, "--packing-length", 10).err
    assert "more than one thing to plan" in headway("pack", table, "--lengths", table, "--packing-length", 10).err
    bounded = headway("pack", "--lengths", table, "--packing-length", 10, "--max-characters", 9)
    assert bounded.code == 2
    assert "cannot take effect with --lengths" in " ".join(bounded.err.split())
    shrunk = headway("pack", "--lengths", table, "--packing-length", 10, "--media", "fps=1")
    assert (shrunk.code, "--media fps=1 is for DATA" in " ".join(shrunk.err.split())) == (2, True)


TABLE = "tokens\n5\n25\n"
BAD = [
    ([], TABLE, 2, "--packing-length is missing"),
    (
        ["--packing-length", 10],
        TABLE,
        1,
        "Row 1 (counted from 0) of lengths has 25 tokens and 0 vision patches, more than a",
    ),
    (["--packing-length", 30, "--strategy", "worst_fit"], TABLE, 2, "'worst_fit'. Allowed: balanced, best_fit"),
    (["--packing-length", 30, "--overlong", "cut"], TABLE, 2, "'cut'. Allowed: error, drop, truncate, split"),
    (["--packing-length", 30, "--model", "qwen9"], TABLE, 2, "qwen9"),
    (
        ["--packing-length", 30, "--plot", "plot.pdf"],
        TABLE,
        2,
        "a plot is an .svg file, but this name has .pdf. Name plot.svg",
    ),
    (["--packing-length", 30, "--plot", "nowhere/plot.svg"], TABLE, 2, "the folder nowhere does not exist"),
    (["--packing-length", 4, "--overlong", "drop"], TABLE, 1, "None of 2 samples fits a pack of 4 tokens"),
    (["--packing-length", 30], "length\n5\n", 1, 'has no column "tokens"'),
    (["--packing-length", 30], "", 1, 'has no column "tokens". Its columns are none'),
    (["--packing-length", 30], "tokens\n-3\n", 1, "row 1: tokens is -3"),
    (["--packing-length", 30, "--model", "gpt2"], "tokens,patches\n5,4\n", 2, "no vision tower"),
]


@pytest.mark.parametrize(("options", "table", "code", "text"), BAD)
def test_bad_input_is_one_clear_error(headway, tmp_path, options, table, code, text):
    result = headway("pack", "--lengths", write(tmp_path, table), *options)
    assert (result.code, result.out) == (code, "")
    assert text in " ".join(result.err.split())
    assert "Traceback" not in result.err


def test_planning_from_lengths_loads_no_torch(tmp_path):
    table = write(tmp_path, TABLE)
    script = (
        "import sys; sys.argv = ['headway', 'pack', '--lengths', sys.argv[1], '--packing-length', '30']\n"
        "from headway.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(table)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("option", "number", "says"),
    [
        ("--packing-length", 99999999999999999999999, "at most 67,108,864 of each can be planned"),
        ("--ranks", 99999999999999999999999, "at most 1,048,576 can be planned"),
        ("--accumulation", 10**12, "at most 1,048,576 can be planned"),
        ("--patches", 10**12, "at most 67,108,864 of each can be planned"),
    ],
)
def test_a_number_that_would_fill_the_memory_is_one_error_at_once(headway, tmp_path, option, number, says):
    given = {"--packing-length": 1000, option: number}
    options = [part for pair in given.items() for part in pair]
    result = headway("pack", "--lengths", write(tmp_path, "tokens\n100\n"), *options)
    assert result.code == 2
    assert says in " ".join(result.err.split())


def test_two_files_of_one_name_are_told_apart_by_their_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    model = write_processor(tmp_path / "model", ["one two"], patch_size=8)
    for name in ("pictures", "words"):
        (tmp_path / name).mkdir()
        write(tmp_path, '{"text": "one two"}\n', f"{name}/train.jsonl")
    paths = [str(tmp_path / name / "train.jsonl") for name in ("pictures", "words")]
    assert list(_lengths([*paths, paths[0]], None, str(model), None, {}, None)) == ["pictures/train", "words/train"]


def test_a_column_is_read_by_the_name_that_the_dataset_gives_it(headway, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    model = write_processor(tmp_path / "model", ["one two"], patch_size=8)
    path = write(tmp_path, '{"satz": "one two"}\n', "train.jsonl")
    measured = _lengths([str(path)], None, str(model), None, {"text": "satz"}, None)
    assert measured["train"].ok.all()
    result = headway("pack", "--lengths", path, "--packing-length", 64, "--column", "text=satz")
    assert (result.code, "cannot take effect with --lengths" in " ".join(result.err.split())) == (2, True)
