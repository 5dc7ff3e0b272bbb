"""Chats as text: rendered by the model's own template, with the places that the assistant wrote itself."""

import re
from collections.abc import Sequence
from typing import Any, cast

from headway.data.bounded import TemplateFailure, render_template
from headway.data.samples import AudioPart, Chat, ImagePart, Message, Part, TextPart, VideoPart
from headway.errors import ConfigError, DataError

Span = tuple[int, int]
"""First and one past the last character."""

_MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_KINDS: dict[type[Part], str] = {ImagePart: "image", VideoPart: "video", AudioPart: "audio"}
_Turns = list[dict[str, Any]]


class ChatTemplate:
    """A model's chat template.

    A model without one can still learn documents; it is chats that are then refused.

    Args:
        processor: the model's processor or tokenizer.
        as_parts: whether messages are handed over as parts, media among them, or as strings.

    Attributes:
        sources: the template's text by its name: "default", and "tool_use" where chats with tools have their own.
    """

    def __init__(self, processor: Any, as_parts: bool) -> None:
        self._as_parts = as_parts
        tokenizer = getattr(processor, "tokenizer", processor)
        template = getattr(processor, "chat_template", None) or tokenizer.chat_template or {}
        self.sources: dict[str, str] = template if isinstance(template, dict) else {"default": template}
        self._tokenizer_name = str(tokenizer.name_or_path)
        self._special_tokens: dict[str, Any] = tokenizer.special_tokens_map

    def prompt(self, sample: Chat) -> str:
        """A chat as text, opened for the assistant to answer.

        Raises:
            ConfigError: there is no chat template.
            DataError: the template refuses the chat.
        """
        return self._render(self._turns(sample.messages), sample, opened=True)

    def with_answers(self, sample: Chat) -> tuple[str, list[Span]]:
        """The whole chat as text, and where the assistant's own words stand in it: tool calls and closing tokens too.

        A template may mark those words itself ({% generation %}). Otherwise a turn begins where the chat before it ends
        once opened for an answer, and ends where the chat with it ends, less the white space that templates put behind
        a closing token and that no model generates.

        Raises:
            ConfigError: there is no chat template.
            DataError: the template refuses the chat, leaves words or tool calls out, or renders turns differently once
                others follow them.
        """
        chat = self._turns(sample.messages)
        if _MARKS_GENERATION.search(self._source(sample)):
            text, marked = self._rendered(chat, sample, return_assistant_tokens_mask=True)
            _check_nothing_is_left_out(text, sample)
            return text, [(int(place[0]), int(place[1])) for place in marked[0]]
        text = self._render(chat, sample)
        _check_nothing_is_left_out(text, sample)
        spans = []
        for i, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            whole = self._render(chat[: i + 1], sample) if i + 1 < len(chat) else text
            before = self._render(chat[:i], sample, opened=True) if i else self._opening(whole, chat, sample)
            if not (text.startswith(whole) and whole.startswith(before)):
                raise DataError(
                    f"{sample.where}: the model's chat template renders turn {i + 1} differently once other turns "
                    "follow, so what the assistant wrote cannot be told apart. Split the chat so that each answer is "
                    "the last turn, or mark the assistant's words in the template with {% generation %}."
                )
            spans.append((len(before), len(whole.rstrip())))
        return text, spans

    def _opening(self, whole: str, chat: _Turns, sample: Chat) -> str:
        """The template's text before an assistant turn that begins the chat: all up to its generation prompt."""
        header = self._render(chat[:1], sample, opened=True)[len(whole) :]
        return whole[: whole.find(header) + len(header)] if header and header in whole else ""

    def _render(self, chat: _Turns, sample: Chat, opened: bool = False) -> str:
        return self._rendered(chat, sample, add_generation_prompt=opened)[0]

    def _rendered(self, chat: _Turns, sample: Chat, **options: Any) -> tuple[str, Any]:
        source, tools = self._source(sample), cast(Any, [*sample.tools] or None)
        try:
            return render_template(chat, source, tools=tools, **self._special_tokens, **options)
        except TemplateFailure as error:
            raise DataError(
                f"{sample.where}: the model's chat template refuses this chat: {error}. Check the order of the "
                "roles, and whether the model takes system messages and tools."
            ) from error

    def _source(self, sample: Chat) -> str:
        name = "tool_use" if sample.tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ConfigError(
                f"The tokenizer of {self._tokenizer_name!r} has no chat template, so chats cannot become tokens. Use "
                "the instruction-tuned model's tokenizer, or put a chat_template.jinja into the model's folder."
            )
        return self.sources[name]

    def _turns(self, messages: Sequence[Message]) -> _Turns:
        turns: _Turns = []
        for message in messages:
            content: Any = [_part(part) for part in message.parts] if self._as_parts else message.text
            turn = {"role": message.role, "content": content}
            if message.tool_calls:
                turn["tool_calls"] = list(message.tool_calls)
            if message.name is not None:
                turn["name"] = message.name
            turns.append(turn)
        return turns


def _check_nothing_is_left_out(text: str, sample: Chat) -> None:
    """Templates made for other messages pass over what they do not know, such as tool calls.

    Of what is said the last line is looked for: templates may trim it, and rewrite the thoughts before an answer.
    """
    for number, message in enumerate(sample.messages, start=1):
        texts = [part.text for part in message.parts if isinstance(part, TextPart) and part.text.strip()]
        last = texts[-1].strip().splitlines()[-1] if texts and message.role in ("user", "assistant") else ""
        last = last.rsplit("</think>", 1)[-1].strip()
        calls = [str(call["function"]["name"]) for call in message.tool_calls]
        for what, words in [("words", last), *(("a tool call", call) for call in calls)]:
            if words not in text:
                raise DataError(
                    f"{sample.where}: the model's chat template leaves out {what} of turn {number}, {words[:60]!r}. "
                    "Use a template that renders them (many models have one for tools), or delete the sample."
                )
    for tool in sample.tools:
        name = str(tool.get("function", tool).get("name", ""))
        if name not in text:
            raise DataError(
                f"{sample.where}: the model's chat template leaves out the tool {name!r} that the chat offers. Use a "
                "template that renders tools, or delete the sample."
            )


def _part(part: Part) -> dict[str, str]:
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": _KINDS[type(part)]}
