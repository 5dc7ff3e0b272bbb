"""Rows as people and other tools name their columns, read at first try."""

import json

import pytest
from PIL import Image

from headway.data import read_samples
from headway.data.samples import Document, Preference
from headway.data.sources import open_source
from headway.errors import DataError


@pytest.fixture
def row_of(tmp_path):
    """The sample of one row, with a picture a.png and a sound a.wav beside it."""
    (tmp_path / "pets").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pets" / "a.png")

    def read(row, name="rows.jsonl"):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
        (sample,) = read_samples(tmp_path / name)
        return sample

    return read


def turns(chat):
    return [(message.role, message.text) for message in chat.messages]


@pytest.mark.parametrize(
    "row",
    [
        {"Question": "1 + 1?", "Answer": "2"},
        {" question": "1 + 1?", "answer ": "2"},
        {"QUERY": "other", "query": "1 + 1?", "response": "2"},
        {"question": "1 + 1?", "response": "2"},
        {"input": "1 + 1?", "target": "2"},
        {"inputs": "1 + 1?", "targets": "2"},
        {"source": "1 + 1?", "target": "2"},
        {"user": "1 + 1?", "assistant": "2"},
        {"human": "1 + 1?", "assistant": "2"},
        {"document": "1 + 1?", "summary": "2"},
        {"Text": "1 + 1?", "Label": 2},
        {"text": "1 + 1?", "label": " 2 "},
    ],
)
def test_a_question_and_its_answer_under_other_names(row_of, row):
    assert turns(row_of(row)) == [("user", "1 + 1?"), ("assistant", "2")]


@pytest.mark.parametrize(
    "row",
    [
        {"image_path": "pets/a.png", "caption": "a pet"},
        {"filename": "pets/a.png", "label": "a pet"},
        {"img": "pets/a.png", "text": "a pet"},
        {"Image": "pets/a.png", "text": "a pet"},
        {"img_path": "pets/a.png", "path": "elsewhere/b.png", "caption": "a pet"},
        {"path": "pets/a.png", "caption": "a pet"},
    ],
)
def test_a_column_that_names_a_picture(row_of, row):
    chat = row_of(row)
    assert [part.kind for part in chat.messages[0].parts] == ["image"]
    assert chat.messages[1].text == "a pet"


def test_a_path_or_an_address_that_is_no_picture_is_left_where_it_is(row_of):
    for row in (
        {"text": "print(1)", "path": "src/main.py"},
        {"text": "a page", "file_name": "scans/a.png"},
        {"text": "a page", "image_url": "https://example.com/a.png"},
    ):
        assert isinstance(row_of(row), Document)


def test_metadata_that_call_the_file_otherwise_are_of_the_pictures_beside_them(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text("filename,text\na.png,a pet\n")
    (chat,) = read_samples(tmp_path)
    assert [part.kind for part in chat.messages[0].parts] == ["image"]


def test_a_context_stands_behind_an_instruction_and_before_a_question(row_of):
    dolly = {"instruction": "When?", "context": "It was in 1066.", "response": "1066", "category": "closed_qa"}
    assert turns(row_of(dolly)) == [("user", "When?\nIt was in 1066."), ("assistant", "1066")]
    squad = {"question": "When?", "context": "It was in 1066.", "answer": "1066"}
    assert turns(row_of(squad)) == [("user", "It was in 1066.\nWhen?"), ("assistant", "1066")]
    assert turns(row_of(dolly | {"context": ""})) == [("user", "When?"), ("assistant", "1066")]


def test_a_context_is_not_read_where_columns_are_named(tmp_path):
    row = {"q": "When?", "context": "It was in 1066.", "a": "1066"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    sample = open_source(tmp_path / "rows.jsonl", columns={"question": "q", "answer": "a"})[0]
    assert turns(sample) == [
        ("user", "When?"),
        ("assistant", "1066"),
    ]


def test_a_system_prompt_opens_a_question_and_not_a_chat_that_has_its_own(row_of):
    orca = {"id": 1, "system_prompt": "Be brief.", "question": "When?", "response": "1066"}
    assert turns(row_of(orca)) == [("system", "Be brief."), ("user", "When?"), ("assistant", "1066")]
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "When?"}]
    chat = {"system_prompt": "Be brief.", "messages": [*own, {"role": "assistant", "content": "1066"}]}
    assert turns(row_of(chat))[0] == ("system", "Be long.")


def test_openais_pair_of_outputs_is_a_preference(row_of):
    shown = {"messages": [{"role": "user", "content": "Hello"}], "tools": [], "parallel_tool_calls": True}
    outputs = ([{"role": "assistant", "content": words}] for words in ("Good day.", "What?"))
    sample = row_of(dict(zip(("input", "preferred_output", "non_preferred_output"), (shown, *outputs), strict=True)))
    assert isinstance(sample, Preference)
    assert [turns(chat)[-1][1] for chat in sample.chats] == ["Good day.", "What?"]


@pytest.mark.parametrize("separator", ["|", "\t", ";", ","])
def test_a_csv_by_the_separator_of_its_first_line(tmp_path, separator):
    lines = [("text", "label"), ("A fine film", "good")]
    (tmp_path / "a.csv").write_text("".join(f"{separator.join(line)}\n" for line in lines))
    (chat,) = read_samples(tmp_path / "a.csv")
    assert turns(chat) == [("user", "A fine film"), ("assistant", "good")]


def test_a_json_file_with_an_object_on_each_line_is_read_as_such(tmp_path):
    rows = [{"question": f"{n}?", "answer": n} for n in range(3)]
    (tmp_path / "a.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [turns(chat)[1][1] for chat in read_samples(tmp_path / "a.json")] == ["0", "1", "2"]
    (tmp_path / "a.json").write_text(json.dumps({"data": rows}))
    with pytest.raises(DataError, match="must be an array of objects"):
        read_samples(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("a.xlsx", "Save the sheet as CSV in UTF-8"),
        ("a.zip", "Unpack it, and give the folder"),
        ("a.pdf", "Save its words as .txt"),
        ("a.md", "Name the format text"),
        ("a.pkl", "Write its rows as JSON Lines or Parquet"),
        ("a.png", "It is one image: give its folder"),
    ],
)
def test_a_file_of_another_kind_has_its_way_out(tmp_path, name, way_out):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=way_out):
        read_samples(tmp_path / name)


def test_pictures_of_a_kind_that_is_not_read_are_named(tmp_path):
    for name in ("cat/0.heic", "dog/0.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=r"holds cat/0\.heic, and pictures of the kind \.heic are not read"):
        read_samples(tmp_path)
