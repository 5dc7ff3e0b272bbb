"""What the assistant wrote, found in the chats of real templates.

TRL ships the templates of many models as they are, and beside them copies in which the assistant's words are marked
with {% generation %}: the expected spans here. They differ in whether the line end around an answer belongs to it.
"""

from pathlib import Path

import pytest
import trl
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from headway.data import Chat, Message, Origin, TextPart
from headway.data.chat import ChatTemplate
from headway.data.samples import ImagePart, Media
from headway.errors import DataError

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
HERE = Origin("made", "made.jsonl", 0, "line 1")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}


def said(role, text, **more):
    return Message(role, (TextPart(text),), **more)


ONE = Chat((said("user", "Hi?"), said("assistant", "Hello.")), HERE)
TWO = Chat((*ONE.messages, said("user", "Why?"), said("assistant", "It is polite.\nSo they say.")), HERE)
TOOLS = Chat(
    (
        said("user", "1 + 2?"),
        Message("assistant", (), tool_calls=(CALL,)),
        said("tool", "3", name="add"),
        said("assistant", "Three."),
    ),
    HERE,
    (TOOL,),
)


def template(name, as_parts=False):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return ChatTemplate(tokenizer, as_parts)


def answers(name, chat, as_parts=False):
    text, spans = template(name, as_parts).with_answers(chat)
    return [text[first:last].strip() for first, last in spans]


@pytest.mark.parametrize("chat", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize(
    ("name", "as_parts"),
    [
        *((name, False) for name in ("llama3", "cohere", "qwen2_5", "qwen3_instruct_2507", "gemma", "gemma3", "lfm2")),
        *((name, True) for name in ("qwen2_5_vl", "qwen3_vl", "llava_next", "smolvlm", "idefics3")),
    ],
)
def test_answers_are_those_that_trl_marked(name, as_parts, chat):
    found = answers(name, chat, as_parts)
    assert found == answers(f"{name}_training", chat, as_parts)
    for message, answer in zip([m for m in chat.messages if m.role == "assistant"], found, strict=True):
        assert answer.startswith(message.text)


@pytest.mark.parametrize(
    ("name", "as_parts"), [("qwen2_5", False), ("qwen3_instruct_2507", False), ("lfm2_v2", False), ("qwen3_vl", True)]
)
def test_tool_calls_are_written_by_the_assistant_and_tool_answers_are_not(name, as_parts):
    call, answer = answers(name, TOOLS, as_parts)
    assert [call, answer] == answers(f"{name}_training", TOOLS, as_parts)
    assert "add" in call
    assert answer.startswith("Three.")
    text, _ = template(name, as_parts).with_answers(TOOLS)
    assert '"description": "Add."' in text


def test_a_template_of_its_own_for_tools_is_used_for_chats_with_tools():
    processor = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    bare = (TEMPLATES / "llama3.jinja").read_text()
    processor.chat_template = {"default": bare, "tool_use": (TEMPLATES / "qwen2_5.jinja").read_text()}
    both = ChatTemplate(processor, as_parts=False)
    assert both.with_answers(ONE) == template("llama3").with_answers(ONE)
    assert both.with_answers(TOOLS) == template("qwen2_5").with_answers(TOOLS)


def test_tool_calls_and_tools_that_a_template_passes_over_are_refused():
    with pytest.raises(DataError, match=r"made.jsonl, line 1: .* leaves out a tool call of turn 2, 'add'"):
        template("llama3").with_answers(TOOLS)
    offered = Chat(ONE.messages, HERE, (TOOL,))
    with pytest.raises(DataError, match="leaves out the tool 'add' that the chat offers"):
        template("llama3").with_answers(offered)


def test_words_that_a_template_passes_over_are_refused():
    """Idefics3's template reads lists of parts, and passes over messages that are strings."""
    with pytest.raises(DataError, match=r"leaves out words of turn 1, 'Hi\?'"):
        template("idefics3").with_answers(ONE)


def test_thoughts_before_an_answer_may_be_rewritten():
    thought = Chat((said("user", "Hi?"), said("assistant", "<think>Politely.</think>Hello.")), HERE)
    (answer,) = answers("qwen3_training", thought)
    assert answer == "<think>\nPolitely.\n</think>\n\nHello.<|im_end|>"


def test_images_videos_and_sounds_stand_where_the_template_puts_them():
    parts = (ImagePart(Media("a.png")), TextPart("Which?"), ImagePart(Media("b.png")))
    text, _ = template("qwen3_vl", as_parts=True).with_answers(
        Chat((Message("user", parts), said("assistant", "It.")), HERE)
    )
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"<|im_start|>user\n{image}Which?{image}<|im_end|>" in text
