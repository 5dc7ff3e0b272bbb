"""Rows in the forms that datasets write them, and the one sample that each becomes."""

import contextlib
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.data import AudioPart, Chat, Document, ImagePart, Media, Message, Preference, TextPart, VideoPart
from headway.data.samples import Origin, best_answered
from headway.data.sources.layouts import COLUMNS, LAYOUTS, SCHEMAS, reading_of
from headway.data.sources.marks import HARMLESS_COLUMNS, unread_keys
from headway.data.sources.reader import ParsedRow
from headway.data.sources.references import MediaRules
from headway.data.sources.schemas import Normaliser
from headway.errors import ConfigError, DataError
from helpers.cases import examples

ORIGIN = Origin("data", "data.jsonl", 0, "line 1")


@pytest.fixture
def read(tmp_path):
    """Normalise a row beside which lie the files a.png, b.png, c.mp4 and d.wav."""
    for name in ("a.png", "b.png", "c.mp4", "d.wav"):
        (tmp_path / name).write_bytes(name.encode())

    def normalise(row, schema="auto", columns=None, **members):
        normaliser = Normaliser(schema, str(tmp_path), MediaRules(), columns or {})
        return normaliser.sample(
            ParsedRow(row, {name.replace("_", "."): data for name, data in members.items()} or None), ORIGIN
        )

    return normalise


@pytest.fixture
def at(tmp_path):
    return lambda name: Media(str(tmp_path / name))


def user(*parts):
    return Message("user", tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def assistant(words):
    return Message("assistant", (TextPart(words),))


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def test_messages_of_strings_and_parts(read, at):
    parts = [
        {"type": "text", "text": "See "},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
        {"type": "image", "image": "b.png", "text": None},
        {"type": "video", "video": "c.mp4"},
        {"type": "audio", "url": "d.wav"},
        {"type": "image_url", "image_url": "data:image/png;base64,SGk="},
        {"type": "input_audio", "input_audio": {"data": "SGk=", "format": "wav"}},
        {"type": "image", "image": {"bytes": b"raw", "path": "x.png"}},
    ]
    chat = read({"messages": [said("developer", "Be brief."), said("user", parts), said("assistant", "Yes.")]})
    assert chat == Chat(
        (
            Message("system", (TextPart("Be brief."),)),
            user(
                "See ",
                ImagePart(at("a.png")),
                ImagePart(at("b.png")),
                VideoPart(at("c.mp4")),
                AudioPart(at("d.wav")),
                ImagePart(Media(data=b"Hi")),
                AudioPart(Media(data=b"Hi")),
                ImagePart(Media(data=b"raw")),
            ),
            assistant("Yes."),
        ),
        ORIGIN,
    )


def test_parts_in_the_forms_of_other_libraries(read, at):
    """Anthropic's source, transformers' base64, OpenAI's responses, and qwen-vl-utils' list of frames with its rate."""
    parts = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "SGk="}},
        {"type": "image", "base64": "SGk="},
        {"type": "input_image", "image_url": "a.png"},
        {"type": "input_text", "text": "See "},
        {"type": "video", "video": ["a.png", "b.png"], "sample_fps": "0.5"},
        {"type": "video", "video": ["a.png"], "image": None},
    ]
    (asked, _) = read({"messages": [said("user", parts), said("assistant", "Yes.")]}).messages
    assert asked.parts == (
        ImagePart(Media(data=b"Hi")),
        ImagePart(Media(data=b"Hi")),
        ImagePart(at("a.png")),
        TextPart("See "),
        VideoPart(Media(frames=(at("a.png"), at("b.png")), frames_per_s=0.5)),
        VideoPart(Media(frames=(at("a.png"),), frames_per_s=2.0)),
    )


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            {"type": "image", "img": "a.png"},
            r'message 1: a part of type "image" has img, and none of the keys that say',
        ),
        ({"type": "image", "image": {"file_id": "x"}}, r"an object that has none of the keys bytes, base64"),
        ({"type": "input_audio"}, r'message 1: "input_audio" is null'),
        ({"type": "video", "video": ["a.png"], "fps": 0}, r'message 1: "fps" is 0, but frames per second are a number'),
        ({"type": "video", "video": ["a.png"], "nframes": 2}, r'message 1: "nframes" is 2, but media are read whole'),
        (
            {"type": "video", "video": "c.mp4", "sample_fps": 2},
            r'message 1: "sample_fps" is 2, but media are read whole',
        ),
        ({"type": "video", "video": []}, r'message 1: a part of type "video" needs a string "video", got \[\]'),
        ({"type": "video", "video": [["a.png"]]}, r'message 1: a part of type "image" needs a string "image"'),
    ],
)
def test_parts_that_cannot_be_read_are_named(read, part, says):
    with pytest.raises(DataError, match=says):
        read({"images": ["a.png"], "messages": [said("user", [part]), said("assistant", "Yes.")]})


def test_tool_calls_with_arguments_as_json_or_objects(read):
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern", "days": null}'}},
        {"id": "2", "type": "function", "function": {"name": "clock", "arguments": {"zone": 1}}},
    ]
    turns = [
        said("user", "Weather?"),
        said("assistant", None, tool_calls=calls),
        said("tool", "Sun.", tool_call_id="1"),
        said("tool", "Noon.", name="clock"),
        said("assistant", "Sun."),
    ]
    chat = read({"messages": turns, "tools": [weather]})
    assert chat.tools == (weather,)
    assert chat.messages[1:4] == (
        Message(
            "assistant",
            (),
            (
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern", "days": None}}},
                {"type": "function", "function": {"name": "clock", "arguments": {"zone": 1}}},
            ),
        ),
        Message("tool", (TextPart("Sun."),), name="weather"),
        Message("tool", (TextPart("Noon."),), name="clock"),
    )
    # Tables hold what differs from row to row as JSON, or as one list for each key.
    assert read({"messages": json.dumps(turns), "tools": json.dumps([weather])}) == chat


def test_turns_as_a_list_for_each_key(read):
    columns = {"role": ["user", "assistant"], "content": ["Hi", "Ho"]}
    assert read({"messages": columns}).messages == (user("Hi"), assistant("Ho"))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "c.mp4", "video_start": 1.0, "video_end": 3.0}},
        {"type": "video", "video": "c.mp4", "video_start": 1.0, "nframes": None},
    ],
)
def test_a_piece_of_a_video_is_not_read_as_the_whole(read, part):
    with pytest.raises(DataError, match=r'"video_start" is 1\.0, but media are read whole'):
        read({"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Yes."}]})


def test_a_size_that_an_image_asks_for_is_not_overlooked(read):
    part = {"type": "image", "image": "a.png", "max_pixels": 50176}
    with pytest.raises(DataError, match='"max_pixels" is 50176'):
        read({"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Yes."}]})


def test_parts_without_media_take_those_of_the_columns(read, at):
    parts = [{"type": "image"}, {"type": "text", "text": "and <image>"}, {"type": "image"}]
    chat = read({"messages": [said("user", parts)], "images": ["b.png", {"bytes": b"raw", "path": None}]})
    assert chat.messages == (user(ImagePart(at("b.png")), "and <image>", ImagePart(Media(data=b"raw"))),)


def test_markers_in_words_take_those_of_the_columns(read, at):
    turns = [said("user", "<image>Two? <video> <audio>"), said("assistant", [{"type": "text", "text": "<image>"}])]
    chat = read({"messages": turns, "images": ["a.png", "b.png"], "videos": ["c.mp4"]})
    assert chat.messages == (
        user(ImagePart(at("a.png")), "Two? ", VideoPart(at("c.mp4")), " <audio>"),
        Message("assistant", (ImagePart(at("b.png")),)),
    )


MARKED = [
    {"messages": [said("user", "<image>What?"), said("assistant", "A cat.")]},
    {"conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}]},
    {"prompt": "<image>What?", "completion": "A cat."},
    {"instruction": "<image>What?", "output": "A cat."},
    {"question": "<image>What?", "answer": "A cat."},
    {"messages": [said("user", [{"type": "text", "text": "<image>What?"}]), said("assistant", "A cat.")]},
    {"messages": [said("user", [{"type": "image"}, {"type": "text", "text": "What?"}]), said("assistant", "A cat.")]},
    {"messages": [said("user", [{"type": "image", "image": ""}]), said("assistant", "A cat.")]},
]
NOTHING = [{"images": []}, {"images": None}, {"image": ""}, {"images": [""]}, {"image": {"bytes": None, "path": None}}]


@pytest.mark.parametrize("row", MARKED)
@pytest.mark.parametrize("lost", NOTHING)
def test_a_marker_whose_picture_is_lost_is_an_error_in_every_layout(read, row, lost):
    with pytest.raises(DataError, match="the row has 0 of kind image, but its messages hold more <image> markers"):
        read(row | lost)


@pytest.mark.parametrize("lost", NOTHING)
def test_rows_of_words_may_have_an_empty_column_of_pictures(read, lost):
    for row in MARKED[:6]:
        words = json.loads(json.dumps(row).replace("<image>", ""))
        assert read(words | lost).messages == (user("What?"), assistant("A cat."))
    literal = read(MARKED[0] | lost, schema="sharegpt", columns={"conversations": "messages"})
    assert literal.messages[0] == user("<image>What?")


def test_conversations_with_markers(read, at):
    turns = [
        {"from": "human", "value": "<image>\nWhat is <video>this"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "<image><image>?"},
    ]
    chat = read({"id": 3, "conversations": turns, "image": ["a.png", "b.png", "a.png"], "video": "c.mp4"})
    assert chat.messages == (
        user(ImagePart(at("a.png")), "\nWhat is ", VideoPart(at("c.mp4")), "this"),
        assistant("A cat."),
        user(ImagePart(at("b.png")), ImagePart(at("a.png")), "?"),
    )
    one = read({"conversations": turns[:1], "image": "a.png", "videos": ["c.mp4"]})
    assert one.messages == chat.messages[:1]


def test_sharegpt_with_tools(read):
    turns = [
        {"from": "human", "value": "<image> is a tag of SVG. Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Bern"}}'},
        {"from": "observation", "value": "Sun."},
        {"from": "gpt", "value": "It shines."},
    ]
    chat = read({"conversations": turns, "system": "Be brief.", "tools": '[{"name": "weather"}]'}, schema="sharegpt")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    assert chat.messages == (
        Message("system", (TextPart("Be brief."),)),
        user("<image> is a tag of SVG. Weather?"),
        Message("assistant", (), (call,)),
        Message("tool", (TextPart("Sun."),), name="weather"),
        assistant("It shines."),
    )
    assert chat.tools == ({"name": "weather"},)


def test_prompt_and_completion(read, at):
    assert read({"prompt": "Hi", "completion": "Ho"}).messages == (user("Hi"), assistant("Ho"))
    assert read(
        {"prompt": [said("system", "x"), said("user", "Hi")], "completion": [said("assistant", "Ho")]}
    ).messages == (Message("system", (TextPart("x"),)), user("Hi"), assistant("Ho"))
    pictured = read({"prompt": "<image>?", "completion": "Ho", "image": "a.png"})
    assert pictured.messages == (user(ImagePart(at("a.png")), "?"), assistant("Ho"))


def test_turns_are_read_in_either_column_in_either_form(read):
    turns = [said("user", "Hi"), said("assistant", "Ho")]
    assert read({"conversations": turns, "system": "x"}).messages[1:] == (user("Hi"), assistant("Ho"))
    told = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    assert read({"messages": told}).messages == (user("Hi"), assistant("Ho"))


def test_alpaca(read, at):
    row = {"instruction": "Add.", "input": "1, 2", "output": "3", "text": "the same as one document"}
    assert read(row).messages == (user("Add.\n1, 2"), assistant("3"))
    more = {"instruction": "Add.", "input": "", "output": "3", "system": "x", "history": [["Hi", "Ho"]]}
    head = Message("system", (TextPart("x"),))
    assert read(more).messages == (head, user("Hi"), assistant("Ho"), user("Add."), assistant("3"))
    assert read(row | {"image": "a.png"}).messages[0] == user(ImagePart(at("a.png")), "Add.\n1, 2")


def test_question_and_answer_with_media_where_a_marker_says_or_before_the_words(read, at):
    row = {"question": "What?", "answer": "A cat."}
    assert read(row).messages == (user("What?"), assistant("A cat."))
    assert read(row | {"image": "a.png"}).messages[0] == user(ImagePart(at("a.png")), "What?")
    marked = {"question": "See <image>.", "answer": "A cat.", "image": "a.png"}
    assert read(marked).messages[0] == user("See ", ImagePart(at("a.png")), ".")


def test_columns_by_other_names(read, at):
    row = {"Frage": "What?", "a": {"text": ["A cat.", "Cat"]}, "bild": "a.png", "messages": "of the moderators"}
    mapped = {"question": "Frage", "answer": "a.text.0", "image": "bild"}
    assert read(row, columns=mapped).messages == (user(ImagePart(at("a.png")), "What?"), assistant("A cat."))
    assert read({"body": "Words."}, columns={"text": "body"}) == Document("Words.", ORIGIN)
    assert read({"a.b": "Words."}, columns={"text": "a.b"}).content == "Words."


def test_chosen_answers_can_be_mapped(read):
    pair = {"prompt": "Hi", "chosen": "Ho", "rejected": "Hu"}
    assert read(pair, columns={"prompt": "prompt", "completion": "chosen"}).answer == "Ho"
    turns = {"chosen": [said("user", "Hi"), said("assistant", "Ho")], "rejected": []}
    assert read(turns, columns={"messages": "chosen"}).answer == "Ho"


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"qestion": "Frage"}, "columns maps 'qestion', which no schema reads. Did you mean 'question'?"),
        ({"Frage": "question"}, "The other way round it would be question: Frage."),
    ],
)
def test_a_mapping_to_no_column_is_refused(read, columns, says):
    with pytest.raises(ConfigError) as caught:
        read({"Frage": "?"}, columns=columns)
    assert says in str(caught.value)


def test_a_mapped_column_that_a_row_lacks_is_named(read):
    with pytest.raises(DataError, match=r"no column 'Frage', which columns names for question; it has a, b"):
        read({"a": 1, "b": 2}, columns={"question": "Frage", "answer": "b"})


def test_captions(read, at):
    row = {"image": "a.png", "caption": "A cat."}
    assert read(row).messages == (user(ImagePart(at("a.png"))), assistant("A cat."))
    assert read(row | {"text": "A dog."}, columns={"text": "caption"}).answer == "A cat."
    assert read({"text": "A bird."}, a_png=b"raw").images == (Media(data=b"raw"),)


def test_documents(read):
    assert read({"text": "Words.", "meta": {"a": 1}}) == Document("Words.", ORIGIN)
    assert [read({"text": words}).is_blank for words in ("", " \n", "a")] == [True, True, False]
    assert read({"body": "Words.", "text": None}, columns={"text": "body"}).content == "Words."
    assert read({"input_ids": [3, 1], "labels": [3, 1], "attention_mask": [1, 1]}) == Document((3, 1), ORIGIN)
    assert [read(row).content for row in ({"text": ""}, {"text": None}, {"input_ids": []})] == ["", "", ()]


def test_a_schema_that_is_named_goes_first_and_one_whose_columns_are_mapped(read):
    row = {"text": "Words.", "messages": [said("user", "Hi")], "prompt": "Hi", "completion": "Ho"}
    assert read(row, columns={"messages": "messages"}).messages == (user("Hi"),)
    assert read(row, schema="text") == Document("Words.", ORIGIN)
    assert len(read(row, schema="prompt_completion").messages) == 2


CALL = {"function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "?"}, 'The row is {"question": "?"}, and needs the columns of a schema: messages (messages);'),
        ({"prompt": "a", "chosen": "b"}, 'the row has the column "chosen", "b": it is of a preference'),
        ({"question": "a", "answer": ["b"]}, '"answer" is ["b"], but it must be words or a number. If a column'),
        (
            {"instruction": "a", "output": "b", "history": [["c"]]},
            '"history" is [["c"]], but it must be a list of pairs',
        ),
        ({"messages": "no JSON"}, "messages is a string but not JSON"),
        ({"messages": 3}, 'got 3, but "messages" must be a list of turns'),
        ({"messages": {"role": ["user"], "content": []}}, '"messages" must be a list of turns'),
        (
            {"messages": [said("user", "a", reasoning_content="b")]},
            '"reasoning_content" and parts of the type "thinking"',
        ),
        ({"messages": [said("assistant", "a", thinking=3)]}, '"reasoning_content" and parts of the type "thinking"'),
        ({"messages": [said("user", "a")], "chat_template_kwargs": [1]}, '"chat_template_kwargs" is [1]'),
        ({"messages": [said("assistant", None)]}, 'message 1: "content" is null'),
        ({"messages": [said(["user"], "a")]}, 'unknown role ["user"]'),
        ({"messages": [said("user", [{"type": ["text"]}])]}, "unknown part"),
        ({"messages": [said("user", [{"type": "image"}])]}, "message 1: the row has 0 of kind image"),
        (
            {"messages": [said("assistant", "a")], "images": ["a.png"]},
            "the row names 1 image, and its messages place none of them",
        ),
        ({"messages": [said("user", "<image><image>")], "image": "a.png"}, "hold more <image> markers"),
        ({"messages": [said("user", [{"type": "input_audio", "input_audio": "x"}])]}, '"input_audio" is "x"'),
        ({"messages": [said("assistant", None, tool_calls=[CALL])]}, "the arguments of f is a string but not JSON"),
        ({"messages": [said("assistant", None, tool_calls=[{"id": "1"}])]}, "names no function"),
        (
            {"messages": [said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": [1]}}])]},
            "the arguments of f are [1]",
        ),
        ({"messages": [said("user", "a")], "tools": {"name": "f"}}, '"tools" is {"name": "f"}'),
        ({"conversations": []}, 'the list "conversations" is empty'),
        ({"conversations": [{"from": "human"}]}, 'turn 1: got {"from": "human"}, but a turn needs the strings'),
        ({"conversations": [{"from": "alien", "value": "a"}]}, 'turn 1: unknown speaker "alien". Allowed are system'),
        ({"conversations": [{"from": ["gpt"], "value": "a"}]}, 'unknown speaker ["gpt"]'),
        ({"conversations": [{"from": "human", "value": "<image>"}]}, "choose schema='sharegpt'"),
        (
            {"conversations": [{"from": "human", "value": "a <image>"}], "images": ["a.png", "b.png"]},
            "its messages place 1 of them",
        ),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "turn 1: the call is a string but not JSON"),
        ({"prompt": {"a": 3}, "completion": "a"}, '"prompt" is {"a": 3} and "completion" is "a"'),
        ({"question": "a", "answer": {"text": ["b"]}}, "columns={'answer': 'answer.text'} takes one"),
        ({"question": "a", "answer": float("nan")}, '"answer" is NaN, but it must be words or a number.'),
        (
            {"image": {"bytes": b"\x89PNG" * 99}, "good": 1},
            '{"image": {"bytes": "396 bytes"}, "good": 1}, and needs',
        ),
        (
            {"image": "a.png", "good": 1},
            "the row has image, good, and no schema reads them as they are. Say which is which, for example with",
        ),
        ({"text": 3}, '"text" is 3, but a document must be a string'),
        ({"text": "", "image": "data:,a"}, '"text" is empty, so the media have no words to learn'),
        ({"input_ids": [1, -1]}, "none of them negative"),
        ({"input_ids": [1, 2.0]}, "must be a list of token ids"),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, '"labels" differs from "input_ids"'),
    ],
)
def test_what_is_wrong_is_said(read, row, says):
    with pytest.raises(DataError) as caught:
        read(row)
    assert says in str(caught.value)


def test_a_named_schema_says_what_it_needs(read):
    with pytest.raises(
        DataError, match=r"needs the columns of a schema: prompt and completion \(prompt_completion\)\."
    ):
        read({"text": "a"}, schema="prompt_completion")
    with pytest.raises(DataError, match=r"the row names 1 image, and its messages place none of them"):
        read({"conversations": [{"from": "human", "value": "<image>"}], "image": "a.png"}, schema="sharegpt")
    with pytest.raises(ConfigError, match=f"Unknown schema 'vicuna'. Allowed: {', '.join(SCHEMAS)}"):
        read({"text": "a"}, schema="vicuna")


def test_media_beside_a_document_are_not_dropped(read):
    with pytest.raises(DataError, match=r"the row names 1 image, and"):
        read({"text": "a", "image": "a.png"}, schema="text")


WORDED = {
    "list": [said("user", "Hi"), said("assistant", "Ho")],
    "object": {"messages": [said("user", "Hi")]},
    "pair": {"question": "Hi", "chosen": "Ho", "rejected": "Hu"},
    "ranked": [{"answer": "Ho", "rank": 1}, {"answer": "Hu", "rank": 2}],
}


def row_of(layout, words="Ho"):
    """A row with the columns of a layout and no other."""
    forms = dict(layout.forms)
    names = ("image" if name == "media" else name for name, _ in layout.columns)
    return {name: WORDED[forms[name]] if name in forms else f"{words} {name}.png" for name in names}


PAIRS = list(itertools.combinations([layout for layout in LAYOUTS if not layout.by_name], 2))


def read_or_refused(row):
    try:
        return reading_of(row), ""
    except DataError as error:
        return None, str(error)


def test_of_two_layouts_one_reads_all_the_other_is_of_a_lower_rank_or_both_are_named():
    """The table alone decides: a row with the columns of both loses nothing without a word."""
    for one, other in PAIRS:
        row = row_of(one) | row_of(other) | {name: WORDED[form] for name, form in (*one.forms, *other.forms)}
        columns = {name for layout in (one, other) for name, _ in layout.columns} - {"media"}
        reading, message = read_or_refused(row)
        if reading is None:
            assert "needs the columns" in message or re.search(r"be read in \d ways, by .* or by ", message), row
            continue
        assert reading.layout.rank <= min(one.rank, other.rank)
        assert columns - reading.roles.keys() <= unread_keys(row, reading.roles) | {"source", "label"}, row
        if one.rank == other.rank == reading.layout.rank:
            assert columns <= reading.roles.keys() or reading.layout not in (one, other), row


def test_a_rejected_answer_beside_two_chats_is_of_neither(read):
    turns = [said("user", "Hi"), said("assistant", "Ho")]
    with pytest.raises(DataError, match=r"be read in 2 ways, by messages or by conversations\."):
        read({"messages": turns, "conversations": turns[:1], "rejected_response": "Hu"})


COLUMN = st.sampled_from(sorted({*COLUMNS} - {"label", "kto_tag"}))


@settings(max_examples=examples(200, 1000))
@given(st.dictionaries(COLUMN, st.sampled_from(["a", "b.png", ["c"], {"d": 1}, [said("user", "e")]]), max_size=6))
def test_no_column_that_the_table_knows_is_lost_without_a_word(row):
    with contextlib.suppress(DataError):
        reading = reading_of(row)
        assert row.keys() <= reading.roles.keys() | unread_keys(row, reading.roles) | {*HARMLESS_COLUMNS} | {
            name for name, value in row.items() if value in [row[read] for read in reading.roles]
        }


@pytest.mark.parametrize(
    ("row", "proposed"),
    [  # columns of public sets, which Headway's table does not know
        ({"question_id": 1, "image": "a.png", "question": "What?", "multiple_choice_answer": "cat", "answers": ["cat"]},
         "{answer: multiple_choice_answer}"),  # VQA v2
        ({"filename": "a.png", "class": "cat", "description": "a grey cat"}, "{image: filename, text: description}"),
        ({"img_path": "a.png", "title": "a grey cat"}, "{image: img_path, text: title}"),
        ({"problem": "1 + 1?", "solution": "2"}, "{question: problem, answer: solution}"),
        ({"instruction": "Add.", "gpt4_output": "2"}, "{output: gpt4_output}"),
        ({"image": "a.png", "alt_text": "a cat"}, "{text: alt_text}"),
        ({"id": "7", "article": "Long.", "highlights": "L."}, "{question: article, answer: highlights}"),  # CNN
        ({"problem": "p", "generated_solution": "s", "expected_answer": "4"},
         "{question: problem, answer: generated_solution}"),  # OpenMathInstruct-2
        ({"question": "q", "distractor1": "a", "distractor2": "b", "distractor3": "c", "correct_answer": "d"},
         "{answer: correct_answer}"),  # SciQ
        ({"idx": 1, "sentence": "Fine.", "label": "good"}, "{text: sentence, label: label}"),  # SST-2
        ({"questionId": "1", "question": "q", "image": "a.png", "docId": 1, "page": "9"}, "{answer: page}"),
        ({"id": 1, "query": "q", "answers": "a", "tools": "[]"}, "{response: answers}"),  # xLAM
        ({"title": "t", "content": "Long words."}, "{text: content}"),
        ({"body": "Words."}, "{text: body}"),
        ({"question": "Why?", "answer_0": "a", "answer_1": "b"}, "{chosen: answer_0, rejected: answer_1}"),
        ({"ask": "Why is it?", "reply_1": "a", "reply_2": "b"}, "{prompt: ask, chosen: reply_1, rejected: reply_2}"),
    ],
)  # fmt: skip
def test_what_a_message_proposes_reads_the_row_with_its_media(read, row, proposed):
    with pytest.raises(DataError) as caught:
        read(row)
    columns = dict(pair.split(": ") for pair in proposed.strip("{}").split(", "))
    assert f"for example with columns={columns}" in str(caught.value)
    sample = read(row, columns=columns)
    images = () if isinstance(sample, Document) else best_answered(sample).images
    assert bool(images) is ("png" in str(row))


@pytest.mark.parametrize("name", ["filename", "file", "path", "image_path", "img", "Image_Path"])
@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "What?", "answer": "A cat."}, {}),
        ({"ask": "What?", "reply": "A cat."}, {"question": "ask", "answer": "reply"}),
        ({"class": "A cat."}, {"label": "class"}),
        ({"instruction": "What?", "response": "A cat."}, {}),
    ],
)
def test_a_picture_that_a_column_names_is_taken_with_columns_that_are_mapped_and_without(read, at, row, columns, name):
    chat = read(row | {name: "a.png"}, columns=columns)
    assert (chat.images, chat.answer) == ((at("a.png"),), "A cat.")


@pytest.mark.parametrize("value", [{"bytes": b"raw", "path": None}, b"raw", {"bytes": b"raw", "path": "a.png"}])
@pytest.mark.parametrize("more", [{"label": "cat"}, {"question": "What?", "answer": "cat"}, {"caption": "cat"}])
def test_a_picture_within_a_column_of_such_a_name_is_taken(read, value, more):
    """As in the columns img and label of CIFAR-10."""
    chat = read({"img": value, **more})
    assert (chat.images, chat.answer) == ((Media(data=b"raw"),), "cat")


def test_a_mapped_document_keeps_the_file_that_its_words_are_from_as_a_note(read):
    row = {"text": "A page.", "file_name": "scans/a.png"}
    assert read(row) == Document("A page.", ORIGIN)
    for elsewhere in ("scans/a.png", "/etc/hostname.png", "../a.png", "a\0.png", "https://a.org/b.png"):
        assert read({"question": "What?", "answer": "A cat.", "path": elsewhere}).images == ()
    assert unread_keys(row, reading_of(row).roles) == {"file_name"}


def test_a_medium_in_a_column_of_its_own_goes_before_one_that_a_layout_reads_elsewhere():
    """VLFeedback names its pictures in `img_path`; of a row that has `image` too, one was dropped without a word."""
    completions = [{"response": text, "overall_score": score} for text, score in (("bad", 1.0), ("good", 2.0))]
    row = {"prompt": "What?", "img_path": "a.png", "image": "b.png", "completions": completions}
    reading = reading_of(row)
    assert reading(row)["image"] == "b.png"
    assert "img_path" in unread_keys(row, reading.roles)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [said("user", "<image>Hi"), said("assistant", "Ho")], "images": ["a.png"]},
        {"conversations": [{"from": "human", "value": "<image>Hi"}, {"from": "gpt", "value": "Ho"}], "image": "a.png"},
        {"question": "Hi", "answer": "Ho", "image": "a.png"},
        {"instruction": "Hi", "response": "Ho", "context": "I said"},
        {"prompt": "Hi", "completion": "Ho"},
        {"text": "Hi", "label": "greeting"},
        {"text": "Hi"},
    ],
)
def test_the_way_of_a_row_is_short(read, row):
    """At most 12 stays, of calls on end in one file: who reads a row's way goes from file to file no more often."""
    read(row)  # what its columns mean is found once
    files = []
    sys.setprofile(lambda frame, event, _: files.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        read(row)
    finally:
        sys.setprofile(None)
    stays = [Path(file).name for file, _ in itertools.groupby(file for file in files if "/headway/data/" in file)]
    assert len(stays) <= 12, stays


# Words that schemas look for, so that rows drawn at random come close to real ones.
INNER = ["role", "content", "type", "url", "image_url", "input_audio", "data", "tool_calls", "function", "name", "from"]
KEYS = st.sampled_from([*COLUMNS, *INNER, "video", "audio", "system", "arguments", "value", "id", "weight", "bytes"])
NAMES = ["user", "assistant", "tool", "human", "gpt", "function_call", "text", "image", "image_url", "input_audio"]
PATHS = ["a.png", "data:,a", "http://a/b.png", "s3://", "..", "x" * 5000, "a\0", "\ud800"]
LEAVES = st.sampled_from([*NAMES, *PATHS, "<image>", "[", "{}", "", 0, -1, 1.5, True, None, b"raw"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@settings(max_examples=examples(150, 400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(LAYOUTS), st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from(SCHEMAS), st.booleans())
def test_any_row_is_a_sample_or_a_data_error(read, layout, row, schema, has_member):
    members = {"x_png": b"a"} if has_member else {}
    for fields in (row, row_of(layout) | row):
        with contextlib.suppress(DataError):
            assert isinstance(read(fields, schema, **members), Chat | Document | Preference)
        with contextlib.suppress(DataError):
            unread_keys(fields, reading_of(fields).roles)
