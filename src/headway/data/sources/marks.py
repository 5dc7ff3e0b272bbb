"""Columns of rows and keys of turns that say what is to be learnt: which are obeyed, refused, and passed over.

The names are those of TRL, ms-swift, LLaMA-Factory, axolotl, torchtune and OpenAI, whose rows have them. A key that
says what to learn and is passed over has the model learn what it should not, so what is neither read nor known to be
harmless is named (`unread_keys`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headway.data.samples import Message
from headway.data.sources.json_rows import shortened
from headway.errors import DataError

LEARNT_BY = {"loss": 1, "train": 1, "training": 1, "weight": 1, "masked": 0}
"""Keys of a turn that say whether it is learnt, and the value with which it is.

Source: ms-swift's `loss`, axolotl's `train` and `training`, OpenAI's `weight`, torchtune's `masked`.
"""

_PAIR = (
    "it is of a preference, as DPO and ORPO learn from, and the row lacks what else it takes for one (docs/data.md has "
    "the layouts), so that training would take a single answer for the right one"
)
_CUT_TURN_MESSAGE = "parts of a turn cannot be left unlearnt; a turn is learnt whole or, with loss: false, not at all"
REFUSED_COLUMNS = {
    "chosen": _PAIR,
    "rejected": _PAIR,
    "rejected_response": _PAIR,
    "rejected_messages": _PAIR,
    "rejected_images": _PAIR,
    "margin": "how much better an answer is has no part in any loss here, which is told which is better alone",
    "label": "it is KTO's mark of good and bad answers, or the class of what the row holds, and Headway learns words",
    "kto_tag": "it is KTO's mark of an answer, which is true or false, and stands beside a chat",
    "weight": "every row counts by its tokens; how much of a dataset is trained on is said by data.train's weight",
}
"""Columns of a row that are refused, and why; a weight of 1 says what is done anyhow, and `grade_of` reads grades."""

GRADES = ("label", "kto_tag")
"""Columns that say whether a chat's answer is wished for. Source: TRL's and ms-swift's `label`, LLaMA-Factory's."""

REFUSED_KEYS = {
    "train_detail": _CUT_TURN_MESSAGE,
    "training_detail": _CUT_TURN_MESSAGE,
    "loss_scale": "every turn that is learnt counts in full",
}
"""Keys of a turn that are refused, and why."""

HARMLESS_COLUMNS = (
    "id", "idx", "index", "file_name", "key", "uid", "uuid", "__key__", "__url__", "url", "source", "dataset", "origin",
    "license", "lang", "language", "title", "author", "date", "time", "timestamp", "created_at", "meta", "metadata",
    "info", "split", "subset", "category", "topic", "domain", "tags", "channel", "score", "model", "num_turns",
    "num_tokens", "length", "attention_mask", "token_type_ids", "labels", "objects", "prompt_id", "models",
    "image_path", "ds_name", "origin_dataset", "origin_split",
)  # fmt: skip
"""Columns that say nothing about what is learnt, or are read elsewhere."""

HARMLESS_KEYS = (
    "id", "index", "name", "date", "time", "timestamp", "created_at", "model", "usage", "finish_reason", "end_turn",
)  # fmt: skip
"""Keys of a turn that say nothing about what is learnt."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn that hold what the assistant thinks before it answers."""

QUESTION_KEYS, ANSWER_KEYS = ("user", "human"), ("assistant", "gpt", "bot")  # of a round, which is two turns in one
_READ_KEYS = ("role", "content", "from", "value", "tool_calls", "tool_call_id", *REASONING)
_BOXES = ("<bbox>", "<ref-object>")


def check_columns_of(fields: Mapping[str, Any], *, is_chat: bool, is_mapped: bool) -> None:
    """Refuse a row of another task, whose answers are not all to be learnt.

    Args:
        fields: the row's columns, null ones left out.
        is_chat: whether the row becomes a chat.
        is_mapped: whether the dataset's columns were named, so that the others are known not to be meant.

    Raises:
        DataError: it has such a column.
    """
    for name in sorted(REFUSED_COLUMNS.keys() & fields.keys()):
        value = fields[name]
        if value in ([], "", {}) or (name == "weight" and value == 1):
            continue
        if is_chat and name in GRADES and type(value) is bool:
            continue
        if not is_mapped:
            meant = (
                "{text: sentence, label: label} to learn classes, or {messages: messages} to leave them out"
                if name == "label"
                else "{messages: messages}, {messages: chosen} where chosen answers are lists of messages, or {prompt: "
                "prompt, completion: chosen} where they are strings"
            )
            raise DataError(
                f'the row has the column "{name}", {shortened(value)}: {REFUSED_COLUMNS[name]}. Remove the column, or '
                f"say which columns are meant with columns, such as {meant}."
            )


def grade_of(fields: Mapping[str, Any]) -> bool | None:
    """Whether a chat's answer is wished for, of data for KTO; None of a chat that is not graded.

    Args:
        fields: the row's columns, null ones too.

    Raises:
        DataError: two grades differ, or LLaMA-Factory's column of grades has none for this row.
    """
    grades = {fields[name] for name in GRADES if type(fields.get(name)) is bool}
    if len(grades) > 1:
        raise DataError('"label" and "kto_tag" differ, so whether the answer is a good one cannot be told.')
    if "kto_tag" in fields and not grades:
        raise DataError(
            f'"kto_tag" is {shortened(fields["kto_tag"])}, but it says whether the answer is a good one: true or '
            "false. Grade the row, or leave it out."
        )
    return next(iter(grades), None)


def is_learnt(turn: Mapping[str, Any], role: str, where: str) -> bool:
    """Whether a turn of the assistant is learnt, by the marks that it has.

    Args:
        turn: the turn as it was written.
        role: who speaks.
        where: the turn, for messages to people.

    Raises:
        DataError: a mark between 0 and 1, one for a part of the turn, or one to learn what another than the assistant
            says.

    >>> is_learnt({"role": "assistant", "content": "Ho", "loss": False}, "assistant", "message 2")
    False
    """
    for key in REFUSED_KEYS.keys() & turn.keys():
        if turn[key] not in (None, [], {}, 1):
            raise DataError(f'{where}: "{key}" is {shortened(turn[key])}, but {REFUSED_KEYS[key]}. Remove the key.')
    learnt = True
    for key in LEARNT_BY.keys() & turn.keys():
        value = turn[key]
        if value is None:
            continue
        if type(value) not in (bool, int, float) or value not in (0, 1):
            raise DataError(
                f'{where}: "{key}" is {shortened(value)}, but a turn is learnt in full or not at all. Write 1 or 0.'
            )
        says_learnt = value == LEARNT_BY[key]
        if says_learnt and role != "assistant" and key in ("loss", "train", "training"):
            raise DataError(
                f'{where}: "{key}" is {shortened(value)} in a turn of the {role}, but only what the assistant says is '
                "learnt. Remove the key, or give the turn to the assistant."
            )
        learnt = learnt and says_learnt
    return learnt or role != "assistant"


def check_words(fields: Mapping[str, Any], messages: Iterable[Message]) -> None:
    """Refuse a chat with boxes whose places in the words are not filled in, and one of which nothing is learnt.

    Raises:
        DataError: it is one.
    """
    turns = list(messages)
    if fields.get("objects"):
        box = next((box for box in _BOXES for turn in turns if box in turn.text), None)
        if box is not None:
            raise DataError(
                f'the words hold {box}, which ms-swift replaces by the boxes of "objects", and Headway would learn as '
                "a word. Write the boxes into the words, in the form that the model was trained with."
            )
    answers = [turn for turn in turns if turn.role == "assistant"]
    if answers and not any(turn.learnt for turn in answers):
        raise DataError(
            "every turn of the assistant is marked as not to be learnt, so there is nothing to learn. Delete the row, "
            "or remove the mark of a good answer."
        )


def unread_keys(fields: Mapping[str, Any], read_columns: Iterable[str]) -> set[str]:
    """Columns of a row and keys of its turns that are neither read nor known to be harmless.

    Args:
        fields: the row's columns.
        read_columns: their names.

    >>> row = {"messages": [{"role": "user", "content": "Hi", "mood": 1}], "id": 1, "good": False}
    >>> sorted(unread_keys(row, ["messages"]))
    ['good', 'messages: mood']
    """
    unread = {name for name, value in fields.items() if value is not None}
    unread -= {*read_columns, *REFUSED_COLUMNS, *HARMLESS_COLUMNS}
    known_keys = {*_READ_KEYS, *LEARNT_BY, *REFUSED_KEYS, *HARMLESS_KEYS}
    for column in ("messages", "conversations"):
        turns = fields.get(column)
        for turn in turns if isinstance(turns, list) else ():
            keys = turn.items() if isinstance(turn, dict) else ()
            read_keys = known_keys | {key for key in round_keys(turn) if key is not None}
            unread |= {f"{column}: {key}" for key, value in keys if value is not None and key not in read_keys}
    return unread


def round_keys(turn: Any) -> tuple[str, str] | tuple[None, None]:
    """Keys of a round's question and answer; None twice for a turn that is no round."""
    keys = turn if isinstance(turn, dict) else ()
    question = next((key for key in QUESTION_KEYS if key in keys), None)
    answer = next((key for key in ANSWER_KEYS if key in keys), None)
    return (None, None) if question is None or answer is None else (question, answer)
