"""What the folder of a vision-language or speech family is made of, for the tests that write one."""

from dataclasses import dataclass, field
from typing import Any

from helpers.tiny_models import PATCH

SIDE = 4 * PATCH  # of the square that towers of a fixed size read [pixels]
SQUARE = {"height": SIDE, "width": SIDE}
TILES = ((1, 1), (1, 2), (2, 1), (2, 2))
QWEN_SIZES = {
    "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": 64 * (2 * PATCH) ** 2},
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
}


@dataclass(frozen=True)
class Family:
    """What a family's folder is made of.

    Attributes:
        special: its special tokens, from id 3 on; a pad, a begin and an end token come before.
        processor: the class of its processor.
        image: module (below transformers.models) and class of its image processor, and its settings.
        options: the processor's own.
        named: special tokens that the tokenizer has as attributes.
        placeholder: what the template writes for an image.
        audio: likewise for a sound.
        config: its configuration.
        sound: the class of its feature extractor, where its processor has one.
        needs: packages without which transformers has no such processor.
    """

    special: tuple[str, ...]
    processor: str
    image: tuple[str, str, dict[str, Any]] | None
    placeholder: str = "<image>"
    options: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    audio: str = ""
    config: Any = None
    sound: str = "WhisperFeatureExtractor"
    needs: tuple[str, ...] = ()
