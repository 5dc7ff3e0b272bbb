"""Samples as types: chats, documents and preferences, their media, where each is from, and its length once encoded."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from headway.count.workload import Workload
from headway.data.media.sizes import MediaSizes
from headway.data.pack_times import charged_to
from headway.errors import DataError
from headway.packing.budget import Size
from headway.packing.pieces import Run
from headway.stores import open_url

Grid = tuple[int, int, int]
"""(t, h, w) of an image or video [patches]."""

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a sample: its source, file and row.

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

    @property
    def key(self) -> int:
        """A number of 63 bits for file and row, the same wherever the file's folder is moved."""
        name = f"{self.file.rpartition('/')[2]}\0{self.row}".encode(errors="surrogatepass")
        return int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Media:
    """An image, video or audio clip: a file or its bytes; or a video as pictures of its frames.

    Attributes:
        path: a file, or a URL that fsspec opens; None where the bytes came with the sample.
        data: the encoded bytes; None where they are to be read from `path`.
        frames: pictures of a video's frames, in order; empty for any other media, and `path` and `data` are None then.
        frames_per_s: rate of the frames [1/s]; 0 without them.
    """

    path: str | None = None
    data: bytes | None = None
    frames: tuple["Media", ...] = ()
    frames_per_s: float = 0.0

    def __str__(self) -> str:
        if self.frames:
            return f"of {len(self.frames)} frames from {self.frames[0]} on"
        return self.path if self.path is not None else f"{len(self.data or b'')} bytes within the sample"

    def open(self) -> BinaryIO:
        """Open the encoded bytes as a seekable stream, so that a header is read without the rest.

        Raises:
            OSError: the file cannot be opened.
        """
        if self.data is not None:
            return BytesIO(self.data)
        assert self.path is not None
        with charged_to("read"):
            if "://" in self.path:
                return open_url(self.path)
            return Path(self.path).open("rb")

    def read(self) -> bytes:
        """The encoded bytes.

        Raises:
            OSError: the file cannot be read.
        """
        with self.open() as file, charged_to("read"):
            return file.read()


@dataclass(frozen=True, slots=True)
class TextPart:
    """Words inside a message."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An item of one kind of media inside a message; a class for each kind.

    Attributes:
        media: the file or its bytes.
    """

    kind: ClassVar[str]  # name of one item, as in `headway.count.modalities`
    media: Media

    def __init_subclass__(cls) -> None:
        PARTS[cls.kind] = cls


PARTS: dict[str, type[MediaPart]] = {}
"""Classes of parts by their kinds."""


class ImagePart(MediaPart):
    """A picture inside a message."""

    __slots__ = ()
    kind = "image"


class VideoPart(MediaPart):
    """A video inside a message."""

    __slots__ = ()
    kind = "video"


class AudioPart(MediaPart):
    """A sound inside a message."""

    __slots__ = ()
    kind = "audio"


Part = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: who speaks, one of `ROLES`.
        parts: what is said, in order.
        tool_calls: calls that the assistant makes, each as chat templates read them:
            {"type": "function", "function": {"name": ..., "arguments": {...}}}.
        name: the tool that answers, in a turn with the role "tool"; None elsewhere.
        reasoning: what the assistant thinks before it answers, where that is not written into its words.
        learnt: whether the turn is learnt if it is the assistant's; otherwise it is shown to the model alone.
    """

    role: str
    parts: tuple[Part, ...]
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    reasoning: str = ""
    learnt: bool = True

    @property
    def text(self) -> str:
        """The message's words alone."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose assistant's turns are learnt, except the marked ones.

    Attributes:
        messages: the turns, at least one.
        origin: where it came from.
        tools: JSON schemas of the functions that the assistant may call.
        template_kwargs: variables of the chat template that this chat sets, such as enable_thinking.
        sizes: bounds on what is read of its media, of its source; those of the run where there are none.
        desirable: whether its answer is wished for, of data for KTO; None elsewhere.
    """

    messages: tuple[Message, ...]
    origin: Origin
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sizes: MediaSizes = field(default_factory=MediaSizes)
    desirable: bool | None = None

    @property
    def where(self) -> str:
        """File and place, for messages to people."""
        return str(self.origin)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all messages, in order."""
        return tuple(part for message in self.messages for part in message.parts)

    def media(self, kind: str) -> tuple[Media, ...]:
        """The chat's media of one kind, such as "image", in order."""
        return tuple(part.media for part in self.parts if isinstance(part, MediaPart) and part.kind == kind)

    @property
    def images(self) -> tuple[Media, ...]:
        """The chat's pictures, in order."""
        return self.media("image")

    @property
    def kinds(self) -> set[str]:
        """Kinds of media in the chat."""
        return {part.kind for part in self.parts if isinstance(part, MediaPart)}

    @property
    def answer(self) -> str:
        """The words of the last assistant turn that is learnt; empty without one."""
        return self.messages[self.answers[-1]].text if self.answers else ""

    @property
    def answers(self) -> list[int]:
        """Places of the messages that are learnt."""
        return [i for i, message in enumerate(self.messages) if message.role == "assistant" and message.learnt]


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
    def is_blank(self) -> bool:
        """True if there are no words, so that nothing is to be learnt and the document is left out."""
        return not (self.content.strip() if isinstance(self.content, str) else self.content)

    @property
    def where(self) -> str:
        """File and place, for messages to people."""
        return str(self.origin)


@dataclass(frozen=True, slots=True)
class Preference:
    """Answers to one prompt, of which some are better than others.

    Attributes:
        prompt: the turns that all answers follow; none where the answers differ in what they were shown, and each is a
            whole chat that begins with its own user turn.
        answers: the turns of each answer, the best first; at least two. `(chosen, rejected)` is the common case.
        origin: where it came from.
        tools: JSON schemas of the functions that the assistant may call.
        template_kwargs: variables of the chat template that this row sets.
        sizes: bounds on what is read of its media.
    """

    prompt: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], ...]
    origin: Origin
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sizes: MediaSizes = field(default_factory=MediaSizes)

    @property
    def where(self) -> str:
        """File and place, for messages to people."""
        return str(self.origin)

    @property
    def chats(self) -> tuple[Chat, ...]:
        """Each answer behind the prompt, as a chat of which the answer alone is learnt."""
        shown = unlearnt(self.prompt)
        settings = (self.origin, self.tools, self.template_kwargs, self.sizes)
        return tuple(Chat(shown + answer, *settings) for answer in self.answers)


Prompt = Chat | Document
"""A text that a model answers or continues."""

Sample = Chat | Document | Preference
"""One row of a dataset, read and checked."""


def unlearnt(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Turns of which the assistant's are shown to the model and not learnt."""
    return tuple(replace(turn, learnt=False) if turn.role == "assistant" else turn for turn in messages)


def best_answered(sample: Sample) -> Prompt:
    """A sample as one text: of a preference the chat with the best answer."""
    return sample.chats[0] if isinstance(sample, Preference) else sample


def supervised(sample: Sample) -> Prompt:
    """A sample whose every answer is to be learnt.

    Raises:
        DataError: it is of a set of preferences, whose answers are not all good ones.
    """
    if isinstance(sample, Preference):
        raise unusable(
            sample,
            f"the row holds {len(sample.answers)} answers of which some are better than others, and a run without the "
            "section preference would take each of them for right. Write preference: {loss: sigmoid} to learn which is "
            "better (docs/preferences.md), or learn the best alone by naming its columns, such as "
            "{messages: chosen} where chosen answers are lists of messages, {prompt: prompt, completion: chosen} where "
            "they are strings, or {messages: messages} where they stand in the messages.",
        )
    if isinstance(sample, Chat) and sample.desirable is False:
        raise unusable(
            sample,
            "the row's answer is graded as a bad one (label or kto_tag is false), which KTO learns to avoid, and "
            "training on answers would take it for right. Leave such rows out, or remove the column.",
        )
    return sample


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """Lengths of one encoded sample, which media headers tell without decoding a pixel.

    Attributes:
        tokens: length, placeholders of images, videos and sounds included [tokens].
        supervised: targets that the loss counts [tokens].
        first_target: place of the first supervised token that another one predicts, so at least 1 [tokens].
        media_end: one past the last token that is never cut off: a placeholder of an image, video or sound, or the last
            of a preference's answers; 0 without any [tokens].
        media: sizes of the items of each kind that there is, by the names of `headway.count.modalities`: (t, h, w) of
            each image or video [patches], feature frames of each sound [frames].
        segments: length of each view of a chat that has several, which do not see each other; else empty [tokens].
        parts: of what the sample is made, by the columns of `headway.packing.parts`, of families with parts.
        key: `Origin.key`, of families with parts; 0 for others.
        targets: runs of the targets, each from its first place to one past its last [tokens].
        num_answers: how many answers of a preference there are; 0 of other samples.
        prompt: of a preference, tokens that may stand before its answers once; 0 where there are none [tokens].
        branches: length of each answer behind the prompt, where that stands before them once; else empty [tokens].
    """

    tokens: int
    supervised: int
    first_target: int
    media_end: int = 0
    media: Mapping[str, Any] = field(default_factory=dict)
    segments: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
    key: int = 0
    targets: tuple[Run, ...] = ()
    num_answers: int = 0
    prompt: int = 0
    branches: tuple[int, ...] = ()

    @property
    def patches(self) -> int:
        """Vision patches of images and videos, before merging [patches]."""
        return Workload(**self.media).patches

    @property
    def size(self) -> Size:
        """Tokens and patches that the sample takes of a pack."""
        return Size(self.tokens, self.patches)

    @classmethod
    def joined(cls, views: "Sequence[SampleLengths]") -> "SampleLengths":
        """The lengths of a chat that is shown in several views, one after the other; of a single view its own."""
        if len(views) == 1:
            return views[0]
        ends = list(accumulate((view.tokens for view in views), initial=0))
        return cls(
            tokens=ends[-1],
            supervised=sum(view.supervised for view in views),
            first_target=views[0].first_target,
            media_end=max(
                (end + view.media_end for end, view in zip(ends, views, strict=False) if view.media_end), default=0
            ),
            media={
                name: tuple(size for view in views for size in view.media.get(name, ()))
                for name in dict.fromkeys(name for view in views for name in view.media)
            },
            segments=tuple(length for view in views for length in view.segments or (view.tokens,)),
            targets=tuple(
                (end + first, end + last)
                for end, view in zip(ends, views, strict=False)
                for first, last in view.targets
            ),
        )

    @classmethod
    def of_answers(cls, chats: "Sequence[SampleLengths]") -> "SampleLengths":
        """The lengths of a preference, whose answers stand one after the other and are never cut."""
        answers = cls.joined(chats)
        return replace(answers, media_end=answers.tokens, num_answers=len(chats))

    def with_prompt_once(self) -> "SampleLengths":
        """The lengths of a preference with its prompt before all answers once; of another sample its own."""
        if not self.prompt:
            return self
        starts = list(accumulate(self.segments, initial=0))
        tokens = starts[-1] - (self.num_answers - 1) * self.prompt
        # The targets of an answer move up by the prompts that are left out before it.
        moved = [
            (start - answer * self.prompt, stop - answer * self.prompt)
            for start, stop in self.targets
            for answer in [bisect_right(starts, start) - 1]
        ]
        return replace(
            self,
            tokens=tokens,
            media_end=tokens,
            media={name: sizes[: len(sizes) // self.num_answers] for name, sizes in self.media.items()},
            segments=(),
            targets=tuple(moved),
            branches=tuple(length - self.prompt for length in self.segments),
        )


NOTHING = SampleLengths(tokens=0, supervised=0, first_target=0)
"""Of a document without words, or of a single token, which nothing predicts: it is left out and counted."""


class SampleError(DataError):
    """A row that cannot be used.

    Attributes:
        origin: which row.
    """

    def __init__(self, origin: Origin, *pieces: object) -> None:
        super().__init__(*pieces, where=str(origin))
        self.args = (origin, *pieces)  # pickling the error needs both
        self.origin = origin

    @property
    def pieces(self) -> tuple[object, ...]:
        """Texts of the reason and the arguments that it names."""
        return self.args[1:]

    @property
    def reason(self) -> str:
        """Fault of the row, and the way out."""
        return self.text

    def settle(self) -> None:
        """Keep the reason as it reads now, whoever asks later."""
        self.args = (self.origin, self.text)


def unusable(sample: Sample, *pieces: object) -> DataError:
    """Make the error of a sample that cannot be used, of texts and arguments; it names the sample's place."""
    return DataError(*pieces, where=sample.where)
