"""Turn rows into typed samples: find a row's format, and its columns of questions, answers and media."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from headway.data.media.sizes import MediaSizes
from headway.data.samples import Chat, Document, Media, MediaPart, Message, Origin, Part, Sample, TextPart, unlearnt
from headway.data.sources import preferences
from headway.data.sources.aliases import with_context, with_known_letters, with_media_column, with_own_pair
from headway.data.sources.classes import LABEL, with_class
from headway.data.sources.json_rows import shortened, words_of
from headway.data.sources.marks import GRADES, check_columns_of, check_words, grade_of
from headway.data.sources.messages import json_value, read_tools, read_turns
from headway.data.sources.parts import split_markers
from headway.data.sources.preferences import LAYOUTS, Layout
from headway.data.sources.reader import ParsedRow
from headway.data.sources.references import KINDS, MediaRules, RowMedia, kind_of
from headway.errors import ConfigError, DataError

COLUMNS = (
    "messages", "conversations", "system", "tools", "prompt", "completion", "instruction", "input", "output", "history",
    "question", "answer", "text", "input_ids", "image", "images", "video", "videos", "audio", "audios",
    "chat_template_kwargs", *GRADES, *preferences.COLUMNS,
)  # fmt: skip
"""Names of columns that the schemas read."""

_ALIKE = 0.8  # of names such as answer_0 and answer_1

NEEDS = {
    "messages": ("messages",),
    "llava": ("conversations",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "tokens": ("input_ids",),
    "alpaca": ("instruction", "output"),
    "question_answer": ("question", "answer"),
}
"""Schemas and the columns that each must have; "caption" and "text" need the text column."""

ALIASES = (
    {"query": "question", "response": "answer"},
    {"input": "question", "output": "answer"},
    {"prompt": "prompt", "response": "completion"},
    {"instruction": "instruction", "response": "output"},
    {"instruction": "instruction", "completion": "output"},
    {"question": "question", "completion": "answer"},
    {"conversation": "conversations"},
    {"texts": "conversations"},
    {"question": "question", "response": "answer"},
    {"input": "question", "target": "answer"},
    {"inputs": "question", "targets": "answer"},
    {"source": "question", "target": "answer"},
    {"user": "question", "assistant": "answer"},
    {"human": "question", "assistant": "answer"},
    {"document": "question", "summary": "answer"},
)
"""Columns of other tools and what they are here, where a row has none of a schema's own; the first that fits is taken.

Source: ms-swift's query and response, and conversation; the_cauldron's and FineVision's texts; axolotl's completion;
OpenOrca's response; Natural Instructions' inputs and targets; XSum's document and summary.
"""

SCHEMAS = ("auto", *NEEDS, "caption", "text", *preferences.SCHEMAS)
"""Values of `schema`; "auto" takes the one whose columns a row has."""

VERSION = 7
"""Raised when rows come to be other samples, or can be used that could not be, so that no index says otherwise."""


@dataclass(frozen=True)
class Normaliser:
    """Makes a typed sample of a row.

    Attributes:
        schema: one of `SCHEMAS`; "auto" decides for each row by its columns.
        text_column: the column that holds a document's or caption's words.
        folder: folder of the row's file, where paths start unless the rules have a root.
        rules: which media rows may name.
        columns: the dataset's own names of columns, by the names that schemas read.
        names_files: whether the column `file_name` names a row's picture, video or sound, as in the Hub's folders of
            pictures with a file metadata.csv, metadata.jsonl or metadata.parquet.
        sizes: bounds of the source's own on what is read of its media.

    Raises:
        ConfigError: there is no such schema or name of a column.
    """

    schema: str
    text_column: str
    folder: str
    rules: MediaRules
    columns: Mapping[str, str] = field(default_factory=dict, repr=False)
    names_files: bool = False
    sizes: MediaSizes = field(default_factory=MediaSizes, repr=False)

    def __post_init__(self) -> None:
        check_columns(self.columns)
        if self.schema not in SCHEMAS:
            raise ConfigError(f"Unknown schema {self.schema!r}. Allowed: {', '.join(SCHEMAS)}.")

    def sample(self, row: ParsedRow, origin: Origin) -> Sample:
        """Read a row.

        Raises:
            DataError: the row does not have the schema's form.
        """
        row_fields = self.named(row.fields)
        if self.names_files and (kind := kind_of(str(row_fields.get("file_name")))) is not None:
            row_fields = {kind: row_fields["file_name"], **row_fields}
        layout = self._layout_of({name: value for name, value in row_fields.items() if value is not None})
        if layout is None:
            return self._read(self.schema, row_fields, row.members, origin, {})
        # A row of preferences is a row of a chat for each answer, with the same null columns.
        empty = {name: None for name, value in row_fields.items() if value is None}
        rows = layout.rows({name: value for name, value in row_fields.items() if value is not None}, layout.columns)
        decoded: dict[tuple[bool, str], Media] = {}
        chats: list[Chat] = []
        for chat_row in rows:
            chat = self._read("auto", empty | chat_row, row.members, origin, decoded)
            if not isinstance(chat, Chat):
                raise DataError(
                    f"the row has {' and '.join(layout.columns)}, of a preference, beside a document, which answers "
                    "nothing. Remove it, or give a chat."
                )
            chats.append(preferences.beginning_as(chat, chats))
        return preferences.preference_of(chats, is_explicit=all("completion" in chat_row for chat_row in rows))

    def named(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row's columns under the names that schemas read, of which the text column is one.

        Raises:
            DataError: the row lacks a column that is mapped.
        """
        if self.columns:
            return with_own_names(renamed(fields, self.columns))
        fields = with_known_letters(fields, COLUMNS, is_readable=has_schema(fields) or self.text_column in fields)
        is_readable = has_schema(fields) or self.text_column in fields
        fields = with_media_column(fields, names_files=self.names_files or not is_readable)
        return with_own_names(with_context(with_own_pair(fields)))

    def _layout_of(self, fields: Mapping[str, Any]) -> Layout | None:
        """The layout of a row of preferences; None of any other row."""
        if self.schema not in ("auto", *preferences.SCHEMAS):
            return None
        layouts = [layout for layout in LAYOUTS if layout.is_of(fields)]
        if self.schema != "auto":
            layout = next((layout for layout in layouts if layout.schema == self.schema), None)
            if layout is None:
                raise _lacks_columns(fields, {self.schema: preferences.SCHEMAS[self.schema]})
            return layout
        mapped = self.columns.keys()
        if mapped and layouts:  # what is mapped is meant
            of_mapped = [layout for layout in layouts if mapped & {*layout.columns}]
            others = any(mapped & {*names} and all(name in fields for name in names) for names in NEEDS.values())
            layouts = of_mapped or ([] if others or self.text_column in mapped else layouts)
        return next(iter(layouts), None)

    def _read(
        self,
        schema: str,
        row_fields: Mapping[str, Any],
        members: Mapping[str, bytes],
        origin: Origin,
        decoded: dict[tuple[bool, str], Media],
    ) -> Chat | Document:
        """A row of a chat or of a document; `decoded` as `RowMedia` takes it."""
        fields = {name: value for name, value in row_fields.items() if value is not None}
        media = RowMedia(row_fields, members, self.folder, self.rules, decoded)
        if not has_schema(fields):
            if schema == "auto" and (not self.columns or LABEL in self.columns):
                row_fields = with_class(row_fields, self.text_column, has_media=any(map(media.waits, KINDS)))
                fields = {name: value for name, value in row_fields.items() if value is not None}
            if self.text_column in row_fields:
                fields.setdefault(self.text_column, "")  # of a corpus, which has rows without words
        schema = self._schema_of(schema, fields, media)
        is_chat = schema not in ("tokens", "text")
        others = {name: value for name, value in fields.items() if name != self.text_column}
        check_columns_of(others, is_chat=is_chat, is_mapped=bool(self.columns))
        if schema == "tokens":
            sample: Chat | Document = Document(_token_ids(fields), origin)
        elif schema == "text":
            sample = Document(self._words(fields), origin)
        else:
            messages, grade = self._messages(schema, fields, media), grade_of(row_fields)
            if grade is not None:
                messages = preferences.only_answer(messages)
            check_words(fields, messages)
            sample = Chat(
                messages, origin, read_tools(fields.get("tools")), _template_kwargs(fields), self.sizes, grade
            )
        media.finish()
        return sample

    def _schema_of(self, schema: str, fields: dict[str, Any], media: RowMedia) -> str:
        has_media = any(media.waits(kind) for kind in KINDS)
        needs = NEEDS | {"caption": (self.text_column,), "text": (self.text_column,)}
        if schema == "auto":
            schemas = [name for name, columns in needs.items() if all(column in fields for column in columns)]
            schemas = [
                name for name in schemas if self.columns.keys() & {*needs[name]}
            ] or schemas  # what is mapped is meant
            if schemas:
                return "text" if schemas[0] == "caption" and not has_media else schemas[0]
        elif all(column in fields for column in needs[schema]):
            return schema
        check_columns_of(fields, is_chat=True, is_mapped=False)
        raise _lacks_columns(fields, needs | preferences.SCHEMAS if schema == "auto" else {schema: needs[schema]})

    def _messages(self, schema: str, fields: dict[str, Any], media: RowMedia) -> tuple[Message, ...]:
        # A caption is an answer to the media alone.
        if schema == "caption":
            pictured = tuple(part for kind in KINDS for part in _all_waiting(media, kind))
            words = self._words(fields)
            if not words.strip():
                raise DataError(f'"{self.text_column}" is empty, so the media have no words to learn. Delete the row.')
            return (Message("user", pictured), Message("assistant", (TextPart(words),)))
        # The column "system" opens every chat below; an empty one is none.
        opening = fields.get("system")
        head = (Message("system", (TextPart(opening),)),) if isinstance(opening, str) and opening else ()
        if schema == "alpaca":
            return head + _alpaca(fields, media)
        if schema == "question_answer":
            return head + _earlier(fields, media) + _question_and_answer(fields, "question", "answer", media)
        if fields.get("history"):
            raise DataError(
                f'the row has the column "history", {shortened(fields["history"])}, which is read beside a question '
                "or an instruction alone. Write its rounds as turns of the chat."
            )
        # Columns of turns, of which sharegpt and llava name speakers by "from".
        if schema == "prompt_completion":
            turns = _prompt_completion(fields["prompt"], fields["completion"], media)
        elif schema == "messages":
            turns = read_turns(fields["messages"], "messages", media)
        else:
            turns = read_turns(fields["conversations"], "conversations", media, has_markers=schema == "llava")
        if head and turns[0].role == "system":
            raise DataError(
                f'the row has the column "system", {shortened(opening)}, and its first turn is another system '
                "message. Leave one of them out."
            )
        # Media that no marker places lead the user's first words, but in sharegpt, where markers place all.
        return head + (turns if schema == "sharegpt" else _with_leading_media(turns, media))

    def _words(self, fields: dict[str, Any]) -> str:
        words = fields[self.text_column]
        if not isinstance(words, str):
            raise DataError(f'"{self.text_column}" is {shortened(words)}, but a document must be a string of words.')
        return words


def _lacks_columns(fields: Mapping[str, Any], needs: Mapping[str, tuple[str, ...]]) -> DataError:
    """The error of a row that has the columns of none of some schemas."""
    allowed = "; ".join(f"{' and '.join(columns)} ({name})" for name, columns in needs.items())
    own = ", ".join(map(str, fields)) or "no columns"
    return DataError(
        f"got {shortened(dict(fields))}, but the row needs the columns of a schema: {allowed}. The row has {own}; say "
        f"which of them is which with columns, such as {_possible_columns(fields)}, or name the schema and its text "
        "column. Of CSV the first line names the columns."
    )


def _possible_columns(fields: Mapping[str, Any]) -> str:
    """What the columns of a row could mean, as people would write it: two of like names could be answers to another."""
    worded = [str(name) for name, value in fields.items() if isinstance(value, str | list) and value]
    worded = worded if len(worded) > 1 else [*map(str, fields)]
    for first, second in pairwise(worded):
        others = [name for name in worded if name not in (first, second)]
        if others and difflib.SequenceMatcher(None, first, second).ratio() >= _ALIKE:
            prompt = max(others, key=lambda name: len(str(fields[name])))
            return f"{{prompt: {prompt}, chosen: {first}, rejected: {second}}} where {first} is the better answer"
    if len(worded) > 1:
        return f"{{question: {worded[-2]}, answer: {worded[-1]}}}"
    return f"{{text: {worded[0]}}}" if worded else "{question: Frage, answer: Antwort}"


def _template_kwargs(fields: dict[str, Any]) -> dict[str, Any]:
    """Variables of the chat template that a row sets, as TRL reads them."""
    variables = json_value(fields.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(variables, dict) or not all(
        isinstance(value, bool | int | float | str | None) for value in variables.values()
    ):
        raise DataError(
            f'"chat_template_kwargs" is {shortened(variables)}, but it must be an object of numbers, strings and '
            'booleans, such as {"enable_thinking": false}.'
        )
    return {name: value for name, value in variables.items() if value is not None}


def _with_leading_media(turns: tuple[Message, ...], media: RowMedia) -> tuple[Message, ...]:
    """Media of a kind that no marker and no part places stand before the user's first words.

    Source: TRL 1.16, `prepare_multimodal_messages`; ms-swift 3.8, `Template._add_default_tags`.
    """
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return turns
    placed = {part.kind for turn in turns for part in turn.parts if isinstance(part, MediaPart)}
    leading = (part for kind in KINDS if kind not in placed for part in _all_waiting(media, kind))
    question = replace(turns[first], parts=(*leading, *turns[first].parts))
    return (*turns[:first], question, *turns[first + 1 :])


def _all_waiting(media: RowMedia, kind: str) -> list[Part]:
    parts = []
    while media.waits(kind):
        parts.append(media.next(kind))
    return parts


def _prompt_completion(prompt: Any, completion: Any, media: RowMedia) -> tuple[Message, ...]:
    prompt_turns = [{"role": "user", "content": prompt}] if words_of(prompt) is not None else prompt
    completion_turns = (
        [{"role": "assistant", "content": completion}] if words_of(completion) is not None else completion
    )
    if not isinstance(prompt_turns, list) or not isinstance(completion_turns, list):
        raise DataError(
            f'"prompt" is {shortened(prompt)} and "completion" is {shortened(completion)}, but each must be a string '
            "or a list of messages."
        )
    messages = read_turns([*prompt_turns, *completion_turns], "messages", media)
    shown = messages[: len(prompt_turns)]  # of which TRL learns nothing either
    return unlearnt(shown) + messages[len(prompt_turns) :]


def _alpaca(fields: dict[str, Any], media: RowMedia) -> tuple[Message, ...]:
    """Earlier pairs of the history, then the instruction with its input on the next line, and the answer.

    Source: LLaMA-Factory 0.9, data/converter.py, AlpacaDatasetConverter.
    """
    earlier = _earlier(fields, media)
    more = fields.get("input")
    if more:
        fields = fields | {"instruction": f"{_text(fields, 'instruction')}\n{_text(fields, 'input')}"}
    return earlier + _question_and_answer(fields, "instruction", "output", media)


def _earlier(fields: dict[str, Any], media: RowMedia) -> tuple[Message, ...]:
    """The rounds of the column `history`, pairs of a question and its answer."""
    history = json_value(fields.get("history") or [], "history")
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError(f'"history" is {shortened(history)}, but it must be a list of pairs [instruction, answer].')
    return sum((_question_and_answer(dict(zip("qa", pair, strict=True)), "q", "a", media) for pair in history), ())


def _question_and_answer(
    fields: dict[str, Any], question_column: str, answer_column: str, media: RowMedia
) -> tuple[Message, ...]:
    """A turn of the user and one of the assistant; media that no marker places stand before the question."""
    words = _text(fields, question_column)
    markers = {kind for kind in KINDS if media.counts(kind) and f"<{kind}>" in words}
    shown = tuple(part for kind in KINDS if kind not in markers for part in _all_waiting(media, kind))
    question = Message("user", shown + split_markers(words, markers, media))
    return question, Message("assistant", (TextPart(_text(fields, answer_column)),))


def _text(fields: dict[str, Any], column: str) -> str:
    words = words_of(fields[column])
    if words is None:
        value = fields[column]
        inner = 0 if isinstance(value, list) else next(iter(value), "") if isinstance(value, dict) else ""
        hint = f" Of a column that holds several, columns takes one: {{{column}: {column}.{inner}}}." if value else ""
        raise DataError(f'"{column}" is {shortened(value)}, but it must be words or a number.{hint}')
    return words


def _token_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    ids = fields["input_ids"]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise DataError(f'"input_ids" is {shortened(ids)}, but it must be a list of token ids, none of them negative.')
    if fields.get("labels", ids) != ids:
        raise DataError(
            '"labels" differs from "input_ids", but every token of a document is learnt. Leave the column out, or give '
            "chats, of which only the answers are learnt."
        )
    return tuple(ids)


def check_columns(columns: Mapping[str, str]) -> None:
    """Make sure that columns are mapped to names that a schema reads.

    Args:
        columns: for each name of `COLUMNS` the name that the dataset has for it.

    Raises:
        ConfigError: a name that no schema reads.
    """
    for name in columns:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            turned = f"The other way round it would be {columns[name]}: {name}. " if columns[name] in COLUMNS else ""
            raise ConfigError(
                f"columns maps {name!r}, which no schema reads. {hint}{turned}It says for each name of Headway's the "
                f"column that the dataset has, such as question: Frage; names are {', '.join(COLUMNS)}."
            )


def has_schema(fields: Mapping[str, Any]) -> bool:
    """Whether a row has the columns of a schema of more than a text."""
    return any(all(name in fields for name in columns) for columns in NEEDS.values())


def with_own_names(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row's columns, those of other tools under the names that schemas read.

    >>> with_own_names({"query": "1 + 1?", "response": "2", "id": 1})
    {'id': 1, 'question': '1 + 1?', 'answer': '2'}
    """
    present = {name: value for name, value in fields.items() if value is not None}
    if has_schema(present):
        return fields
    if isinstance(present.get("completion"), list) and "prompt" not in present:  # axolotl's KTO: a whole chat
        return {
            **{name: value for name, value in fields.items() if name != "completion"},
            "messages": fields["completion"],
        }
    for alias in ALIASES:
        if alias.keys() <= present.keys():
            others = {name: value for name, value in fields.items() if name not in alias}
            return others | {own: fields[name] for name, own in alias.items()}
    return fields


def renamed(fields: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row's columns under the names that schemas read.

    Args:
        fields: the row's columns by the dataset's own names.
        columns: as `check_columns` takes them; a name with dots, such as "answers.text.0", leads into a column.

    Raises:
        DataError: the row lacks a column that is mapped.

    >>> renamed({"Frage": "1 + 1?", "a": {"text": ["2"]}}, {"question": "Frage", "answer": "a.text.0"})
    {'question': '1 + 1?', 'answer': '2'}
    """
    mapped = {column if column in fields else column.partition(".")[0] for column in columns.values()}
    others = {name: value for name, value in fields.items() if name not in mapped and name not in columns}
    return others | {name: _value(fields, name, column) for name, column in columns.items()}


def _value(fields: Mapping[str, Any], name: str, column: str) -> Any:
    if column in fields:
        return fields[column]
    value: Any = fields
    for key in column.split("."):
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            raise DataError(
                f"the row has no column {column!r}, which columns names for {name}; it has {', '.join(fields)}, and "
                f"reads {shortened(dict(fields))}."
            )
    return value
