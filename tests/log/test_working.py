import io
import re
import time

import pytest

from headway.cli import output


def test_a_log_file_is_told_what_goes_on_until_it_is_done(capsys):
    told = ""
    with output.working("planning packs of 7 samples", every_s=0.02):
        while told.count("\n") < 2:
            time.sleep(0.01)
            told += capsys.readouterr().err
    assert re.fullmatch(r"(planning packs of 7 samples: [0-9.]+ \w+ so far\n)+", told)
    capsys.readouterr()
    time.sleep(0.06)
    assert capsys.readouterr().err == "", "nothing is told once it is done"


def test_what_is_done_at_once_says_nothing_and_errors_pass(capsys):
    with pytest.raises(ZeroDivisionError), output.working("dividing"):
        raise ZeroDivisionError
    seen = capsys.readouterr()
    assert seen.out == seen.err == ""


def test_a_terminal_shows_it_while_it_lasts(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with output.working("tracing [a model]"):
        pass
    assert "tracing [a model]" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K"), "the line is taken away in the end"
