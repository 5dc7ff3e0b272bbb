"""Help, tables and errors as a terminal of 80 and of 120 columns shows them, to the character.

To renew a file after a change that is meant: COLUMNS=80 headway devices --help > tests/cli/shown/help-80.txt 2>&1
"""

from pathlib import Path

import pytest

SHOWN = Path(__file__).parent / "shown"
COMMANDS = {
    "help": ("devices", "--help"),
    "table": ("flops", "qwen3-vl-8b", "--segments", "4096*3,512", "--images", "1024x768px*2"),
    "error": ("flops", "qwen3-vl-8b", "--segments", "4096", "--images", "1024x768"),
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("what", COMMANDS)
def test_it_is_shown_as_the_file_says(headway, monkeypatch, what, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = headway(*COMMANDS[what])
    assert result.out + result.err == (SHOWN / f"{what}-{columns}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", [40, 63, 200])
@pytest.mark.parametrize("command", [COMMANDS["table"], COMMANDS["error"], ("devices",), ("devices", "H10x")])
def test_no_line_is_wider_than_the_terminal(headway, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = headway(*command)
    lines = (result.out + result.err).splitlines()
    assert [line for line in lines if len(line) > columns and len(line.split()) > 1] == []


def test_in_a_pipe_a_row_is_a_line(headway, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, headway("devices").out.splitlines())) > 120


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (("-V",), "headway "),
        (("version",), "headway "),
        (("help",), "Usage: headway [OPTIONS]"),
        (("help", "devices"), "Usage: headway devices [OPTIONS] [NAME]"),
    ],
)
def test_what_other_tools_call_version_and_help(headway, arguments, first):
    result = headway(*arguments)
    assert (result.code, result.out.startswith(first)) == (0, True)


def test_pixels_are_rounded_to_whole_tokens_of_the_model(headway):
    in_pixels = headway("flops", "qwen3-vl-8b", "--segments", "4096", "--images", "1024x768px,1x2x2")
    in_patches = headway("flops", "qwen3-vl-8b", "--segments", "4096", "--images", "1x48x64,1x2x2")
    assert in_pixels.out == in_patches.out
    text_model = headway("flops", "qwen3-8b", "--segments", "4096", "--images", "1024x768px")
    assert (text_model.code, "qwen3-8b has no vision tower, but --images" in " ".join(text_model.err.split())) == (
        2,
        True,
    )


def test_an_mfu_above_100_percent_is_a_failure(headway):
    result = headway("mfu", "--flops-per-token", "1e9", "--tokens-per-s", "1e9", "--device", "H100", "--chips", "1")
    assert (result.code, "above 100 %" in result.err) == (1, True)
