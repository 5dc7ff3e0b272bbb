"""What the folders of vision-language and speech families are made of: tokens, processor, template, configuration."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


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
        config: class and settings of its configuration, as `helpers.models.built` takes them.
        sound: the class of its feature extractor, where its processor has one.
        needs: packages without which transformers has no such processor.
    """

    special: tuple[str, ...]
    processor: str
    config: dict[str, Any]
    image: tuple[str, str, dict[str, Any]] | None = None
    placeholder: str = "<image>"
    options: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    audio: str = ""
    sound: str = "WhisperFeatureExtractor"
    needs: tuple[str, ...] = ()


_TABLES = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
SIDE: int = _TABLES["parts"]["square"]["height"]  # of the square that towers of a fixed size read [pixels]
FAMILIES = {name: Family(**row) for name, row in _TABLES["folders"].items()}
