"""What the assistant wrote, found in the chats of real templates, and where it learns to stop.

TRL ships the templates of many models as they are, and beside most of them copies in which the assistant's words are
marked with {% generation %}: the expected words here. They may mark the beginning of the turn as well, which the model
is given, and tokens behind the one at which generation stops.
"""

import os
import re
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
import trl
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from headway.data import Chat, Message, Origin, TextPart
from headway.data.chat import ChatTemplate
from headway.data.chat_settings import ChatSettings
from headway.data.samples import ImagePart, Media
from headway.errors import ConfigError, DataError

# chats of every kind that people train on, and the templates of other models that TRL ships as copies
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

BARS = "[|\uff5c]"  # DeepSeek's is a wide one
_SPECIAL = re.compile(
    rf"<{BARS}[^\s<>{{}}'\"]+{BARS}>|<\|[a-z_]+>|<[a-z_]+\|>|</?(?:think|tool_call|s)>"
    r"|<(?:(?:start|end)_of_turn|end_of_utterance)>"
)


def made(source, as_parts=False, **settings):
    """A template with a tokenizer that has the special tokens that it writes."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens(sorted({*_SPECIAL.findall(source)} - {"<s>", "</s>"}), special_tokens=True)
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer, as_parts, **settings)


def template(name, **settings):
    return made((TEMPLATES / f"{name}.jinja").read_text(), name.removesuffix("_training") in READ_PARTS, **settings)


def answers(found, sample):
    return [view.text[first:last] for view in found.views(sample) for first, last in view.spans]


def rendered(source, turns, sample, **options):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return render_jinja_template([turns], tools=[*sample.tools] or None, chat_template=source, **special, **options)


def marked_by_trl(name, sample):
    """The words that TRL's training template marks of each answer, as the last turn of the chat; None if it refuses."""
    source, turns = (TEMPLATES / f"{name}_training.jinja").read_text(), template(name)._turns(sample.messages)
    found = []
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            try:
                (text,), (marks,) = rendered(source, turns[: number + 1], sample, return_assistant_tokens_mask=True)
                before = rendered(source, turns[:number], sample)[0][0].rstrip()
            except (TemplateError, TypeError):
                return None
            own = [mark for mark in marks if mark[1] > len(before)]
            if not own:  # some mark nothing of an answer that follows another one
                return None
            found.append(text[own[0][0] : own[-1][1]].strip())
    return found


def views_or_refusal(found, sample):
    try:
        return found.views(sample)
    except DataError as error:
        return str(error)


ALWAYS = ("one", "two", "three", "spaces", "empty thinking", "the same", "user last")
REFUSALS = "refuses this chat|leaves out (words|a tool call|the tool|what the assistant thinks)"
# Templates that join answers in a row, or continue a turn behind the answer of a tool, and so rewrite what was asked.
REWRITES = {
    *(("deepseekv3", "calls in turn"), ("diffusion_gemma", "call with words"), ("gemma4_v5", "call with words")),
    *(
        (name, what)
        for name in ("diffusion_gemma", "gemma4_v5")
        for what in ("answers in a row", "answers in a row at the end")
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_of_every_chat_each_answer_is_learnt_as_it_is_asked_for_and_ends_where_generation_stops(name):
    found = template(name)
    source = found.sources["default"]
    for what, sample in CHATS.items():
        views = views_or_refusal(found, sample)
        if isinstance(views, str):  # of what the template does not take, with a true reason
            assert re.search(REFUSALS, views) or (name, what) in REWRITES, (what, views)
            assert what not in ALWAYS, (what, views)
            continue
        turns = found._turns(sample.messages)
        at = iter([(number, message) for number, message in enumerate(sample.messages) if message.role == "assistant"])
        assert sum(len(view.spans) for view in views) == sum(m.role == "assistant" for m in sample.messages), what
        ends = [view.messages for view in views]
        assert ends == sorted(ends), what
        for view in views:
            for first, last in view.spans:
                number, message = next(at)
                words = view.text[first:last]
                assert message.text.strip() in words or what in ("thinking", "empty thinking"), (what, words)
                assert "<s>" not in words, (what, words)  # nor is what opens a turn that begins the chat
                assert message.reasoning in words, (what, words)
                assert [call["function"]["name"] in words for call in message.tool_calls] == [True] * len(
                    message.tool_calls
                )
                assert any(words.endswith(token) for token in found.stops(bool(sample.tools)).tokens), (what, words)
                if number:  # what is before it is what the model is given, but for thoughts opened for it
                    known = [turn for turn in turns[:number] if name != "deepseekv3" or "tool_calls" not in turn]
                    if len(known) < number:  # DeepSeek-V3's reads arguments as JSON alone
                        continue
                    asked = rendered(source, known, sample, add_generation_prompt=True)[0][0]
                    assert asked.startswith(view.text[:first]), (what, words)


@pytest.mark.parametrize("unlearnt", [(0,), (1,), (2,), (0, 1), (0, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_answers_that_are_marked_as_not_to_be_learnt_are_shown_alone(name, unlearnt):
    """Three rounds by the templates that models ship: what is learnt of the others is what it was without the marks."""
    found, words = template(name), ("Hello.", "So.", "Yes.")
    questions = ("Hi?", "Why?", "Really?")
    turns = [
        turn
        for number, pair in enumerate(zip(questions, words, strict=True))
        for turn in (user(pair[0]), answer(pair[1], learnt=number not in unlearnt))
    ]
    learnt = [number for number in range(3) if number not in unlearnt]
    everything = answers(found, chat(*(replace(turn, learnt=True) for turn in turns)))
    views = found.views(chat(*turns))
    assert answers(found, chat(*turns)) == [everything[number] for number in learnt]
    for number in range(max(learnt) + 1):  # and those that are not learnt are shown up to the last that is
        assert any(words[number] in view.text for view in views)
    assert all(any(word in view.text[a:b] for word in words) for view in views for a, b in view.spans)


@pytest.mark.parametrize("name", MARKED)
def test_each_answer_that_a_template_marks_ends_where_generation_stops(name):
    """TRL's marked copies, which may mark an answer piece by piece, and words behind its stop."""
    found = template(f"{name}_training")
    for what, sample in CHATS.items():
        refusal = views_or_refusal(found, sample)
        if isinstance(refusal, str):
            assert re.search(REFUSALS, refusal) or (name, what) in REWRITES, (what, refusal)
            assert what not in ALWAYS, what
            continue
        for number, message in enumerate(sample.messages):
            if message.role == "assistant":
                text, spans = found._answer(found._turns(sample.messages), number, sample)
                stops = found.stops(bool(sample.tools)).tokens
                learnt = "".join(text[first:last] for first, last in spans)
                assert learnt.endswith(stops), (what, learnt)
                own = message.text + "".join(str(call) for call in message.tool_calls)
                assert sum(learnt.count(stop) - own.count(stop) for stop in stops) == 1, (what, learnt)
                assert message.text.strip() in learnt or what in ("thinking", "empty thinking"), (what, learnt)


@pytest.mark.parametrize("name", MARKED)
def test_what_is_learnt_is_what_trl_marked(name):
    found = template(name)
    compared = 0
    for what, sample in CHATS.items():
        try:
            views = found.views(sample)
        except DataError:
            continue
        marked = marked_by_trl(name, sample)
        if marked is None or (name, what) in DIFFERENT:
            continue
        places = [(view.text, first, last) for view in views for first, last in view.spans]
        for (text, first, last), expected in zip(places, marked, strict=True):
            words = text[first:last].strip()
            start = expected.find(words) if words in expected else -1
            assert start >= 0, (what, words, expected)
            assert text[:first].rstrip().endswith(expected[:start].rstrip()), (what, words, expected)
            behind = expected[start + len(words) :]
            assert behind.strip() in ("", "</s>"), (what, words, expected)
            compared += 1
    assert compared >= 5


# TRL's copies of these differ: R1's keeps thoughts that the model's own cuts off; DiffusionGemma's leaves the marker of
# a tool's answer, at which generation stops, to the tool, and begins a turn of its own behind it.
DIFFERENT = {("deepseek_r1_distill", "empty thinking"), *(("diffusion_gemma", what) for what in WITH_CALLS)}


def test_a_chat_has_a_view_for_each_way_in_which_its_beginning_is_shown():
    """Qwen3 shows no thoughts of answers before the last question; Qwen2.5 shows every turn alike."""
    assert [view.messages for view in template("qwen2_5").views(TWO)] == [4]
    first, second = template("qwen3").views(THOUGHT)
    assert first.text.endswith("<|im_start|>assistant\n<think>\nPolitely.\n</think>\n\nHello.<|im_end|>\n")
    assert "assistant\nHello.<|im_end|>\n<|im_start|>user\nWhy?" in second.text
    assert second.text.endswith("<think>\nHm.\n</think>\n\nSo.<|im_end|>\n")
    (both,) = template("qwen3_training").views(THOUGHT)  # TRL's keeps them, so that one view shows all
    assert len(both.spans) == 2


def test_glm_learns_the_marker_of_the_turn_that_ends_an_answer():
    """GLM writes nothing behind an answer; its generation stops at the next turn's marker (TRL's glm4moe_training)."""
    assert answers(template("glm4moe"), ONE) == ["\n<think></think>\nHello.<|user|>"]
    call, last = answers(template("glm4moe"), TOOLS)
    assert call.endswith("</tool_call><|observation|>")
    assert last.endswith("Three.<|user|>")
    assert set(template("glm4moe").stops(has_tools=True).tokens) == {"<|user|>", "<|observation|>", "</s>"}


def test_without_any_token_behind_answers_the_end_of_text_is_learnt():
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert answers(made(bare), TWO) == ["Hello.</s>", "It is polite.\nSo they say.</s>"]
    outside = bare.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}</s>")
    assert answers(made(outside), TWO) == ["Hello.</s>", "It is polite.\nSo they say.</s>"]


def test_a_marker_that_is_no_token_is_refused():
    found = made("{% for m in messages %}{{ m.role }}: {{ m.content }}<END>\n{% endfor %}")
    with pytest.raises(ConfigError, match="ends answers with '<END>', which is not a token of the tokenizer"):
        found.views(ONE)
    assert found.stop_ids() == {1}  # </s>, at which a model that is not trained here stops


def test_variables_of_the_template_come_from_the_row_and_then_from_the_settings():
    source = (TEMPLATES / "qwen3.jinja").read_text()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>")
    tokenizer.chat_template = source
    ChatSettings(variables={"enable_thinking": False}).write_into(tokenizer)
    opened = "<|im_start|>assistant\n"
    asked, silent = chat(user("Hi?")), f"{opened}<think>\n\n</think>\n\n"
    assert ChatTemplate(tokenizer, False).prompt(asked).endswith(silent)
    assert (
        ChatTemplate(tokenizer, False)
        .prompt(replace(asked, template_kwargs={"enable_thinking": True}))
        .endswith(opened)
    )
    # The settings stand in the template, so that transformers renders what was learnt.
    turns = [{"role": "user", "content": "Hi?"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True).endswith(silent)
    with pytest.raises(ConfigError, match="sets enable_thought, which the model's chat template does not read"):
        ChatSettings(variables={"enable_thought": False}).write_into(tokenizer)


@pytest.mark.parametrize("name", sorted(signature(PreTrainedTokenizerBase.apply_chat_template).parameters))
def test_a_row_or_a_run_that_sets_an_argument_of_rendering_is_refused_by_name(name):
    found = template("qwen3")
    with pytest.raises(DataError, match=rf'line 1: "chat_template_kwargs" sets {name}, which rendering itself decides'):
        found.views(replace(ONE, template_kwargs={name: True, "enable_thinking": False}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template="{{ messages }}")
    with pytest.raises(ConfigError, match=f"sets {name}, which rendering itself decides"):
        ChatSettings(variables={name: True}).write_into(tokenizer)


def test_variables_with_names_of_headways_own_functions_are_variables():
    source = "{{ chat }}{{ source }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    sample = replace(ONE, template_kwargs={"chat": "a", "source": "b", "variables": "c"})
    assert made(source).prompt(sample) == "abHi?</s>Hello.</s>"


def test_a_chat_is_refused_where_its_answers_take_too_many_renderings(monkeypatch):
    """Llama 3 shows every turn alike; Qwen3 shows thoughts of the last answer alone."""
    monkeypatch.setattr("headway.data.chat.MOST_TURNS", 100)
    messages = 30 * TWO.messages[:2]
    assert len(answers(template("llama3"), chat(*messages))) == 30
    with pytest.raises(DataError, match=r"has 30 answers to learn in 60 turns, .* takes more than 100 turns\. Split"):
        template("qwen3").views(chat(*messages))
    shown = (replace(turn, learnt=False) for turn in messages[:-1])
    assert len(answers(template("qwen3"), chat(*shown, messages[-1]))) == 1


def test_a_file_of_a_template_is_read_with_a_clear_error_for_each_mistake(tmp_path):
    file = tmp_path / "mine.jinja"
    for content, message in [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe{{", "cannot be read"),
        (b" \n", "is empty"),
        (b"\n{% if %}", "is not a Jinja template, line 2"),
        (b"x" * 2**21, "has 2,097,152 bytes"),
    ]:
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            ChatSettings.of(str(file))
    file.write_text("{{ messages }}")
    assert ChatSettings.of(str(file)).template == "{{ messages }}"


def test_a_template_of_its_own_for_tools_is_used_for_chats_with_tools():
    bare, tools = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("llama3", "qwen2_5"))
    both = made(bare + tools)
    both.sources = {"default": bare, "tool_use": tools}
    assert answers(both, ONE) == answers(template("llama3"), ONE)
    assert answers(both, TOOLS) == answers(template("qwen2_5"), TOOLS)


def test_tool_calls_and_tools_that_a_template_passes_over_are_refused():
    with pytest.raises(DataError, match=r"made.jsonl, line 1: .* leaves out a tool call of turn 2, 'add'"):
        template("llama3").views(chat(*TOOLS.messages))
    offered = chat(*ONE.messages, tools=(TOOL,))
    with pytest.raises(DataError, match="leaves out the tool 'add' that the chat offers"):
        template("llama3").views(offered)


def test_thoughts_that_a_template_passes_over_are_refused():
    with pytest.raises(DataError, match=r"leaves out what the assistant thinks in turn 4, 'Hm\.'"):
        template("qwen2_5").views(THOUGHT)
    with pytest.raises(DataError, match=r"leaves out what the assistant thinks in turn 2, 'Well\.'"):
        template("deepseek_r1_distill").views(chat(*CHATS["thinking"].messages[:2]))


def test_words_that_a_template_passes_over_are_refused():
    """Idefics3's template reads lists of parts, and passes over messages that are strings."""
    with pytest.raises(DataError, match=r"leaves out words of turn 1, 'Hi\?'"):
        made((TEMPLATES / "idefics3.jinja").read_text(), as_parts=False).views(ONE)


def test_images_videos_and_sounds_stand_where_the_template_puts_them():
    parts = (ImagePart(Media("a.png")), TextPart("Which?"), ImagePart(Media("b.png")))
    (view,) = template("qwen3_vl").views(chat(Message("user", parts), answer("It.")))
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"<|im_start|>user\n{image}Which?{image}<|im_end|>" in view.text


def test_a_template_is_a_plain_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe cannot be read: it is a pipe or a device, not a file"):
        ChatSettings.of(str(tmp_path / "pipe"))
