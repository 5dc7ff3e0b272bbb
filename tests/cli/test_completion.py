"""Shell completion: the script that a shell runs, and what its call back to the command answers."""

import os
import pty
import select
import subprocess
import sys
import time

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
        # half a line may hold what a command would refuse
        ("headway plan --tokens 3x --pr", {"--price", "--price-list"}),
        ("headway train a.yaml --set optim.lr=1 --set optim.lr=2 --smo", {"--smoke"}),
        ("headway train a.yaml --set optim.lr_", {"optim.lr_of"}),
        ("headway plan qwen3-0", {"qwen3-0.6b"}),
        ("headway plan qwen3-0.6b --device h100-", {"h100-nvl", "h100-pcie", "h100-sxm"}),
        ("headway flops qwen3-0", {"qwen3-0.6b"}),
        ("headway completion b", {"bash"}),
    ],
)
def test_bash_and_zsh_are_answered(words, answers):
    typed = words.split(" ")
    out, err = asked(_HEADWAY_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(typed) - 1))
    assert (set(out.split()), err) == (answers, "")
    out, err = asked(_HEADWAY_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=words)
    assert all(f'"{answer}"' in out for answer in answers)
    assert err == ""


@pytest.fixture
def path(tmp_path):
    """A PATH with the command that these tests are of."""
    command = tmp_path / "headway"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m headway "$@"\n')
    command.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def test_the_script_completes_in_bash(path):
    asks = (
        'eval "$(headway completion bash)"; complete -p headway; '
        'COMP_WORDS=(headway go); COMP_CWORD=1; _headway_completion headway; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", asks], capture_output=True, text=True, env=os.environ | {"PATH": path}, check=True
    )
    assert done.stdout.splitlines() == ["complete -o default -F _headway_completion headway", "goodput"]


@pytest.mark.slow
def test_tab_completes_what_is_typed_into_an_interactive_bash(path):
    """Readline itself, on a terminal of its own: what is typed, a Tab, and what stands on the line then."""
    master, slave = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "-i"], stdin=slave, stdout=slave, stderr=slave, close_fds=True, start_new_session=True,
        env=os.environ | {"PATH": path, "PS1": "> ", "TERM": "dumb"},
    )  # fmt: skip
    os.close(slave)
    try:
        os.write(master, b'eval "$(headway completion bash)"; echo rea""dy\n')
        assert "ready" in _until(master, "\nready")
        os.write(master, b"headway goo\t")
        assert "headway goodput " in _until(master, "goodput ")
    finally:
        shell.kill()
        shell.wait()
        os.close(master)


def _until(terminal, wanted):
    """What a terminal shows until something stands there, or for a minute."""
    shown, end = "", time.monotonic() + 60
    while wanted not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace").replace("\r", "")
    return shown


@pytest.mark.parametrize(("shell", "marks"), [("zsh", "#compdef headway"), ("fish", "complete --command headway")])
def test_scripts_for_other_shells(headway, shell, marks):
    result = headway("completion", shell)
    assert (result.code, marks in result.out) == (0, True)
