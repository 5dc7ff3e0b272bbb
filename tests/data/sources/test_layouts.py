"""Rows as people and other tools write them and name their columns, and tables as `datasets` saves them."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Json, List, Value
from PIL import Image
from transformers.utils.chat_template_utils import render_jinja_template
from trl.data_utils import prepare_multimodal_messages

from headway.data import ImagePart, Media, Message, TextPart, read_samples
from headway.data.samples import Document, Preference
from headway.data.sources import open_source
from headway.errors import DataError


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    return tmp_path


@pytest.fixture
def read(folder):
    def read(row, **options):
        (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
        return open_source(folder / "rows.jsonl", **options)[0]

    return read


def words(sample):
    """Role and words of each turn, a picture as its file's name in angle brackets."""
    return [
        (
            message.role,
            "".join(
                part.text if isinstance(part, TextPart) else f"<{part.media.path.rpartition('/')[2]}>"
                for part in message.parts
            ),
        )
        for message in sample.messages
    ]


ROUND = [("user", "Two?"), ("assistant", "Red.")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # ms-swift, Custom-dataset: query and response with history, ShareGPT's conversation, Alpaca.
        (
            {"system": "Be brief.", "query": "Two?", "response": "Red.", "history": [["One?", "Blue."]]},
            [("system", "Be brief."), ("user", "One?"), ("assistant", "Blue."), *ROUND],
        ),
        (
            {
                "system": "Be brief.",
                "conversation": [{"human": "One?", "assistant": "Blue."}, {"human": "Two?", "assistant": "Red."}],
            },
            [("system", "Be brief."), ("user", "One?"), ("assistant", "Blue."), *ROUND],
        ),
        ({"query": "<image>Two?", "response": "Red.", "images": ["a.png"]}, [("user", "<a.png>Two?"), ROUND[1]]),
        # the_cauldron and FineVision: rounds about the pictures before the first.
        (
            {
                "images": ["a.png", "b.png"],
                "texts": [
                    {"user": "One?", "assistant": "Blue.", "source": "VQAv2"},
                    {"user": "Two?", "assistant": "Red.", "source": "VQAv2"},
                ],
            },
            [("user", "<a.png><b.png>One?"), ("assistant", "Blue."), *ROUND],
        ),
        ({"input": "Two?", "output": "Red."}, ROUND),
        ({"prompt": "Two?", "response": "Red."}, ROUND),
        ({"instruction": "Two?", "response": "Red."}, ROUND),
        # Roles of Gemma, Vicuna and others, in any case.
        ({"messages": [{"role": "User", "content": "Two?"}, {"role": "model", "content": "Red."}]}, ROUND),
        ({"messages": [{"role": "human", "content": "Two?"}, {"role": "BOT", "content": "Red."}]}, ROUND),
        ({"conversations": [{"from": "Human", "value": "Two?"}, {"from": "bot", "value": "Red."}]}, ROUND),
        # Columns by other names: capitals and spaces do not count, unless another has the exact one.
        ({"Question": "Two?", "Answer": "Red."}, ROUND),
        ({" question": "Two?", "answer ": "Red."}, ROUND),
        ({"QUERY": "other", "query": "Two?", "response": "Red."}, ROUND),
        ({"question": "Two?", "response": "Red."}, ROUND),
        ({"input": "Two?", "target": "Red."}, ROUND),
        ({"inputs": "Two?", "targets": "Red."}, ROUND),
        ({"source": "Two?", "target": "Red."}, ROUND),
        ({"user": "Two?", "assistant": "Red."}, ROUND),
        ({"human": "Two?", "assistant": "Red."}, ROUND),
        ({"document": "Two?", "summary": "Red."}, ROUND),
        ({"Text": "Two?", "Label": "Red."}, ROUND),
        ({"text": "Two?", "label": " Red. "}, ROUND),
        # Answers that are numbers, as those of VQA's counts.
        ({"question": "Two?", "answer": 3}, [ROUND[0], ("assistant", "3")]),
        ({"question": "Two?", "answer": 0.5}, [ROUND[0], ("assistant", "0.5")]),
        ({"question": 2, "answer": True}, [("user", "2"), ("assistant", "true")]),
        (
            {"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": 7}]},
            [ROUND[0], ("assistant", "7")],
        ),
        (
            {"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": 7}]},
            [ROUND[0], ("assistant", "7")],
        ),
        ({"prompt": "Two?", "completion": 7}, [ROUND[0], ("assistant", "7")]),
    ],
)
def test_rows_of_other_tools(read, row, expected):
    assert words(read(row)) == expected


@pytest.mark.parametrize("layout", ["messages", "prompt", "strings"])
@pytest.mark.parametrize("images", [["a.png"], ["a.png", "b.png"]])
def test_pictures_without_markers_stand_where_trl_puts_them(read, layout, images):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Red."},
    ]
    row = {"messages": turns, "images": images}
    if layout == "prompt":
        row = {"prompt": turns[:-1], "completion": turns[-1:], "images": images}
    elif layout == "strings":
        turns = turns[3:]
        row = {"prompt": "Two?", "completion": "Red.", "images": images}
    expected = [
        (
            turn["role"],
            "".join(f"<{part['image']}>" if part["type"] == "image" else part["text"] for part in turn["content"]),
        )
        for turn in prepare_multimodal_messages(turns, images)
    ]
    assert words(read(row)) == expected


def test_pictures_are_not_moved_where_any_of_them_has_a_place(read):
    row = {"messages": [{"role": "user", "content": "<image>One?"}], "images": ["a.png", "b.png"]}
    with pytest.raises(DataError, match=r"names 2 images, and its messages place 1 of them"):
        read(row)
    with pytest.raises(DataError, match="place none"):
        read({"conversations": [{"from": "human", "value": "<image>"}], "image": "a.png"}, schema="sharegpt")


def test_calls_of_ms_swift_and_sharegpt_are_turns_of_the_assistant(read):
    """ms-swift, Agent-support: calls that are made together follow each other, and so do their answers."""

    def call(city):
        return {"role": "tool_call", "content": json.dumps({"name": f"weather_{city}", "arguments": {"city": city}})}

    turns = [
        {"role": "user", "content": "Weather?"},
        call("Bern"),
        call("Rome"),
        {"role": "tool_response", "content": "snow"},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "Snow and sun."},
        call("Oslo"),
        {"role": "tool_response", "content": "rain"},
        {"role": "assistant", "content": "Rain."},
    ]
    as_sharegpt = [
        {"from": turn["role"].replace("tool_call", "function_call"), "value": turn["content"]} for turn in turns
    ]
    for row in ({"messages": turns}, {"conversations": as_sharegpt}):
        chat = read(row)
        assert [message.role for message in chat.messages] == [
            "user", "assistant", "tool", "tool", "assistant", "assistant", "tool", "assistant",
        ]  # fmt: skip
        calls = [[each["function"]["arguments"]["city"] for each in message.tool_calls] for message in chat.messages]
        assert [cities for cities in calls if cities] == [["Bern", "Rome"], ["Oslo"]]
        assert [message.name for message in chat.messages if message.role == "tool"] == [
            "weather_Bern", "weather_Rome", "weather_Oslo",
        ]  # fmt: skip
    with pytest.raises(DataError, match=r"message 1: the tool call null names no function"):
        read({"messages": [{"role": "tool_call", "tool_calls": []}]})


@pytest.mark.parametrize("result", [{"t": 1, "ö": ["a"]}, [{"t": 1}], [1, 2]])
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_a_tools_result_that_is_an_object_is_the_json_that_templates_write(read, result, form):
    turns = [("user", "Go"), ("tool", result), ("assistant", "Done.")]
    names = {"messages": ("role", "content"), "conversations": ("from", "value")}[form]
    chat = read({form: [dict(zip(names, turn, strict=True)) for turn in turns]})
    template = "{{ messages[0].content | tojson }}"
    (expected,), _ = render_jinja_template([[{"role": "tool", "content": result}]], chat_template=template)
    assert words(chat)[1] == ("tool", expected)


@pytest.mark.parametrize(
    "images", [[["a.png"], ["b.png"]], [["a.png", "b.png"]], [[["a.png"]], "b.png"], [["a.png"], [], ["b.png"]]]
)
def test_images_of_lists_within_lists_are_taken_in_their_order(read, images):
    row = {
        "images": images,
        "messages": [{"role": "user", "content": "<image>or<image>"}, {"role": "assistant", "content": "Red."}],
    }
    assert words(read(row))[0] == ("user", "<a.png>or<b.png>")


def test_marks_of_a_round_are_those_of_its_answer(read):
    rounds = [{"human": "One?", "assistant": "Blue.", "loss": False}, {"human": "Two?", "assistant": "Red."}]
    assert [message.learnt for message in read({"conversation": rounds}).messages] == [True, False, True, True]


TOOLS = [
    [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
        }
    ],
    [
        {
            "type": "function",
            "function": {"name": "g", "parameters": {"type": "object", "properties": {"b": {"type": "integer"}}}},
        }
    ],
]
CALLS = [
    [
        {"role": "user", "content": "Go"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        },
    ]
    for name, arguments in (("f", {"a": "x"}), ("g", {"b": 1}))
]


def saved(table, folder, form):
    if form == "parquet":
        table.to_parquet(folder / "rows.parquet")
        return open_source(folder / "rows.parquet")
    table.save_to_disk(folder / "saved")
    return open_source(folder / "saved")


@pytest.mark.parametrize("form", ["parquet", "saved"])
@pytest.mark.parametrize("kind", ["structs", "json", "strings", "lists of strings"])
def test_tools_and_calls_of_a_table_have_their_own_keys_alone(folder, form, kind):
    columns = {"messages": CALLS, "tools": TOOLS}
    features = None
    if kind == "json":  # the usual way since datasets 4.7
        features = Features({"messages": List(Json()), "tools": List(Json())})
    elif kind == "strings":
        columns = {name: [json.dumps(value) for value in rows] for name, rows in columns.items()}
    elif kind == "lists of strings":
        columns = {name: [list(map(json.dumps, value)) for value in rows] for name, rows in columns.items()}
    source = saved(Dataset.from_dict(columns, features=features), folder, form)
    for row, (tools, turns) in enumerate(zip(TOOLS, CALLS, strict=True)):
        chat = source[row]
        assert list(chat.tools) == tools
        assert [dict(call) for call in chat.messages[1].tool_calls] == turns[1]["tool_calls"]


def test_nulls_of_json_are_kept(folder):
    tool = {"name": "f", "parameters": {"default": None}}
    table = Dataset.from_dict(
        {"messages": [CALLS[0]], "tools": [[tool]]},
        features=Features({"messages": List(Json()), "tools": List(Json())}),
    )
    assert saved(table, folder, "parquet")[0].tools == (tool,)


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_content_that_differs_from_row_to_row_is_read_from_json(folder, form):
    turns = [
        [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Red."}],
        [{"role": "user", "content": [{"type": "text", "text": "Two?"}]}, {"role": "assistant", "content": "Red."}],
    ]
    source = saved(Dataset.from_dict({"messages": turns}, features=Features({"messages": List(Json())})), folder, form)
    assert [words(source[row])[0] for row in (0, 1)] == [("user", "One?"), ("user", "Two?")]


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_classes_are_answers_by_their_names(folder, form):
    features = Features(
        {"image": datasets.Image(), "label": ClassLabel(names=["cat", "dog"]), "question": Value("string")}
    )
    table = Dataset.from_dict(
        {"image": [str(folder / "a.png")] * 3, "label": [1, 0, None], "question": ["What?"] * 3}, features=features
    )
    source = saved(table, folder, form)
    path = folder / ("rows.parquet" if form == "parquet" else "saved")
    assert (source[0].answer, len(source[0].images)) == ("dog", 1)
    with pytest.raises(DataError, match='row 2: "label" is null'):
        source[2]
    mapped = open_source(path, columns={"answer": "label"})
    assert [mapped[row].answer for row in (0, 1)] == ["dog", "cat"]
    assert open_source(path, columns={"answer": "label"}, schema="question_answer")[0].images
    captions = open_source(path, columns={"text": "label"}, schema="caption")
    assert captions[0].messages[1] == Message("assistant", (TextPart("dog"),))


def test_a_class_without_a_name_is_a_bad_row(folder):
    features = {"label": {"names": ["cat"], "_type": "ClassLabel"}}
    schema = pa.schema(
        [("question", pa.string()), ("label", pa.int64())],
        {"huggingface": json.dumps({"info": {"features": features}})},
    )
    pq.write_table(pa.table({"question": ["a", "b"], "label": [0, 7]}, schema=schema), folder / "rows.parquet")
    source = open_source(folder / "rows.parquet", columns={"answer": "label"})
    assert source[0].answer == "cat"
    with pytest.raises(DataError, match=r'row 1: "label" is the class 7, but the table names 1 classes'):
        source[1]


def test_pictures_of_a_table_are_found_by_part_and_by_path(folder):
    rows = {
        "images": [[{"bytes": (folder / "a.png").read_bytes(), "path": None}, {"bytes": None, "path": "b.png"}]],
        "question": ["?"],
        "answer": ["!"],
    }
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    chat = open_source(folder / "rows.parquet")[0]
    assert [part.media.data is not None for part in chat.parts if isinstance(part, ImagePart)] == [True, False]
    assert chat.images[1] == Media(str(folder / "b.png"))


@pytest.mark.parametrize(
    "row",
    [
        {"image_path": "a.png", "caption": "a pet"},
        {"filename": "a.png", "label": "a pet"},
        {"img": "a.png", "text": "a pet"},
        {"Image": "a.png", "text": "a pet"},
        {"img_path": "a.png", "path": "elsewhere/b.png", "caption": "a pet"},
        {"path": "a.png", "caption": "a pet"},
    ],
)
def test_a_column_that_names_a_picture(read, row):
    chat = read(row)
    assert [part.kind for part in chat.messages[0].parts] == ["image"]
    assert chat.messages[1].text == "a pet"


def test_a_path_or_an_address_that_is_no_picture_is_left_where_it_is(read):
    for row in (
        {"text": "print(1)", "path": "src/main.py"},
        {"text": "a page", "file_name": "scans/a.png"},
        {"text": "a page", "image_url": "https://example.com/a.png"},
    ):
        assert isinstance(read(row), Document)


def test_metadata_that_call_the_file_otherwise_are_of_the_pictures_beside_them(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text("filename,text\na.png,a pet\n")
    (chat,) = read_samples(tmp_path)
    assert [part.kind for part in chat.messages[0].parts] == ["image"]


def test_a_context_stands_behind_an_instruction_and_before_a_question(read):
    dolly = {"instruction": "When?", "context": "It was in 1066.", "response": "1066", "category": "closed_qa"}
    assert words(read(dolly)) == [("user", "When?\nIt was in 1066."), ("assistant", "1066")]
    squad = {"question": "When?", "context": "It was in 1066.", "answer": "1066"}
    assert words(read(squad)) == [("user", "It was in 1066.\nWhen?"), ("assistant", "1066")]
    assert words(read(dolly | {"context": ""})) == [("user", "When?"), ("assistant", "1066")]


def test_a_context_is_not_read_where_columns_are_named(read):
    row = {"q": "When?", "context": "It was in 1066.", "a": "1066"}
    sample = read(row, columns={"question": "q", "answer": "a"})
    assert words(sample) == [
        ("user", "When?"),
        ("assistant", "1066"),
    ]


def test_a_system_prompt_opens_a_question_and_not_a_chat_that_has_its_own(read):
    orca = {"id": 1, "system_prompt": "Be brief.", "question": "When?", "response": "1066"}
    assert words(read(orca)) == [("system", "Be brief."), ("user", "When?"), ("assistant", "1066")]
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "When?"}]
    chat = {"system_prompt": "Be brief.", "messages": [*own, {"role": "assistant", "content": "1066"}]}
    assert words(read(chat))[0] == ("system", "Be long.")


def test_openais_pair_of_outputs_is_a_preference(read):
    shown = {"messages": [{"role": "user", "content": "Hello"}], "tools": [], "parallel_tool_calls": True}
    outputs = ([{"role": "assistant", "content": words}] for words in ("Good day.", "What?"))
    sample = read(dict(zip(("input", "preferred_output", "non_preferred_output"), (shown, *outputs), strict=True)))
    assert isinstance(sample, Preference)
    assert [words(chat)[-1][1] for chat in sample.chats] == ["Good day.", "What?"]


@pytest.mark.parametrize("separator", ["|", "\t", ";", ","])
def test_a_csv_by_the_separator_of_its_first_line(tmp_path, separator):
    lines = [("text", "label"), ("A fine film", "good")]
    (tmp_path / "a.csv").write_text("".join(f"{separator.join(line)}\n" for line in lines))
    (chat,) = read_samples(tmp_path / "a.csv")
    assert words(chat) == [("user", "A fine film"), ("assistant", "good")]


def test_a_json_file_with_an_object_on_each_line_is_read_as_such(tmp_path):
    rows = [{"question": f"{n}?", "answer": n} for n in range(3)]
    (tmp_path / "a.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [words(chat)[1][1] for chat in read_samples(tmp_path / "a.json")] == ["0", "1", "2"]
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
