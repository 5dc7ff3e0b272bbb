"""A small model from nothing, for experiments: random weights, and a tokenizer that learned from the data itself."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from headway.data.samples import Chat, best_answered
from headway.data.sources import Source
from headway.data.sources.opening import samples_of
from headway.errors import ConfigError, DataError
from headway.files import new_folder
from headway.hub import CONFIG, is_model_here
from headway.models.load import load_model
from headway.models.trial import try_packs
from headway.synthetic.small_model import Shape, processor_class, small_config, write_small_model
from headway.tracing.build import subconfigs
from headway.words import Argument

TEXT, IMAGES, SOUNDS = "qwen3", "qwen3_vl", "qwen2_audio"
"""Kinds of a new model if nothing is said: for data of text alone, with pictures or videos, with sounds."""

_TOWERS = {"image": ("vision", IMAGES), "video": ("vision", IMAGES), "audio": ("audio", SOUNDS)}
"""The tower that each kind of media needs, and a model that has it."""

IMAGE_TOKENS = 256
"""Larger pictures are shrunk to so many tokens."""

TRAINING_BYTES = 16
"""Weights, gradients and AdamW's two moments of a parameter in float32 [bytes]."""

# Smallest first: layers and width grow together, about 64 of width for each layer.
_SHAPES = (
    Shape(2, 16, 4),
    Shape(2, 32, 4),
    *(Shape(layers, 64, layers, layers) for layers in (3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24)),
)
_MOST_SAMPLES = 20_000  # most samples that the tokenizer learns from
_MOST_CHARACTERS = 50_000_000


@dataclass(frozen=True)
class NewModel:
    """A model that was written.

    Attributes:
        folder: the model folder.
        like: the type of transformers that it is like.
        parameters: how many it has.
        vocabulary: entries of its tokenizer [tokens].
        layers: of its text model.
        width: of its text model.
        samples: that the tokenizer learned from.
    """

    folder: Path
    like: str
    parameters: int
    vocabulary: int
    layers: int
    width: int
    samples: int


def write_new_model(
    folder: Path, sources: Sequence[Source], *, like: str | None, size: int, vocab_size: int, seed: int
) -> NewModel:
    """Write a model folder with random weights and a tokenizer trained on data.

    Args:
        folder: to write; must not hold a model yet.
        sources: what the tokenizer learns from.
        like: a model type of transformers, such as "qwen3" or "qwen3_vl"; by the media of the data if None.
        size: parameters wanted; the nearest of a row of shapes is taken.
        vocab_size: most entries of the vocabulary [tokens].
        seed: of the weights.

    Raises:
        ConfigError: a folder that holds a model, a type that is not known, cannot be made small or does not read what
            the data hold.
        DataError: the data hold no words, or both sounds and pictures.
    """
    if is_model_here(folder):
        raise ConfigError(f"The folder {folder} holds a model already. Give another folder, or delete it.")
    with new_folder(folder, last=CONFIG) as unfinished:
        return replace(_write(unfinished, sources, like, size, vocab_size, seed), folder=folder)


def _write(
    folder: Path, sources: Sequence[Source], like: str | None, size: int, vocab_size: int, seed: int
) -> NewModel:
    texts, samples, kinds = _texts(sources)
    towers = {_TOWERS[kind] for kind in sorted(kinds)}
    if len(towers) > 1:
        raise DataError(
            "The data hold sounds as well as pictures or videos, but a small model reads only one of the two. Make "
            "one model for each, or start from a checkpoint that reads both, such as Qwen2.5-Omni."
        )
    config = _config_like(like or next((usual for _, usual in towers), TEXT))
    for tower, usual in towers:
        if getattr(config, f"{tower}_config", None) is None:
            media = "sounds" if tower == "audio" else "pictures or videos"
            raise ConfigError(
                Argument("like", like),
                f" reads no {media.replace('or', 'and')}, but the data hold some. Leave the option out for {usual}, "
                "or name a model type that reads them.",
            )
    if any(hasattr(config, f"{part}_config") for part in ("vision", "audio")):
        processor_class(config)
    # the shape whose parameters are nearest to those wanted
    shape, parameters = _nearest(config, size, vocab_size)
    area = _token_area(config)
    write_small_model(folder, config, texts, max_pixels=IMAGE_TOKENS * area, shape=shape, vocab_size=vocab_size)
    # weights are drawn with a spread that suits each width
    written: Any = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    text = written.get_text_config()
    for part in subconfigs(written):
        if hasattr(part, "initializer_range"):
            part.initializer_range = _spread(getattr(part, "hidden_size", text.hidden_size))
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = load_model(written, random_init=True)
    model.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    depth, width, words = text.num_hidden_layers, text.hidden_size, text.vocab_size
    return NewModel(folder, config.model_type, parameters, words, depth, width, samples)


def _spread(width: int) -> float:
    """Standard deviation of initial weights: 0.02 at a width of 1000, more for narrower models, which else learn late.

    Source: Nguyen and Salazar 2019 (arXiv:1910.05895), section 3.2, "SmallInit".
    """
    return math.sqrt(2 / (5 * width))


def _texts(sources: Sequence[Source]) -> tuple[list[str], int, set[str]]:
    """Words of the first samples of every source, how many samples, and the kinds of media in them."""
    texts: list[str] = []
    count, kinds = 0, set[str]()
    for source in sources:
        left = _MOST_CHARACTERS // len(sources)
        for sample in map(best_answered, islice(samples_of(source), _MOST_SAMPLES // len(sources))):
            count += 1
            if isinstance(sample, Chat):
                own_texts = [message.text for message in sample.messages] + [f"{m.role}\n" for m in sample.messages]
                kinds |= sample.kinds & _TOWERS.keys()
            else:
                own_texts = [sample.content] if isinstance(sample.content, str) else []
            for text in own_texts:  # cut: one text may be longer than the memory that learning from it takes
                texts.append(text[:left])
                left -= len(texts[-1])
            if not left:
                break
    if not any(text.strip() for text in texts):
        raise DataError("The data hold no words that a tokenizer could learn from. Give chats or documents of text.")
    return texts, count, kinds


def _config_like(like: str) -> PreTrainedConfig:
    name = like.lower().replace("-", "_")
    if name not in CONFIG_MAPPING:
        near = difflib.get_close_matches(name, list(CONFIG_MAPPING.keys()), n=3)
        hint = f"Did you mean {', '.join(near)}? " if near else ""
        raise ConfigError(
            Argument("like"),
            f" {like!r} is no model type of the installed transformers. {hint}Give a model_type as in a "
            f"config.json, such as {TEXT} or {IMAGES}.",
        )
    config: PreTrainedConfig = AutoConfig.for_model(name)
    return config


def _nearest(config: PreTrainedConfig, size: int, vocabulary: int) -> tuple[Shape, int]:
    best: tuple[Shape, int] | None = None
    for shape in _SHAPES:
        model = load_model(small_config(config, vocabulary, shape), random_init=True, device="meta")
        count = sum(parameter.numel() for parameter in model.parameters())
        if best is None:  # a kind of model that cannot be trained is refused before anything is written
            try_packs(model)
        if best is None or abs(math.log(count / size)) < abs(math.log(best[1] / size)):
            best = shape, count
        if count > size:
            break
    assert best is not None
    return best


def _token_area(config: PreTrainedConfig) -> int:
    """Pixels that one token of a picture stands for; 1 without a vision tower."""
    vision = getattr(config, "vision_config", None)
    return 1 if vision is None else (vision.patch_size * getattr(vision, "spatial_merge_size", 1)) ** 2
