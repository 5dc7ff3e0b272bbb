"""CSV and TSV as spreadsheets and libraries write them, and the Hub's folders of pictures with a table of words."""

import csv
import difflib
import io
import json

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headway.data.sources import open_source, text_rows
from headway.data.sources.text_rows import _values
from headway.errors import DataError

CELLS = st.lists(st.text(st.sampled_from('a,;"\t \n\r1'), max_size=6), min_size=1, max_size=4)


@given(CELLS, st.sampled_from(",;\t"))
def test_values_are_those_that_python_wrote(cells, separator):
    file = io.StringIO()
    csv.writer(file, delimiter=separator).writerow(cells)
    assert _values(file.getvalue(), separator) == cells


@given(st.lists(CELLS.filter(lambda cells: "".join(cells).strip()), min_size=1, max_size=5))
def test_rows_are_those_that_python_wrote(rows):
    width = max(map(len, rows))
    rows = [[*row, *[""] * (width - len(row))] for row in rows]
    file = io.StringIO()
    csv.writer(file).writerows([[f"c{number}" for number in range(width)], *rows])
    reader = object.__new__(text_rows.DelimitedReader)
    reader._separator_of = lambda _: b","
    found = [_values(record.data.decode(), ",") for record in reader.records(io.BytesIO(file.getvalue().encode()))]
    expected = [row for row in csv.reader(io.StringIO(file.getvalue())) if row][1:]
    assert found == [row for row in expected if ",".join(row).strip() or width > 1]


def written(tmp_path, text, name="rows.csv"):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_source(tmp_path / name)


def test_a_row_is_named_by_the_line_on_which_it_begins(tmp_path):
    source = written(tmp_path, 'question,answer\r\n"one\r\ntwo",red\r\n\r\nthree,blue\r\n')
    assert [source[row].origin.place for row in (0, 1)] == ["line 2", "line 5"]
    assert [source[row].messages[0].text for row in (0, 1)] == ["one\r\ntwo", "three"]


def test_nested_values_are_json(tmp_path):
    turns = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Red."}]
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages", "images"], [json.dumps(turns), json.dumps(["a.png", "b.png"])]])
    chat = open_source(tmp_path / "rows.csv")[0]
    assert (len(chat.images), chat.answer) == (2, "Red.")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("question,answer\na,b,c\n", "line 2: it has 3 values, and the first line names 2 columns"),
        ("question,answer\na\n", "line 2: it has 1 values"),
        ('question,answer\n"a"b,c\n', "line 2: behind the closing quote of value 1 stands 'b'"),
        (
            'question,answer\na,"b\nc,d\n',
            r"at its start: the file cannot be read further: the value in quotes that begins on line 2",
        ),
        ("question,question\na,b\n", "the first line names question twice"),
        (b"question,answer\n\xff,b\n", "line 2: it is not UTF-8 text"),
        ("question,answer\n", "at its start: it holds no samples"),
        ("a,b\n1,2\n", r'The row is {"a": "1", "b": "2"}, and needs the columns of a schema'),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, says):
    with pytest.raises(DataError, match=says):
        written(tmp_path, text)[0]


def test_a_quote_that_is_not_closed_does_not_take_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "_MAX_ROW_BYTES", 100)
    source = written(tmp_path, 'text\na\n"b\n' + "c\n" * 1000)
    assert len(source) == 2
    with pytest.raises(DataError, match="the value in quotes that begins on line 3 does not end"):
        source[1]


def test_a_value_may_be_a_long_document(tmp_path):
    source = written(tmp_path, 'text\n"' + "word, " * 100_000 + '"\n')
    assert len(source[0].content) == 600_000


def test_a_lone_carriage_return_that_pandas_wrote_is_part_of_its_value(tmp_path):
    path = tmp_path / "table.csv"
    pd.DataFrame({"question": ["this\rand that"], "answer": ["yes"]}).to_csv(path)
    assert b'"' not in path.read_bytes()
    question, answer = (message.parts[0].text for message in open_source(path)[0].messages)
    assert (question, answer) == ("this\rand that", "yes")


def test_an_inch_within_a_value_is_no_quote(tmp_path):
    source = written(tmp_path, 'question,answer\nhow long?,5" or so\nand this?,6"\n')
    assert [source[row].answer for row in range(len(source))] == ['5" or so', '6"']


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_folders_of_pictures_with_a_table_of_words_are_read_as_the_hub_has_them(tmp_path, form):
    rows = [{"file_name": f"in/{name}.png", "text": f"A {name}."} for name in ("cat", "dog")]
    (tmp_path / "in").mkdir()
    for row in rows:
        Image.new("RGB", (8, 8)).save(tmp_path / row["file_name"])
    with pytest.raises(DataError, match=r"holds pictures, videos or sounds and no file .* metadata\.csv"):
        open_source(tmp_path)
    file = tmp_path / f"metadata.{form}"
    if form == "csv":
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, ["file_name", "text"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    source = open_source(tmp_path)
    assert [(sample.answer, sample.images[0].path) for sample in (source[0], source[1])] == [
        ("A cat.", str(tmp_path / "in/cat.png")),
        ("A dog.", str(tmp_path / "in/dog.png")),
    ]
    other = tmp_path / f"rows.{form}"  # where a file's name is a note
    other.write_bytes(file.read_bytes())
    assert open_source(other)[0].content == "A cat."


def test_a_table_of_thousands_of_columns_is_refused_by_comparing_few_names(tmp_path, monkeypatch):
    """`difflib` took a minute a row for all pairs of 3,000 names."""
    compared = []
    ratio = difflib.SequenceMatcher.ratio
    monkeypatch.setattr(difflib.SequenceMatcher, "ratio", lambda self: compared.append(self.a) or ratio(self))
    row = ",".join("a" * 3000) + "\n"
    (tmp_path / "a.csv").write_text(",".join(f"c{number}" for number in range(3000)) + "\n" + row * 3)
    for number in range(3):
        with pytest.raises(DataError, match="2,988 more, and no schema reads them"):
            open_source(tmp_path / "a.csv")[number]
    assert len(compared) <= 64 * 63 / 2  # pairs of 64, once
