"""Standard streams that are closed, full or without a reader: the conventional exit, or one paragraph."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli.app import main
from helpers.folders import tiny_tokenizer

HEADWAY = f"{sys.executable} -P -m headway"
TABLE, RECORD = f"{HEADWAY} models", f"{HEADWAY} flops qwen3-8b --segments 4096 --json"


def shell(line, **variables):
    """Exit code of the first program of a pipe, and what was said on stderr."""
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"],
        env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stderr, done.stdout


@pytest.mark.parametrize("command", [TABLE, RECORD, f"{HEADWAY} --help"])
def test_a_reader_that_is_gone_ends_a_command_as_sigpipe_does_and_says_nothing(command):
    assert shell(f"{command} | (exec <&-; true)")[0] in (141, 0)  # 0 where all was written before the reader went


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", [TABLE, RECORD])
def test_a_full_disk_behind_standard_output_is_one_error(command):
    code, error, _ = shell(f"{command} > /dev/full")
    assert (code, error.count("Error:"), "No space left on device" in error) == (1, 1, True)


def test_a_closed_standard_output_is_refused_before_anything_is_done():
    code, error, _ = shell(f"{TABLE} >&-")
    assert (code, error.startswith("Error: Standard output is closed")) == (2, True)


def test_nothing_ends_a_command_because_nobody_reads_what_it_says_aside():
    assert shell(f"{TABLE} 2>&-")[0] == 0
    assert shell(f"{HEADWAY} flops qwen3-8b --segments x 2>&-")[0] == 2
    assert shell(f"{HEADWAY} flops qwen3-8b --segments x 2>/dev/full")[0] == 2


def test_a_closed_standard_input_is_an_empty_one():
    code = "from headway.cli.output import open_streams; open_streams(); import sys; print(len(sys.stdin.readline()))"
    assert shell(f'{sys.executable} -P -c "{code}" <&-') == (0, "", "0\n")


def test_letters_that_a_locale_lacks_are_printed_by_their_numbers():
    code = "from headway.cli.output import open_streams; open_streams(); print('\\ufffd \\u00e9 \\udcff')"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = f'{sys.executable} -P -c "{code}"'
    assert shell(program, **ascii_only) == (0, "", "\\ufffd \\xe9 \\udcff\n")
    assert shell(program, PYTHONIOENCODING="utf-8") == (0, "", "\ufffd \u00e9 \\udcff\n")


@pytest.mark.parametrize("cache", ["/proc/none", "/dev/null"])
def test_a_cache_that_cannot_be_made_is_one_error_that_names_it(cache, tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "w1 w2 w3"}\n')
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setenv("HEADWAY_CACHE", cache)
    monkeypatch.setattr(
        sys, "argv", ["headway", "index", str(rows), "--model", str(tmp_path / "model"), "--workers", "0"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert (ended.value.code, "Error:" in error, cache in error, "HEADWAY_CACHE" in error) == (2, True, True, True)


def test_what_the_system_refuses_is_one_error_wherever_a_command_meets_it(monkeypatch, capsys):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr("headway.cli.app.app", refused)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err.startswith("Error: /somewhere: Permission denied.")) == (1, True)
