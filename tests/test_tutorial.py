"""The tutorial is followed from its first block to its last, with fewer pictures and steps."""

import functools
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|sh|yaml)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
SMALLER = (("range(200)", "range(24)"), ("[:160]", "[:20]"), ("[160:]", "[20:]"), ("steps: 300", "steps: 4"))
SMALLER += (("warmup_steps: 10", "warmup_steps: 1"), ("every: 100", "every: 2"), ("199.png", "23.png"))
TYPED = "/image shapes/images/23.png\nWhat is this?\n"  # in a conversation


def run_command(command, monkeypatch):
    from headway.cli.app import main

    monkeypatch.setattr(sys, "argv", shlex.split(command))
    monkeypatch.setattr(sys, "stdin", io.StringIO(TYPED))
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code


def test_every_block_runs_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    names = {}
    for kind, written in BLOCKS:
        body = functools.reduce(lambda text, change: text.replace(*change), SMALLER, written)
        if kind == "python":
            exec(compile(body, "tutorial.md", "exec"), names)
        elif kind == "yaml":
            (tmp_path / "shapes.yaml").write_text(body)
        else:
            for command in body.splitlines():
                assert command.startswith("headway ")
                assert run_command(command, monkeypatch) == 0, command
    out = capsys.readouterr().out
    assert "it says:" in out
    assert (tmp_path / "shapes/run/summary.json").exists()


def test_what_is_made_smaller_stands_on_the_page():
    assert [old for old, _ in SMALLER if old not in PAGE] == []
