"""Images, videos and sounds that rows name: paths below the dataset's folder, URLs where allowed, bytes, frames."""

import base64
import binascii
import os
import posixpath
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from headway.count.modalities import in_chats
from headway.data.samples import PARTS, Media, Part
from headway.data.sources.text_rows import json_or_words, shortened
from headway.errors import DataError
from headway.words import Argument

KINDS = tuple(in_chats())
"""Kinds of media that rows may name."""
EXTENSIONS = {kind: row.extensions for kind, row in in_chats().items()}
REMOTE = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss")
"""Protocols that `allow_remote` allows. None of them reaches a file of this machine."""

_ENCODED = ("bytes", "base64", "data")  # keys of an object that holds the media themselves
_NAMES = ("url", "path", *KINDS, *(f"{kind}_url" for kind in KINDS))  # and of one that names them
MEDIA_KEYS = (*_ENCODED, *_NAMES, "source")
"""Keys of a part, or of an object in a column, that say which media it is. Source: `datasets`' bytes and path; OpenAI's
url; Anthropic's source, with the type base64 or url; transformers' base64."""

FRAMES_PER_S = 2.0
"""Rate of a video that is a list of frames and names none. Source: qwen-vl-utils 0.0.14, `fetch_video`."""

_FILE_URI = "file://"
_DIGITS = re.compile(r"(\d+)")
_OTHER_ROOT = Argument("root")
_COLUMNS = {kind: (f"{kind}s", kind) for kind in KINDS}
_TYPE = {extension: kind for kind, extensions in EXTENSIONS.items() for extension in extensions}

MAX_INLINE_BYTES = 256 * 2**20  # largest decoded media within a row

_MIN_PASTED = 64  # characters: no picture, video or sound is shorter, and few names are longer
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_HEAD_CHARACTERS = 64
# First bytes of pictures, videos and sounds: at byte 0, but for MP4's and AVIF's `ftyp`.
_SIGNATURES = (
    b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP", b"P5", b"P6",
    b"\x1aE\xdf\xa3", b"ID3", b"fLaC", b"OggS", b"\xff\xfb", b"\xff\xf3", b"\0\0\x01\xba",
)  # fmt: skip


@dataclass(frozen=True)
class MediaRules:
    """Bounds on the media that a dataset's rows may name.

    Attributes:
        root: the folder or URL that paths start from and stay below; None for the file's own folder.
        allow_remote: whether rows may name media elsewhere, on the web or in object stores.
    """

    root: str | None = None
    allow_remote: bool = False


class RowMedia:
    """The media of one row, handed out to its messages.

    Args:
        fields: the row's columns, null ones too; those named image(s), video(s) and audio(s) wait for the messages'
            markers.
        members: media stored with the row, of an archive; they wait too, unless the row names them.
        folder: folder of the row's file.
        rules: which media may be named.
        decoded: media that were decoded before, by their words; shared where a row is read several times.

    Attributes:
        counted: kinds of which markers stand for media: the row has a column of them, or its archive has files.
        waiting: media of each kind that wait for markers.

    Raises:
        DataError: a column holds something else.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        members: Mapping[str, bytes] | None,
        folder: str,
        rules: MediaRules,
        decoded: dict[tuple[bool, str], Media] | None = None,
    ) -> None:
        self._root, self._rules = rules.root or folder, rules
        self._decoded = {} if decoded is None else decoded
        self._members = {name: Media(data=data) for name, data in (members or {}).items()}
        self._num_placed = dict.fromkeys(KINDS, 0)
        has_columns = {kind for kind in KINDS for name in _COLUMNS[kind] if name in fields}
        self.counted = has_columns if members is None else {*KINDS}
        self.waiting = {kind: self._column(kind, fields) for kind in KINDS}

    def rest(self, but: Collection[str] = ()) -> tuple[Part, ...]:
        """Media that no marker has placed, but for some kinds."""
        return tuple(self.next(kind) for kind in KINDS if kind not in but for _ in range(len(self.waiting[kind])))

    def next(self, kind: str) -> Part:
        """The next of the row's media, for a marker, which must be there."""
        if not self.waiting[kind]:
            raise DataError(
                f"the row has {self._num_placed[kind]} of kind {kind}, but its messages hold more <{kind}> markers. "
                f'Give every marker its {kind}, or leave the row out where that is lost; where "<{kind}>" is meant '
                f"literally, choose {Argument('schema', 'sharegpt')}."
            )
        self._num_placed[kind] += 1
        return PARTS[kind](self.waiting[kind].pop(0))

    def named(self, kind: str, value: Any, frames_per_s: float = FRAMES_PER_S) -> Part:
        """Media that a message names: by a path, URL, data URI, bytes, an object of these, or as a video's frames."""
        media = self._media(kind, value, frames_per_s)
        own_media = media.frames or (media,)
        waiting = self.waiting["image" if media.frames else kind]
        # A member of the sample waits no longer.
        waiting[:] = [other for other in waiting if all(other is not medium for medium in own_media)]
        return PARTS[kind](media)

    def finish(self) -> None:
        """Make sure that no media is left over: the messages must hold as many markers as the row has media."""
        for kind, waiting in self.waiting.items():
            if waiting:
                total, placed = self._num_placed[kind] + len(waiting), self._num_placed[kind]
                raise DataError(
                    f"the row names {total} {kind}{'s' * (total > 1)}, and its messages place {placed or 'none'} of "
                    f"them. Write the marker <{kind}> into a message where each belongs, as in "
                    f'"<{kind}>What is shown here?".'
                )

    def _column(self, kind: str, fields: Mapping[str, Any]) -> list[Media]:
        for name in _COLUMNS[kind]:
            value = _listed(fields.get(name))
            # A list of pictures is one video's frames, and not a list of videos.
            is_one = not isinstance(value, list) or (kind == "video" and bool(value) and all(map(_is_frame, value)))
            values = [item for item in ([value] if is_one else value or []) if not is_nothing(item)]
            if kind != "video":  # inner lists of videos are frames
                values = [item for value in values for item in _flat(value)]
            if values:
                return [self._media(kind, item) for item in values]
        return [media for name, media in self._members.items() if kind_of(name) == kind]

    def _media(self, kind: str, value: Any, frames_per_s: float = FRAMES_PER_S) -> Media:
        if isinstance(value, dict):
            return self._described(kind, value, frames_per_s)
        if isinstance(value, bytes):
            return Media(data=value)
        if kind == "video" and isinstance(value, list) and value:
            return Media(frames=tuple(self._media("image", frame) for frame in value), frames_per_s=frames_per_s)
        if not isinstance(value, str):
            raise DataError(f'a part of type "{kind}" needs a string "{kind}", got {shortened(value)}.')
        return self._decode(kind, value, is_base64=False) or self._elsewhere(kind, value)

    def _described(self, kind: str, value: Mapping[str, Any], frames_per_s: float) -> Media:
        """Media of an object that holds or names them."""
        key = media_key(value)
        if key is None:
            raise DataError(
                f'a part of type "{kind}" needs a string "{kind}", got {shortened(value)}: an object that has none of '
                f"the keys {', '.join(MEDIA_KEYS)}."
            )
        content = value[key]
        if key in _ENCODED and isinstance(content, str) and not content.startswith("data:"):
            media = self._decode(kind, content, is_base64=True)
            assert media is not None
            return media
        return self._media(kind, content, frames_per_s)

    def _decode(self, kind: str, words: str, *, is_base64: bool) -> Media | None:
        """Media within the row's words, decoded once however often they are read; None if the words name media."""
        if (is_base64, words) not in self._decoded:
            data = inline_bytes(kind, words, is_base64=is_base64)
            if data is None:
                return None
            self._decoded[is_base64, words] = Media(data=data)
        return replace(self._decoded[is_base64, words])  # every place of a row has an item of its own

    def _elsewhere(self, kind: str, name: str) -> Media:
        """Media that stand outside the row's words: a member of the sample, a path or an address."""
        if name[: len(_FILE_URI)].lower() == _FILE_URI:
            name = self._path_of(name)
        if self._members:
            return self._member(kind, name)
        if "://" in name:
            return Media(self._remote(kind, name))
        if kind == "video" and self._is_there(os.path.isdir, name):
            return self._folder(name)
        return Media(below(self._root, kind, name))

    def _path_of(self, uri: str) -> str:
        """The path in a file URI, as qwen-vl-utils takes it; with its escapes read if no such file is there.

        Source: RFC 8089; qwen-vl-utils 0.0.14, `fetch_image`, which takes what follows file://.
        """
        path = uri[len(_FILE_URI) :]
        return path if self._is_there(os.path.exists, path) else unquote(path)

    def _is_there(self, test: Callable[[str], bool], name: str) -> bool:
        return "://" not in self._root and test(os.path.join(self._root, name))  # noqa: PTH118 - Path raises for odd names

    def _folder(self, name: str) -> Media:
        """The pictures of a folder as a video's frames; numbers in their names in the order of their values."""
        folder = below(self._root, "video", name, is_folder=True)
        names = [path.name for path in Path(folder).iterdir() if _is_frame(path.name)]
        if not names:
            raise DataError(
                f"the video {name!r} is a folder without pictures. Give a video, or a folder of its frames."
            )
        names.sort(key=lambda name: [int(part) if part.isdecimal() else part for part in _DIGITS.split(name)])
        return self._media("video", [f"{name.rstrip('/')}/{frame}" for frame in names])

    def _member(self, kind: str, name: str) -> Media:
        """Look up a stored member by its name, with or without the sample's key before it."""
        for stored, media in self._members.items():
            if name in (stored, stored.rpartition("/")[2], stored.rpartition("/")[2].partition(".")[2]):
                return media
        raise DataError(
            f"the {kind} {name!r} is not stored with the sample, which holds {', '.join(self._members)}. Name one of "
            "them, or its extension."
        )

    def _remote(self, kind: str, url: str) -> str:
        protocol = url.partition("://")[0].lower()
        if protocol not in REMOTE or "::" in url:
            raise DataError(
                f"the {kind} {url!r} has a protocol that rows may not use. Allowed are paths below the folder "
                f"{self._root!r}, data URIs and, where allow_remote is set, {', '.join(REMOTE)}."
            )
        if not self._rules.allow_remote:
            raise DataError(
                f"the {kind} {url!r} lies outside the dataset, and nothing is fetched from elsewhere unless allowed. "
                f"Download it below the folder {self._root!r} and name its path, or open the dataset with "
                f"{Argument('allow_remote', True)}."
            )
        return url


def _listed(value: Any) -> Any:
    """A column's value; a list where it is the JSON of one, as a table of text has it."""
    return json_or_words(value) if isinstance(value, str) and value.startswith("[") else value


def _flat(value: Any) -> Iterator[Any]:
    """The media of a list within a list, as `datasets` nests sequences."""
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    elif not is_nothing(value):
        yield value


def is_nothing(value: Any) -> bool:
    """Tell whether a column names no media: null, an empty string as in LLaVA's rows of text, a struct of nulls."""
    value = _listed(value)
    if isinstance(value, dict):
        return all(inner is None for inner in value.values())
    return all(map(is_nothing, value)) if isinstance(value, list) else value in (None, "")


def kind_of(name: str) -> str | None:
    """The kind of media that a file name's extension promises; None for anything else.

    >>> kind_of("a/b.PNG"), kind_of("a.json")
    ('image', None)
    """
    return _TYPE.get(name.rpartition(".")[2].lower())


def media_key(value: Mapping[str, Any]) -> str | None:
    """The key by which an object says which media it is; None without, as where its source is a dataset's name."""
    keys = (key for key in MEDIA_KEYS if value.get(key) not in (None, ""))
    return next((key for key in keys if key != "source" or isinstance(value[key], dict)), None)


def _is_frame(name: Any) -> bool:
    return isinstance(name, str) and kind_of(name) == "image" and not name.lower().endswith(".gif")


def below(root: str, kind: str, name: str, *, is_folder: bool = False) -> str:
    """Join a path that a row names to the dataset's root.

    Of a plain file in a folder that was looked at before, the file system is asked once.

    Args:
        root: of the dataset.
        kind: of media.
        name: as the row has it.
        is_folder: whether a folder is meant, such as one of frames, and no file.

    Raises:
        DataError: it leaves the root, by its words or by a link; or nothing is there (looked for on this machine only).
    """
    inside = posixpath.normpath(name) if name else ".."
    # An absolute path is taken where it leads below the root, as tools write them.
    if posixpath.isabs(inside):
        within = _within(root, inside)
        if within is None:
            raise DataError(
                f"the {kind} path {name!r} is absolute and leads elsewhere than to the dataset's root, the folder "
                f"{root!r}. Paths start from there and stay below it; write it without what leads there, or "
                f"open the dataset with another {_OTHER_ROOT}."
            )
        inside = within
    # By its words: no step above the root, no Windows separators, which would hide one.
    if inside == ".." or inside.startswith("../") or "\\" in name or "\0" in name:
        raise DataError(
            f"the {kind} path {name!r} leaves the dataset's folder {root!r}. Paths are relative to the dataset's root "
            "(the file's own folder, if no other is given), with forward slashes, and stay below it; move the file "
            f"there, or open the dataset with another {_OTHER_ROOT}."
        )
    # Behind a URL nothing is looked for here: the store says so when the media is opened.
    if "://" in root:
        return f"{root.rstrip('/')}/{inside}"
    path = str(Path(root) / inside)
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):  # a name that is too long, too
        mode = 0
    is_link = stat.S_ISLNK(mode)
    if is_link:
        is_there = (os.path.isdir if is_folder else os.path.isfile)(path)
    else:
        is_there = (stat.S_ISDIR if is_folder else stat.S_ISREG)(mode)
    if not is_there:
        raise DataError(
            f"the {kind} {name!r} does not exist in the folder {root!r}. Put the file there, correct the path, or "
            "delete the row."
        )
    # By a link: the real place must be below the root's real place. A folder's own place is looked up once.
    place = os.path.realpath(path) if is_link else _real_folder(os.path.dirname(path))  # noqa: PTH120 - fast, for each row
    if not f"{place}/".startswith(_real_folder(root).rstrip("/") + "/"):
        raise DataError(
            f"the {kind} path {name!r} leaves the dataset's folder {root!r} by a link, to {os.path.realpath(path)}. "
            f"Copy the file, or open the dataset with another {_OTHER_ROOT} that holds both."
        )
    return path


def _within(root: str, path: str) -> str | None:
    """Part of an absolute path on this machine below the root; None for a path elsewhere."""
    if "://" in root:
        return None
    for start in (os.path.abspath(root), _real_folder(root)):  # noqa: PTH100 - as it is written, and with links resolved
        if path.startswith(start.rstrip("/") + "/"):
            return path[len(start.rstrip("/")) + 1 :]
    return None


def _real_folder(folder: str) -> str:
    return _real(os.path.join(os.getcwd(), folder))  # noqa: PTH109, PTH118 - fast, for each row


@lru_cache(maxsize=4096)
def _real(folder: str) -> str:
    return os.path.realpath(folder)


def inline_bytes(kind: str, words: str, *, is_base64: bool = False) -> bytes | None:
    """Bytes of media within a row's words: a data URI, or base64 with the first bytes of media; None for a name.

    Words that are known to be base64 may have line breaks. Source: RFC 2397.

    >>> inline_bytes("image", "data:text/plain;base64,SGk="), inline_bytes("image", "a.png")
    (b'Hi', None)
    """
    is_uri = not is_base64 and words.startswith("data:")
    if not (is_uri or is_base64 or _is_pasted(words)):
        return None
    head, comma, data = words.partition(",") if is_uri else ("", "", words)
    if len(data) > MAX_INLINE_BYTES * 4 // 3:
        raise DataError(
            f"the {kind} in {'a data URI' if is_uri else 'base64'} has {len(data)} characters; at most "
            f"{MAX_INLINE_BYTES // 2**20} MiB are read from one. Store it as a file and name its path."
        )
    try:
        if not is_uri:
            return base64.b64decode("".join(words.split()), validate=True)
        if not comma:
            raise ValueError("it has no comma")
        content = unquote_to_bytes(data)
        return base64.b64decode(content, validate=True) if head.endswith(";base64") else content
    except ValueError as error:  # binascii.Error among them, and letters that are not ASCII
        if not is_uri:
            raise DataError(
                f"the {kind} has {len(words):,} characters that are not base64 ({error}). Write its bytes in base64, "
                "or store them as a file and name its path."
            ) from error
        raise DataError(
            f"the {kind} in the data URI {shortened(words)} cannot be decoded: {error}. It must read "
            '"data:image/png;base64,..." and be whole.'
        ) from error


def _is_pasted(words: str) -> bool:
    """Tell bare base64 of a file of media from a path or an address."""
    if len(words) < _MIN_PASTED or not _BASE64.fullmatch(words, 0, _HEAD_CHARACTERS):
        return False
    try:
        head = base64.b64decode("".join(words[:_HEAD_CHARACTERS].split())[: _HEAD_CHARACTERS // 2])
    except binascii.Error:
        return False
    return head.startswith(_SIGNATURES) or head[4:8] == b"ftyp"
