"""Numeric options of every command are read by one parser."""

import json

import pytest
import typer

from headway.cli.app import app
from headway.cli.parse import _numeric

COMMANDS = typer.main.get_command(app).commands
OPTIONS = [
    (name, option, kind)
    for name, command in COMMANDS.items()
    for argument, kind in _numeric(command.callback).items()
    for option in next(param for param in command.params if param.name == argument).opts[:1]
]


def test_most_commands_have_numbers():
    assert len(OPTIONS) > 60
    assert {"--price", "--step-time", "--tokens", "--chips", "--seed"} <= {option for _, option, _ in OPTIONS}


@pytest.mark.parametrize(("command", "option", "kind"), OPTIONS)
def test_what_is_no_number_is_answered_with_examples(headway, command, option, kind):
    for arguments in ((option, "10 quarks"), (f"{option}=10 quarks",)):
        result = headway(command, *arguments)
        assert result.code == 2
        message = " ".join(result.err.split())
        assert f"{option} '10 quarks' is not a {'whole ' if kind.is_whole else ''}number. Write " in message


def test_numbers_as_people_write_them_are_the_numbers(headway):
    def answer(*options):
        return json.loads(headway("mfu", "qwen3-8b", "--seq-len", "4096", "--device", "H100", *options, "--json").out)

    plain = answer("--tokens-per-s", "10000", "--chips", "8", "--total-tokens", "100000000000", "--price", "2.5")
    assert plain == answer("--tokens-per-s=10k", "--chips", "8", "--total-tokens", "100B", "--price", "$2.5")
    assert answer("--mfu", "0.4", "--chips", "1024") == answer("--mfu", "40%", "--chips", "1,024")


def test_what_stands_behind_two_dashes_and_values_of_other_options_stay(headway):
    assert "unexpected extra argument" in headway("mfu", "qwen3-8b", "--", "--price", "$2.5").err.lower()
    assert "--tokens 'abc' is not a number. Write 0.5, 40%" in " ".join(
        headway("plan", "x", "--tokens", "abc").err.split()
    )
