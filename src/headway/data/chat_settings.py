"""Settings of chats: a template and variables in place of the model folder's."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.files import SETTINGS_BYTES, check_plain, read_text
from headway.words import Argument

TEMPLATE_FILE = Argument("model.chat_template")


@cache
def rendering_arguments() -> frozenset[str]:
    """Names that no variable of a template may have: of the messages, and of arguments of `apply_chat_template`."""
    from transformers import PreTrainedTokenizerBase

    return frozenset({"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters})


@dataclass(frozen=True)
class ChatSettings:
    """A chat template and what it is rendered with.

    Attributes:
        template: the template's text; None for the model's own.
        variables: of the template, such as enable_thinking, for all chats that do not set them.
    """

    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, file: str | None, variables: Mapping[str, Any] | None = None) -> "ChatSettings":
        """Read a template's file.

        Raises:
            ConfigError: it cannot be read, or is not a template.
        """
        template = None if file is None else _read_template(Path(file))
        return cls(template, dict(variables or {}))

    def write_into(self, processor: Any) -> None:
        """Give a processor or tokenizer the template, as its own: whatever it renders, and saves, follows it.

        Variables stand at the template's beginning, so that a model's folder that is saved renders chats by itself
        as they were learnt.

        Raises:
            ConfigError: there are variables, but no template that could read them, or they are arguments of rendering.
        """
        tokenizer = getattr(processor, "tokenizer", processor)
        template = self.template or getattr(processor, "chat_template", None) or tokenizer.chat_template
        if self.variables:
            if arguments := sorted(rendering_arguments() & self.variables.keys()):
                raise ConfigError(
                    f"model.chat_template_kwargs sets {', '.join(arguments)}, which rendering itself decides: it is an "
                    "argument of apply_chat_template and no variable of the template. Leave it out."
                )
            if not template:
                raise ConfigError(
                    f"model.chat_template_kwargs sets {', '.join(self.variables)}, but the model has no chat template. "
                    f"Leave it out, or give a template with {TEMPLATE_FILE}."
                )
            texts = template.values() if isinstance(template, dict) else [template]
            if unread := [name for name in self.variables if not any(name in text for text in texts)]:
                raise ConfigError(
                    f"model.chat_template_kwargs sets {', '.join(unread)}, which the model's chat template does not "
                    f"read, so it has no effect. Leave it out, or give another template with {TEMPLATE_FILE}."
                )
            if isinstance(template, dict):
                template = {name: self._opening() + text for name, text in template.items()}
            else:
                template = self._opening() + template
        elif self.template is None:
            return
        for part in {id(part): part for part in (processor, tokenizer)}.values():
            part.chat_template = template

    def _opening(self) -> str:
        return "".join(
            f"{{%- if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif -%}}"
            for name, value in self.variables.items()
        )


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _read_template(path: Path) -> str:
    from jinja2 import TemplateSyntaxError

    from headway.data.template_bounds import MAX_SOURCE, compile_template

    try:
        check_plain(path)  # to open a pipe would wait for whoever writes it
        if path.stat().st_size > MAX_SOURCE:
            raise ConfigError(f"{TEMPLATE_FILE} {path} has {path.stat().st_size:,} bytes: that is no template.")
        text = read_text(path, most=SETTINGS_BYTES)
        compile_template(text)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"{TEMPLATE_FILE} {path} is not a Jinja template, line {error.lineno}: {error.message}. Give the text "
            "of a chat_template.jinja."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{TEMPLATE_FILE} {path} cannot be read: {getattr(error, 'strerror', None) or error}. Give a file that "
            "holds a Jinja chat template, such as a model folder's chat_template.jinja."
        ) from error
    if not text.strip():
        raise ConfigError(f"{TEMPLATE_FILE} {path} is empty. Give a file that holds a Jinja chat template.")
    return text
