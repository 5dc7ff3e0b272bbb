import json

import pytest

from headway.data import ImagePart, Media, TextPart, read_samples
from headway.errors import DataError


def chat(*messages):
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def test_strings_and_parts_become_messages_in_order(write):
    parts = [{"type": "text", "text": "See "}, {"type": "image", "image": "in/a.png"}, {"type": "text", "text": "!"}]
    file = write(chat(("user", parts), ("assistant", "One.")), pictures={"in/a.png": (16, 16)})
    (sample,) = read_samples(file)
    image = file.parent / "in" / "a.png"
    assert sample.messages[0].parts == (TextPart("See "), ImagePart(Media(str(image))), TextPart("!"))
    assert sample.messages[0].text == "See !"
    assert sample.images == (Media(str(image)),)
    assert sample.answer == "One."


def test_line_numbers_count_blank_lines(write):
    file = write(chat(("user", "a")), "", "   ", chat(("user", "b")))
    samples = read_samples(file)
    assert [(sample.origin.row, sample.origin.place) for sample in samples] == [(0, "line 1"), (1, "line 4")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [', "not valid JSON"),
        ("[1, 2]", "got [1, 2], but it must be an object"),
        ('{"prompt": "x"}', "and needs the columns of a schema: messages (messages); conversations (llava)"),
        ('{"messages": []}', 'the list "messages" is empty'),
        ('{"messages": ["hello"]}', 'a message must be an object with "role" and "content"'),
        ('{"messages": [{"role": "user"}]}', 'a message must be an object with "role" and "content"'),
        (
            json.dumps(chat(("robot", "hi"))),
            'unknown role "robot". Allowed are system, developer, user,',
        ),
        (json.dumps(chat(("user", {"a": 3}))), '"content" is {"a": 3}, but it must be a string or a list of parts'),
        (json.dumps(chat(("user", [{"type": "video", "video": "a.mp4"}]))), "the video 'a.mp4' does not exist"),
        (json.dumps(chat(("user", [{"type": "file", "file": "a.pdf"}]))), "unknown part"),
        (json.dumps(chat(("user", ["hi"]))), 'unknown part "hi"'),
        (json.dumps(chat(("user", [{"type": "text"}]))), 'a part of type "text" needs a string "text", got null'),
        (json.dumps(chat(("user", [{"type": "image", "image": 7}]))), 'needs a string "image", got 7'),
        (json.dumps(chat(("user", [{"type": "image", "image": "no.png"}]))), "the image 'no.png' does not exist"),
        (json.dumps(chat(("user", [{"type": "image", "image": "../a.png"}]))), "leaves the dataset's folder"),
        (json.dumps(chat(("user", [{"type": "image", "image": "x/../../a.png"}]))), "leaves the dataset's folder"),
        (json.dumps(chat(("user", [{"type": "image", "image": "/etc/passwd"}]))), "'/etc/passwd' is absolute"),
        (json.dumps(chat(("user", [{"type": "image", "image": ""}]))), "leave the row out where that is lost"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(write, line, says):
    file = write(chat(("user", "fine")), line)
    with pytest.raises(DataError) as caught:
        read_samples(file)
    message = str(caught.value)
    assert message.startswith(f"{file}, line 2")
    assert says in message
    assert "\n" not in message


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read: No such file"):
        read_samples(tmp_path / "none.jsonl")


def test_an_empty_file_is_a_clear_error(write):
    with pytest.raises(DataError, match="holds no samples"):
        read_samples(write("", " "))


def test_a_file_that_is_not_utf_8_is_a_clear_error(tmp_path):
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"messages": "Größe"}'.encode("latin-1"))
    with pytest.raises(DataError, match="it is not UTF-8 text"):
        read_samples(file)
