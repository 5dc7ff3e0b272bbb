"""Columns of rows and keys of turns that say what is to be learnt: which are obeyed, refused, and passed over.

A key that says what to learn and is passed over has the model learn what it should not. So a key whose name speaks of
loss, training, weights or masks is obeyed where its meaning is plain and refused by name elsewhere (`sense_of`), and
what is neither read nor known to be harmless is named (`unread_keys`). Source: keys of rows of ms-swift (`loss`),
axolotl (`train`, `training`), OpenAI (`weight`), torchtune (`masked`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from headway.data.samples import Message, unlearnt
from headway.data.sources.references import kind_of
from headway.data.sources.text_rows import shortened
from headway.errors import DataError

_LEARNING = {
    "loss", "losses", "train", "trained", "trainable", "training", "learn", "learned", "learnt", "learnable",
    "supervise", "supervised", "weight", "weights", "weighted", "weighting", "gradient", "gradients", "backprop",
    "finetune", "finetuned",
}  # fmt: skip
_MASKING = {"mask", "masks", "masked", "masking"}
_DENYING = {
    "no", "not", "non", "without", "ignore", "ignored", "skip", "skipped", "exclude", "excluded", "drop", "dropped",
    "masked", "masking",
}  # fmt: skip
_OF_TURNS = {"turn", "turns", "message", "messages", "this", "answer", "answers", "assistant", "output", "outputs"}
_SPEAKS = re.compile("loss|train|learn|supervis|mask|weight|gradient|backprop|finetune", re.IGNORECASE)
_JOINED = r"(?:is|no|loss|train|label|mask|weight)(?=(?:loss|train|label|mask|weight)[a-z]{0,3}(?![a-z]))"  # lossmask
_WORD = re.compile(rf"{_JOINED}|[A-Z]?[a-z]+|[A-Z]+")
_TO_OTHERS = ("weight", "weights")  # turns of other roles have these keys as well, without a meaning

_PAIR = (
    "it is of a preference, as DPO and ORPO learn from, and the row lacks what else it takes for one "
    "(docs/data-formats.md has the layouts), so that training would take a single answer for the right one"
)
REFUSED_COLUMNS = {
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images"), _PAIR),
    "margin": "how much better an answer is has no part in any loss here, which is told which is better alone",
    "label": "it is KTO's mark of good and bad answers, or the class of what the row holds, and Headway learns words",
    "kto_tag": "it is KTO's mark of an answer, which is true or false, and stands beside a chat",
}
"""Columns of a row that are refused, and why; `marked` reads grades."""

GRADES = ("label", "kto_tag")
"""Columns that say whether a chat's answer is wished for. Source: TRL's and ms-swift's `label`, LLaMA-Factory's."""

HARMLESS_COLUMNS = {
    "id", "idx", "index", "file_name", "key", "uid", "uuid", "__key__", "__url__", "url", "source", "dataset", "origin",
    "license", "lang", "language", "title", "author", "date", "time", "timestamp", "created_at", "meta", "metadata",
    "info", "split", "subset", "category", "topic", "domain", "tags", "channel", "score", "model", "num_turns",
    "num_tokens", "length", "attention_mask", "token_type_ids", "special_tokens_mask", "objects", "prompt_id", "models",
    "ds_name", "origin_dataset", "origin_split",
}  # fmt: skip
"""Columns that say nothing about what is learnt, or are read elsewhere."""

HARMLESS_KEYS = (
    "id", "index", "name", "date", "time", "timestamp", "created_at", "model", "usage", "finish_reason", "end_turn",
)  # fmt: skip
"""Keys of a turn that say nothing about what is learnt."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn that hold what the assistant thinks before it answers."""

# Keys of a round, which is two turns in one.
QUESTION_KEYS, ANSWER_KEYS = ("user", "human"), ("assistant", "gpt", "bot")
_READ_KEYS = ("role", "content", "from", "value", "tool_calls", "tool_call_id", *REASONING)
# Beginnings of templates' texts and turns: <|im_start|>, <s>, <start_of_turn>, DeepSeek's wide bars, [INST].
_RENDERED = re.compile(r"\s*(<[|\uff5c][^\s<>]+[|\uff5c]>|<(?:s|bos|start_of_turn|end_of_turn|turn\|)>|\[INST\])")
_BOXES = ("<bbox>", "<ref-object>")


@lru_cache(maxsize=4096)
def sense_of(name: str) -> int | None:
    """Sense of a key that speaks of learning, by the words of its name.

    Returns:
        1 where a true value says that something is learnt, -1 where it says that it is not, 0 where the name speaks of
        loss, training, weights or masks and which of both it means is not plain; None of any other name.

    >>> [sense_of(name) for name in ("trainable", "loss_mask", "is_masked", "no_loss", "labels_mask", "mood")]
    [1, 1, -1, -1, 0, None]
    """
    if not _SPEAKS.search(name):  # most names do not
        return None
    words = [word.lower() for word in _WORD.findall(name)]
    stems = [word[2:] if word.startswith("un") and word[2:] in _LEARNING | _MASKING else word for word in words]
    learning, masking = [[place for place, stem in enumerate(stems) if stem in kind] for kind in (_LEARNING, _MASKING)]
    if not learning and not masking:
        return None
    # A mark that is called a mask alone is ambiguous: 1 may mean that the turn is masked, or that it is not.
    if {"mask", "masks"} & {*words} and (not learning or masking[0] < learning[0]):
        return 0
    behind_on = words[words.index("on") + 1 :] if "on" in words else []
    if "only" in words or (behind_on and not _OF_TURNS & {*behind_on}):
        return 0
    denials = sum(word in _DENYING or word != stem for word, stem in zip(words, stems, strict=True))
    return -1 if denials % 2 else 1


def speaks_of_learning(name: str) -> bool:
    """Tell whether an unread column is refused, or may be a mark of learning."""
    return name in REFUSED_COLUMNS or (name not in HARMLESS_COLUMNS and sense_of(name) is not None)


@lru_cache(maxsize=1024)
def learning_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Keys of a turn that speak of learning."""
    return tuple(key for key in keys if sense_of(key) is not None)


@lru_cache(maxsize=1024)
def round_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Keys of the question and of the answer of a round; none for a turn that is no round."""
    question = next((key for key in QUESTION_KEYS if key in keys), None)
    answer = next((key for key in ANSWER_KEYS if key in keys), None)
    return () if question is None or answer is None else (question, answer)


def _says_learnt(name: str, value: Any) -> bool | None:
    """A mark's word on its turn or row: learnt or not; None of a mark that does not say so plainly."""
    sense = sense_of(name)
    return (value == 1) is (sense == 1) if sense and type(value) in (bool, int, float) and value in (0, 1) else None


def check_columns_of(fields: Mapping[str, Any], *, ways: str, is_chat: bool = True) -> None:
    """Refuse a row of another task, whose answers are not all to be learnt, and one that is marked otherwise.

    Args:
        fields: the row's columns that are not read, and its grades; null ones left out.
        ways: columns that could be named instead, for messages to people.
        is_chat: whether the row becomes a chat; `marked` reads lists of marks of its turns.
    """
    for name, value in fields.items():
        reason = REFUSED_COLUMNS.get(name)
        if reason is not None and (value in ([], "", {}) or (is_chat and name in GRADES and type(value) is bool)):
            continue
        if reason is None and _is_mark(name, value) and not (is_chat and isinstance(value, list)):
            marks = value if isinstance(value, list) else [value]
            if all(_says_learnt(name, mark) for mark in marks):
                continue
            reason = "every row is learnt in full; how much of a dataset is trained on is said by data.train's weight"
        if reason is not None:
            raise DataError(
                f'the row has the column "{name}", {shortened(value)}: {reason}. Remove the column, or say which '
                f"columns are meant, for example with {ways}."
            )


def _is_mark(name: str, value: Any) -> bool:
    """Tell a column that speaks of learning from one that does not, such as a picture of a mask."""
    if name in HARMLESS_COLUMNS or sense_of(name) is None or value in (None, "", [], {}):
        return False
    return not isinstance(value, bytes | dict) and not (isinstance(value, str) and kind_of(value))


def marked(
    messages: tuple[Message, ...], columns: Mapping[str, Any], asides: Mapping[str, Any]
) -> tuple[tuple[Message, ...], bool | None]:
    """Turns of a chat with the marks that its row lists, and whether its answer is wished for, if it is graded for KTO.

    Args:
        messages: the turns.
        columns: the row's columns by their roles, null ones too.
        asides: its columns that are not read and speak of learning.

    >>> turns = (Message("user", ()), Message("assistant", ()), Message("assistant", ()))
    >>> [turn.learnt for turn in marked(turns, {}, {"loss_mask": [0, 0, 1]})[0]]
    [True, False, True]
    """
    for name, marks in asides.items():
        if isinstance(marks, list) and _is_mark(name, marks):
            messages = _with_marks(messages, name, marks)
    # Grades of two names, of which LLaMA-Factory's must be there where the column is.
    grades = {columns[name] for name in GRADES if type(columns.get(name)) is bool}
    if len(grades) > 1:
        raise DataError('"label" and "kto_tag" differ, so whether the answer is a good one cannot be told.')
    if "kto_tag" in columns and not grades:
        raise DataError(
            f'"kto_tag" is {shortened(columns["kto_tag"])}, but it says whether the answer is a good one: true or '
            "false. Grade the row, or leave it out."
        )
    messages = only_answer(messages) if grades else messages
    if columns.get("objects") and (box := next((box for box in _BOXES for turn in messages if box in turn.text), None)):
        raise DataError(
            f'the words hold {box}, which ms-swift replaces by the boxes of "objects", and Headway would learn as a '
            "word. Write the boxes into the words, in the form that the model was trained with."
        )
    answers = [turn for turn in messages if turn.role == "assistant"]
    if answers and not any(turn.learnt for turn in answers):
        raise DataError(
            "every turn of the assistant is marked as not to be learnt, so there is nothing to learn. Delete the row, "
            "or remove the mark of a good answer."
        )
    return messages, next(iter(grades), None)


def _with_marks(messages: tuple[Message, ...], name: str, marks: list[Any]) -> tuple[Message, ...]:
    """Turns with the marks of a column, one for each."""
    num_before = len(messages) - len(marks)  # a column's system prompt is no turn
    if num_before not in (0, 1) or any(turn.role != "system" for turn in messages[:num_before]):
        raise DataError(
            f'the row has the column "{name}", {shortened(marks)}, of {len(marks)} marks, and its chat has '
            f"{len(messages)} turns, so what is to be learnt cannot be told. Give a mark for each turn, or mark turns "
            "by their own key loss."
        )
    turns = [
        replace(turn, learnt=is_learnt({name: mark}, turn.role, f"turn {number}") and turn.learnt)
        for number, (turn, mark) in enumerate(zip(messages[num_before:], marks, strict=True), 1)
    ]
    return (*messages[:num_before], *turns)


def only_answer(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Turns of a chat, learnt only behind the last turn of the user."""
    question_end = behind_question(messages)
    return unlearnt(messages[:question_end]) + tuple(messages[question_end:])


def behind_question(messages: Sequence[Message]) -> int:
    """Place of the first turn behind the last one of the user."""
    return max((place for place, turn in enumerate(messages, 1) if turn.role == "user"), default=0)


def is_learnt(turn: Mapping[str, Any], role: str, where: str) -> bool:
    """Tell whether a turn of the assistant is learnt, by the marks that it has, which must be plain.

    >>> is_learnt({"role": "assistant", "content": "Ho", "trainable": False}, "assistant", "message 2")
    False
    """
    learnt = True
    for key in learning_keys(tuple(turn)):
        sense, value = sense_of(key), turn[key]
        if value in (None, "", [], {}):
            continue
        says_learnt = _says_learnt(key, value)
        if says_learnt is None:
            raise DataError(
                f'{where}: "{key}" is {shortened(value)}, but a turn is learnt in full or not at all, by a key such as '
                "loss, which is 1 or 0. Write that, or remove the key."
            )
        if says_learnt and role != "assistant" and sense == 1 and key not in _TO_OTHERS:
            raise DataError(
                f'{where}: "{key}" is {shortened(value)} in a turn of the {role}, but only what the assistant says is '
                "learnt. Remove the key, or give the turn to the assistant."
            )
        learnt = learnt and says_learnt
    return learnt or role != "assistant"


def check_part(part: Mapping[str, Any], where: str) -> None:
    """Refuse a part of a turn that is not to be learnt where the rest is."""
    for key in learning_keys(tuple(part)):
        value = part[key]
        if value not in (None, "", [], {}) and not _says_learnt(key, value):
            raise DataError(
                f'{where}: a part has "{key}", {shortened(value)}, but a turn is learnt in full or not at all. Split '
                "the turn, or remove the key."
            )


def unread_keys(fields: Mapping[str, Any], roles: Mapping[str, str]) -> set[str]:
    """Columns of a row, and keys of its turns and parts, that are neither read, nor repetitions, nor harmless.

    >>> row = {"messages": [{"role": "user", "content": "Hi", "mood": 1}], "id": 1, "good": False}
    >>> sorted(unread_keys(row, {"messages": "messages"}))
    ['good', 'messages: mood']
    """
    read_values = [fields[name] for name in roles]
    unread = {
        name
        for name, value in fields.items()
        if name not in roles
        and value is not None
        and value not in read_values
        and (name not in HARMLESS_COLUMNS or (isinstance(value, str) and kind_of(value) is not None))
    }
    known_keys = {*_READ_KEYS, *HARMLESS_KEYS}
    for column, role in roles.items():
        turns = fields[column] if role in ("messages", "conversations") else None
        for turn in turns if isinstance(turns, list) else ():
            keys = turn if isinstance(turn, dict) else {}
            read_keys = known_keys.union(round_keys(tuple(keys)))
            unread |= {
                f"{column}: {key}"
                for key, value in keys.items()
                if value is not None and key not in read_keys and sense_of(key) is None
            }
            content = keys.get("content", keys.get("value"))
            parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
            inner = [
                part[key] for part in parts for key in ("image_url", "video_url") if isinstance(part.get(key), dict)
            ]
            if any(part.get("detail") not in (None, "", "auto") for part in (*parts, *inner)):
                unread.add(f"{column}: detail")
    return unread


def rendered_opening(columns: Mapping[str, Any]) -> str:
    """The token with which words of a chat's row begin as a chat template writes them; empty for other rows.

    >>> rendered_opening({"prompt": "<|begin_of_text|>Hi", "completion": "Ho"})
    '<|begin_of_text|>'
    """
    for turns in columns.values():
        for turn in turns if isinstance(turns, list) else [turns]:
            words = turn.get("content", turn.get("value")) if isinstance(turn, dict) else turn
            if isinstance(words, str) and (token := _RENDERED.match(words)):
                return token[1]
    return ""
