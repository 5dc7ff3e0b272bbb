"""Marks of what is not to be learnt, in rows as the documentation of the tools that read them writes them."""

import json

import numpy as np
import pytest
from PIL import Image

from headway.data import Message, TextPart
from headway.data.samples import Origin
from headway.data.sources import open_source
from headway.data.sources.marks import ANSWER_KEYS, QUESTION_KEYS, sense_of, unread_keys
from headway.data.sources.reader import ParsedRow
from headway.data.sources.references import MediaRules
from headway.data.sources.schemas import Normaliser
from headway.errors import DataError

ASKED = {"role": "user", "content": "What is 1 + 1?"}
BAD = {"role": "assistant", "content": "3"}
GOOD = {"role": "assistant", "content": "2"}


def read(row, schema="auto", columns=None):
    normaliser = Normaliser(schema, ".", MediaRules(), columns or {})
    return normaliser.sample(ParsedRow(row), Origin("data", "data.jsonl", 0, "line 1"))


def learnt(chat):
    return [message.text for message in chat.messages if message.role == "assistant" and message.learnt]


@pytest.mark.parametrize(
    "mark",
    [
        {"loss": False},  # ms-swift
        {"loss": 0},
        {"train": False},  # axolotl
        {"training": False},
        {"weight": 0},  # OpenAI
        {"weight": 0.0, "loss": None},
        {"masked": True},  # torchtune
        # words of the same kind
        {"trainable": False}, {"is_trainable": 0}, {"train_on_turn": False}, {"loss_mask": 0}, {"loss_weight": 0},
        {"loss_scale": 0}, {"lossWeight": 0}, {"is_masked": 1}, {"isMasked": True}, {"no_loss": True},
        {"skip_training": 1},
        {"ignore_loss": True}, {"untrained": True}, {"learn": False}, {"supervised": False}, {"TRAIN": 0},
        {"exclude_from_loss": True}, {"not_trained": 1}, {"lossmask": 0}, {"nolosss": None, "noloss": 1},
    ],
)  # fmt: skip
def test_a_turn_that_says_so_is_shown_and_not_learnt(mark):
    chat = read({"messages": [ASKED, BAD | mark, ASKED, GOOD]})
    assert [message.text for message in chat.messages] == ["What is 1 + 1?", "3", "What is 1 + 1?", "2"]
    assert learnt(chat) == ["2"]
    assert chat.answer == "2"
    turns = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "3", **mark}, {"from": "gpt", "value": "2"}]
    assert learnt(read({"conversations": turns})) == ["2"]
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {}}', **mark}
    assert [turn.learnt for turn in read({"conversations": [*turns, call]}).messages] == [True, False, True, False]


@pytest.mark.parametrize(
    "mark",
    [
        {"loss": True}, {"train": 1}, {"weight": 1.0}, {"masked": False}, {"loss": None}, {"trainable": True},
        {"loss_scale": 1}, {"no_loss": False}, {"labels_mask": None}, {"train_detail": []},
    ],
)  # fmt: skip
def test_a_turn_that_says_that_it_is_learnt_is(mark):
    assert learnt(read({"messages": [ASKED, GOOD | mark]})) == ["2"]


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (GOOD | {"weight": 0.5}, 'message 2: "weight" is 0.5, but a turn is learnt in full or not at all'),
        (GOOD | {"loss": "no"}, 'message 2: "loss" is "no"'),
        (GOOD | {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, '"train_detail" is [{'),
        (ASKED | {"train": True}, 'message 2: "train" is true in a turn of the user'),
        (GOOD | {"labels_mask": 1}, 'message 2: "labels_mask" is 1, but a turn is learnt in full or not at all'),
        (GOOD | {"mask": True}, '"mask" is true'),
        (GOOD | {"mask_loss": True}, '"mask_loss" is true'),
        (GOOD | {"assistant_masks": [0, 1, 1]}, '"assistant_masks" is [0, 1, 1]'),
        (GOOD | {"train_on_inputs": True}, '"train_on_inputs" is true'),
        (GOOD | {"weights": [1, 0]}, '"weights" is [1, 0]'),
        (ASKED | {"trainable": True}, 'message 2: "trainable" is true in a turn of the user'),
        (GOOD | {"content": [{"type": "text", "text": "2", "loss": False}]}, 'message 2: a part has "loss", false'),
        (BAD | {"loss": False}, "every turn of the assistant is marked as not to be learnt"),
    ],
)
def test_a_mark_that_cannot_be_obeyed_is_named(turn, says):
    with pytest.raises(DataError) as caught:
        read({"messages": [ASKED, turn]})
    assert says in str(caught.value)


CHAT = {"messages": [ASKED, GOOD]}
DETAILED = {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}
ALPACA = {"instruction": "Add.", "output": "2"}


@pytest.mark.parametrize(
    "layout", [CHAT, ALPACA, {"question": "1 + 1?", "answer": "2"}, {"prompt": "a", "completion": "b"}]
)
@pytest.mark.parametrize(
    "mark",
    [
        {"rejected": "3"},  # half of a pair
        {"chosen": {"from": "gpt", "value": "2"}},
        {"margin": 0.5},
        {"label": 1},  # a class
        {"weight": 0.5},
        {"loss": 2.31},
        {"trainable": False},
        {"masked": True},
        {"train_on_inputs": True},
        {"labels_mask": 1},
        {"loss_mask": [1]},
        {"loss_mask": [1, 0, 1]},
        {"assistant_masks": [0, 1]},
        {"sample_weight": 2},
    ],
)
def test_a_row_of_another_task_is_refused_in_every_layout(layout, mark):
    with pytest.raises(DataError, match="|".join(f'"{name}"' for name in mark)):
        read(layout | mark)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({"loss_mask": [0, 1, 0, 0]}, ["3"]),
        ({"loss_mask": [0, 0, 0, 1]}, ["2"]),
        ({"trainable": [False, True, False, True]}, ["3", "2"]),
        ({"turn_weights": [1, 0, 1, 1]}, None),  # which of them is learnt is said of the user's as well
        ({"weights": [1, 0, 1, 1]}, ["2"]),
        ({"masked": [1, 1, 1, 0]}, ["2"]),
    ],
)
@pytest.mark.parametrize("system", [{}, {"system": "Be brief."}])
def test_a_row_that_lists_a_mark_for_each_turn_is_obeyed(marks, expected, system):
    rows = [
        {"messages": [ASKED, BAD, ASKED, GOOD]},
        {"conversations": [{"user": "1 + 1?", "assistant": "3"}, {"user": "1 + 1?", "assistant": "2"}]},
    ]
    for row in rows:
        if expected is None:
            with pytest.raises(DataError, match="only what the assistant says is learnt"):
                read(row | marks | system)
        else:
            assert learnt(read(row | marks | system)) == expected


def test_a_row_whose_marks_say_that_nothing_is_learnt_is_refused():
    with pytest.raises(DataError, match="every turn of the assistant is marked as not to be learnt"):
        read(CHAT | {"loss_mask": [0, 0]})


@pytest.mark.parametrize(
    "name", ["constraint", "trainer", "glossary", "damask", "blossom", "counterweight", "relearns"]
)
def test_words_that_only_hold_such_a_word_are_no_marks(name):
    assert sense_of(name) is None


def test_a_pair_whose_row_lists_marks_is_refused():
    with pytest.raises(DataError, match=r'"loss_mask", \[0, 1\]'):
        read({"prompt": "a", "chosen": "b", "rejected": "c", "loss_mask": [0, 1]})


def test_pictures_of_masks_and_masks_of_attention_are_no_marks_of_learning():
    for more in ({"mask": "a_mask.png"}, {"mask": {"bytes": b"", "path": "m.png"}}, {"special_tokens_mask": [1, 0]}):
        assert learnt(read(CHAT | more)) == ["2"]
    assert read({"input_ids": [1, 2], "attention_mask": [1, 1]}).content == (1, 2)
    with pytest.raises(DataError, match='"attention_mask" leaves out 1 of the tokens'):
        read({"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]})


def test_marks_of_good_answers_say_what_is_done_anyhow():
    assert read(CHAT | {"label": True, "kto_tag": True, "weight": 1, "rejected_images": []}).answer == "2"


def test_a_labelled_text_is_a_document_only_where_the_text_is_named():
    row = {"text": "A fine film.", "label": 1}
    assert read(row).answer == "1"
    assert read(row, columns={"text": "text"}).content == "A fine film."


def test_columns_that_are_named_leave_the_others_out():
    assert read(CHAT | {"rejected_response": "3"}, columns={"messages": "messages"}).answer == "2"
    assert read(CHAT | {"label": False}, columns={"messages": "messages"}).desirable is False
    assert read(CHAT | {"label": 3}, columns={"messages": "messages"}).desirable is None


def test_boxes_that_another_tool_fills_in_are_not_learnt_as_words():
    turns = [{"role": "user", "content": "Find the cat."}, {"role": "assistant", "content": "<bbox>"}]
    with pytest.raises(DataError, match='the words hold <bbox>, which ms-swift replaces by the boxes of "objects"'):
        read({"messages": turns, "objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}})
    assert read(CHAT | {"objects": {"ref": [], "bbox": []}}).answer == "2"


def test_the_history_of_a_question_becomes_rounds_and_is_dropped_nowhere():
    row = {"query": "And 2 + 2?", "response": "4", "history": [["1 + 1?", "2"]]}  # ms-swift
    chat = read(row, columns={"question": "query", "answer": "response"})
    assert [message.text for message in chat.messages] == ["1 + 1?", "2", "And 2 + 2?", "4"]
    for layout in (CHAT, {"prompt": "a", "completion": "b"}):
        with pytest.raises(DataError, match='the row has the column "history"'):
            read(layout | {"history": [["1 + 1?", "2"]]})


def test_a_system_column_stands_before_messages_too():
    assert read(CHAT | {"system": "Be brief."}).messages[0] == Message("system", (TextPart("Be brief."),))
    with pytest.raises(DataError, match="its first turn is another system message"):
        read({"messages": [{"role": "system", "content": "Be long."}, ASKED, GOOD], "system": "Be brief."})


def test_answers_within_a_prompt_are_shown_and_not_learnt_as_in_trl():
    chat = read({"prompt": [ASKED, BAD, ASKED], "completion": [GOOD]})
    assert learnt(chat) == ["2"]
    assert len(chat.messages) == 4


def test_keys_that_nobody_knows_are_named():
    row = CHAT | {"id": 1, "mood": "good", "empty": None}
    turns = [ASKED | {"timestamp": 1}, GOOD | {"is_good": False, "weight": 1}]
    assert unread_keys(row | {"messages": turns}, {"messages": "messages"}) == {"mood", "messages: is_good"}


@pytest.mark.parametrize(("question", "answer"), [(a, b) for a in QUESTION_KEYS for b in ANSWER_KEYS])
def test_keys_of_a_round_are_read_and_not_named(question, answer):
    rounds = [{question: "Hi", answer: "Ho", "mood": 1}]
    assert unread_keys({"texts": rounds}, {"texts": "conversations"}) == {"texts: mood"}
    assert unread_keys({"messages": [ASKED | {question: 1}]}, {"messages": "messages"}) == {f"messages: {question}"}


def test_each_file_is_told_of_once_with_the_keys_that_nobody_looks_at(tmp_path):
    for name, more in (("a", {"mood": "good"}), ("b", {"mood": "bad", "id": 3}), ("c", {"id": 4})):
        (tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps(CHAT | more)] * 30))
    (note,) = open_source(tmp_path / "*.jsonl").notes()
    assert note.startswith(f"{tmp_path}/a.jsonl and 1 more files: mood is not looked at")
    assert open_source(tmp_path / "a.jsonl", columns={"system": "mood"}).notes() == []


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"text": None}] * 3, "3 of its first rows have no text, which is null, and are left out"),
        ([{"text": "a"}, {"text": None}], "1 of its first rows have no text"),
        ([{"text": "a"}, {"text": ""}], None),
        ([{"prompt": "<|begin_of_text|>Hi", "completion": "Ho<|eot_id|>"}], "words begin with '<|begin_of_text|>'"),
        ([{"messages": [{"role": "user", "content": "<start_of_turn>user\nHi"}, GOOD]}], "with '<start_of_turn>'"),
        ([{"question": "[INST] Hi [/INST]", "answer": "Ho"}], "begin with '[INST]'"),
        ([{"prompt": "<|im_start|>user", "chosen": "a", "rejected": "b"}], "begin with '<|im_start|>'"),
        ([{"text": "<s>[INST] Hi [/INST] Ho</s>"}], None),  # a document, which keeps one beginning
        ([{"question": "<b>1</b> + <i>?", "answer": "<p>"}], None),
        ([{"messages": [{"role": "user", "content": [DETAILED]}, GOOD]}], "messages: detail is not looked at"),
        ([{"messages": [ASKED | {f"k{n}": 1 for n in range(5000)}, GOOD]}], "messages: k0, messages: k1,"),
        ([CHAT | {"k" * 5000: 1}], "kkk... is not looked at"),
    ],
)  # fmt: skip
def test_what_is_done_to_rows_without_being_plain_is_told_once_in_a_line(tmp_path, rows, says):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    notes = open_source(tmp_path / "a.jsonl").notes()
    assert len(notes) == (says is not None)
    assert says is None or (says in notes[0] and len(notes[0]) < 600 + len(str(tmp_path)))


def test_pictures_that_come_out_nearly_black_are_told_of(tmp_path):
    for name, top in (("ray", 4095), ("scaled", 65535)):
        Image.fromarray(np.array([[0, top]], np.uint16)).save(tmp_path / f"{name}.png")
        row = {"text": "Lungs.", "image": f"{name}.png"}
        (tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    (note,) = open_source(tmp_path / "ray.jsonl").notes()
    assert note.startswith(
        f"{tmp_path}/ray.jsonl, line 1: no pixel of the 16-bit grey image {tmp_path}/ray.png is above"
    )
    assert "4,095 of 65,535" in note
    assert open_source(tmp_path / "scaled.jsonl").notes() == []
