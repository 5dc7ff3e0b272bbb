"""Rows as typed samples: which form a row has, and what becomes of it."""

from dataclasses import dataclass
from typing import Any

from headway.data.samples import Chat, Document, Message, Origin, Part, Sample, TextPart
from headway.data.sources.json_rows import shortened
from headway.data.sources.messages import json_value, read_conversations, read_messages, read_tools
from headway.data.sources.reader import ParsedRow
from headway.data.sources.references import KINDS, MediaRules, RowMedia
from headway.errors import ConfigError, DataError

NEEDS = {
    "messages": ("messages",),
    "llava": ("conversations",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "tokens": ("input_ids",),
}
"""Schemas and the columns that each must have; "caption" and "text" need the text column."""

SCHEMAS = ("auto", *NEEDS, "caption", "text")


@dataclass(frozen=True)
class Normaliser:
    """Makes a typed sample of a row.

    Attributes:
        schema: one of `SCHEMAS`; "auto" decides for each row by its columns.
        text_column: the column that holds a document's or caption's words.
        folder: folder of the row's file, where paths start unless the rules have a root.
        rules: which media rows may name.

    Raises:
        ConfigError: there is no such schema.
    """

    schema: str
    text_column: str
    folder: str
    rules: MediaRules

    def __post_init__(self) -> None:
        if self.schema not in SCHEMAS:
            raise ConfigError(f"Unknown schema {self.schema!r}. Allowed: {', '.join(SCHEMAS)}.")

    def sample(self, row: ParsedRow, origin: Origin) -> Sample:
        """Read a row.

        Raises:
            DataError: the row does not have the schema's form.
        """
        fields = {name: value for name, value in row.fields.items() if value is not None}
        media = RowMedia(fields, row.members, self.folder, self.rules)
        schema = self._schema_of(fields, media)
        if schema == "tokens":
            sample: Sample = Document(_token_ids(fields), origin)
        elif schema == "text":
            sample = Document(self._words(fields), origin)
        else:
            messages = self._messages(schema, fields, media)
            sample = Chat(messages, origin, read_tools(fields.get("tools")))
        media.finish()
        return sample

    def _schema_of(self, fields: dict[str, Any], media: RowMedia) -> str:
        has_media = any(media.waits(kind) for kind in KINDS)
        needs = NEEDS | {"caption": (self.text_column,), "text": (self.text_column,)}
        if self.schema == "auto":
            found = [name for name, columns in needs.items() if all(column in fields for column in columns)]
            if found:
                return "text" if found[0] == "caption" and not has_media else found[0]
        elif all(column in fields for column in needs[self.schema]):
            return self.schema
        wanted = needs if self.schema == "auto" else {self.schema: needs[self.schema]}
        allowed = "; ".join(f"{' and '.join(columns)} ({name})" for name, columns in wanted.items())
        raise DataError(
            f"got {shortened(fields)}, but the row needs the columns of a schema: {allowed}. Rename the columns, or "
            "name the schema and its text column."
        )

    def _messages(self, schema: str, fields: dict[str, Any], media: RowMedia) -> tuple[Message, ...]:
        if schema == "messages":
            return read_messages(fields["messages"], media)
        if schema == "prompt_completion":
            return _prompt_completion(fields["prompt"], fields["completion"], media)
        if schema == "caption":
            pictured = tuple(part for kind in KINDS for part in _all_waiting(media, kind))
            return (Message("user", pictured), Message("assistant", (TextPart(self._words(fields)),)))
        opening = fields.get("system")
        head = (Message("system", (TextPart(opening),)),) if isinstance(opening, str) and opening else ()
        return head + read_conversations(fields["conversations"], media, has_markers=schema == "llava")

    def _words(self, fields: dict[str, Any]) -> str:
        words = fields[self.text_column]
        if not isinstance(words, str) or not words:
            raise DataError(f'"{self.text_column}" is {shortened(words)}, but a document must be a string of words.')
        return words


def _all_waiting(media: RowMedia, kind: str) -> list[Part]:
    parts = []
    while media.waits(kind):
        parts.append(media.next(kind))
    return parts


def _prompt_completion(prompt: Any, completion: Any, media: RowMedia) -> tuple[Message, ...]:
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else json_value(prompt, "prompt")
    said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if not isinstance(asked, list) or not isinstance(said, list):
        raise DataError(
            f'"prompt" is {shortened(prompt)} and "completion" is {shortened(completion)}, but each must be a string '
            "or a list of messages."
        )
    messages = read_messages([*asked, *said], media)
    if any(message.role == "assistant" for message in messages[: len(asked)]):
        raise DataError(
            "the prompt holds turns of the assistant, which prompt/completion data leaves unlearnt while a chat here "
            'learns all of them. Write the row as "messages" to learn them too, or split it.'
        )
    return messages


def _token_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    ids = fields["input_ids"]
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise DataError(f'"input_ids" is {shortened(ids)}, but it must be a list of token ids, none of them negative.')
    if fields.get("labels", ids) != ids:
        raise DataError(
            '"labels" differs from "input_ids", but every token of a document is learnt. Leave the column out, or give '
            "chats, of which only the answers are learnt."
        )
    return tuple(ids)
