"""Changes of a run to its model's processor; all that is read, and exported folders, follow them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.data.chat_settings import ChatSettings
from headway.data.media.sizes import MediaSizes
from headway.data.new_tokens import NewTokens


@dataclass(frozen=True)
class ProcessorSettings:
    """Changes of a processor, or of the tokenizer of a text-only model.

    Attributes:
        chats: how chats become text.
        sizes: how large images and videos are read, of sources that do not say.
        tokens: that are added.
    """

    chats: ChatSettings = field(default_factory=ChatSettings)
    sizes: MediaSizes = field(default_factory=MediaSizes)
    tokens: NewTokens = field(default_factory=NewTokens)

    @classmethod
    def of(cls, *, chats: Mapping[str, Any], sizes: Any, tokens: Any) -> "ProcessorSettings":
        """Read settings as a configuration has them.

        Args:
            chats: as `ChatSettings.of` takes them.
            sizes: has the attributes of `MediaSizes`.
            tokens: has `new_tokens` and `new_special_tokens`.

        Raises:
            ConfigError: a file of a chat template cannot be read, or is none.
        """
        added = NewTokens(tokens.new_tokens, tokens.new_special_tokens)
        return cls(ChatSettings.of(**chats), MediaSizes.of(sizes), added)

    def write_into(self, processor: Any, rows: int | None) -> int | None:
        """Change a processor.

        Args:
            processor: of a model, or its tokenizer.
            rows: of the model's embedding, before tokens are added; None where that is not known [tokens].

        Returns:
            Rows that it needs with the tokens.

        Raises:
            ConfigError: a setting that the processor has no place for.
        """
        if self.tokens:
            tokenizer = getattr(processor, "tokenizer", processor)
            rows = self.tokens.add_to(processor, len(tokenizer) if rows is None else rows).rows
        self.chats.write_into(processor)
        self.sizes.write_into(processor)
        return rows
