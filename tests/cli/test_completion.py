"""Shell completion: the script that a shell runs, and what its call back to the command answers."""

import os
import subprocess
import sys

import pytest

ASK = [sys.executable, "-c", "from headway.cli.app import main; main()"]


def asked(**variables):
    done = subprocess.run(ASK, capture_output=True, text=True, env=os.environ | variables, check=False, timeout=60)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ("headway tr", {"train"}),
        ("headway new", {"new-model"}),
        ("headway plan qwen3-8b --sc", {"--scale"}),
        (
            "headway plan --tokens 3x --pr",
            {"--price", "--price-list"},
        ),  # half a line may hold what a command would refuse
    ],
)
def test_bash_and_zsh_are_answered(words, answers):
    typed = words.split(" ")
    out, err = asked(_HEADWAY_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(typed) - 1))
    assert (set(out.split()), err) == (answers, "")
    out, err = asked(_HEADWAY_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=words)
    assert all(f'"{answer}"' in out for answer in answers)
    assert err == ""


def test_the_script_completes_in_bash(tmp_path):
    command = tmp_path / "headway"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m headway "$@"\n')
    command.chmod(0o755)
    asks = (
        'eval "$(_HEADWAY_COMPLETE=source_bash headway)"; complete -p headway; '
        'COMP_WORDS=(headway go); COMP_CWORD=1; _headway_completion headway; echo "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", asks], capture_output=True, text=True, env=os.environ | {"PATH": path}, check=True
    )
    assert done.stdout.splitlines() == ["complete -o default -F _headway_completion headway", "goodput"]
