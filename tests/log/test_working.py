import io
import re
import time

import pytest

from headway.log.working import measuring_rows, working


def test_a_log_file_is_told_what_goes_on_until_it_is_done(capsys):
    told = ""
    with working("planning packs of 7 samples", every_s=0.02):
        while told.count("\n") < 2:
            time.sleep(0.01)
            told += capsys.readouterr().err
    assert re.fullmatch(r"(planning packs of 7 samples: [0-9.]+ \w+ so far\n)+", told)
    capsys.readouterr()
    time.sleep(0.06)
    assert capsys.readouterr().err == "", "nothing is told once it is done"


def test_what_is_done_at_once_says_nothing_and_errors_pass(capsys):
    with pytest.raises(ZeroDivisionError), working("dividing"):
        raise ZeroDivisionError
    seen = capsys.readouterr()
    assert seen.out == seen.err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal_of(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    return shown


def test_a_terminal_shows_it_while_it_lasts(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with working("tracing [a model]"):
        pass
    assert "tracing [a model]" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K"), "the line is taken away in the end"


def test_work_within_work_has_the_same_line_and_gives_it_back(capsys):
    def line_now():
        """The second line from now on: the first may have been on its way."""
        capsys.readouterr()
        told = ""
        while told.count("\n") < 2:
            time.sleep(0.005)
            told += capsys.readouterr().err
        return told.splitlines()[1].partition(":")[0]

    with working("setting up", every_s=0.02) as tell:
        tell("building the model")
        assert line_now() == "building the model"
        with working("tracing", every_s=60):
            assert line_now() == "tracing"
        with measuring_rows("chats") as measured:
            measured(0, 300, 0)
            measured(100, 300, 2)
            assert line_now() == "indexing chats"
        assert line_now() == "building the model"


def test_rows_are_a_bar_on_a_terminal(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with measuring_rows("[chats]") as measured:
        measured(0, 1200, 0)
        measured(1200, 1200, 2)
    assert "indexing [chats]" in terminal.getvalue()
    assert "1200/1200 rows, 2 bad" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())


def test_of_several_processes_the_first_one_speaks(monkeypatch):
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    with working("building the model") as tell:
        tell("restoring the checkpoint")
    assert terminal.getvalue() == ""
