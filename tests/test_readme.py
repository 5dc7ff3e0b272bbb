"""What the README shows is what happens: its console sessions and Python snippets are run."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from helpers.pages import broken_links

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


# Commands of the console blocks, each with the output that the README shows below it.
SESSIONS = [
    session.partition("\n")[::2]
    for kind, body in BLOCKS
    if kind == "console"
    for session in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
]


def pattern(shown):
    """Turn shown output into a pattern: a line `...` stands for any lines, ` ...` at a line's end for its rest."""
    lines = shown.splitlines()
    return "".join(
        "(?:.*\n)*" if line == "..." else re.escape(line.removesuffix(" ...")) + (" .*" * line.endswith(" ...")) + "\n"
        for line in lines
    )


@pytest.mark.parametrize(("command", "shown"), SESSIONS, ids=[command for command, _ in SESSIONS])
def test_a_console_session_prints_what_the_readme_shows(command, shown, monkeypatch, capsys):
    from headway.cli.app import main

    program, *arguments = shlex.split(command)
    assert program == "headway"
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    out = capsys.readouterr().out
    assert exit_.value.code == 0
    assert re.fullmatch(pattern(shown), out), out


SNIPPETS = [body for kind, body in BLOCKS if kind == "python"]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_python_snippet_runs(snippet, capsys):
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("\n")


def test_the_readme_has_what_these_tests_are_for():
    assert len(SESSIONS) >= 3
    assert len(SNIPPETS) >= 1
    assert len(README.splitlines()) < 150


def test_links_lead_to_files_and_headings():
    assert broken_links(ROOT / "README.md") == []
