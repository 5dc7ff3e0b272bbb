"""Numeric options of every command are read by one parser."""

import json
from pathlib import Path

import pytest
import typer

from headway.cli.app import app
from headway.cli.parse import _numeric

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen2.5-7b-text-81920.yaml"
GROUP = typer.main.get_command(app)
COMMANDS = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", "qwen3-8b", "--mtbf", "2m"), "--mtbf '2m' is not a number: 2m may be minutes, milliseconds or"),
        (("plan", "qwen3-8b", "--price", "2,5"), "--price '2,5' is not a number: the comma of 2,5 may stand before"),
        (("plan", "qwen3-8b", "--tokens", "100m"), "--tokens '100m' is not a number: 100m may be millions or"),
        (("plan", "qwen3-8b", "--devices", "50%"), "--devices '50%' is not a whole number: 50% is a share, but this"),
        (("plan", "qwen3-8b", "--device", "H100", "--scale", "8,x"), "'x' is not a number of devices"),
        (
            ("tune", "RECIPE", "--memory", "40G"),
            "--memory '40G' is not a size: 40G may mean units of 1000 or of 1024. Write 40GB",
        ),
        (("flops", "qwen3-8b", "--segments", "4k*2x"), "'2x' is not a whole number. Write, for example,"),
        (("flops", "qwen3-8b", "--segments", "4k", "--lora", "1.5"), "--lora '1.5' is not RANK or RANK:TARGETS"),
        (
            ("mfu", "qwen3-8b", "--seq-len", "4k", "--step-time", "1s", "--device=-5"),
            "'-5' is not a positive number",
        ),
    ],
)
def test_a_number_of_two_meanings_is_an_error_that_names_both(headway, arguments, says):
    result = headway(*(RECIPE if word == "RECIPE" else word for word in arguments))
    assert (result.code in (1, 2), says in " ".join(result.err.split())) == (True, True), result.err


def test_repeats_ranks_shares_and_rates_take_units_too(headway):
    def answer(*options):
        result = headway(*options, "--json")
        assert result.code == 0, result.err
        return json.loads(result.out)

    flops = ("flops", "qwen3-8b", "--segments")
    assert answer(*flops, "512*2000", "--lora", "1024:q_proj") == answer(*flops, "512*2k", "--lora", "1_024:q_proj")
    mfu = ("mfu", "qwen3-8b", "--seq-len", "4096", "--tokens-per-s", "10k", "--chips", "1")
    rates = [answer(*mfu, "--device", rate)["mfu"] for rate in ("989.4e12", "989.4T", "989.4 TFLOP/s")]
    assert rates[0] == rates[1] == rates[2]
    mixed = (*mfu, "--device", "B200", "--dtype")
    assert answer(*mixed, "fp8:70%,bf16:30%")["mfu"] == answer(*mixed, "fp8:0.7,bf16:0.3")["mfu"]
