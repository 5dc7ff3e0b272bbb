"""`--chat-template FILE`: one option, one reader and the same errors in all commands that make text of chats."""

import io
import json
from pathlib import Path

import pytest
import yaml

from headway.data.template_bounds import MAX_SOURCE
from helpers.folders import QUESTIONS, picture_reader

WORDY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\nIn words: {{ m.content[0].text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CPU = ("--device", "cpu", "--max-new-tokens", 4)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return picture_reader(tmp_path_factory.mktemp("template") / "reader")


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    chats = [{"messages": [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "two"}]}] * 4
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


COMMANDS = {
    "index": lambda reader, rows: ("index", rows, "--model", reader),
    "look": lambda reader, rows: ("look", rows, "--model", reader),
    "init": lambda reader, rows: ("init", "--model", reader, "--data", rows, "-o", rows.with_name("new.yaml")),
    "chat": lambda reader, _: ("chat", reader, "--device", "cpu"),
    "generate": lambda reader, _: ("generate", reader, "--prompt", QUESTIONS[0], *CPU),
    "evaluate": lambda reader, rows: ("evaluate", reader, rows, "--device", "cpu"),
}
FILES = {
    "missing.jinja": (None, "cannot be read: No such file"),
    "empty.jinja": ("  \n", "is empty"),
    "syntax.jinja": ("{% for m in messages %}", "is not a Jinja template, line 1"),
    "large.jinja": ("x" * (MAX_SOURCE + 1), "that is no template"),
    "silent.jinja": ("{{ messages[0].role }}", None),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_template_is_one_clear_error_in_every_command(headway, reader, rows, command, name):
    text, words = FILES[name]
    path = rows.with_name(name)
    if text is not None:
        path.write_text(text)
    if words is None and command in ("chat", "generate"):
        pytest.skip("a question alone needs no answer to be shown")
    result = headway(*COMMANDS[command](reader, rows), "--chat-template", path)
    message = " ".join((result.err + result.out).split())
    if words is not None:
        assert result.code == 2
        assert words in message
        assert f"--chat-template {path}" in message
        assert "model.chat_template" not in message
    else:  # what is wrong shows in the rows: each is named, and none is learnt
        assert "leaves out words" in message or "no token" in message or "cannot be used" in message


def test_answers_are_to_the_questions_as_the_template_writes_them(headway, reader, rows, monkeypatch):
    template = rows.with_name("wordy.jinja")
    template.write_text(WORDY)
    asked = ("generate", reader, "--prompt", QUESTIONS[0], *CPU, "--json")
    own, other = (json.loads(headway(*asked, *more).out) for more in ((), ("--chat-template", template)))
    assert own["prompt_tokens"] != other["prompt_tokens"]  # more words
    plain = headway(*asked[:-1], "--plain", "--chat-template", template)
    assert (plain.code, "cannot take effect with --plain" in " ".join(plain.err.split())) == (2, True)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    talked = headway("chat", reader, *CPU, "--chat-template", template)
    assert talked.code == 0, talked.err
    losses = [
        json.loads(headway("evaluate", reader, rows, "--device", "cpu", "--json", *more).out)["loss"]
        for more in ((), ("--chat-template", template))
    ]
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_a_configuration_that_init_writes_holds_the_template(headway, reader, rows, monkeypatch):
    monkeypatch.chdir(rows.parent)
    Path("wordy.jinja").write_text(WORDY)
    made = headway("init", "--model", reader, "--data", rows, "-o", "a.yaml", "--chat-template", "wordy.jinja")
    assert made.code == 0, made.err
    assert yaml.safe_load(Path("a.yaml").read_text())["model"]["chat_template"] == "wordy.jinja"
    shown = headway("look", rows, "--model", reader, "--chat-template", "wordy.jinja")
    assert f"In words: {QUESTIONS[0]}" in shown.out.replace("|", "")
