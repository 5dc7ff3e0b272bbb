"""What the pages show is what happens; sessions on a log file are not run: it is not kept."""

import re
import shlex
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel

from helpers.pages import FENCED, broken_links

DOCS = Path(__file__).parent.parent / "docs"
NOT_RUN = {"tutorial.md"}  # tests/test_tutorial.py runs it
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name not in NOT_RUN)
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(
        r"^```(\w+)\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
]
SESSIONS = [
    session.partition("\n")[::2]
    for kind, body in BLOCKS
    if kind == "console"
    for session in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
    if ".log" not in session.partition("\n")[0]
]


@pytest.mark.parametrize(("command", "shown"), SESSIONS, ids=[command for command, _ in SESSIONS])
def test_a_console_session_prints_what_the_page_shows(command, shown, monkeypatch, capsys):
    from headway.cli.app import main

    program, *arguments = shlex.split(command)
    assert program == "headway"
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    out = capsys.readouterr().out
    assert exit_.value.code == (1 if "DOES NOT FIT" in out else 0)
    pattern = "".join("(?:.*\n)*" if line == "..." else re.escape(line) + "\n" for line in shown.splitlines())
    assert re.fullmatch(pattern, out), out


SNIPPETS = [
    (snippet, shown)
    for page in PAGES
    for snippet, shown in re.findall(
        r"^```python\n(.*?)^```$(?:\n+(?:prints\n+)?```text\n(.*?)^```$)?",  # what it prints may stand right below it
        (DOCS / page).read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
]


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")  # Lightning's advice
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.* is deprecated:FutureWarning")  # Lightning asks torch
@pytest.mark.parametrize(("snippet", "shown"), SNIPPETS)
def test_a_python_snippet_prints_what_the_page_shows(snippet, shown, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    exec(compile(snippet, "docs", "exec"), {})
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert not shown or out.split() == shown.split()  # a page breaks lines where it is full


def test_there_are_sessions_and_snippets_to_run():
    assert len(SESSIONS) >= 5
    assert len(SNIPPETS) == sum(kind == "python" for kind, _ in BLOCKS)
    assert sum(bool(shown) for _, shown in SNIPPETS) >= 3


@pytest.mark.parametrize("page", sorted(page.name for page in DOCS.glob("*.md")))
def test_links_lead_to_files_and_headings(page):
    assert broken_links(DOCS / page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# A page\n\n## Why 33 % is `21`?\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](there.md) [b](there.md#why-33--is-21) [c](there.md#twice-1) [d](#here) [e](https://example.org/x)\n"
        "[f](gone.md) [g](there.md#gone) [h](#gone) [i](gone.md#here) `[j](code.md)`\n```python\n[k](code.md)\n```\n"
    )
    assert broken_links(page) == ["gone.md", "there.md#gone", "#gone", "gone.md#here"]


@pytest.mark.parametrize("page", sorted({page.name for page in DOCS.glob("*.md")} - {"index.md"}))
def test_a_page_begins_with_what_one_types(page):
    begin = (DOCS / page).read_text(encoding="utf-8").splitlines()[:25]
    assert any(re.match(r"```(bash|console|python|sh|text|yaml)|    \S", line) for line in begin)


@pytest.mark.parametrize("page", sorted(page.name for page in DOCS.glob("*.md")))
def test_each_table_has_a_head_and_rows_of_one_width(page):
    """Otherwise a blank line within a table has torn it."""
    text = FENCED.sub("", (DOCS / page).read_text(encoding="utf-8"))
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [re.sub(r"\\\||`[^`]*`", "", row) for row in table.splitlines()]
        assert len(rows) > 2, table
        assert re.fullmatch(r"(\| ---:? )+\|", rows[1]), table
        assert len({row.count("|") for row in rows}) == 1, table


def test_the_index_names_every_page():
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    assert {*linked, "index.md"} == {page.name for page in DOCS.glob("*.md")}


def sections_in(annotation):
    """The configuration classes that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def unknown_keys(section, node, path=""):
    """Dotted keys of a piece of YAML that the configuration does not have."""
    if isinstance(node, list):
        return [key for item in node for key in unknown_keys(section, item, path)]
    if not isinstance(node, dict):
        return []
    found = []
    for key, value in node.items():
        fields = [one.model_fields[key] for one in section if key in one.model_fields]
        found += [] if fields else [f"{path}{key}"]
        for field in fields:
            inner = sections_in(field.annotation)
            found += unknown_keys(inner, value, f"{path}{key}.") if inner else []
    return found


SETTINGS = [
    (page, body)
    for page in PAGES
    for body in re.findall(
        r"^```yaml\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
]


@pytest.mark.parametrize(("page", "settings"), SETTINGS, ids=[page for page, _ in SETTINGS])
def test_settings_on_a_page_exist(page, settings):
    from headway.config import TrainConfig

    written = yaml.safe_load(settings)
    written.pop("extends", None)
    assert unknown_keys([TrainConfig], written) == []


def test_a_setting_that_does_not_exist_is_found():
    from headway.config import TrainConfig

    assert unknown_keys([TrainConfig], {"optim": {"lr": 1.0, "stepz": 3}}) == ["optim.stepz"]
    assert unknown_keys([TrainConfig], {"data": {"train": [{"path": "a", "rowz": 1}]}}) == ["data.train.rowz"]
