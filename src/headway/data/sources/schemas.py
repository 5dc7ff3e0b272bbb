"""Turn rows into typed samples: columns as a layout reads them, by its schema."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.data.media.sizes import MediaSizes
from headway.data.samples import Chat, Document, Media, Message, Origin, Sample, TextPart, unlearnt
from headway.data.sources.layouts import COLUMNS, DIGEST, SCHEMAS, TEXT, Layout, RowReading, reading_of
from headway.data.sources.marks import check_columns_of, marked
from headway.data.sources.messages import (
    json_value,
    read_template_inputs,
    read_turns,
    split_markers,
    with_leading_media,
    words_of,
)
from headway.data.sources.preferences import beginning_as, preference_of, rows_of_answers
from headway.data.sources.reader import ParsedRow
from headway.data.sources.references import MediaRules, RowMedia, below, kind_of
from headway.data.sources.text_rows import listed, shortened
from headway.errors import ConfigError, DataError
from headway.words import Argument

VERSION = f"8 {DIGEST}"
"""Other when rows come to be other samples, or can be used that could not be, so that no index says otherwise: by the
table of layouts, or by a number that is raised with the code."""


@dataclass(frozen=True)
class Normaliser:
    """Makes a typed sample of a row.

    Attributes:
        schema: one of `SCHEMAS`; "auto" decides for each row by its columns.
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
    folder: str
    rules: MediaRules
    columns: Mapping[str, str] = field(default_factory=dict, repr=False)
    names_files: bool = False
    sizes: MediaSizes = field(default_factory=MediaSizes, repr=False)

    def __post_init__(self) -> None:
        _check_columns(self.columns)
        if self.schema not in SCHEMAS:
            raise ConfigError(f"Unknown schema {self.schema!r}. Allowed: {', '.join(SCHEMAS)}.")

    def sample(self, row: ParsedRow, origin: Origin) -> Sample:
        """Read a row.

        Raises:
            DataError: no layout fits, or the row does not have the schema's form.
        """
        fields, reading = self.reading(row)
        layout, columns = reading.layout, reading(fields)
        asides: dict[str, Any] = {}
        if reading.asides and not self.columns:  # a mapping of columns leaves the rest out on purpose
            asides = {name: fields[own] for own, name in reading.asides.items() if fields[own] is not None}
            check_columns_of(asides, is_chat=layout.makes == "chat", ways=layout.mapping)
        if layout.makes != "preference":
            media = RowMedia(columns, row.members, self.folder, self.rules)
            return self._read(layout, columns, media, origin, asides)
        # A row of preferences is a row of a chat for each answer, with the same null columns.
        empty = {name: None for name, value in columns.items() if value is None}
        filled = {name: value for name, value in columns.items() if value is not None}
        chat_rows = rows_of_answers(filled, layout.schema, layout.names, layout.marks)
        decoded: dict[tuple[bool, str], Media] = {}
        chats: list[Chat] = []
        for chat_row in chat_rows:
            answered = empty | chat_row
            reading = reading_of(answered, has_members=self._has_media(row.members))
            columns = reading(answered)
            media = RowMedia(answered, row.members, self.folder, self.rules, decoded)
            is_chat = reading.layout.makes == "chat"
            chat = self._read(reading.layout, columns, media, origin, {}) if is_chat else None
            if not isinstance(chat, Chat):
                raise DataError(
                    f"the row has {layout}, of a preference, beside a document, which answers nothing. Remove it, or "
                    "give a chat."
                )
            chats.append(beginning_as(chat, chats))
        return preference_of(chats, is_explicit=all("completion" in chat_row for chat_row in chat_rows))

    def reading(self, row: ParsedRow) -> tuple[Mapping[str, Any], RowReading]:
        """A row's columns, mapped columns under their new names, and their meaning."""
        fields = _renamed(row.fields, self.columns) if self.columns else row.fields
        return fields, reading_of(
            fields,
            schema=self.schema,
            mapped=self.columns.keys(),
            has_members=self._has_media(row.members),
            names_files=self.names_files,
            is_there=self._is_there,
        )

    @staticmethod
    def _has_media(members: Mapping[str, bytes] | None) -> bool:
        return any(map(kind_of, members or ()))

    def _is_there(self, name: str) -> bool:
        root = self.rules.root or self.folder
        try:
            return "://" not in root and bool(below(root, "image", name))
        except DataError:
            return False

    def _read(
        self, layout: Layout, fields: dict[str, Any], media: RowMedia, origin: Origin, asides: Mapping[str, Any]
    ) -> Chat | Document:
        """A row of a chat or of a document, its columns by their roles; those aside may mark turns."""
        for name, role in layout.columns:
            if name == TEXT and layout.has_class and fields[role] is None:
                fields[role] = ""
            if name == TEXT and layout.has_class and not (any(media.waiting.values()) or str(fields[role]).strip()):
                return Document("", origin)  # left out as an empty document
            if name == "label":
                fields[role] = _class(fields[role])
        columns, fields = fields, {name: value for name, value in fields.items() if value is not None}
        if layout.schema == "tokens":
            sample: Chat | Document = Document(_token_ids(fields), origin)
        elif layout.schema == "text":
            sample = Document(self._words(fields), origin)
        else:
            messages, grade = marked(self._messages(layout.schema, fields, media), columns, asides)
            sample = Chat(messages, origin, *read_template_inputs(fields), self.sizes, grade)
        media.finish()
        return sample

    def _messages(self, schema: str, fields: dict[str, Any], media: RowMedia) -> tuple[Message, ...]:
        # A caption is an answer to the media alone.
        if schema == "caption":
            pictured, words = media.rest(), self._words(fields)
            if not words.strip():
                raise DataError(
                    f'"{self.columns.get(TEXT, TEXT)}" is empty, so the media have no words to learn. Delete the row.'
                )
            return (Message("user", pictured), Message("assistant", (TextPart(words),)))
        # The column "system" opens every chat below; an empty one is none.
        opening = fields.get("system")
        head = (Message("system", (TextPart(opening),)),) if isinstance(opening, str) and opening else ()
        if schema in ("alpaca", "question_answer"):
            return head + _rounds(schema, fields, media)
        if fields.get("history"):
            raise DataError(
                f'the row has the column "history", {shortened(fields["history"])}, which is read beside a question '
                "or an instruction alone. Write its rounds as turns of the chat."
            )
        # Columns of turns, of which sharegpt and llava name speakers by "from".
        if schema == "prompt_completion":
            turns = _prompt_completion(fields["prompt"], fields["completion"], media)
        else:
            column = "messages" if schema == "messages" else "conversations"
            turns = read_turns(fields[column], column, media, has_markers=schema != "sharegpt")
        if head and turns[0].role == "system":
            raise DataError(
                f'the row has the column "system", {shortened(opening)}, and its first turn is another system '
                "message. Leave one of them out."
            )
        # Media that no marker places lead the user's first words, but in sharegpt, where markers place all.
        return head + (turns if schema == "sharegpt" else with_leading_media(turns, media))

    def _words(self, fields: dict[str, Any]) -> str:
        words = fields.get(TEXT, "")  # null in a corpus that has rows without words
        if not isinstance(words, str):
            raise DataError(
                f'"{self.columns.get(TEXT, TEXT)}" is {shortened(words)}, but a document must be a string of words.'
            )
        return words


def _class(label: Any) -> str:
    """A row's class, as the words of its answer."""
    words = label if isinstance(label, str) else words_of(label)
    answer = (words or "").strip()  # a space behind a separator is no part of a class
    if not answer:
        raise DataError(
            f'"label" is {shortened(label)}, and a class is a word or a number. Delete rows without one. If there '
            f"are several, {Argument('columns', {'label': 'label.0'})} takes the first, and "
            f"{Argument('columns', {'text': 'text'})} learns the texts themselves."
        )
    return answer


def _prompt_completion(prompt: Any, completion: Any, media: RowMedia) -> tuple[Message, ...]:
    shown, learnt = [
        [{"role": role, "content": value}] if words_of(value) is not None else value
        for role, value in (("user", prompt), ("assistant", completion))
    ]
    if not isinstance(shown, list) or not isinstance(learnt, list):
        raise DataError(
            f'"prompt" is {shortened(prompt)} and "completion" is {shortened(completion)}, but each must be a string '
            "or a list of messages."
        )
    messages = read_turns([*shown, *learnt], "messages", media)
    return unlearnt(messages[: len(shown)]) + messages[len(shown) :]  # TRL learns nothing of a prompt either


def _rounds(schema: str, fields: dict[str, Any], media: RowMedia) -> tuple[Message, ...]:
    """Earlier rounds of the column `history`, then the row's own; an instruction's input stands on the next line.

    Source: LLaMA-Factory 0.9, data/converter.py, AlpacaDatasetConverter.
    """
    history = json_value(fields["history"], "history") if fields.get("history") else []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError(f'"history" is {shortened(history)}, but it must be a list of pairs [instruction, answer].')
    question, answer = ("instruction", "output") if schema == "alpaca" else ("question", "answer")
    earlier = [_round(dict(zip("qa", pair, strict=True)), "q", "a", media) for pair in history]
    if schema == "alpaca" and fields.get("input") and str(fields["input"]).strip():
        fields = fields | {question: f"{_text(fields, question)}\n{_text(fields, 'input')}"}
    return sum(earlier, ()) + _round(fields, question, answer, media)


def _round(fields: dict[str, Any], question: str, answer: str, media: RowMedia) -> tuple[Message, ...]:
    """A turn of the user and one of the assistant; a context, and media that no marker places, stand before a question.

    Source: SQuAD's context and question.
    """
    words = _text(fields, question)
    if str(fields.get("context") or "").strip():
        words = f"{fields['context']}\n{words}"
    markers = {kind for kind in media.counted if f"<{kind}>" in words}
    parts = media.rest(markers) + split_markers(words, markers, media)
    return Message("user", parts), Message("assistant", (TextPart(_text(fields, answer)),))


def _text(fields: dict[str, Any], column: str) -> str:
    value = fields[column]
    words = value if isinstance(value, str) else words_of(value)
    if words is None:
        inner = 0 if isinstance(value, list) else next(iter(value), "") if isinstance(value, dict) else ""
        way = Argument("columns", {column: f"{column}.{inner}"})
        hint = f" If a column holds several values, {way} takes one." if value else ""
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
    attended = fields.get("attention_mask") or [1]
    if isinstance(attended, list) and any(mark != 1 for mark in attended):
        raise DataError(
            f'"attention_mask" leaves out {sum(mark != 1 for mark in attended)} of the tokens, as of padding, but '
            "every token of a document is learnt. Give the ids without padding."
        )
    return tuple(ids)


def _check_columns(columns: Mapping[str, str]) -> None:
    """Make sure that columns are mapped to names that a schema reads."""
    for name in columns:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            turned = f"The other way round it would be {columns[name]}: {name}. " if columns[name] in COLUMNS else ""
            raise ConfigError(
                f"columns maps {name!r}, which no schema reads. {hint}{turned}It says for each name of Headway's the "
                f"column that the dataset has, such as question: Frage; names are {', '.join(COLUMNS)}."
            )


def _renamed(fields: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row's columns under the names that schemas read; one with dots, as "answers.text.0", leads into a column."""
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
                f"the row has no column {column!r}, which columns names for {name}; it has {listed(fields)}, and "
                f"reads {shortened(dict(fields))}."
            )
    return value
