"""What is learnt from: chats and documents, typed, and where each came from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from headway.errors import DataError
from headway.report import printable

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sample came from.

    Attributes:
        source: the source's name in the run's mixture.
        file: path or URL of the file.
        row: place in the file, from 0, the same for every reader.
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


class SampleError(DataError):
    """A row that cannot be used.

    Attributes:
        origin: which row.
        reason: what is wrong with it, and what to do.
    """

    def __init__(self, origin: Origin, reason: str) -> None:
        super().__init__(origin, reason)  # both, so that the error can be pickled
        self.origin, self.reason = origin, reason

    def __str__(self) -> str:
        return printable(f"{self.origin}: {self.reason}")
