"""Turns of a chat and their content, in the forms that datasets write them.

Turns are OpenAI's messages, ShareGPT's conversations, or rounds of a question and its answer. Content is words, with
markers that stand for media, or a list of parts: words, images, videos and sounds in the forms of many tools.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.data.samples import MediaPart, Message, Part, TextPart
from headway.data.sources.marks import (
    HARMLESS_COLUMNS,
    HARMLESS_KEYS,
    REASONING,
    check_part,
    is_learnt,
    learning_keys,
    round_keys,
)
from headway.data.sources.references import FRAMES_PER_S, KINDS, MEDIA_KEYS, RowMedia, media_key
from headway.data.sources.text_rows import shortened
from headway.errors import DataError

SPEAKERS = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Roles and speakers in the words of OpenAI, ShareGPT, LLaMA-Factory, Gemma and ms-swift, and the roles they have here.

Capitals do not matter.
"""

_CALLERS = ("function_call", "tool_call")  # speakers whose words are the JSON of a call
_MEANINGFUL = ("function_call", "refusal", "audio")  # keys that would change what is learnt if they were left out


# Keys that Qwen's and LMMs-Engine's processors read beside a part's media: a piece of it, or a size of its own.
_CUTS = (
    "video_start", "video_end", "nframes", "fps", "min_frames", "max_frames",
    "min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "sample_fps", "raw_fps",
)  # fmt: skip
_BESIDE_MEDIA = ("type", "text", "detail", "cache_control", *HARMLESS_KEYS, *HARMLESS_COLUMNS)
_RATES = ("sample_fps", "fps")  # frame rates of a list of frames, as qwen-vl-utils reads them
_TYPES = {
    "image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio", "input_image": "image",
    "input_text": "text", "output_text": "text",
}  # fmt: skip
"""Types of parts and the kinds that they are of. Source: OpenAI's chat completions and responses."""
_MARKER = re.compile(f"<({'|'.join(KINDS)})>")


def words_of(value: Any) -> str | None:
    """A string as it is, a number, true or false as JSON writes it; None of any other value.

    >>> words_of("a"), words_of(3), words_of(0.5), words_of(True), words_of([])
    ('a', '3', '0.5', 'true', None)
    """
    if isinstance(value, str):
        return value
    is_word = isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    return json.dumps(value) if is_word else None


def read_turns(value: Any, column: str, media: RowMedia, has_markers: bool = True) -> tuple[Message, ...]:
    """Read a column of turns in any form: {"role", "content"}, {"from", "value"}, or rounds {"user", "assistant"}.

    Content is a string or a list of parts. Parts of the types image, video and audio take their media from the row's
    columns if they name none. Without such parts, the markers <image>, <video> and <audio> in words stand for the
    columns' media, even where those are empty; without columns they are words, but in turns with "from", whose markers
    always stand for media.

    Args:
        value: the list of turns.
        column: where they stand, for messages to people; of turns with neither key, "conversations" means "from".
        media: the row's media.
        has_markers: whether markers are looked for; otherwise they are words.
    """
    turns = rounds_as_turns(turns_of(value, column))
    first = turns[0].keys() if isinstance(turns[0], dict) else set[str]()
    has_speakers = "from" in first or (column == "conversations" and "role" not in first)
    typed = {_kind_of_part(part) for turn in turns if isinstance(turn, dict) for part in _parts_of(turn.get("content"))}
    markers = {
        kind for kind in KINDS if has_markers and (has_speakers or (kind in media.counted and kind not in typed))
    }
    reader = _Turns(media, markers)
    for number, turn in enumerate(turns, start=1):
        reader.read(_with_role(turn, f"turn {number}") if has_speakers else turn, number, has_speakers)
    return tuple(reader.messages)


class _Turns:
    """Reads the turns of a chat one after the other; knows the tools that were called."""

    def __init__(self, media: RowMedia, markers: set[str]) -> None:
        self.messages: list[Message] = []
        self._media, self._markers = media, markers
        self._names: dict[str, str] = {}  # names of called tools, by the ids of their calls
        self._waiting: list[str] = []  # names of tools that were called by a turn of its own, and have not answered

    def read(self, turn: Any, number: int, has_speakers: bool = False) -> None:
        """Read a turn with the keys role and content."""
        where = f"{'turn' if has_speakers else 'message'} {number}"
        if not isinstance(turn, dict) or "role" not in turn or not {"content", "tool_calls", *REASONING} & turn.keys():
            raise DataError(
                f'{where}: got {shortened(turn)}, but a message must be an object with "role" and "content".'
            )
        speaker = turn["role"].lower() if isinstance(turn["role"], str) else None
        role = SPEAKERS.get(speaker or "")
        if role is None:
            raise DataError(
                f"{where}: unknown {'speaker' if has_speakers else 'role'} {shortened(turn['role'])}. Allowed are "
                f"{', '.join(SPEAKERS)}."
            )
        for key in _MEANINGFUL:
            if turn.get(key) not in (None, "", []):
                raise DataError(
                    f'{where}: "{key}" is not read, and leaving it out would change the turn. Write its words into '
                    '"content" as the model\'s chat template does, and calls into "tool_calls".'
                )
        learnt = not learning_keys(tuple(turn)) or is_learnt(turn, role, where)
        if speaker in _CALLERS:
            self._call(turn.get("content"), where, learnt)
        else:
            self.messages.append(self._message(turn, role, where, learnt))

    def _call(self, content: Any, where: str, learnt: bool) -> None:
        """A turn of calls alone; several on end are one turn, as ms-swift writes calls that are made together."""
        calls = _tool_calls(json_value(content, f"{where}: the call"), where)
        last = self.messages[-1] if self.messages else None
        if last is not None and last.tool_calls and not last.parts and last.learnt == learnt:
            calls = last.tool_calls + calls
            self.messages.pop()
        self._waiting = [call["function"]["name"] for call in calls]
        self.messages.append(Message("assistant", (), calls, learnt=learnt))

    def _message(self, turn: dict[str, Any], role: str, where: str, learnt: bool) -> Message:
        content, name = turn.get("content"), None
        calls: tuple[dict[str, Any], ...] = ()
        if role == "tool":
            name = turn.get("name") or self._names.get(str(turn.get("tool_call_id")))
            if self._waiting:  # calls that were made together are answered in their order
                name = name or (self._waiting.pop(0) if len(self._waiting) > 1 else self._waiting[0])
        else:
            calls = _tool_calls(json_value(turn.get("tool_calls") or [], "tool_calls"), where, self._names)
        thoughts = _reasoning(turn, role, where)
        if content is None and (calls or thoughts):
            return Message(role, (), calls, name, thoughts, learnt)
        if (words := words_of(content)) is not None:
            return Message(role, split_markers(words, self._markers, self._media), calls, name, thoughts, learnt)
        # A tool's answer may be a value, which templates write as JSON.
        is_value = isinstance(content, dict) or (isinstance(content, list) and not all(map(_kind_of_part, content)))
        if role == "tool" and is_value:
            return Message(role, (TextPart(json.dumps(content, ensure_ascii=False)),), calls, name, thoughts, learnt)
        if not isinstance(content, list):
            raise DataError(f'{where}: "content" is {shortened(content)}, but it must be a string or a list of parts.')
        for part in content:
            if isinstance(part, dict) and learning_keys(tuple(part)):
                check_part(part, where)
        spoken = (part for part in content if not _is_thinking(part))
        parts = tuple(part for item in spoken for part in _read_part(item, self._media, self._markers, where))
        return Message(role, parts, calls, name, thoughts, learnt)


def _with_role(turn: Any, where: str) -> Any:
    """A turn of ShareGPT, {"from": speaker, "value": words}, with the keys that OpenAI gives it."""
    speaker, words = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
    if speaker is None or (words_of(words) is None and not isinstance(words, list | dict)):
        raise DataError(f'{where}: got {shortened(turn)}, but a turn needs the strings "from" and "value".')
    return {**turn, "role": speaker, "content": words}


def rounds_as_turns(entries: Iterable[Any]) -> list[Any]:
    """Turns, some of them perhaps written as rounds of two."""
    return [turn for entry in entries for turn in _turns_of_round(entry)]


def speaks_as(turn: Any) -> str | None:
    """The role of a turn as it was written; None for other values.

    >>> speaks_as({"from": "gpt", "value": "Ho"}), speaks_as({"user": "Hi", "assistant": "Ho"}), speaks_as("Hi")
    ('assistant', 'user', None)
    """
    if not isinstance(turn, dict):
        return None
    speaker = turn.get("role", turn.get("from", "user" if round_keys(tuple(turn)) else None))
    return SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None


def _turns_of_round(turn: Any) -> list[Any]:
    """The two turns of a round, {"user": words, "assistant": words}; any other turn as it is.

    Source: the_cauldron's and FineVision's `texts`; ms-swift's `conversation`, whose user is called human.
    """
    keys = round_keys(tuple(turn)) if isinstance(turn, dict) else ()
    if not keys:
        return [turn]
    marks = {key: value for key, value in turn.items() if key not in keys}
    question, answer = (turn[key] for key in keys)
    return [{"role": "user", "content": question}, {**marks, "role": "assistant", "content": answer}]


def turns_of(value: Any, name: str) -> list[Any]:
    """The list of turns in a column, which may hold JSON, or a list for every key as `datasets` stores sequences."""
    turns = json_value(value, name)
    if isinstance(turns, list):  # each may be JSON by itself, as older `datasets` store what differs from row to row
        turns = [json_value(turn, name) if _is_object(turn) else turn for turn in turns]
    turns = as_rows(turns)
    if not isinstance(turns, list):
        raise DataError(f'got {shortened(value)}, but "{name}" must be a list of turns.')
    if not turns:
        raise DataError(f'the list "{name}" is empty. A chat needs at least one turn; delete the row or fill it.')
    return turns


def as_rows(value: Any) -> Any:
    """The rows of an object of lists, as tables hold a list of objects; anything else as it is."""
    columns = list(value.values()) if isinstance(value, dict) else []
    if all(isinstance(column, list) for column in columns) and len({len(column) for column in columns}) == 1:
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    return value


def _is_object(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("{")


def json_value(value: Any, what: str) -> Any:
    """A column's value, read as JSON where it is a string: columns of a table hold nested values so."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of too many digits
        raise DataError(f"{what} is a string but not JSON ({error}): {shortened(value)}.") from error


def with_leading_media(turns: tuple[Message, ...], media: RowMedia) -> tuple[Message, ...]:
    """Media of a kind that no marker and no part places stand before the user's first words.

    Source: TRL 1.16, `prepare_multimodal_messages`; ms-swift 3.8, `Template._add_default_tags`.
    """
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None or not any(media.waiting.values()):
        return turns
    placed = {part.kind for turn in turns for part in turn.parts if isinstance(part, MediaPart)}
    leading = media.rest(placed)
    question = replace(turns[first], parts=(*leading, *turns[first].parts))
    return (*turns[:first], question, *turns[first + 1 :])


def read_template_inputs(fields: Mapping[str, Any]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Functions that the assistant may call, and variables of the chat template, which a row sets as TRL reads them."""
    tools = json_value(fields["tools"], "tools") if fields.get("tools") not in (None, "") else []
    if isinstance(tools, list):
        tools = [json_value(tool, "tools") if _is_object(tool) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f'"tools" is {shortened(fields["tools"])}, but it must be a list of JSON schemas of functions.')
    variables = json_value(fields.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(variables, dict) or not all(
        isinstance(value, bool | int | float | str | None) for value in variables.values()
    ):
        raise DataError(
            f'"chat_template_kwargs" is {shortened(variables)}, but it must be an object of numbers, strings and '
            'booleans, such as {"enable_thinking": false}.'
        )
    return tuple(tools), {name: value for name, value in variables.items() if value is not None}


def _reasoning(turn: Mapping[str, Any], role: str, where: str) -> str:
    """Thoughts of the assistant before it answers: of a key of their own, or of parts of the type thinking."""
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


def _parts_of(content: Any) -> Sequence[Any]:
    """The parts of a turn's content; none of words."""
    return content if isinstance(content, list) else ()


def _kind_of_part(part: Any) -> str | None:
    """Kind of a part: text, image, video or sound; None for anything else."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return None
    kind = _TYPES.get(kind, kind)
    return kind if kind == "text" or kind in KINDS else None


def _read_part(part: Any, media: RowMedia, markers: set[str], where: str) -> tuple[Part, ...]:
    """Parts of a turn's content of one as it was written; its words may hold markers."""
    kind = _kind_of_part(part)
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
    """Frames per second of a part whose video is a list of frames, in place of a file's own rate."""
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
    """Refuse settings of a piece of the media, or of another size: all of it is read, in the folder's own sizes."""
    inner = part.get(part["type"])
    settings = {**part, **(inner if isinstance(inner, dict) else {})}
    cut = next((key for key in _CUTS if settings.get(key) is not None), None)
    if cut is not None:
        raise DataError(
            f'"{cut}" is {shortened(settings[cut])}, but media are read whole, in the sizes and at the rate that the '
            "model's folder, the run or a source sets (data.max_pixels and others, docs/data.md). Cut the file "
            "beforehand, or remove the key."
        )


def _input_audio(value: Any, media: RowMedia) -> Part:
    """OpenAI's sound, in base64 with its format beside it."""
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, str):
        raise DataError(f'"input_audio" is {shortened(value)}, but it must be {{"data": <base64>, "format": ...}}.')
    return media.named("audio", f"data:audio/{value.get('format', '')};base64,{data}")
