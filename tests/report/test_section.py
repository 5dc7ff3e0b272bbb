"""Text of anyone in Markdown: an outside renderer makes neither tags nor links of it, and its reader sees the text."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from headway.report.section import markdown_cell, markdown_code, markdown_text
from helpers.cases import PAYLOADS


class Seen(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *dict(attrs)))

    def handle_data(self, data):
        self.text += data


def rendered(markdown):
    return Seen(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown))


def shown(text):
    """Letters that a reader must see, spaces and code marks apart."""
    return re.sub(r"[\s`]", "", text)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_tag_and_no_link_comes_out_of_a_text(payload):
    page = rendered(f"a {markdown_text(payload)} z")
    assert {tag for tag, *_ in page.tags} <= {"p", "code"}
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page.text)
    page = rendered(f"| a | b |\n| --- | --- |\n| {markdown_cell(payload)} | z |")
    assert {tag for tag, *_ in page.tags} <= {"table", "thead", "tbody", "tr", "th", "td", "code"}
    assert [tag for tag, *_ in page.tags].count("td") == 2
    page = rendered(f"a {markdown_code(payload)} z")
    assert [tag for tag, *_ in page.tags] == ["p", "code"]


@given(st.text(alphabet="ab `*_[]()<>&;#!\\|~-\"'=/:\n", max_size=40))
def test_any_text_stays_text(text):
    page = rendered(f"a {markdown_text(text)} z")
    assert {tag for tag, *_ in page.tags} <= {"p", "code"}
    assert shown(page.text) == shown(f"a {text} z")


def test_a_bar_keeps_its_spaces_and_code_stays_code():
    assert markdown_cell("   ##") == "`   ##`"
    assert markdown_cell("  |") == "`  \\|`"
    assert markdown_text("see `headway goodput`") == "see `headway goodput`"
