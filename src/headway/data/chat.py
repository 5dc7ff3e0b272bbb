"""Chats as text: rendered by the model's own template, with the places that the assistant wrote itself."""

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from headway.data.samples import Chat, Message, TextPart
from headway.errors import ConfigError, DataError

Span = tuple[int, int]
"""First and one past the last character."""

_MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_Turns = list[dict[str, Any]]


class ChatTemplate:
    """A model's chat template.

    Args:
        processor: the model's processor or tokenizer.
        sees_images: whether messages are handed over as parts, images among them, or as strings.

    Raises:
        ConfigError: there is no chat template.
    """

    def __init__(self, processor: Any, sees_images: bool) -> None:
        self._processor, self._sees_images = processor, sees_images
        tokenizer = getattr(processor, "tokenizer", processor)
        template = getattr(processor, "chat_template", None) or tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not isinstance(template, str):
            raise ConfigError(
                f"The tokenizer of {tokenizer.name_or_path!r} has no chat template, so chats cannot become tokens. "
                "Use the instruction-tuned model's tokenizer, or put a chat_template.jinja into the model's folder."
            )
        self._template: str = template
        self._special_tokens: dict[str, Any] = tokenizer.special_tokens_map

    def prompt(self, messages: Sequence[Message], sample: Chat) -> str:
        """Messages as text, opened for the assistant to answer.

        Raises:
            DataError: the template refuses the chat.
        """
        return self._render(self._chat(messages), sample, opened=True)

    def with_answers(self, sample: Chat) -> tuple[str, list[Span]]:
        """The whole chat as text, and where the assistant's own words stand in it, closing tokens included.

        A template may mark those words itself ({% generation %}). Otherwise a turn begins where the chat before it ends
        once opened for an answer, and ends where the chat with it ends, less the white space that templates put behind
        a closing token and that no model generates.

        Raises:
            DataError: the template refuses the chat, or renders turns differently once others follow them.
        """
        chat = self._chat(sample.messages)
        if _MARKS_GENERATION.search(self._template):
            rendered: Any = render_jinja_template(
                [chat], chat_template=self._template, return_assistant_tokens_mask=True, **self._special_tokens
            )
            texts, marked = rendered
            return str(texts[0]), [(int(place[0]), int(place[1])) for place in marked[0]]
        text = self._render(chat, sample)
        spans = []
        for i, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            whole = self._render(chat[: i + 1], sample)
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
        """What the template puts before an assistant turn that begins the chat: all up to its generation prompt."""
        header = self._render(chat[:1], sample, opened=True)[len(whole) :]
        return whole[: whole.find(header) + len(header)] if header and header in whole else ""

    def _render(self, chat: _Turns, sample: Chat, opened: bool = False) -> str:
        try:
            text: str = self._processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=opened)
        except (TemplateError, TypeError, ValueError, KeyError) as error:  # what templates raise is theirs to choose
            raise DataError(
                f"{sample.where}: the model's chat template refuses this chat: {error}. Check the order of the "
                "roles, and whether the model takes system messages."
            ) from error
        return text

    def _chat(self, messages: Sequence[Message]) -> _Turns:
        """Messages in the form that templates read."""
        if not self._sees_images:
            return [{"role": message.role, "content": message.text} for message in messages]
        return [{"role": message.role, "content": [_part(part) for part in message.parts]} for message in messages]


def _part(part: Any) -> dict[str, str]:
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
