"""Chat templates of strangers: what they may do is bounded, and what honest ones do stays as it is."""

import itertools
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from headway.data.template_bounds import MAX_SOURCE, TemplateFailure, compile_template, render_template

BIG = "{% set a = 'a' * 1000000 %}"
DOUBLING = "{{% set ns = namespace(s={}) %}}{{% for i in range(90) %}}{{% set ns.s = {} %}}{{% endfor %}}{{{{ ns.s }}}}"
HOSTILE = {
    "loops within loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}"
    ),
    "a loop that calls itself": "{% for i in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "text in loops": "{% for i in range(99999) %}{% for j in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endfor %}",
    "a product, which jinja2 computes as it compiles": "{{ 'a' * 10**10 }}",
    "a product of a list": "{{ [1] * 10**10 }}",
    "a sum that doubles": DOUBLING.format("'a'", "ns.s + ns.s"),
    "words that double": DOUBLING.format("'a'", "ns.s ~ ns.s"),
    "a block that doubles": (
        "{% set ns = namespace(s='a') %}{% for i in range(90) %}{% set q %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = q %}{% endfor %}"
    ),
    "lists that hold one list twice": DOUBLING.format("1", "[ns.s, ns.s]"),
    "mappings that hold one mapping twice": DOUBLING.format("1", "dict(a=ns.s, b=ns.s)"),
    "a number that is squared": DOUBLING.format("9", "ns.s * ns.s"),
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a width of a format": "{{ '%1000000000d' % 5 }}",
    "a stated width": "{{ '%*d' % (10**9, 5) }}",
    "a width of braces": "{{ '{:>1000000000}'.format('a') }}",
    "a stated width of braces": "{{ '{:>{w}}'.format('a', w=10**9) }}",
    "a method that pads": "{{ 'a'.center(10**10) }}",
    "a filter that pads": "{{ 'a' | center(10**9) }}",
    "bytes of a number": "{{ (5).to_bytes(10**10, 'big') }}",
    "an indent": "{{ ('\n' * 99999) | indent(99999) }}",
    "JSON's indent": "{{ [1, 2] | tojson(indent=10**9) }}",
    "a batch": "{{ [1] | batch(10**10, 'x') | list }}",
    "a method that replaces": BIG + "{{ a.replace('a', a) }}",
    "a filter that replaces": BIG + "{{ a | replace('a', a) }}",
    "a method that joins": BIG + "{{ a.join(range(99999) | map('string')) }}",
    "a filter that joins": BIG + "{{ range(99999) | map('string') | join(a) }}",
    "lists that are added up": "{{ ([[1] * 1000] * 99999) | sum(start=[]) }}",
    "words without end": "{{ lipsum(n=10**6) }}",
    "a range": "{% for i in range(10**12) %}{% endfor %}",
    "Python's insides": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "no template": "{% for",
    "a text longer than templates are": "x" * (MAX_SOURCE + 1),
    "deep brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
}
QUESTION, ANSWER = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
THOUGHT = {**ANSWER, "reasoning_content": "Two and two.", "thinking": "Two and two."}
CHATS = {
    "thoughts": [QUESTION, THOUGHT, QUESTION, THOUGHT],
    "a call": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}],
    "a question": [QUESTION],
    "an answer": [QUESTION, ANSWER],
    "two rounds": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER, QUESTION, ANSWER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWER],
}


LONG = "a macro that calls itself twice"  # stopped by time alone


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == LONG)) for name in HOSTILE])
def test_a_hostile_template_is_refused(name):
    """Each would take hours or gigabytes, or raise what no list of exceptions names."""
    with pytest.raises(TemplateFailure):
        render_template([dict(QUESTION)], HOSTILE[name])


@pytest.mark.parametrize("name", ["no template", "deep brackets", "a text longer than templates are"])
def test_a_text_that_cannot_be_compiled_is_no_template(name):
    with pytest.raises(TemplateSyntaxError):
        compile_template(HOSTILE[name])


def test_the_bounds_count_each_rendering_for_itself():
    template = "{% for i in range(30000) %}{% for j in range(20) %}{% endfor %}{% endfor %}{{ messages | length }}"
    assert [render_template([QUESTION], template)[0] for _ in range(5)] == ["1"] * 5


def _templates():
    spec = find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else None
    return sorted(folder.glob("*.jinja")) if folder else []


@pytest.mark.parametrize("path", _templates(), ids=lambda path: path.stem)
def test_templates_as_models_ship_them_render_as_transformers_renders_them(path):
    source = path.read_text(encoding="utf-8")
    variables = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}
    options = [{}, {"add_generation_prompt": True}, {"enable_thinking": False, "xml_tools": True}]
    marks = bool(re.search(r"{%-?\s*generation\s*-?%}", source))
    for chat, tools, more in itertools.product(CHATS.values(), (None, [TOOL]), options):
        given = {"tools": tools, **variables, **more}
        own = {"tools": tools, "add_generation_prompt": more.get("add_generation_prompt", False)}
        named = {name: value for name, value in given.items() if name not in own}
        try:
            # plain data as transformers hands it over: it fills `thinking` and `reasoning_content` from each other
            texts, spans = render_jinja_template(
                [chat], chat_template=source, return_assistant_tokens_mask=marks, **given
            )
        except Exception:  # noqa: BLE001 - templates raise whatever they like
            with pytest.raises(TemplateFailure):
                render_template(chat, source, variables=named, **own)
            continue
        assert render_template(chat, source, variables=named, **own) == (texts[0], spans[0] if marks else [])


def test_what_templates_find_is_what_transformers_gives_them():
    for template in (
        "{{ strftime_now('%Y') }}{{ {'é': ['<', 1.5, true, none]} | tojson(indent=2, sort_keys=true) }}",
        "{% set n = namespace(a=1) %}{% set n.b = dict(x=2) %}{{ n.a }}{{ n.b }}{{ dict.fromkeys('ab', 1) }}",
        "{%- for i in range(9) -%}{% if i == 3 %}{% break %}{% endif %}\n  {{ i }}\n{%- endfor %}",
        "{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}{{ messages[0].role }}",
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}c{% generation %}{% endgeneration %}",
        "{% for m in messages %}x{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    ):
        marks = "generation %}" in template
        texts, spans = render_jinja_template(
            [[QUESTION, ANSWER]], chat_template=template, return_assistant_tokens_mask=marks
        )
        assert render_template([QUESTION, ANSWER], template) == (texts[0], spans[0] if marks else [])
    with pytest.raises(TemplateFailure, match="no such chats"):
        render_template([QUESTION], "{{ raise_exception('no such chats') }}")
    for name in ("_x", "__class__"):
        with pytest.raises(TemplateFailure, match="underscore"):
            render_template([QUESTION], f"{{% set n = namespace({name}=1) %}}")
        with pytest.raises(TemplateFailure, match="underscore"):
            render_template([QUESTION], f"{{% set n = namespace() %}}{{% set n.{name} = 1 %}}")


def test_loops_see_what_they_go_through_as_ever():
    template = (
        "{% for a in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{{ loop.nextitem is defined }}{% endfor %}"
        "{% for k, v in {'x': 1}.items() %}{{ k ~ v }}{% else %}none{% endfor %}"
        "{% for x in nothing %}{% else %}e{% endfor %}"
        "{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}"
        "{{ (1, 2)[0] }}{{ [1, 2] | join('-') }}{{ {'a': [1]} | tojson }}{{ '%s-%3d' % ('a', 5) }}{{ 'a' in ['a'] }}"
    )
    expected = render_jinja_template([[QUESTION, ANSWER]], chat_template=template)[0][0]
    assert render_template([QUESTION, ANSWER], template)[0] == expected
    assert expected == '1/2FalseTrue2/2TrueFalsex1e12311-2{"a": [1]}a-  5True'
