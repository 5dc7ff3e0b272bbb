"""Renderings of a chat's beginnings by one run of its template, held against a run for each beginning.

Foreign inputs: the chat templates that TRL ships, as models have them and as its own marked copies.
"""

import re
from pathlib import Path

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st

from headway.data.template_bounds import TemplateFailure, render_template
from headway.data.template_prefixes import render_beginnings

FOLDER = Path(trl.__file__).parent / "chat_templates"
SOURCES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.jinja"))}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
QUESTION, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
RESULT = {"role": "tool", "content": "3", "name": "add"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ROUNDS, AGENT = [QUESTION, ANSWER] * 20, [QUESTION, *[CALLING, RESULT] * 20, ANSWER]

words = st.sampled_from(
    [
        "",
        " ",
        "Hi.",
        "<think>\nHm.\n</think>\n\nSo.",
        "<|im_start|>",
        "<|im_end|>",
        "</s>",
        "assistant\n",
        "{{ x }}",
        "\n a",
    ]
)
parts = st.lists(
    st.one_of(words.map(lambda text: {"type": "text", "text": text}), st.just({"type": "image"})), max_size=3
)
contents = st.one_of(words, words, parts)
thoughts = st.sampled_from([{}, {}, {"reasoning_content": "Hm.", "thinking": "Hm."}])
turns = st.one_of(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "system"]), contents),
    st.builds(lambda content, more: ANSWER | {"content": content} | more, contents, thoughts),
    st.builds(lambda content, more: CALLING | {"content": content} | more, words, thoughts),
    words.map(lambda content: RESULT | {"content": content}),
)
rounds = st.builds(lambda asked, said: [QUESTION | {"content": asked}, ANSWER | {"content": said}], words, words)
settings = st.sampled_from(
    [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"preserve_thinking": True}, {"clear_thinking": False}]
)


def alone(chat, source, opened, **options):
    try:
        return render_template(chat, source, add_generation_prompt=opened, **options)
    except TemplateFailure:
        return None


def together(chat, source, **options):
    """Renderings of all beginnings by one run, by length and whether an answer is opened; None where it has none."""
    try:
        beginnings = render_beginnings(chat, source, range(1, len(chat) + 1), **options)
    except TemplateFailure:
        beginnings = None
    keys = [(length, opened) for length in range(1, len(chat) + 1) for opened in (False, True)]
    return {key: None if beginnings is None else beginnings.get(*key) for key in keys}


def check(chat, source, **options):
    """Count beginnings, and those that one run gives; each has to be what a run of its own gives."""
    renderings = {key: rendering for key, rendering in together(chat, source, **options).items() if rendering}
    for (length, opened), rendering in renderings.items():
        assert rendering == alone(chat[:length], source, opened, **options), (length, opened)
    return 2 * len(chat) - 1, len(renderings)


@pytest.mark.parametrize("name", SOURCES)
@given(
    chat=st.one_of(
        st.lists(turns, min_size=1, max_size=7),
        st.lists(rounds, min_size=1, max_size=4).map(lambda pairs: [turn for pair in pairs for turn in pair]),
    ),
    tools=st.sampled_from([None, [TOOL]]),
    more=settings,
)
def test_a_beginning_is_what_the_template_renders_of_it_alone(name, chat, tools, more):
    check([dict(turn) for turn in chat], SOURCES[name], tools=tools, variables=VARIABLES | more)


# Templates that learn before the loop where the last question is: the turns behind each question share one run.
LAST_QUESTION = re.compile(
    "glm4moe|lfm2_2_5|nemotron|qwen3(_training|_5|_6|_8)?(_n?o?think)?(_training)?$|gemma4(_v[345])?$"
)
# Those that look through all later messages behind an answer or a call, or mark what stands behind the last turn.
FAR = re.compile("gemma4(_v[345])?$|diffusion_gemma|gptoss|muse_glimmer_training|phi3(_5)?_training|llama3_[12]$")


@pytest.mark.parametrize("name", SOURCES)
def test_one_run_gives_all_beginnings_where_turns_are_shown_alike(name):
    """Twenty rounds of questions, and twenty calls behind one question."""
    for chat, tools, several in ((ROUNDS, None, LAST_QUESTION), (AGENT, [TOOL], FAR)):
        turns = [dict(turn) for turn in chat]
        if "for content in message" in SOURCES[name] or "for line in message" in SOURCES[name]:
            turns = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        number, given = check(turns, SOURCES[name], tools=tools, variables=VARIABLES)
        assert given in (0, number) or several.match(name) or FAR.match(name)
        # A template that refuses such chats gives none; the others follow them.
        refused = alone(turns, SOURCES[name], False, tools=tools, variables=VARIABLES) is None
        assert (given == 0) == refused


LOOP = "{%% for m in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}>{%% endif %%}"
MADE = {
    "the last turn": (LOOP % "{{ m.role }}{% if loop.last %}!{% else %}{% set x = 1 %},{% endif %}{{ x }}", 1.0),
    "the next message": (LOOP % "{{ m.role }}{{ (loop.nextitem or m).role }}", 1.0),
    "the next message by its place": (LOOP % "{{ m.role }}{{ (messages[loop.index0 + 1] or m).role }}", 1.0),
    "turns to come": (LOOP % "{{ loop.revindex }}", 0.15),
    "the number of messages": ("{{ messages | length }}" + LOOP % "{{ m.role }}", 0.0),
    "whether there are messages": ("{% if messages %}{% endif %}" + LOOP % "{{ m.role }}", 1.0),
    "the last message": ("{% set last = messages[-1].role %}" + LOOP % "{{ m.role }}{{ last }}", 0.0),
    "the last message's type": ("{% set t = messages[-1] is mapping %}" + LOOP % "{{ m.role }}{{ t }}", 1.0),
    "messages from the second on": (LOOP.replace("in messages", "in messages[1:]") % "{{ m.role }}", 0.9),
    "a namespace that counts": (
        "{% set n = namespace(i=0) %}"
        + LOOP % "{% set n.i = n.i + 1 %}{{ n.i }}{% if loop.last %}{% endif %}"
        + "{{ n.i }}",
        1.0,
    ),
    "a namespace that the end sets": ("{% set n = namespace(i=0) %}" + LOOP % "{{ n.i }}" + "{% set n.i = 5 %}", 1.0),
    "whether an answer is opened": (LOOP % "{% if loop.last and add_generation_prompt %}?{% endif %}{{ m.role }}", 1.0),
    "whether an answer is opened, always": (LOOP % "{% if add_generation_prompt %}?{% endif %}{{ m.role }}", 0.5),
    "turns that are left": (LOOP % "{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}", 0.5),
    "a part of messages": (LOOP % "{{ m.role }}" + "{{ messages[1:] | map(attribute='role') | join }}", 1.0),
    "an iterator": (
        "{% set roles = messages | map(attribute='role') %}" + LOOP % "{{ m.role }}" + "{{ roles | first }}",
        0.0,
    ),
    "messages as one value": (LOOP % "{{ m.role }}" + "{{ messages | tojson }}", 0.0),
    "a variable that is left": (LOOP % "{% set x = m.role %}{{ x }}" + "{{ x }}", 1.0),
    "the loop's variable behind it": (LOOP % "{{ m.role }}" + "{{ m.role }}", 0.0),
    "a macro that asks": (
        "{% macro a() %}{{ add_generation_prompt }}{{ messages[-1].role }}{% endmacro %}"
        + LOOP % "{{ m.role }}"
        + "{{ a() }}",
        0.5,
    ),
    "another loop": (LOOP % "{{ m.role }}" + "{% for i in [1, 2] %}{{ i }}{% endfor %}", 0.0),
    "marks of the last turn": (
        LOOP % "{% if not loop.last %}x{% endif %}{% generation %}{{ m.role }}{% endgeneration %}",
        0.0,
    ),
    "marks": (LOOP % "{% generation %}{{ m.role }}{% endgeneration %}", 1.0),
}


@pytest.mark.parametrize("what", MADE)
def test_what_a_template_looks_at_decides_what_one_run_gives(what):
    source, share = MADE[what]
    number, given = check([dict(turn) for turn in ROUNDS[:10]], source)
    assert given / number == pytest.approx(share, abs=0.1), given / number
