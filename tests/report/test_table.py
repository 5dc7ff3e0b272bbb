import pytest

from headway.report import Column, render_pairs, render_table


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
