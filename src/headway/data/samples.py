"""What is learnt from: chats and documents, typed, and where each came from."""

import json
import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from headway.errors import DataError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sample came from.

    Attributes:
        source: the source's name in the run's mixture.
        file: path or URL of the file.
        row: place in the source, from 0, the same for every reader.
        place: the place as people say it, such as "line 3".
    """

    source: str
    file: str
    row: int
    place: str

    def __str__(self) -> str:
        return f"{self.file}, {self.place}"


@dataclass(frozen=True, slots=True)
class Media:
    """An image, video or audio clip: a file or its bytes.

    Attributes:
        path: a file, or a URL that fsspec opens; None where the bytes came with the sample.
        data: the encoded bytes; None where they are to be read from `path`.
    """

    path: str | None = None
    data: bytes | None = None

    def __str__(self) -> str:
        return self.path if self.path is not None else f"{len(self.data or b'')} bytes within the sample"

    def read(self) -> bytes:
        """The encoded bytes.

        Raises:
            OSError: the file cannot be read.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        if "://" not in self.path:
            return Path(self.path).read_bytes()
        with fsspec.open(self.path, "rb") as file:
            content: bytes = file.read()
        return content


@dataclass(frozen=True, slots=True)
class TextPart:
    """Words inside a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture inside a message."""

    media: Media


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A video inside a message."""

    media: Media


@dataclass(frozen=True, slots=True)
class AudioPart:
    """A sound inside a message."""

    media: Media


Part = TextPart | ImagePart | VideoPart | AudioPart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: who speaks, one of `ROLES`.
        parts: what is said, in order.
        tool_calls: calls that the assistant makes, each as chat templates read them:
            {"type": "function", "function": {"name": ..., "arguments": {...}}}.
        name: the tool that answers, in a turn with the role "tool"; None elsewhere.
    """

    role: str
    parts: tuple[Part, ...]
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None

    @property
    def text(self) -> str:
        """The message's words alone."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to learn the assistant's turns of.

    Attributes:
        messages: the turns, at least one.
        origin: where it came from.
        tools: JSON schemas of the functions that the assistant may call.
    """

    messages: tuple[Message, ...]
    origin: Origin
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def where(self) -> str:
        """File and place, for messages to people."""
        return str(self.origin)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all messages, in order."""
        return tuple(part for message in self.messages for part in message.parts)

    @property
    def images(self) -> tuple[Media, ...]:
        """The chat's pictures, in order."""
        return tuple(part.media for part in self.parts if isinstance(part, ImagePart))

    @property
    def videos(self) -> tuple[Media, ...]:
        """The chat's videos, in order."""
        return tuple(part.media for part in self.parts if isinstance(part, VideoPart))

    @property
    def audio(self) -> tuple[Media, ...]:
        """The chat's sounds, in order."""
        return tuple(part.media for part in self.parts if isinstance(part, AudioPart))

    @property
    def answer(self) -> str:
        """The words of the last assistant turn; empty without one."""
        turns = [message.text for message in self.messages if message.role == "assistant"]
        return turns[-1] if turns else ""


@dataclass(frozen=True, slots=True)
class Document:
    """Running text of a pre-training corpus, every token of it learnt.

    Attributes:
        content: the words, or the token ids [tokens] of a corpus that was tokenised before.
        origin: where it came from.
    """

    content: str | tuple[int, ...]
    origin: Origin

    @property
    def where(self) -> str:
        """File and place, for messages to people."""
        return str(self.origin)


Sample = Chat | Document


def read_samples(path: str | Path) -> list[Chat]:
    """Read a dataset of chats.

    Each line is `{"messages": [{"role": ..., "content": ...}, ...]}`; content is a string, or a list of
    `{"type": "text", "text": ...}` and `{"type": "image", "image": <path relative to the file>}`. Blank lines are
    skipped.

    Args:
        path: the JSONL file.

    Raises:
        DataError: the file is missing or empty, or a line is not such a chat; the message names file and line.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "chats.jsonl"
    >>> _ = file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    >>> read_samples(file)[0].messages
    (Message(role='user', parts=(TextPart(text='Hi'),)),)
    """
    file = Path(path)
    samples: list[Chat] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    samples.append(_sample(line, file, number, len(samples)))
    except OSError as error:
        raise DataError(
            f"The dataset {file} cannot be read: {error.strerror or error}. Give the path of a JSONL file with one "
            "chat per line."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"The dataset {file} is not UTF-8 text: {error}. Save it as UTF-8, one JSON object per line."
        ) from error
    if not samples:
        raise DataError(f"The dataset {file} holds no samples. Write one JSON object with a list of messages per line.")
    return samples


def _sample(line: str, file: Path, number: int, row: int) -> Chat:
    where = f"{file}, line {number}"
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}). Each line must be one whole JSON object."
        ) from error
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list):
        raise DataError(f'{where}: got {_short(content)}, but a line must be an object with a list "messages".')
    if not messages:
        raise DataError(
            f'{where}: the list "messages" is empty. A chat needs at least one message; delete the line or fill it.'
        )
    return Chat(
        tuple(_message(m, file.parent, f"{where}, message {i}") for i, m in enumerate(messages, 1)),
        Origin(file.stem, str(file), row, f"line {number}"),
    )


def _message(content: Any, folder: Path, where: str) -> Message:
    if not isinstance(content, dict) or "role" not in content or "content" not in content:
        raise DataError(f'{where}: got {_short(content)}, but a message must be an object with "role" and "content".')
    role, said = content["role"], content["content"]
    if role not in ROLES:
        raise DataError(f"{where}: unknown role {_short(role)}. A role is one of {', '.join(ROLES)}.")
    if isinstance(said, str):
        return Message(role, (TextPart(said),))
    if not isinstance(said, list):
        raise DataError(f'{where}: "content" is {_short(said)}, but it must be a string or a list of parts.')
    return Message(role, tuple(_part(part, folder, where) for part in said))


def _part(content: Any, folder: Path, where: str) -> TextPart | ImagePart:
    kind = content.get("type") if isinstance(content, dict) else None
    if kind not in ("text", "image"):
        raise DataError(f'{where}: unknown part {_short(content)}. A part has "type" "text" or "image".')
    value = content.get(kind)
    if not isinstance(value, str):
        raise DataError(f'{where}: a part of type "{kind}" needs a string "{kind}", got {_short(value)}.')
    return TextPart(value) if kind == "text" else ImagePart(Media(str(_image_path(value, folder, where))))


def _image_path(name: str, folder: Path, where: str) -> Path:
    inside = posixpath.normpath(name)
    if posixpath.isabs(inside) or inside == ".." or inside.startswith("../") or "\\" in name or not name:
        raise DataError(
            f"{where}: the image path {name!r} leaves the dataset's folder {folder}. Image paths are relative to the "
            "JSONL file, with forward slashes, and stay below its folder; move or link the image there."
        )
    path = folder / inside
    if not path.is_file():
        raise DataError(
            f"{where}: the image {name!r} does not exist in {folder}. Put the file there, correct the path, or "
            "delete the line."
        )
    return path


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
