import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from headway.data.media.sizes import MediaSizes
from headway.models import load_processor
from headway.synthetic.digits import write_reader
from headway.synthetic.processor import write_processor

QUESTION = {"role": "user", "content": "Which digits do you see?"}


@pytest.fixture
def model(tmp_path):
    return write_processor(tmp_path / "model", ["Which digits do you see?"], patch_size=8)


@pytest.fixture
def chats(tmp_path):
    """Twelve chats, of which the third has no answer and the fourth is no JSON."""
    lines = [json.dumps({"messages": [QUESTION, {"role": "assistant", "content": f"It is {n}."}]}) for n in range(12)]
    lines[2] = json.dumps({"messages": [QUESTION]})
    lines[3] = '{"messages": ['
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


def test_the_summary_goes_to_stdout(headway, chats, model, tmp_path):
    result = headway("index", chats, "--model", model, "--on-bad", "skip", "--workers", 0)

    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    named = dict(line.split(maxsplit=1) for line in lines if not line.startswith("bad:"))
    assert named["data"] == str(chats)
    assert named["samples"] == "12"
    assert named["bad"] == "2 (16.7 %), left out of the numbers below"
    assert named["patches"] == "0"
    assert "images" not in named
    assert named["index"].startswith(str(tmp_path / "cache" / "index"))
    assert [line.partition("line ")[2][:2] for line in lines if line.startswith("bad:")] == ["3:", "4:"]


def test_a_log_file_is_told_how_far_it_is(headway, monkeypatch, chats, model):
    monkeypatch.setattr("headway.data.index.build.units_of", lambda rows: [range(n, n + 4) for n in range(0, rows, 4)])
    asked = ("index", chats, "--model", model, "--on-bad", "skip", "--workers", 0, "--refresh")
    assert headway(*asked).err == ""  # it took less than half a minute
    monkeypatch.setattr("headway.log.working.LINE_S", 0.0)
    told = headway(*asked).err.splitlines()
    assert [line.partition(" bad, ")[0] for line in told] == [
        "indexing chats: 4 of 12 rows, 2", "indexing chats: 8 of 12 rows, 2"
    ]  # fmt: skip
    assert all(line.endswith(" left") for line in told)


def test_json_names_every_bad_row(headway, chats, model):
    result = headway("index", chats, "--model", model, "--on-bad", "skip", "--workers", 0, "--json")

    said = json.loads(result.out)
    assert said["schema_version"] == 1
    (found,) = said["indices"]
    assert (found["samples"], found["bad"]) == (12, 2)
    assert [(bad["row"], bad["place"]) for bad in found["bad_rows"]] == [(2, "line 3"), (3, "line 4")]
    lengths = found["length_percentiles"]
    assert lengths["0"] * 10 <= found["tokens"] <= lengths["100"] * 10


def test_several_datasets_have_an_index_each(headway, chats, model, tmp_path):
    documents = tmp_path / "documents.jsonl"
    documents.write_text('{"text": "Which digits?"}\n{"text": "One, two, three."}')

    result = headway("index", chats, documents, "--model", model, "--on-bad", "skip", "--workers", 0, "--json")

    first, second = json.loads(result.out)["indices"]
    assert (first["samples"], second["samples"]) == (12, 2)
    assert first["path"] != second["path"]


def test_a_bad_row_is_an_error_unless_skipped(headway, chats, model):
    result = headway("index", chats, "--model", model, "--workers", 0)

    assert (result.code, result.out) == (1, "")
    assert "line 3: " in " ".join(result.err.split())


def test_the_quarantine_names_what_was_skipped(headway, chats, model, tmp_path):
    arguments = ("--on-bad", "skip", "--quarantine", tmp_path / "bad.jsonl", "--workers", 0)

    assert headway("index", chats, "--model", model, *arguments).code == 0

    lines = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert [json.loads(line)["place"] for line in lines] == ["line 3", "line 4"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nothing.jsonl", "--model", "MODEL"), 2, "The dataset nothing.jsonl cannot be read"),
        (("CHATS", "--model", "./nothing"), 2, "no model folder or config.json at './nothing'"),
        (("CHATS", "--model", "MODEL", "--on-bad", "ignore"), 2, "--on-bad 'ignore' is neither error nor skip"),
        (("CHATS", "--model", "MODEL", "--schema", "xml"), 2, "'xml'"),
        (("CHATS", "--model", "MODEL", "--workers", "-1"), 2, "--workers -1 is not a number of processes"),
        (("CHATS", "--model", "MODEL", "--quarantine", "bad.jsonl"), 2, "bad.jsonl would stay empty"),
    ],
)
def test_a_mistake_is_one_paragraph(headway, chats, model, arguments, code, said):
    given = {"CHATS": chats, "MODEL": model}

    result = headway("index", *(given.get(argument, argument) for argument in arguments))

    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("Error: ")
    assert said in " ".join(result.err.split())


def test_the_second_index_imports_neither_torch_nor_transformers(headway, chats, model):
    arguments = ["index", str(chats), "--model", str(model), "--on-bad", "skip"]
    first = headway(*arguments, "--workers", 0)
    code = (
        "import sys; from headway.cli.app import app; app(sys.argv[1:], standalone_mode=False);"
        "print(*({'torch', 'transformers', 'tokenizers'} & {*sys.modules}), file=sys.stderr)"
    )

    command = [sys.executable, "-c", code, *arguments]
    environment = dict(os.environ)  # and not COLUMNS, which readline sets behind Python's back
    second = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)

    assert (second.stdout, second.stderr.split()) == (first.out, [])


def test_keys_that_nobody_looks_at_are_told_once(headway, model, tmp_path):
    turns = [QUESTION, {"role": "assistant", "content": "Three.", "mark": "bad"}]
    file = tmp_path / "marked.jsonl"
    file.write_text("\n".join([json.dumps({"messages": turns, "mood": 1})] * 3))
    for command in (("index", "--workers", 0), ("index", "--workers", 0), ("look",)):
        result = headway(command[0], file, "--model", model, *command[1:])
        assert result.code == 0
        assert result.err.count("messages: mark, mood are not looked at") == 1


@pytest.mark.parametrize("command", ["index", "look", "pack"])
def test_bounds_on_media_are_those_of_a_run(headway, tmp_path, command):
    model = write_reader(tmp_path / "reader")
    Image.new("RGB", (300, 200)).save(tmp_path / "a.png")
    question = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which?"}]}
    file = tmp_path / "seen.jsonl"
    file.write_text(json.dumps({"messages": [question, {"role": "assistant", "content": "One."}]}))
    asked = (command, file, "--model", model, *(("--packing-length", 4000) if command != "index" else ()), "--json")
    plain, bounded = (headway(*asked, *media) for media in ((), ("--media", "max_pixels=4k")))
    assert (plain.code, bounded.code) == (0, 0), bounded.err
    assert plain.out != bounded.out
    images = MediaSizes(max_pixels=4000).written_into(load_processor(model)).image_processor
    patches = int(np.prod(images(images=[Image.new("RGB", (300, 200))])["image_grid_thw"]))
    assert patches * images.patch_size**2 <= 4000
    if command != "pack":  # which prints tokens alone
        assert f'"patches": {patches}' in bounded.out


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ("max_pixel=9", r"--media unknown key 'max_pixel'"),
        ("max_pixels", r"--media 'max_pixels' is not SETTING=N, such as max_pixels=1003520"),
        ("max_pixels=0", r"--media max_pixels = 0: must be at least 1"),
        ("fps=fast", r"--media fps = 'fast': give"),
    ],
)
def test_bounds_on_media_that_are_none_are_refused(headway, chats, model, media, message):
    result = headway("index", chats, "--model", model, "--media", media)
    assert result.code == 2
    assert message in " ".join(result.err.split())
