"""Templates: what they are given stays text, and they ask nothing of the network."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import headway.report
from headway.pages.page import RunPage
from headway.pages.steps import StepPart
from headway.report.charts import DrawnLine, lines_chart
from headway.report.page import render, svg_file
from headway.report.section import ReportSection

TEMPLATES = Path(headway.report.__file__).with_name("templates")


def page_of(*sections, points=()):
    """A page with these sections, and points of a section more."""
    tiles = ReportSection("", ["", "value", "remark"], [["MFU", "20.0 %", "median"]])
    folds = {"The run": [*sections, ReportSection("Notes", points=points)]}
    return RunPage("a", ["b"], tiles, folds=folds, numbers={"k": 1}).as_html()


def test_columns_of_sentences_stand_on_the_left_and_numbers_on_the_right():
    rows = [["palm", "12.8 GFLOP", "6 x parameters per slot"], ["useful", "", "real tokens"]]
    text = page_of(ReportSection("Bills", ["convention", "FLOPs", "counts"], rows))
    assert '<th scope="col" class="words">counts</th>' in text
    assert '<td class="words">6 x parameters per slot</td>' in text
    assert '<td class="number">12.8 GFLOP</td>' in text
    assert text.count('class="words"') == 3


def test_a_table_of_many_columns_has_the_width_of_the_page():
    narrow, wide = (ReportSection(name, [name] * count, [["1"] * count]) for name, count in (("n", 3), ("w", 4)))
    assert re.findall(r"(<section[^>]*>)\s*<h3>(n|w)<", page_of(narrow, wide)) == [
        ("<section>", "n"),
        ('<section class="whole">', "w"),
    ]


def test_commands_in_notes_are_code_and_hostile_ones_stay_text():
    text = page_of(points=["see `headway goodput` or `x`.", "`<img src=x>`", "a ` alone", "`` two"])
    assert '<p class="note">See <code>headway goodput</code> or <code>x</code>.</p>' in text
    assert '<p class="note"><code>&lt;img src=x&gt;</code></p>' in text
    assert '<p class="note">A ` alone</p>\n<p class="note">`` two</p>' in text


class Elements(HTMLParser):
    """Tags of a page, with the attributes of each."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, *(name for name, _ in attrs)))


EVIL = """<script>alert(1)</script>"><img src=x onerror='alert(1)'> ]]></style>{{ 7 * 7 }} `</code><b>` \x1b[2J\u202e"""
PLAIN = "two words"


def pages_of(text):
    """Every page, each place of a stranger's text filled with one."""
    section = ReportSection(text, [text, text], [[text, text]], says=text, pictures=[text])
    image = ReportSection(text, [text], [[text]], says=text, image=text)
    drawn = ReportSection(
        text, remark=text, chart=lines_chart(text, [DrawnLine(text, [1, 2], [1.0, 2.0])], form="plain")
    )
    card = ReportSection(text, points=[text] * 3, remark=text)
    tiles = ReportSection("", [text] * 4, [[text] * 4])
    part = StepPart(text, 0, [1, 1], [(text, [1, 1])])
    folds = {text: [section, image, drawn, ReportSection(text, points=[text])]}
    more = {"card": card, "more": [card] * 2, "charts": [drawn], "files": {text: text}, "numbers": {text: text}}
    page = RunPage(text, [text], tiles, tiles, [part], [1, 1], folds=folds, **more)
    piece = {"text": text, "token": text, "count": 2, "is_learnt": False}
    sample = {"error": "", "where": text, "lengths": text, "left_out": text, "media": [(text, text)], "pieces": [piece]}
    sample["answers"] = [{**sample, "title": text}]
    item = {"source": text, "row": 1, "tokens": 2}
    return {
        "run.html.jinja": page.as_html(),
        "waiting.html.jinja": render("waiting.html.jinja", name=text, path=text, error=text),
        "samples.html.jinja": render(
            "samples.html.jinja", model=text, samples=[sample, {"error": text}], packs=[(text, [item])], budget=4,
            counts=[text], bad=[text],
        ),
        "charts.svg.jinja": svg_file({text: drawn.chart}),
    }  # fmt: skip


def test_every_page_is_among_those_that_strangers_write_into():
    parts = {"base.html.jinja", "parts.html.jinja", "colours.css.jinja"}
    assert pages_of(PLAIN).keys() | parts == {path.name for path in TEMPLATES.iterdir()}


@pytest.mark.parametrize("template", pages_of(PLAIN))
def test_text_of_a_stranger_stays_text_wherever_it_stands(template):
    evil, plain = pages_of(EVIL)[template], pages_of(PLAIN)[template]
    added = ("code",)  # of what stands between backticks
    assert [e for e in Elements(evil).elements if e != added] == Elements(plain).elements
    assert "{{ 7 * 7 }}" in evil
    assert not re.search("[\x1b\u202e]", evil)


@pytest.mark.parametrize("template", pages_of(PLAIN))
def test_no_page_asks_another_host_for_anything(template):
    text = pages_of(PLAIN)[template]
    assert {*re.findall(r"https?://[^\s\"'<]+", text)} <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"@import|<link|<iframe|<form|(?:src|href)=\"(?!data:)", text)
    assert template == "charts.svg.jinja" or "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text


def test_templates_let_nothing_but_our_own_charts_and_their_script_pass_unescaped():
    texts = {path.name: path.read_text() for path in TEMPLATES.iterdir()}
    unescaped = {(name, match) for name, text in texts.items() for match in re.findall(r"[\w.]+ *\| *safe", text)}
    own = {("parts.html.jinja", "section.chart|safe"), ("charts.svg.jinja", "chart.svg|safe")}
    assert unescaped == own | {("base.html.jinja", "script|safe")}
    assert not [name for name, text in texts.items() if "autoescape" in text]


def test_a_name_that_a_page_is_not_given_is_an_error():
    with pytest.raises(UndefinedError, match="error"):
        render("waiting.html.jinja", name="a", path="b")
