"""`headway chat`: lines of a pipe are questions, media wait for the next one, and the conversation is remembered."""

import io
import json
import sys

import pytest

from helpers.folders import QUESTIONS, picture, picture_reader, text_model

CPU = ("--device", "cpu", "--max-new-tokens", 6)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return picture_reader(tmp_path_factory.mktemp("chat") / "reader")


@pytest.fixture
def say(headway, monkeypatch):
    def run(model, *lines, stdin=None):
        monkeypatch.setattr(sys, "stdin", stdin or io.StringIO("".join(f"{line}\n" for line in lines)))
        return headway("chat", model, *CPU)

    return run


class Terminal(io.StringIO):
    def isatty(self):
        return True


def answer_to(headway, folder, model, messages):
    path = folder / "turns.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    return json.loads(headway("generate", model, "--input", path, *CPU).out)["answer"]


def test_a_conversation_is_what_generate_gives_for_all_of_its_turns(reader, say, headway, tmp_path):
    path = picture(tmp_path / "a.png")
    result = say(reader, f"/image {path}", QUESTIONS[0], QUESTIONS[1], "/new", QUESTIONS[1])
    assert result.code == 0, result.err
    first, second, anew = result.out.splitlines()
    shown = [{"type": "image", "image": "a.png"}, {"type": "text", "text": QUESTIONS[0]}]
    turns = [{"role": "user", "content": shown}]
    assert first == answer_to(headway, tmp_path, reader, turns)
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": QUESTIONS[1]}]
    assert second == answer_to(headway, tmp_path, reader, turns)
    assert anew == answer_to(headway, tmp_path, reader, turns[-1:])
    assert "cut after 6 tokens" in result.err


def test_from_a_pipe_a_mistake_ends_it_and_in_a_terminal_it_is_said(reader, say, monkeypatch):
    result = say(reader, "/image nowhere.png", QUESTIONS[0])
    assert result.code == 1
    assert "There is no image 'nowhere.png'" in result.err
    assert say(reader, "/sing", QUESTIONS[0]).code == 1

    typed = iter(["/image nowhere.png", "/help", QUESTIONS[1]])

    def asked(_):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", asked)
    result = say(reader, stdin=Terminal())
    assert result.code == 0
    assert "There is no image 'nowhere.png'" in result.err
    assert "/new" in result.err
    assert result.out.strip()


def test_ctrl_c_ends_it_politely(reader, say, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    result = say(reader, stdin=Terminal())
    assert (result.code, result.out) == (0, "")


def test_without_a_chat_template_the_last_words_are_continued(say, headway, tmp_path):
    model = text_model(tmp_path / "writer")
    result = say(model, "w1 w2", "w5 w6")
    assert result.code == 0
    expected = [headway("generate", model, "--prompt", prompt, *CPU).out for prompt in ("w1 w2", "w5 w6")]
    assert result.out == "".join(expected)
    refused = say(model, f"/image {picture(tmp_path / 'a.png')}", "w1")
    assert refused.code == 2
    assert "no chat template" in refused.err
