"""Turns of a chat, in the forms that datasets write them: OpenAI's messages and ShareGPT's conversations."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headway.data.samples import ROLES, Message, Part, TextPart
from headway.data.sources.json_rows import shortened
from headway.data.sources.marks import HARMLESS_COLUMNS, HARMLESS_KEYS, REASONING, is_learnt
from headway.data.sources.references import FRAMES_PER_S, KINDS, MEDIA_KEYS, RowMedia, media_key
from headway.errors import DataError

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
"""ShareGPT's speakers and the roles that they have here."""

_MEANINGFUL = ("function_call", "refusal", "audio")
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
_MARKER = re.compile(r"<(image|video|audio)>")


def read_turns(value: Any, column: str, media: RowMedia, has_markers: bool = True) -> tuple[Message, ...]:
    """Read a column of turns in either form, told by the first turn's keys: "from", or "role".

    Args:
        value: the list of turns.
        column: "messages" or "conversations", whose form is meant where the first turn has neither.
        media: the row's media.
        has_markers: whether markers are looked for; otherwise they are words.

    Raises:
        DataError: it is something else; the message names the turn.
    """
    first = turns_of(value, column)[0]
    keys = first.keys() if isinstance(first, dict) else set[str]()
    if "from" in keys or (column == "conversations" and "role" not in keys):
        return read_conversations(value, media, has_markers)
    return read_messages(value, media, column, has_markers)


def read_messages(
    value: Any, media: RowMedia, column: str = "messages", has_markers: bool = True
) -> tuple[Message, ...]:
    """Read OpenAI's messages.

    Content is a string or a list of parts. Parts of the types image, video and audio take their media from the row's
    columns if they name none. Without such parts, the markers <image>, <video> and <audio> in words stand for the
    columns' media, even where those are empty; without columns they are words.

    Args:
        value: the list of messages.
        media: the row's media.
        column: where they stand, for messages to people.
        has_markers: whether markers are looked for; otherwise they are words.

    Raises:
        DataError: it is something else; the message names the turn.
    """
    turns = turns_of(value, column)
    typed = {_kind(part) for turn in turns if isinstance(turn, dict) for part in _parts_of(turn.get("content"))}
    markers = {kind for kind in KINDS if has_markers and media.counts(kind) and kind not in typed}
    calls: dict[str, str] = {}  # names of called tools by the calls' ids
    return tuple(_message(turn, media, markers, calls, f"message {i}") for i, turn in enumerate(turns, 1))


def read_conversations(value: Any, media: RowMedia, has_markers: bool = True) -> tuple[Message, ...]:
    """Read ShareGPT's turns, each {"from": speaker, "value": words}.

    Args:
        value: the list of turns.
        media: the row's media, one for each marker <image>, <video> or <audio>, in order.
        has_markers: whether markers are looked for; otherwise they are words.

    Raises:
        DataError: it is something else; the message names the turn.
    """
    messages, called = [], ""
    for number, turn in enumerate(turns_of(value, "conversations"), start=1):
        where = f"turn {number}"
        speaker, words = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(words, str):
            raise DataError(f'{where}: got {shortened(turn)}, but a turn needs the strings "from" and "value".')
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise DataError(f"{where}: unknown speaker {shortened(speaker)}. Allowed are {', '.join(SPEAKERS)}.")
        _check_keys(turn, where)
        learnt = is_learnt(turn, SPEAKERS[speaker], where)
        if speaker == "function_call":
            calls = _tool_calls(json_value(words, f"{where}: the call"), where)
            called = calls[-1]["function"]["name"]
            messages.append(Message("assistant", (), calls, learnt=learnt))
            continue
        parts = split_markers(words, set(KINDS) if has_markers else set(), media)
        role = SPEAKERS[speaker]
        messages.append(Message(role, parts, name=(called or None) if role == "tool" else None, learnt=learnt))
    return tuple(messages)


def turns_of(value: Any, name: str) -> list[Any]:
    """The list of turns in a column, which may hold JSON, or a list for every key as `datasets` stores sequences.

    Raises:
        DataError: it is something else, or empty.
    """
    turns = json_value(value, name)
    columns = list(turns.values()) if isinstance(turns, dict) else []
    if all(isinstance(column, list) for column in columns) and len({len(column) for column in columns}) == 1:
        turns = [dict(zip(turns, turn, strict=True)) for turn in zip(*columns, strict=True)]
    if not isinstance(turns, list):
        raise DataError(f'got {shortened(value)}, but "{name}" must be a list of turns.')
    if not turns:
        raise DataError(f'the list "{name}" is empty. A chat needs at least one turn; delete the row or fill it.')
    return turns


def json_value(value: Any, what: str) -> Any:
    """A column's value, read as JSON where it is a string: columns of a table hold nested values so.

    Raises:
        DataError: the string is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of too many digits
        raise DataError(f"{what} is a string but not JSON ({error}): {shortened(value)}.") from error


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Read the functions that the assistant may call: a list of JSON schemas, or JSON of one.

    Raises:
        DataError: it is something else.
    """
    tools = json_value(value, "tools") if value not in (None, "") else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f'"tools" is {shortened(value)}, but it must be a list of JSON schemas of functions.')
    return tuple(tools)


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


def _message(turn: Any, media: RowMedia, markers: set[str], calls: dict[str, str], where: str) -> Message:
    if not isinstance(turn, dict) or "role" not in turn or not {"content", "tool_calls", *REASONING} & turn.keys():
        raise DataError(f'{where}: got {shortened(turn)}, but a message must be an object with "role" and "content".')
    role, said = turn["role"], turn.get("content")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise DataError(f"{where}: unknown role {shortened(role)}. A role is one of {', '.join(ROLES)}, developer.")
    _check_keys(turn, where)
    made = _tool_calls(json_value(turn.get("tool_calls") or [], "tool_calls"), where, calls) if role != "tool" else ()
    name = turn.get("name") or calls.get(str(turn.get("tool_call_id"))) if role == "tool" else None
    learnt = is_learnt(turn, role, where)
    thoughts = _reasoning(turn, role, where)
    if said is None and (made or thoughts):
        return Message(role, (), made, name, thoughts, learnt)
    if isinstance(said, str):
        return Message(role, split_markers(said, markers, media), made, name, thoughts, learnt)
    if not isinstance(said, list):
        raise DataError(f'{where}: "content" is {shortened(said)}, but it must be a string or a list of parts.')
    parts = [part for each in said if not _is_thinking(each) for part in _read_part(each, media, markers, where)]
    return Message(role, tuple(parts), made, name, thoughts, learnt)


def _reasoning(turn: Mapping[str, Any], role: str, where: str) -> str:
    """What the assistant thinks before it answers: of a key of its own, or of parts of the type thinking."""
    values = [turn[key] for key in REASONING if turn.get(key) not in (None, "")]
    for part in filter(_is_thinking, _parts_of(turn.get("content"))):
        values.append(next((part[key] for key in (*REASONING, "text") if part.get(key) not in (None, "")), ""))
    if not values:
        return ""
    if role != "assistant" or not all(isinstance(value, str) for value in values):
        raise DataError(
            f'{where}: got {shortened(turn)}, but "reasoning_content" and parts of the type "thinking" are strings in '
            "turns of the assistant. Write the words there, or remove them."
        )
    return "\n".join(dict.fromkeys(values))  # one text under several names is one text


def _is_thinking(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")


def _check_keys(turn: Mapping[str, Any], where: str) -> None:
    """Refuse what would change what is learnt if it were left out."""
    for key in _MEANINGFUL:
        if turn.get(key) not in (None, "", []):
            raise DataError(
                f'{where}: "{key}" is not read, and leaving it out would change the turn. Write its words into '
                '"content" as the model\'s chat template does, and calls into "tool_calls".'
            )


def _parts_of(content: Any) -> Sequence[Any]:
    return content if isinstance(content, list) else ()


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return None
    kind = _TYPES.get(kind, kind)
    return kind if kind == "text" or kind in KINDS else None


def _read_part(part: Any, media: RowMedia, markers: set[str], where: str) -> tuple[Part, ...]:
    kind = _kind(part)
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
    given = {**part, **(inner if isinstance(inner, dict) else {})}
    cut = next((key for key in _CUTS if given.get(key) is not None), None)
    if cut is not None:
        raise DataError(
            f'"{cut}" is {shortened(given[cut])}, but media are read whole, in the sizes of the model\'s '
            "folder. Cut the file beforehand, or remove the key."
        )


def _input_audio(value: Any, media: RowMedia) -> Part:
    """OpenAI's sound, in base64 with its format beside it."""
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, str):
        raise DataError(f'"input_audio" is {shortened(value)}, but it must be {{"data": <base64>, "format": ...}}.')
    return media.named("audio", f"data:audio/{value.get('format', '')};base64,{data}")


def _tool_calls(value: Any, where: str, names: dict[str, str] | None = None) -> tuple[dict[str, Any], ...]:
    """Calls in the form that chat templates read; `names` learns each call's id."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise DataError(f'{where}: the tool call {shortened(call)} names no function; it needs "name".')
        arguments = json_value(function.get("arguments") or {}, f"{where}: the arguments of {name}")
        if not isinstance(arguments, dict):
            raise DataError(f"{where}: the arguments of {name} are {shortened(arguments)}, but must be an object.")
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
        if names is not None and isinstance(call.get("id"), str):
            names[call["id"]] = name
    return tuple(calls)
