import io

import pytest

from headway.report import Column, render_pairs, render_table
from headway.report.table import coloured, width_of


def test_a_table_aligns_text_left_and_numbers_right():
    columns = [Column("name", "left"), Column("n")]
    assert render_table(columns, [["a", "1"], ["long name", "1,000"]], footer=["total", "1,001"]) == (
        "name           n\n---------  -----\na              1\nlong name  1,000\n---------  -----\ntotal      1,001"
    )


def test_a_table_without_rows_still_has_its_headings():
    assert render_table([Column("name", "left"), Column("n")], []) == "name  n\n----  -"


def test_a_row_of_the_wrong_width_is_our_own_mistake():
    with pytest.raises(AssertionError, match="1 cells for 2 columns"):
        render_table([Column("a"), Column("b")], [["1"]])


def test_pairs_align_their_values():
    assert (
        render_pairs([("MFU", "47.1 %"), ("tokens", "12,800"), ("note", "")]) == "MFU     47.1 %\ntokens  12,800\nnote"
    )
    assert render_pairs([]) == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("COLUMNS", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


def test_a_pipe_has_no_width_unless_it_is_given(monkeypatch):
    assert width_of(io.StringIO()) is None
    for given, width in (("80", 80), ("10", 40), ("999", 200), ("0", None), ("wide", None)):
        monkeypatch.setenv("COLUMNS", given)
        assert width_of(io.StringIO()) == width
    assert width_of(Terminal()) is not None


def test_colour_is_for_terminals_that_want_it(monkeypatch):
    assert coloured("Error:", "red", io.StringIO()) == "Error:"
    assert coloured("Error:", "red", Terminal()) == "\x1b[1;31mError:\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("Error:", "red", Terminal()) == "Error:"


def test_words_wrap_in_their_column():
    rows = [["mlp", "12", "two words and some more of them"]]
    assert render_table([Column("part", "left"), Column("n"), Column("what", "left")], rows, width=32) == (
        "part   n  what\n----  --  ----------------------\nmlp   12  two words and some more\n          of them"
    ).replace("----------------------", "-" * 22).replace("two words and some more\n          of them",
        "two words and some\n          more of them")  # fmt: skip


def test_columns_without_room_stand_below_with_the_first_repeated():
    columns = [Column("part", "left"), *map(Column, ("forward", "backward"))]
    shown = render_table(columns, [["mlp", "12", "24"]], footer=["all", "12", "24"], width=15)
    assert shown == (
        "part  forward\n----  -------\nmlp        12\n----  -------\nall        12\n\n"
        "part  backward\n----  --------\nmlp         24\n----  --------\nall         24"
    )


def test_long_values_wrap_beside_their_names():
    assert render_pairs([("what", "some words that do not fit"), ("n", "1")], width=24) == (
        "what  some words that do\n      not fit\nn     1"
    )
