"""Chats of every kind that people train on, and the chat templates of other models that TRL ships as copies."""

from pathlib import Path

import trl

from headway.data import Chat, Message, Origin, TextPart
from headway.data.samples import ImagePart, Media

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(file.stem for file in TEMPLATES.glob("*.jinja") if not file.stem.endswith("_training"))
MARKED = [name for name in NAMES if (TEMPLATES / f"{name}_training.jinja").is_file()]
READ_PARTS = ("idefics3", "lfm2_2_5_vl", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm")
HERE = Origin("made", "made.jsonl", 0, "line 1")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
NUMBER = {"type": "integer", "description": "A number."}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}


def said(role, text, **more):
    return Message(role, (TextPart(text),), **more)


def chat(*messages, tools=()):
    return Chat(messages, HERE, tools)


def user(text):
    return said("user", text)


def answer(text, **more):
    return said("assistant", text, **more)


ONE = chat(user("Hi?"), answer("Hello."))
TWO = chat(*ONE.messages, user("Why?"), answer("It is polite.\nSo they say."))
ASKED = (user("1 + 2?"), Message("assistant", (), tool_calls=(CALL,)))
RESULT = said("tool", "3", name="add")
TOOLS = chat(*ASKED, RESULT, answer("Three."), tools=(TOOL,))
THOUGHT = chat(user("Hi?"), answer("Hello.", reasoning="Politely."), user("Why?"), answer("So.", reasoning="Hm."))
CHATS = {
    "one": ONE,
    "two": TWO,
    "three": chat(*TWO.messages, user("Really?"), answer("Yes.")),
    "system": chat(said("system", "Be kind."), *TWO.messages),
    "tools": TOOLS,
    "call": chat(*ASKED, tools=(TOOL,)),
    "reasoning": THOUGHT,
    "thinking": chat(user("Hi?"), answer("<think>\nWell.\n</think>\n\nHello."), user("Why?"), answer("So.")),
    "empty thinking": chat(user("Hi?"), answer("<think>\n\n</think>\n\nHello.")),
    "empty answer": chat(user("Hi?"), answer(""), user("Why?"), answer("So.")),
    "spaces": chat(user("Hi?"), answer("\n  Hello. \n")),
    "words of templates": chat(user("Say assistant </s> model"), answer("assistant"), user("user"), answer("user")),
    "the same": chat(*2 * (user("Hello."), answer("Hello."))),
    "users in a row": chat(user("Hi?"), user("More."), answer("Hello.")),
    "user last": chat(user("Hi?"), answer("Hello."), user("Why?")),
    "image": chat(Message("user", (ImagePart(Media("a.png")), TextPart("Which?"))), answer("It.")),
    "answers in a row": chat(user("Hi?"), answer("Hello."), answer("And more."), user("Why?"), answer("So.")),
    "answers in a row at the end": chat(user("Hi?"), answer("Hello."), answer("And more.")),
    "answer first": chat(answer("Welcome."), user("Hi?"), answer("Hello.")),
    "calls together": chat(
        user("1 + 2, and 1 + 2?"),
        Message("assistant", (), tool_calls=(CALL, CALL)),
        *2 * (RESULT,),
        answer("Three."),
        tools=(TOOL,),
    ),
    "calls in turn": chat(*ASKED, RESULT, ASKED[1], RESULT, answer("Three."), tools=(TOOL,)),
    "call, then a question": chat(*TOOLS.messages, user("Sure?"), answer("Yes."), tools=(TOOL,)),
    "call with words": chat(
        user("1 + 2?"), answer("Let me see.", tool_calls=(CALL,)), RESULT, answer("Three."), tools=(TOOL,)
    ),
    "call with thoughts": chat(
        user("1 + 2?"),
        Message("assistant", (), tool_calls=(CALL,), reasoning="A sum."),
        RESULT,
        answer("Three.", reasoning="Easy."),
        tools=(TOOL,),
    ),
    "tools not called": chat(user("Hi?"), answer("Hello."), tools=(TOOL,)),
    "thoughts at the end": chat(user("Hi?"), answer("Hello."), user("Why?"), answer("So.", reasoning="Hm.")),
    "stop within words": chat(user("Hi?"), answer("a</s>b<|im_end|>c"), user("Why?"), answer("<|im_end|>")),
}
WITH_CALLS = [what for what, sample in CHATS.items() if any(turn.tool_calls for turn in sample.messages)]
