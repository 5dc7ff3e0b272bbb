"""Chat samples as they lie on disk: one JSON object per line, images beside the file."""

import json
import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import DataError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class TextPart:
    """Words inside a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture inside a message, by file."""

    path: Path


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat: who speaks (one of `ROLES`) and the parts of what is said, in order."""

    role: str
    parts: tuple[TextPart | ImagePart, ...]

    @property
    def text(self) -> str:
        """The message's words alone."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True)
class Sample:
    """One chat, and the line it came from."""

    messages: tuple[Message, ...]
    path: Path
    line: int

    @property
    def where(self) -> str:
        """File and line, for messages to people."""
        return f"{self.path}, line {self.line}"

    @property
    def images(self) -> tuple[Path, ...]:
        """The chat's picture files, in order."""
        return tuple(part.path for message in self.messages for part in message.parts if isinstance(part, ImagePart))

    @property
    def answer(self) -> str:
        """The words of the last assistant turn; empty without one."""
        turns = [message.text for message in self.messages if message.role == "assistant"]
        return turns[-1] if turns else ""


def read_samples(path: str | Path) -> list[Sample]:
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
    samples = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    samples.append(_sample(line, file, number))
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


def _sample(line: str, file: Path, number: int) -> Sample:
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
    return Sample(
        tuple(_message(m, file.parent, f"{where}, message {i}") for i, m in enumerate(messages, 1)), file, number
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
    return TextPart(value) if kind == "text" else ImagePart(_image_path(value, folder, where))


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
