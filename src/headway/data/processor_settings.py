"""What a run changes of its model's processor; whatever it reads, and the folders that are exported, follow it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.data.chat_settings import ChatSettings
from headway.data.media.sizes import MediaSizes


@dataclass(frozen=True)
class ProcessorSettings:
    """Changes of a processor, or of the tokenizer of a text-only model.

    Attributes:
        chats: how chats become text.
        sizes: how large images and videos are read, of sources that do not say.
    """

    chats: ChatSettings = field(default_factory=ChatSettings)
    sizes: MediaSizes = field(default_factory=MediaSizes)

    @classmethod
    def of(cls, *, chats: Mapping[str, Any], sizes: Any) -> "ProcessorSettings":
        """Read settings as a configuration has them.

        Args:
            chats: as `ChatSettings.of` takes them.
            sizes: has the attributes of `MediaSizes`.

        Raises:
            ConfigError: a file of a chat template cannot be read, or is none.
        """
        return cls(ChatSettings.of(**chats), MediaSizes.of(sizes))

    def write_into(self, processor: Any) -> None:
        """Change a processor.

        Raises:
            ConfigError: a setting that the processor has no place for.
        """
        self.chats.write_into(processor)
        self.sizes.write_into(processor)
