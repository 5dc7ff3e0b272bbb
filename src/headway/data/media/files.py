"""Open media wherever they lie, and say what is wrong with one in one form."""

from io import BytesIO
from pathlib import Path
from typing import BinaryIO, cast

import fsspec

from headway.data.samples import Media
from headway.errors import DataError


def open_media(media: Media) -> BinaryIO:
    """The encoded bytes as a seekable stream, so that a header is read without the rest.

    Raises:
        OSError: the file cannot be opened.
    """
    if media.data is not None:
        return BytesIO(media.data)
    assert media.path is not None
    if "://" in media.path:
        return cast(BinaryIO, fsspec.open(media.path, "rb").open())
    return Path(media.path).open("rb")


def media_error(media: Media, where: str, kind: str, reason: BaseException | str) -> DataError:
    """An error that names the sample, the file, its size and what to do.

    Args:
        media: the file or its bytes.
        where: the sample's place.
        kind: "image", "video" or "sound".
        reason: what was found.
    """
    if isinstance(reason, str):
        return DataError(f"{where}: the {kind} {media} cannot be used: {reason}.")
    return DataError(
        f"{where}: the {kind} {media} ({_kept(media, reason)}) cannot be read: {reason}. It may be cut short or of an "
        f"unknown format; copy it again, convert it, or delete the sample."
    )


def _kept(media: Media, reason: BaseException) -> str:
    if isinstance(reason, FileNotFoundError):
        return "missing"
    try:
        with open_media(media) as file:
            return f"{file.seek(0, 2)} bytes"
    except OSError as error:
        return str(error)
