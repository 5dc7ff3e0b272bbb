"""Media that stand in a row's own words: data URIs and base64."""

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from headway.data.sources.json_rows import shortened
from headway.errors import DataError

MAX_INLINE_BYTES = 256 * 2**20  # of media within a row, decoded

_MIN_PASTED = 64  # characters: no picture, video or sound is shorter, and few names are longer
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_HEAD_CHARACTERS = 64
# How files of pictures, videos and sounds begin: at byte 0, but for MP4's and AVIF's `ftyp`.
_SIGNATURES = (
    b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP", b"P5", b"P6",
    b"\x1aE\xdf\xa3", b"ID3", b"fLaC", b"OggS", b"\xff\xfb", b"\xff\xf3", b"\0\0\x01\xba",
)  # fmt: skip


def inline_bytes(kind: str, uri: str) -> bytes:
    """Decode a data URI.

    Raises:
        DataError: it is damaged or too large.

    Source: RFC 2397.

    >>> inline_bytes("image", "data:text/plain;base64,SGk=")
    b'Hi'
    """
    head, comma, data = uri.partition(",")
    _check_length(kind, "a data URI", data)
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


def base64_bytes(kind: str, words: str) -> bytes:
    """Decode base64, with or without line breaks.

    Raises:
        DataError: it is something else, damaged or too large.

    >>> base64_bytes("image", "SGk=")
    b'Hi'
    """
    _check_length(kind, "base64", words)
    try:
        return base64.b64decode("".join(words.split()), validate=True)
    except ValueError as error:  # binascii.Error among them, and letters that are not ASCII
        raise DataError(
            f"the {kind} has {len(words):,} characters that are not base64 ({error}). Write its bytes in base64, or "
            "store them as a file and name its path."
        ) from error


def pasted_bytes(kind: str, words: str) -> bytes | None:
    """Bytes of media in bare base64, told by how files of media begin; None for anything else, such as a path.

    Raises:
        DataError: they are damaged or too large.
    """
    if len(words) < _MIN_PASTED or not _BASE64.fullmatch(words, 0, _HEAD_CHARACTERS):
        return None
    try:
        head = base64.b64decode("".join(words[:_HEAD_CHARACTERS].split())[: _HEAD_CHARACTERS // 2])
    except binascii.Error:
        return None
    if not (head.startswith(_SIGNATURES) or head[4:8] == b"ftyp"):
        return None
    return base64_bytes(kind, words)


def _check_length(kind: str, form: str, characters: str) -> None:
    if len(characters) > MAX_INLINE_BYTES * 4 // 3:
        raise DataError(
            f"the {kind} in {form} has {len(characters)} characters; at most {MAX_INLINE_BYTES // 2**20} MiB are read "
            "from one. Store it as a file and name its path."
        )
