"""Images, videos and sounds that rows name: paths below the dataset's folder, URLs where allowed, bytes, data URIs."""

import base64
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from headway.data.samples import AudioPart, ImagePart, Media, Part, VideoPart
from headway.data.sources.json_rows import shortened
from headway.errors import DataError

KINDS: dict[str, type[ImagePart] | type[VideoPart] | type[AudioPart]] = {
    "image": ImagePart,
    "video": VideoPart,
    "audio": AudioPart,
}
EXTENSIONS = {
    "image": ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"),
    "video": ("mp4", "mkv", "webm", "avi", "mov", "m4v", "mpg", "mpeg"),
    "audio": ("wav", "mp3", "flac", "ogg", "opus", "m4a"),
}
REMOTE = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss")
"""Protocols that `allow_remote` allows. None of them reaches a file of this machine."""

MAX_INLINE_BYTES = 256 * 2**20  # a data URI's, decoded

_OTHER_ROOT = "open the dataset with another root"
_COLUMNS = {"image": ("images", "image"), "video": ("videos", "video"), "audio": ("audios", "audio")}
_TYPE = {extension: kind for kind, extensions in EXTENSIONS.items() for extension in extensions}


@dataclass(frozen=True)
class MediaRules:
    """Which media a dataset's rows may name.

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
        members: media stored with the row; they wait too, unless the row names them.
        folder: folder of the row's file.
        rules: which media may be named.

    Raises:
        DataError: a column holds something else.
    """

    def __init__(self, fields: Mapping[str, Any], members: Mapping[str, bytes], folder: str, rules: MediaRules) -> None:
        self._root, self._rules = rules.root or folder, rules
        self._members = {name: Media(data=data) for name, data in members.items()}
        self._taken = dict.fromkeys(KINDS, 0)
        self._columns = {kind for kind in KINDS if any(name in fields for name in _COLUMNS[kind])}
        self._waiting = {kind: self._column(kind, fields) for kind in KINDS}

    def waits(self, kind: str) -> bool:
        """Whether the row brings media of a kind for its messages' markers."""
        return bool(self._waiting[kind])

    def counts(self, kind: str) -> bool:
        """Whether markers of a kind stand for media: the row has a column of them, even an empty one, or members."""
        return kind in self._columns or self.waits(kind)

    def next(self, kind: str) -> Part:
        """The next of the row's media, for a marker.

        Raises:
            DataError: there is none left.
        """
        if not self._waiting[kind]:
            raise DataError(
                f"the row has {self._taken[kind]} of kind {kind}, but its messages hold more <{kind}> markers. Give "
                f'every marker its {kind}, or leave the row out where that is lost; where "<{kind}>" is meant '
                'literally, choose the schema "sharegpt".'
            )
        self._taken[kind] += 1
        return KINDS[kind](self._waiting[kind].pop(0))

    def named(self, kind: str, value: Any) -> Part:
        """Media that a message names itself.

        Raises:
            DataError: it is no such thing, leaves the root, or is remote.
        """
        media = self._media(kind, value)
        waiting = self._waiting[kind]
        waiting[:] = [other for other in waiting if other is not media]  # a member that is named waits no longer
        return KINDS[kind](media)

    def finish(self) -> None:
        """Make sure that no media is left over.

        Raises:
            DataError: the messages hold fewer markers than the row has media.
        """
        for kind, waiting in self._waiting.items():
            if waiting:
                named, placed = self._taken[kind] + len(waiting), self._taken[kind]
                raise DataError(
                    f"the row names {named} {kind}{'s' * (named > 1)}, and its messages place {placed or 'none'} of "
                    f"them. Write the marker <{kind}> into a message where each belongs, as in "
                    f'"<{kind}>What is shown here?".'
                )

    def _column(self, kind: str, fields: Mapping[str, Any]) -> list[Media]:
        for name in _COLUMNS[kind]:
            value = fields.get(name)
            named = [each for each in (value if isinstance(value, list) else [value]) if not _is_nothing(each)]
            if named:
                return [self._media(kind, each) for each in named]
        return [media for name, media in self._members.items() if kind_of(name) == kind]

    def _media(self, kind: str, value: Any) -> Media:
        if isinstance(value, dict):
            value = next((value[key] for key in ("bytes", "url", "path") if value.get(key) is not None), value)
        if isinstance(value, bytes):
            return Media(data=value)
        if not isinstance(value, str):
            raise DataError(f'a part of type "{kind}" needs a string "{kind}", got {shortened(value)}.')
        if value.startswith("data:"):
            return Media(data=inline_bytes(kind, value))
        if self._members:
            return self._member(kind, value)
        if "://" in value:
            return Media(self._remote(kind, value))
        return Media(below(self._root, kind, value))

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
                "allow_remote=True."
            )
        return url


def _is_nothing(value: Any) -> bool:
    """Whether a column names no media: null, an empty string as LLaVA's rows of text have it, a struct of nulls."""
    return value in (None, "") or (isinstance(value, dict) and all(inner is None for inner in value.values()))


def kind_of(name: str) -> str | None:
    """The kind of media that a file name's extension promises; None for anything else.

    >>> kind_of("a/b.PNG"), kind_of("a.json")
    ('image', None)
    """
    return _TYPE.get(name.rpartition(".")[2].lower())


def inline_bytes(kind: str, uri: str) -> bytes:
    """Decode a data URI.

    Raises:
        DataError: it is damaged or too large.

    Source: RFC 2397.

    >>> inline_bytes("image", "data:text/plain;base64,SGk=")
    b'Hi'
    """
    head, comma, data = uri.partition(",")
    if len(data) > MAX_INLINE_BYTES * 4 // 3:
        raise DataError(
            f"the {kind} in a data URI has {len(data)} characters; at most {MAX_INLINE_BYTES // 2**20} MiB are read "
            "from one. Store it as a file and name its path."
        )
    try:
        if not comma:
            raise ValueError("it has no comma")
        if head.endswith(";base64"):
            return base64.b64decode(unquote_to_bytes(data), validate=True)
        return unquote_to_bytes(data)
    except ValueError as error:  # binascii.Error among them
        raise DataError(
            f"the {kind} in the data URI {shortened(uri)} cannot be decoded: {error}. It must read "
            '"data:image/png;base64,..." and be whole.'
        ) from error


def below(root: str, kind: str, name: str) -> str:
    """Join a path that a row names to the dataset's root.

    Raises:
        DataError: it leaves the root, by its words or by a link; or nothing is there (looked for on this machine only).
    """
    inside = posixpath.normpath(name) if name else ".."
    if posixpath.isabs(inside):
        within = _within(root, inside)
        if within is None:
            raise DataError(
                f"the {kind} path {name!r} is absolute and leads elsewhere than to the dataset's root, the folder "
                f"{root!r}. Paths start from there and stay below it; write it without what leads there, or "
                f"{_OTHER_ROOT}."
            )
        inside = within
    if inside == ".." or inside.startswith("../") or "\\" in name or "\0" in name:
        raise DataError(
            f"the {kind} path {name!r} leaves the dataset's folder {root!r}. Paths are relative to the dataset's root "
            "(the file's own folder, if no other is given), with forward slashes, and stay below it; move the file "
            f"there, or {_OTHER_ROOT}."
        )
    if "://" in root:
        return f"{root.rstrip('/')}/{inside}"
    path = Path(root) / inside
    if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for names that are too long
        raise DataError(
            f"the {kind} {name!r} does not exist in the folder {root!r}. Put the file there, correct the path, or "
            "delete the row."
        )
    if not Path(os.path.realpath(path)).is_relative_to(_real(str(Path(root).absolute()))):
        raise DataError(
            f"the {kind} path {name!r} leaves the dataset's folder {root!r} by a link, to {os.path.realpath(path)}. "
            f"Copy the file, or {_OTHER_ROOT} that holds both."
        )
    return str(path)


def _within(root: str, path: str) -> str | None:
    """What follows the root in an absolute path on this machine; None where that lies elsewhere."""
    if "://" in root:
        return None
    for start in (os.path.abspath(root), _real(root)):  # noqa: PTH100 - as it is written, and with links resolved
        if path.startswith(start.rstrip("/") + "/"):
            return path[len(start.rstrip("/")) + 1 :]
    return None


@lru_cache(maxsize=256)
def _real(root: str) -> str:
    return os.path.realpath(root)
