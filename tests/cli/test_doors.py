"""The doors that newcomers try first, as they type them: data of their own, words of other tools, a run as model."""

import json
import shutil

import pytest
from PIL import Image


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Pictures in folders for their classes, below two splits, and a table of reviews."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        for name, colour in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (32, 32), colour).save(folder / f"{number}.png")
    reviews = "".join(f'"A film, number {n}.",{"good" if n % 2 else "bad"}\n' for n in range(8))
    (tmp_path / "reviews.csv").write_text(f"text,label\n{reviews},good\n")
    (tmp_path / "theirs.yaml").write_text(
        "model: {path: tiny}\ndata: {train: reviews.csv, tokens_per_pack: 512}\n"
        "optim: {steps: 1, lr: 1e-3}\nrun: {folder: runs/a}\n"
    )
    return tmp_path


@pytest.mark.slow
def test_a_folder_of_classes_is_trained_on_and_the_run_is_the_next_ones_model(headway, data):
    assert headway("new-model", "tiny", "--data", "pictures/train", "--size", "100k").code == 0
    shown = headway("look", "pictures/train", "--model", "tiny", "-n", "1")
    assert ("train, blue/0.png" in shown.out, "image 1: " in shown.out) == (True, True), shown
    made = headway("init", "--model", "tiny", "--data", "pictures/train", "-o", "a.yaml", "--json")
    assert (json.loads(made.out)["samples"], json.loads(made.out)["bad"]) == (8, 0)
    few = ("--set", "optim.steps=1", "--set", "run.device=cpu")
    assert headway("train", "a.yaml", *few).code == 0
    answers = headway("generate", "runs/a", "--input", "pictures/test", "--max-new-tokens", 2)
    assert [json.loads(line)["gold"] for line in answers.out.splitlines()] == ["blue"] * 4 + ["red"] * 4

    answers = [
        headway("generate", "runs/a", *prompt, "--image", "pictures/test/red/0.png", "--max-new-tokens", 2)
        for prompt in ((), ("--prompt", ""))
    ]
    assert (answers[0].code, answers[0].out) == (0, answers[1].out), answers[0].err

    again = headway("train", "a.yaml", *few, "--set", "model.path=runs/a", "--set", "run.folder=runs/b")
    assert (again.code, "runs/a/export/step-000001" in again.err) == (0, True), again.err
    assert "runs/a/export/step-000001" in (data / "runs/b/config.yaml").read_text()
    assert headway("flops", "runs/b", "--segments", "64").code == 0
    assert headway("init", "--model", "runs/b", "--data", "pictures/train", "-o", "b.yaml").code == 0


@pytest.mark.slow
def test_a_table_of_classes_is_measured_and_its_empty_text_left_out(headway, data):
    assert headway("new-model", "tiny", "--data", "reviews.csv", "--size", "100k").code == 0
    measured = headway("index", "reviews.csv", "--model", "tiny")
    assert (measured.code, "bad " in measured.out) == (0, False), measured.err
    assert "1 documents without words, left out" in " ".join(measured.out.split())


@pytest.mark.slow
def test_a_configuration_for_pairs_of_answers_compares_them(headway, data):
    rows = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": "No."} for n in range(8)]
    (data / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert headway("new-model", "tiny", "--data", "pairs.jsonl", "--size", "100k").code == 0
    assert headway("init", "--model", "tiny", "--data", "pairs.jsonl", "-o", "a.yaml").code == 0
    assert "preference:\n  loss: sigmoid" in (data / "a.yaml").read_text()
    trained = headway("train", "a.yaml", "--set", "optim.steps=1", "--set", "run.device=cpu")
    assert trained.code == 0, trained.err
    assert '"preference": {"pairs": ' in (data / "runs/a/metrics.jsonl").read_text()
    # beside chats nothing is taken to be meant
    mixed = headway("init", "--model", "tiny", "--data", "pairs.jsonl", "--data", "reviews.csv", "-o", "b.yaml")
    assert (mixed.code, "preference:" in (data / "b.yaml").read_text()) == (0, False)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"pictures": None}, "holds the splits test, train. Give one of them, such as"),
        ({"pictures/train/red": None}, "or sort them into a folder for each class"),
        ({"pictures/train": "cover.png"}, "in a folder named for its class, as blue/1.png; cover.png does not"),
        ({"pictures/train": "red/deep/5.png"}, "red/deep/5.png does not. Move it there, or write a file metadata.csv"),
        ({"pictures/train": "red/0.txt"}, "beside pictures, videos or sounds, such as blue/0.png"),
        ({"a.csv": "text,label\nGood.,\n"}, '"label" is "", and a class is a word or a number. Delete rows without'),
        (
            {"a.jsonl": '{"text": "Good.", "label": [1, 2]}'},
            "several, --column label=label.0 takes the first",
        ),
        (
            {"a.jsonl": '{"premise": "a", "label": 1}'},
            "say which columns are meant, for example with --column text=premise --column label=label.",
        ),
        (
            {"a.csv": "review,sentiment\nGood.,1\n"},
            "the row has review, sentiment, and no schema reads them",
        ),
        ({"a.csv": "text,text\na,b\n"}, "the first line names text twice. Give every column a name of its own"),
        ({"a.csv": "text,label\na,b,c\n"}, "it has 3 values, and the first line names 2 columns"),
        ({"a.csv": 'text,label\n"a,b\n'}, "the value in quotes that begins on line 2 does not end"),
        ({"metadata.csv": "file_name,text\nnone.png,a\n"}, "the image 'none.png' does not exist in the folder"),
        ({"a.xlsx": "x"}, "a.xlsx is not known by its extension. Save the sheet as CSV in UTF-8. Known are .jsonl"),
    ],
)
def test_data_that_cannot_be_read_are_one_error_with_the_way_out(headway, data, files, says):
    ((path, content),) = files.items()
    if content is not None and (data / path).is_dir():
        (data / path / content).parent.mkdir(exist_ok=True)
        shutil.copy(data / "pictures/test/red/0.png", data / path / content)
    elif content is not None:
        (data / path).write_text(content)
    result = headway("new-model", "tiny", "--data", path)
    assert (result.code, says in " ".join(result.err.split())) == (1, True), result.err
    assert not (data / "tiny").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "learning_rate=1"), "unknown key 'learning_rate', in Headway it is `optim.lr`"),
        (("--set", "data.max_length=1"), "unknown key 'data.max_length', in Headway it is `data.tokens_per_pack`"),
        (
            ("--learning_rate", "1"),
            "There is no option --learning_rate; in Headway it is `optim.lr`. To change",
        ),
        (
            ("--per-device-train-batch-size=2",),
            "--per-device-train-batch-size; in Headway it is `data.",
        ),
        (("--lr", "1"), "There is no option --lr; the setting is 'optim.lr'. To change"),
        (("--device", "H100", "--device", "A100"), "--device H100 has no effect, because --device A100 follows"),
        (("--set", "optim.lr=1", "--set", "optim.lr=2"), "--set optim.lr=1 has no effect, because optim.lr=2"),
        (
            ("--set", "optim.steps=1", "--set", "optim.epochs=2"),
            "optim.steps=1 has no effect, because optim.ep",
        ),
        (("--set", "optim={lr: 1, lr: 2}"), "the key 'lr' stands twice in one mapping"),
        (("--set", "run.trackers=wand"), "run.trackers"),
        (("--set", "optim.lr=2,5e-4"), "the comma of 2,5e-4 may stand before decimals or thousands"),
        (
            ("--set", "model.path=runs/a"),
            "runs/a is a training run and no model. The run has no model folder yet. `headway export",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_one_error_with_the_way_out(headway, data, arguments, says):
    (data / "runs/a/export").mkdir(parents=True)
    result = headway("train", "theirs.yaml", *arguments)
    assert (result.code in (1, 2), says in " ".join(result.err.split())) == (True, True), result.err
    assert "Error: " in result.err


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("reviews.csv", None, "To write one for your data: `headway init --model MODEL --data FILE`"),
        ("chats.jsonl", b'{"text": "a"}\n{"text": "b"}\n', "To write one for your data: `headway init"),
        ("pictures", None, "Is a directory. Give the path of a YAML file. To write one for your data: `headway init"),
        ("a.yaml", "model: {path: m}".encode("utf-16"), "it is not UTF-8 text (invalid start byte at byte 0). Save"),
        ("a.yaml", b"model: {path: m}\n", "'data', 'optim' and 'run' are required (`headway init` writes them)"),
    ],
)
def test_a_file_that_is_no_configuration_says_how_one_is_made(headway, data, name, content, says):
    if content is not None:
        (data / name).write_bytes(content)
    result = headway("train", name)
    assert (result.code, says in " ".join(result.err.split())) == (2, True), result.err
