"""The tokens that end an answer, read off a chat template by rendering made-up chats.

Most templates write a token behind every answer. Some write none: what ends an answer is then the marker with which the
next turn begins (GLM), which generation stops at, or the tokenizer's end of text.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.data.samples import Message, TextPart
from headway.errors import DataError

_QUESTION, _ANSWER, _RESULT = "Qx7?", "Ax7.", "Rx7"
_NAME, _VALUE = "fx7", "Vx7"
_CALL = {"type": "function", "function": {"name": _NAME, "arguments": {"x": _VALUE}}}
_SCHEMA = {"type": "object", "properties": {"x": {"type": "string", "description": "a"}}, "required": ["x"]}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "a", "parameters": _SCHEMA}}
_MARKER = re.compile(r"<\S+>|\[\S+\]")

Render = Callable[[Sequence[Message], tuple[dict[str, Any], ...]], str]
"""Renders a chat that offers tools."""


class Stop(NamedTuple):
    """Token that ends an answer.

    Attributes:
        token: a special token of the tokenizer.
        before: white space that the template writes before it, which a model has to generate as well.
    """

    token: str
    before: str = ""


class Stops(NamedTuple):
    """Tokens that end answers in words, and tokens that end calls of a tool.

    Attributes:
        plain: behind words; None where neither the template nor the tokenizer has one.
        call: behind a tool call; None where the template renders none.
        end: the tokenizer's end of text, which ends an answer wherever it stands; None without.
        unknown: a marker that the template writes behind words, which is no token of the tokenizer; None without.
    """

    plain: Stop | None
    call: Stop | None
    end: Stop | None
    unknown: str | None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(dict.fromkeys(stop.token for stop in (self.plain, self.call, self.end) if stop is not None))

    def end_in(self, answer: str, special: "SpecialTokens") -> int | None:
        """One past the token that ends an answer, behind which a template may write more tokens; None without one."""
        for stop in (self.plain, self.call, self.end):
            place = -1 if stop is None else answer.rfind(stop.token)
            if stop is not None and place >= 0 and special.alone(answer[place + len(stop.token) :]):
                return place + len(stop.token)
        return None


@dataclass(frozen=True)
class SpecialTokens:
    """A tokenizer's special tokens.

    Attributes:
        ids: id of each, by its text.
        end: the end of text; None without one.
    """

    ids: dict[str, int]
    end: str | None

    @classmethod
    def of(cls, tokenizer: Any) -> "SpecialTokens":
        """Those of a tokenizer: tokens that it never puts together from others."""
        ids = {str(token): int(number) for number, token in tokenizer.added_tokens_decoder.items()}
        end = tokenizer.eos_token
        return cls(ids | ({end: int(tokenizer.eos_token_id)} if end is not None else {}), end)

    def first(self, text: str) -> str | None:
        """The special token with which a text begins."""
        return max((token for token in self.ids if text.startswith(token)), key=len, default=None)

    def last(self, text: str) -> str | None:
        """The special token with which a text ends."""
        return max((token for token in self.ids if text.endswith(token)), key=len, default=None)

    def within(self, text: str) -> list[str]:
        """The special tokens that a text holds."""
        return [token for token in self.ids if token in text]

    def beginning(self, text: str) -> list[str]:
        """The special tokens with which a text begins, with white space before each."""
        tokens, left = [], text.lstrip()
        while (token := self.first(left)) is not None:
            tokens.append(token)
            left = left[len(token) :].lstrip()
        return tokens

    def alone(self, text: str) -> bool:
        """Tell whether a text holds nothing but special tokens and white space."""
        return not text.strip() or sum(map(len, self.beginning(text))) == len("".join(text.split()))

    def around(self, text: str, place: int) -> int:
        """The beginning of the special token that a place in a text falls into; the place itself without one."""
        for token in self.ids:
            start = text.rfind(token, max(0, place - len(token) + 1), place + len(token) - 1)
            if start >= 0 and start < place:
                return start
        return place


def find_stops(render: Render, special: SpecialTokens, has_tools: bool) -> Stops:
    """Find the tokens that end answers.

    Args:
        render: the chat template.
        special: of the tokenizer.
        has_tools: whether tool calls are tried as well.
    """
    end = None if special.end is None else Stop(special.end)
    plain = _plain(render, special)
    unknown = plain if isinstance(plain, str) else None
    called = _call(render, special) if has_tools else None
    return Stops(plain if isinstance(plain, Stop) else end, called, end, unknown)


def _plain(render: Render, special: SpecialTokens) -> Stop | str | None:
    """Find the text behind an answer in words, which may be no token; None where nothing stands there."""
    chat = [_turn("user", _QUESTION), _turn("assistant", _ANSWER)]
    try:
        tail = render(chat, ()).rpartition(_ANSWER)[2]
        followed = render([*chat, _turn("user", _QUESTION)], ()).rpartition(_ANSWER)[2]
    except DataError:  # a template that refuses this chat may take the real ones
        return None
    if not tail.strip():
        return _begins(followed, special)
    written, before_turn = special.beginning(tail), special.beginning(followed)
    if not written and _MARKER.fullmatch(tail.strip()):
        return tail.strip()
    # The last token that stands there whatever follows: a template may end the whole chat with one more.
    shared = [token for token, other in zip(written, before_turn, strict=False) if token == other]
    return Stop((shared or written[:1])[-1]) if written else None


def _call(render: Render, special: SpecialTokens) -> Stop | None:
    """Find the token behind a tool call; None where the template renders none."""
    chat = [_turn("user", _QUESTION), Message("assistant", (), tool_calls=(_CALL,))]
    try:
        shown = render(chat, (_TOOL,)).rstrip()
    except DataError:
        return None
    before, _, tail = shown.rpartition(_VALUE)
    if not before:
        return None
    last = special.last(shown)
    # A token that closes what another one opened, as </tool_call>, ends the call and not the answer.
    if last is not None and not any(
        token != last and _name_in(token) == _name_in(last) for token in special.within(before)
    ):
        return Stop(last)
    after = [*chat, Message("tool", (TextPart(_RESULT),), name=_NAME)]
    return _next(render, special, after, _VALUE + tail, (_TOOL,))


def _next(
    render: Render, special: SpecialTokens, chat: Sequence[Message], answer: str, tools: tuple[dict[str, Any], ...] = ()
) -> Stop | None:
    """The special token with which the turn after an answer begins; None where it begins with words."""
    try:
        before, _, tail = render(chat, tools).rpartition(answer)
    except DataError:
        return None
    return _begins(tail, special) if before else None


def _begins(text: str, special: SpecialTokens) -> Stop | None:
    """The special token with which a text begins, behind white space."""
    token = special.first(text.lstrip())
    return None if token is None else Stop(token, text[: len(text) - len(text.lstrip())])


def _turn(role: str, text: str) -> Message:
    return Message(role, (TextPart(text),))


def _name_in(token: str) -> str:
    """The letters of a token, which one that opens and one that closes have in common."""
    return re.sub(r"\W", "", token)


def with_stops(settings: Any, stop_ids: set[int]) -> Any:
    """A copy of a model's generation settings that ends answers where they were learnt to end as well.

    Args:
        settings: transformers' `GenerationConfig`.
        stop_ids: of the chat template and the tokenizer, beside which the model's own stay.
    """
    settings = copy.deepcopy(settings)
    own = settings.eos_token_id
    ids = [*(own if isinstance(own, list) else [] if own is None else [own])]
    ids += sorted(stop_ids - {*ids})
    settings._from_model_config = False  # keeps transformers from deriving settings anew from the model's configuration
    settings.eos_token_id = (ids if len(ids) > 1 else ids[0]) if ids else None
    return settings
