"""Content of a turn: words with markers, and parts of words, images, videos and sounds in the forms of many tools."""

import math
import re
from collections.abc import Sequence
from typing import Any

from headway.data.samples import Part, TextPart
from headway.data.sources.json_rows import shortened
from headway.data.sources.marks import HARMLESS_COLUMNS, HARMLESS_KEYS
from headway.data.sources.references import FRAMES_PER_S, KINDS, MEDIA_KEYS, RowMedia, media_key
from headway.errors import DataError

# What Qwen's and LMMs-Engine's processors read beside a part's media: a piece of it, or a size of its own.
_CUTS = (
    "video_start", "video_end", "nframes", "fps", "min_frames", "max_frames",
    "min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "sample_fps", "raw_fps",
)  # fmt: skip
_BESIDE_MEDIA = ("type", "text", "detail", "cache_control", *HARMLESS_KEYS, *HARMLESS_COLUMNS)
_RATES = ("sample_fps", "fps")  # of a list of frames, as qwen-vl-utils reads them
_TYPES = {
    "image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio", "input_image": "image",
    "input_text": "text", "output_text": "text",
}  # fmt: skip
"""Types of parts and the kinds that they are of. Source: OpenAI's chat completions and responses."""
_MARKER = re.compile(f"<({'|'.join(KINDS)})>")


def split_markers(words: str, kinds: set[str], media: RowMedia) -> tuple[Part, ...]:
    """Words with every marker of some kinds replaced by the row's next media of that kind."""
    parts: list[Part] = []
    end = 0
    for marker in _MARKER.finditer(words):
        if marker[1] in kinds:
            if marker.start() > end:
                parts.append(TextPart(words[end : marker.start()]))
            parts.append(media.next(marker[1]))
            end = marker.end()
    if end < len(words) or not parts:
        parts.append(TextPart(words[end:]))
    return tuple(parts)


def parts_of(content: Any) -> Sequence[Any]:
    """The parts of a turn's content; none of words."""
    return content if isinstance(content, list) else ()


def kind_of_part(part: Any) -> str | None:
    """Kind of a part: text, image, video or sound; None for anything else."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return None
    kind = _TYPES.get(kind, kind)
    return kind if kind == "text" or kind in KINDS else None


def read_part(part: Any, media: RowMedia, markers: set[str], where: str) -> tuple[Part, ...]:
    """Read a part of a turn's content.

    Args:
        part: as it was written.
        media: the row's media.
        markers: kinds of media that markers in words stand for.
        where: the turn, for messages to people.

    Raises:
        DataError: it is of no kind, or names no media that can be used.
    """
    kind = kind_of_part(part)
    if kind is None:
        allowed = ", ".join(f'"{name}"' for name in ("text", *KINDS, "image_url", "video_url", "input_audio"))
        raise DataError(f'{where}: unknown part {shortened(part)}. A part\'s "type" is one of {allowed}.')
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise DataError(f'{where}: a part of type "text" needs a string "text", got {shortened(part.get("text"))}.')
        return split_markers(part["text"], markers, media)
    try:
        if part["type"] == "input_audio":
            return (_input_audio(part.get("input_audio"), media),)
        value = part.get(part["type"])
        if value in (None, "") and (key := media_key(part)) is not None:
            value = {key: part[key]}
        if kind == "video" and isinstance(value, list):
            return (media.named(kind, value, _rate_of(part)),)
        _refuse_cuts(part)
        if value in (None, ""):
            _check_names_nothing(part, kind)
            return (media.next(kind),)
        return (media.named(kind, value),)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _rate_of(part: dict[str, Any]) -> float:
    """Frames per second of a part whose video is a list of frames, which takes the place of a file's own.

    Raises:
        DataError: it is no number above 0, or the part asks for a piece of the list or another size.
    """
    key = next((key for key in _RATES if part.get(key) is not None), None)
    _refuse_cuts({name: value for name, value in part.items() if name not in _RATES})
    if key is None:
        return FRAMES_PER_S
    try:
        rate = float(part[key])
    except (TypeError, ValueError):
        rate = 0.0
    if not 0 < rate < math.inf:
        raise DataError(f'"{key}" is {shortened(part[key])}, but frames per second are a number above 0.')
    return rate


def _check_names_nothing(part: dict[str, Any], kind: str) -> None:
    """Refuse a part that names its media by a key that is not read; one that names none takes the row's next."""
    keys = [key for key, value in part.items() if key not in _BESIDE_MEDIA and value not in (None, "")]
    if keys:
        raise DataError(
            f'a part of type "{kind}" has {", ".join(keys)}, and none of the keys that say which {kind} it is: '
            f"{', '.join(MEDIA_KEYS)}."
        )


def _refuse_cuts(part: dict[str, Any]) -> None:
    """Refuse what asks for a piece of the media, or for another size: all of it is read, in the folder's own sizes."""
    inner = part.get(part["type"])
    settings = {**part, **(inner if isinstance(inner, dict) else {})}
    cut = next((key for key in _CUTS if settings.get(key) is not None), None)
    if cut is not None:
        raise DataError(
            f'"{cut}" is {shortened(settings[cut])}, but media are read whole, in the sizes and at the rate that the '
            "model's folder, the run or a source sets (data.max_pixels and others, docs/media.md). Cut the file "
            "beforehand, or remove the key."
        )


def _input_audio(value: Any, media: RowMedia) -> Part:
    """OpenAI's sound, in base64 with its format beside it."""
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, str):
        raise DataError(f'"input_audio" is {shortened(value)}, but it must be {{"data": <base64>, "format": ...}}.')
    return media.named("audio", f"data:audio/{value.get('format', '')};base64,{data}")
