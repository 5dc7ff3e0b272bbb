"""`headway look`: what is shown is what is trained: tokens, loss mask, pictures, packs, and what was left out."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from headway.data import Encoder, read_samples
from headway.data.sources import open_source
from headway.models.load import load_processor
from headway.synthetic.digits import write_reader
from helpers.folders import QUESTIONS, picture

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_reader(tmp_path_factory.mktemp("look") / "model", [*QUESTIONS, "user\n", "assistant\n", "red"])


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Five chats, the third of them unusable and the last one long, the second with a picture."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    picture(tmp_path / "a.png", (64, 32))
    shown = [{"type": "image", "image": "a.png"}, {"type": "text", "text": QUESTIONS[0]}]
    asked = [QUESTIONS[0], shown, "no answer", f"{EVIL} two\nlines", "How many? " * 40]
    rows = [{"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "red"}]} for one in asked]
    del rows[2]["messages"][1]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path / "chats.jsonl"


def test_tokens_and_mask_are_those_of_the_encoder(model, data, headway):
    result = headway("look", data, "--model", model, "-n", 5, "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    encoder = Encoder(load_processor(model))
    rows = [row for number, row in enumerate(data.read_text().splitlines()) if number != 2]
    data.with_name("good.jsonl").write_text("\n".join(rows))
    usable = read_samples(data.with_name("good.jsonl"))
    shown = [sample for sample in record["samples"] if "error" not in sample]
    assert ["error" in sample for sample in record["samples"]] == [False, False, True, False, False]
    assert "no assistant turn" in record["samples"][2]["error"]
    for sample, seen in zip(usable, shown, strict=True):
        encoded = encoder.encode(sample)
        ids = [piece["token"] for piece in seen["pieces"] for _ in range(piece["count"])]
        learnt = [piece["is_learnt"] for piece in seen["pieces"] for _ in range(piece["count"])]
        assert ids == encoded.input_ids_S.tolist()
        assert learnt == (encoded.labels_S != -100).tolist()
        text = "".join(piece["text"] * piece["count"] for piece in seen["pieces"])
        assert text == encoder.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert seen["lengths"]["tokens"] == len(ids)
    assert shown[1]["media"] == [
        {"kind": "image", "file": str(data.with_name("a.png")), "size": [64, 32], "grid": [1, 4, 8], "frames": None}
    ]


def test_a_pipe_gets_marks_and_a_terminal_colours(model, data, headway, monkeypatch):
    arguments = ("look", data, "--model", model, "-n", 2)
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = headway(*arguments).out
        assert max(len(line) for line in out.splitlines() if not line.startswith(("image", str(data)))) <= columns
        assert "\033" not in out
        assert ">>red|<|im_end|><<" in out
        assert "<|image_pad|> x 8" in out
    assert "image 1: " in out
    assert "64 x 32 pixels, grid 1x4x8, 32 patches" in out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.search(r"\033\[1;32mred\033\[0m", headway(*arguments).out)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in headway(*arguments).out


@pytest.mark.slow
def test_packs_are_strips_and_what_was_cut_or_dropped_is_told(model, data, headway, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    options = ("--model", model, "--packing-length", 64, "-n", 5)
    out = headway("look", data, *options).out
    assert re.search(r"^dropped: \d+ tokens are more than a pack's 64$", out, flags=re.MULTILINE)
    assert re.search(r"^chats: 5 read, 1 bad, 1 dropped, \d+ tokens left out$", out, flags=re.MULTILINE)
    strips = re.findall(r"^[#=.]{80}$", out, flags=re.MULTILINE)
    record = json.loads(headway("look", data, *options, "--json").out)
    assert len(strips) == len(record["packs"]) >= 1
    for strip, pack in zip(strips, record["packs"], strict=True):
        assert strip.count(".") / 80 == pytest.approx(1 - pack["tokens"] / 64, abs=0.02)
        assert len(re.findall("#+|=+", strip)) == len(pack["items"])
    held = sorted(item["row"] for pack in record["packs"] for item in pack["items"])
    assert held == [0, 1, 3]
    cut = json.loads(headway("look", data, *options, "--overlong", "split", "--json").out)["samples"][4]
    ((start, stop),) = cut["used"]  # the question before it is longer than two packs, and nothing of it is learnt
    assert start == 128 < stop
    assert cut["left_out"].startswith(f"split into 1 piece, tokens 128 to {stop}: ")


def test_the_page_shows_pictures_and_escapes_what_stands_in_rows(model, data, headway, tmp_path):
    page = tmp_path / "page.html"
    arguments = ("look", data, "--model", model, "--packing-length", 64, "-n", 5, "--html", page)
    assert headway(*arguments).code == 0
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;" in text
    assert text.count('src="data:image/png;base64,') == 1
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    assert 'class="learnt"' in text
    assert 'class="strip"' in text
    assert headway(*arguments).code == 2  # there already


def test_the_page_obeys_no_control_character_of_a_row(model, headway, tmp_path):
    hostile = "a\x1b[31m\u202eb"
    rows = [{"messages": [{"role": "user", "content": hostile}, {"role": "assistant", "content": hostile}]}]
    data, page = tmp_path / "rows\x1b[2J\u202e.jsonl", tmp_path / "page.html"
    data.write_text(json.dumps(rows[0]))
    result = headway("look", data, "--model", model, "--packing-length", 64, "--html", page)
    assert result.code == 0
    for text in (page.read_text(), result.out, result.err):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert "\\u202e" in page.read_text()


@pytest.mark.slow
def test_of_a_training_its_own_packs_are_shown(model, data, headway, tmp_path):
    """Those that the run's feed hands to its first step."""
    import torch

    from headway.answer.model_folder import make_encoder
    from headway.config import load_config
    from headway.models.parallel.ranks import Ranks
    from headway.optim import adapt, freeze
    from headway.tracing import trace
    from headway.train.build import build_model
    from headway.train.data import open_feed

    rows = data.read_text().splitlines()
    data.write_text("\n".join([rows[0], rows[1], rows[3]] * 5))
    raw = {
        "model": {"path": str(model), "random_init": True, "freeze": ["vision"]},
        "data": {"train": [{"path": str(data)}], "tokens_per_pack": 100, "workers": 0, "seed": 3},
        "optim": {"steps": 2, "lr": 1e-3, "warmup_steps": 0, "accumulation": 2},
        "run": {"folder": str(tmp_path / "run"), "device": "cpu"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    seen = json.loads(headway("look", path, "-n", 1, "--packs", 2, "--json").out)
    config = load_config(path)
    shell = build_model(config, None, torch.float32, torch.device("meta"))
    costs = adapt(shell, freeze(shell, trace(shell), config.model.freeze), config.model)
    encoder = make_encoder(load_processor(model), shell)
    with open_feed(config, encoder, shell, costs, Ranks(0, 1), pin_memory=False) as feed:
        batches = next(iter(feed))
    fed = sorted([batch.tokens, [origin.row for origin in batch.origins]] for batch in batches)
    shown = sorted([pack["tokens"], [item["row"] for item in pack["items"]]] for pack in seen["packs"])
    assert shown == fed  # the packs of a step, whose gradients add up in any order


def test_a_recipe_is_looked_at_and_planned_with_its_own_limit_of_images(model, data, headway, tmp_path):
    from headway.cli.plan_data import lengths_of_data
    from headway.cli.resolve import resolve_cost_model
    from headway.config import load_config

    path = tmp_path / "run.yaml"
    raw = {
        "model": {"path": str(model)},
        "data": {"train": [{"path": str(data)}], "tokens_per_pack": 1000, "max_image_pixels": 64 * 32 - 1},
        "optim": {"steps": 2, "lr": 1e-3},
        "run": {"folder": str(tmp_path / "run"), "device": "cpu"},
    }
    path.write_text(yaml.safe_dump(raw))
    bad = json.loads(headway("look", path, "-n", 1, "--json").out)["bad"]
    assert ["64 x 32 pixels" in reason for reason in bad] == [True, False], bad  # the other has no answer
    _, table = lengths_of_data(load_config(path), resolve_cost_model(str(model)))
    assert len(table.tokens) == 3


def test_samples_behind_the_last_one_are_refused(headway, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    result = headway("look", tmp_path / "a.jsonl", "--model", "m", "--start", 3)
    assert (result.code, result.err) == (2, "Error: There is no sample 3 to begin with, because the data hold 2.\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.jsonl",), "DATA needs --model"),
        (("run.yaml", "--model", "m"), "--model has no effect: run.yaml sets it"),
        (("a.jsonl", "--model", "m", "--overlong", "split"), "no packs without --packing-length"),
        (("a.jsonl", "--model", "m", "--html", "a.html", "--json"), "Give one of the two"),
        (("a.jsonl", "--model", "m", "--html", "a.html", "--tokens", 9), "a page and JSON show all tokens"),
        (("nowhere.jsonl", "--model", "m", "--packing-length", "9", "--overlong", "x"), "Unknown policy"),
    ],
)
def test_wrong_use_is_one_clear_error(headway, arguments, message):
    result = headway("look", *arguments)
    assert result.code == 2
    assert message in " ".join(result.err.split())


@pytest.mark.parametrize(
    "words",
    [
        ("look", "no-such.jsonl", "--model", "m"),
        ("evaluate", "m", "no-such.jsonl"),
        ("generate", "m", "--input", "no-such.jsonl"),
        ("init", "--model", "m", "--data", "no-such.jsonl"),
        ("new-model", "new", "--data", "no-such.jsonl"),
    ],
)
def test_a_typo_in_a_path_is_told_before_slow_libraries_are_imported(words, tmp_path):
    code = (
        "import sys\n"
        "from headway.cli.app import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    print(end.code, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60
    )
    assert done.stdout.split("\n")[-2] == "2 []", done
    assert "no-such.jsonl cannot be read" in " ".join(done.stderr.split())


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """A pair about a picture, a pair of two pictures, three ranked answers, a bad grade, and a row that is wrong."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    for name, size in (("a.png", (64, 32)), ("b.png", (32, 32))):
        picture(tmp_path / name, size)
    asked = {"role": "user", "content": "<image>What is this?"}
    answered = [asked, {"role": "assistant", "content": "red"}]
    rows = [
        {"messages": answered, "images": ["a.png"], "rejected_response": "How many?"},
        {"messages": answered, "images": ["a.png"], "rejected_images": ["b.png"]},
        {"prompt": EVIL, "answers": [{"answer": word, "rank": 3 - i} for i, word in enumerate(("how", "many", "red"))]},
        {"prompt": "What?", "completion": "red", "label": False},
        {"prompt": "What?", "chosen": "red", "rejected": "red"},
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path / "pairs.jsonl"


def test_answers_of_a_preference_stand_side_by_side(model, pairs, headway, monkeypatch):
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = headway("look", pairs, "--model", model, "-n", 5)
        assert result.code == 0, result.err
        lines = [line for line in result.out.splitlines() if not line.startswith(("image", str(pairs)))]
        assert max(map(len, lines)) <= columns
        beside = [line for line in lines if ">>red" in line and "||" in line]
        assert bool(beside) == (columns >= 80)
        if beside:
            left, right = beside[0].split(" || ")
            assert left.rstrip() == ">>red|<|im_end|><<\\n"
            assert right == ">>How| many|?|<|im_end|><<\\n"
    assert "2 answers to one prompt" in result.out
    assert "answer 1, the best: " in result.out
    assert "answer 3, place 3: " in result.out
    assert "graded as a bad answer" in result.out
    assert "left out: " in result.out
    assert "answers 1 and 2 are the same" in " ".join(result.out.split())
    assert result.out.count("a.png,") == 2  # of the first row once, of the second beside the other one


def test_answers_are_encoded_as_each_chat_of_the_preference(model, pairs, headway):
    record = json.loads(headway("look", pairs, "--model", model, "-n", 3, "--json").out)
    encoder, source = Encoder(load_processor(model)), open_source(pairs)
    for row, shown in enumerate(record["samples"]):
        sample = source[row]
        for chat, answer in zip(sample.chats, shown["answers"], strict=True):
            encoded = encoder.encode(chat)
            pieces = [piece for piece in answer["pieces"] for _ in range(piece["count"])]
            assert [piece["token"] for piece in pieces] == encoded.input_ids_S.tolist()
            assert [piece["is_learnt"] for piece in pieces] == (encoded.labels_S != -100).tolist()
        measured = encoder.measure(sample)
        assert shown["lengths"]["tokens"] == measured.tokens == sum(a["lengths"]["tokens"] for a in shown["answers"])
        assert shown["lengths"]["num_answers"] == measured.num_answers == len(sample.chats)


def test_the_page_has_a_column_for_each_answer(model, pairs, headway, tmp_path):
    page = tmp_path / "pairs.html"
    assert headway("look", pairs, "--model", model, "-n", 5, "--html", page).code == 0
    text = page.read_text()
    assert text.count('<div class="answers">') == 3
    assert text.count("the best: ") == 3
    assert text.count('src="data:image/png;base64,') == 3  # one for the first row, two for the second
    assert EVIL not in text


def test_the_index_counts_preferences_and_their_answers(model, pairs, headway):
    result = headway("index", pairs, "--model", model, "--on-bad", "skip", "--workers", 0)
    assert result.code == 0, result.err
    assert re.search(r"preferences\s+3, of 7 answers", result.out)
    (record,) = json.loads(headway("index", pairs, "--model", model, "--on-bad", "skip", "--json").out)["indices"]
    assert (record["samples"], record["bad"], record["preferences"], record["answers"]) == (5, 1, 3, 7)
