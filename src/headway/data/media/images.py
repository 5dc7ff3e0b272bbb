"""Pictures of any kind as upright RGB: the size from the header, pixels when asked for, one clear error otherwise."""

import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import BinaryIO, Self

import numpy as np
from PIL import ExifTags, ImageOps, UnidentifiedImageError
from PIL import Image as Pillow

from headway.data.samples import Media
from headway.errors import ConfigError, DataError, reraise_own
from headway.words import Argument

MAX_IMAGE_PIXELS = 89_478_485
"""Default bound on an image [pixels]: a quarter GiB of 24-bit colour, as Pillow's own `Image.MAX_IMAGE_PIXELS`."""

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are read, by Pillow's names; no other is even tried, whatever a file is called.

For some, such as EPS, Pillow starts another program, and most of the rest is rare and little tested.
"""

# Formats whose header gives the decoded size and, but for late PNG chunks, the orientation.
_TELLING_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP")
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_LATE_CHUNKS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # PNG chunks that can hold an orientation
_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
_TURNING_TEXTS = (b"Raw profile type exif\0", b"Raw profile type APP1\0", b"XML:com.adobe.xmp\0")  # may turn a picture
_WIDE_GREY = ("I;16", "I;16L", "I;16B", "I;16N", "I")


def check_limit(max_pixels: int) -> int:
    """A bound on image sizes that can take effect [pixels].

    Raises:
        ConfigError: it is below 1, or above what Pillow opens at all.
    """
    most = 2 * (Pillow.MAX_IMAGE_PIXELS or 2**31)
    if not 1 <= max_pixels <= most:
        raise ConfigError(
            f"max_image_pixels is {max_pixels}; allowed are 1 to {most} pixels, above which Pillow refuses to open "
            "an image. Shrink the images, or raise PIL.Image.MAX_IMAGE_PIXELS first."
        )
    return max_pixels


@contextmanager
def reading_media(media: Media, where: str, kind: str) -> Iterator[None]:
    """Run a decoder on a file that anybody may have written: whatever it raises becomes the sample's error.

    Args:
        media: the file or its bytes.
        where: the sample's place.
        kind: "image", "video" or "sound".

    Raises:
        DataError: the decoder fails, but for want of memory.
    """
    try:
        yield
    except MemoryError:  # the machine's, not the file's
        raise
    except BaseException as error:
        reraise_own(error)
        raise media_error(media, where, kind, error) from error


def media_error(media: Media, where: str, kind: str, reason: BaseException | str) -> DataError:
    """An error that names the sample, the file, its size and the way out.

    Args:
        media: the file or its bytes.
        where: the sample's place.
        kind: "image", "video" or "sound".
        reason: what was found.
    """
    if isinstance(reason, str):
        return DataError(f"the {kind} {media} cannot be used: {reason}.", where=where)
    return DataError(
        f"the {kind} {media} ({_stored(media, reason)}) cannot be read: {reason}. It may be cut short or of "
        f"an unknown format; copy it again, convert it, or delete the sample.",
        where=where,
    )


def _stored(media: Media, reason: BaseException) -> str:
    if isinstance(reason, FileNotFoundError):
        return "missing"
    try:
        with media.open() as file:
            return f"{file.seek(0, 2)} bytes"
    except OSError as error:
        return str(error)


class Picture:
    """An opened image, of which only the header has been read.

    Of an animated file this is the first frame. EXIF orientations are applied, transparency is laid over white, and
    16-bit grey is scaled to 8 bits.

    Args:
        media: the file or its bytes.
        where: the sample's place, for messages.
        max_pixels: larger images are refused before they are decoded, as decompression bombs [pixels].

    Raises:
        DataError: the file is missing, no picture, or too large; the message names the sample and the file.
    """

    def __init__(self, media: Media, where: str, max_pixels: int = MAX_IMAGE_PIXELS) -> None:
        self._media, self._where = media, where
        self._file: BinaryIO | None = None
        try:
            with reading_media(media, where, "image"):
                self._file = media.open()
                try:
                    self.size = self._open(self._file, max_pixels)
                except ValueError as error:
                    if "MAX_TEXT" not in str(error):  # Pillow's bounds on what is written beside the pixels of a PNG
                        raise
                    self._file = _without_texts(self._file)
                    self.size = self._open(self._file, max_pixels)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def decode(self) -> Pillow.Image:
        """The pixels, as RGB, upright.

        Raises:
            DataError: the file is damaged, or of a kind that has no agreed meaning as a picture.
        """
        with reading_media(self._media, self._where, "image"):
            self._image.load()
            ImageOps.exif_transpose(self._image, in_place=True)
            decoded = _as_rgb(self._image)
        if (decoded.height, decoded.width) != self.size:
            raise media_error(
                self._media,
                self._where,
                "image",
                f"its header promises {self.size[0]} x {self.size[1]} pixels, but {decoded.height} x {decoded.width} "
                "were decoded. Save it anew",
            )
        return decoded

    def brightest_of_16_bits(self) -> int | None:
        """The largest value of a picture in 16-bit grey, of 65,535; None of other pictures.

        Raises:
            DataError: the file is damaged.
        """
        if self._image.mode not in _WIDE_GREY:
            return None
        with reading_media(self._media, self._where, "image"):
            return int(np.asarray(self._image).max())

    def _open(self, file: BinaryIO, max_pixels: int) -> tuple[int, int]:
        """Read the header; (height, width) once upright [pixels]."""
        self._image = _opened(file)
        width, height = self._image.size
        if width * height > max_pixels:
            raise media_error(
                self._media,
                self._where,
                "image",
                f"it has {width} x {height} pixels, more than the limit of {max_pixels}, and may be a "
                f"decompression bomb. Shrink it, or raise {Argument('max_image_pixels')}",
            )
        return self._upright_size()

    def _upright_size(self) -> tuple[int, int]:
        """(height, width) once turned by the EXIF orientation [pixels]."""
        image = self._image
        if image.format not in _TELLING_FORMATS or (image.format == "PNG" and self._late_chunks()):
            image.load()  # a file of these formats tells its size or orientation only once it is loaded
        orientation = Pillow.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
        width, height = image.size
        return (width, height) if orientation in _TURNED else (height, width)

    def _late_chunks(self) -> bool:
        """Tell whether a PNG has metadata behind its pixels, where only decoding would find it."""
        file = self._file
        assert file is not None
        place, is_late, pixels_seen = file.tell(), False, False
        file.seek(8)
        while not is_late and len(head := file.read(8)) == 8:
            size, kind = struct.unpack(">I4s", head)
            is_late = pixels_seen and kind in _LATE_CHUNKS
            pixels_seen = pixels_seen or kind == b"IDAT"
            file.seek(size + 4, 1)
        file.seek(place)
        return is_late


def decode_all(pictures: Sequence[Picture]) -> list[Pillow.Image]:
    """The pixels of several pictures."""
    return [picture.decode() for picture in pictures]


def _opened(file: BinaryIO) -> Pillow.Image:
    Pillow.init()
    formats = [name for name in FORMATS if name in Pillow.OPEN]  # AVIF is in some builds of Pillow only
    # Sizes are held against our own limit. For good: a filter that is taken back takes those of other threads along.
    warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)
    try:
        return Pillow.open(file, formats=formats)
    except UnidentifiedImageError as error:  # the error's own text shows the file object's repr alone
        raise OSError("it is no picture in a format that is read") from error


def _without_texts(file: BinaryIO) -> BinaryIO:
    """A PNG without its texts, such as the workflow that drew it; those that may turn it stay."""
    with file:
        file.seek(0)
        copy = BytesIO()
        copy.write(file.read(8))
        while len(head := file.read(8)) == 8:
            size, kind = struct.unpack(">I4s", head)
            content = file.read(size + 4)
            if kind not in _TEXT_CHUNKS or content.startswith(_TURNING_TEXTS):
                copy.write(head + content)
    copy.seek(0)
    return copy


def _as_rgb(image: Pillow.Image) -> Pillow.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        over_white = Pillow.new("RGBA", image.size, "white")
        over_white.alpha_composite(coloured)
        return over_white.convert("RGB")
    if image.mode in _WIDE_GREY:
        return _from_16_bit(image).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, which have no agreed black and white")
    return image.convert("RGB")


def _from_16_bit(image: Pillow.Image) -> Pillow.Image:
    values_HW = np.asarray(image).astype(np.int64)
    if values_HW.min() < 0 or values_HW.max() > 65535:
        raise ValueError(
            f"its pixels run from {values_HW.min()} to {values_HW.max()}, outside the 0 to 65535 of 16-bit grey"
        )
    return Pillow.fromarray(((values_HW + 128) // 257).astype(np.uint8))  # 65535 / 255 = 257
