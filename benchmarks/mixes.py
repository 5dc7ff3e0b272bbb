"""The data and models that the throughput benchmark compares on, encoded once for all that read them from memory.

`headway train` reads the same samples from files, where a mix is made in a folder.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from headway.data import EncodedSample, Encoder, Origin, read_samples
from headway.data.media.tensors import MediaTensors
from headway.models import load_model, load_model_config, load_processor, rope_index
from headway.models.video import normalised
from headway.models.vision import patch_size_of
from headway.objectives.preferences.rows import into_pairs
from headway.packing.lengths import MIXES
from headway.synthetic.digits import write_digits, write_reader
from headway.synthetic.small_data import vocabulary_texts, write_small_data
from headway.synthetic.small_model import write_small_model
from headway.tracing.build import preset_config

MIX_MEDIAN, MIX_SIGMA, MIX_MAX = 128, 1.0, 2048  # tokens; the lognormal's median and sigma; lengths are clipped
IMAGES_SCALE, IMAGES_DEPTH = 8, 9  # lengths and widths are divided by the one, layers by the other


class MixFiles(NamedTuple):
    """Files of a mix.

    Attributes:
        model: folder of the model's configuration and tokenizer or processor.
        samples: the samples in their order, a line each.
    """

    model: Path
    samples: Path


@dataclass(frozen=True)
class Mix:
    """Samples and the model to train on them; `files` where the mix was made in a folder that stays."""

    name: str
    description: str
    config: PreTrainedConfig
    samples: list[EncodedSample]
    files: MixFiles | None = None

    @property
    def is_text(self) -> bool:
        """Whether no sample has images or videos."""
        return all("images" not in sample.media and not sample.processed for sample in self.samples)


@contextmanager
def place(folder: Path | None) -> Iterator[Path]:
    """The folder, or one that is removed in the end."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def text_mix(num_samples: int, seed: int = 0, folder: Path | None = None) -> Mix:
    """Long-tailed text: lognormal lengths, median 128 tokens, sigma 1.0, random tokens, every token supervised."""
    rng = np.random.default_rng(seed)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MIX_MAX,
        tie_word_embeddings=True,
    )
    lengths = np.clip(np.round(rng.lognormal(np.log(MIX_MEDIAN), MIX_SIGMA, num_samples)), 8, MIX_MAX).astype(int)
    samples = [_text_sample(rng.integers(0, 4096, size=length), row) for row, length in enumerate(lengths)]
    description = (
        f"lognormal lengths, median {MIX_MEDIAN} tokens, sigma {MIX_SIGMA}, clipped at {MIX_MAX}; "
        f"mean {lengths.mean():.0f}, longest {lengths.max()}; Qwen3, 4 layers, hidden 256, vocabulary 4096"
    )
    files = None
    if folder is not None:
        files = MixFiles(folder / "model", folder / "samples.jsonl")
        config.save_pretrained(files.model)
        tokenizer(config.vocab_size).save_pretrained(files.model)
        lines = [json.dumps({"input_ids": sample.input_ids_S.tolist()}) + "\n" for sample in samples]
        files.samples.write_text("".join(lines), encoding="utf-8")
    return Mix("text mix", description, config, samples, files)


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer that readers of token ids ask for, with a word for each."""
    words = {"<pad>": 0, "<eos>": 1} | {f"w{token}": token for token in range(2, vocab_size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


def _text_sample(token_ids: Any, row: int) -> EncodedSample:
    ids_S = torch.from_numpy(token_ids)
    positions_1S = torch.arange(len(ids_S))[None]
    return EncodedSample(
        input_ids_S=ids_S,
        labels_S=ids_S.clone(),
        position_ids_RS=positions_1S,
        origin=Origin("mix", "mix", row, f"row {row}"),
    )


def images_mix(num_samples: int, seed: int = 0, folder: Path | None = None, *, in_pairs: bool = False) -> Mix:
    """Long-tailed chats about images, and Qwen3-VL-8B, both an eighth as large as real ones.

    Attention's FLOPs are to those of projections as length is to width, so with both divided by the same number, text
    and images have about the shares of a step that they have in the real model on the real lengths. Within the vision
    tower attention has less, and the mergers more, as a tower of three layers keeps all of them.

    Args:
        num_samples: chats, or pairs of answers.
        seed: of everything random.
        folder: where files stay; None for a temporary one.
        in_pairs: each chat with a worse answer beside its own, as a preference.
    """
    mix = MIXES["images"]
    with place(folder) as here:
        source: Any = preset_config("qwen3-vl-8b")
        vision = source.vision_config
        area = (vision.patch_size * vision.spatial_merge_size) ** 2
        write_small_model(here / "model", source, vocabulary_texts(), max_pixels=MIX_MAX // 4 * area)
        _divide(here / "model", source)
        path = write_small_data(
            here / "data",
            mix,
            scale=1 / IMAGES_SCALE,
            num_samples=num_samples,
            longest=MIX_MAX,
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            seed=seed,
        )
        if in_pairs:
            into_pairs(path)
        config, samples, facts = encoded(here / "model", path)
    description = f"{mix.description}; lengths and widths divided by {IMAGES_SCALE}: {facts}"
    files = None if folder is None else MixFiles(folder / "model", path)
    return Mix("images", description, config, samples, files)


def _divide(folder: Path, source: Any) -> None:
    """Give the small model in the folder the widths and depths of the source, divided; heads are as wide as there."""
    small: Any = load_model_config(folder)
    text, vision = source.text_config, source.vision_config
    for config, original, depth, heads in (
        (small.text_config, text, "num_hidden_layers", ("num_attention_heads", "num_key_value_heads")),
        (small.vision_config, vision, "depth", ("num_heads",)),
    ):
        setattr(config, depth, getattr(original, depth) // IMAGES_DEPTH)
        for name in ("hidden_size", "intermediate_size", *heads):
            setattr(config, name, getattr(original, name) // IMAGES_SCALE)
    small.text_config.head_dim = text.head_dim
    small.text_config.rope_parameters = text.rope_parameters
    small.text_config.vocab_size = text.vocab_size // (IMAGES_SCALE * IMAGES_DEPTH)  # a head's share as in the source
    small.vision_config.out_hidden_size = small.text_config.hidden_size
    small.vision_config.deepstack_visual_indexes = [n // IMAGES_DEPTH for n in vision.deepstack_visual_indexes]
    small.save_pretrained(folder)


def digits_mix(num_samples: int, folder: Path | None = None) -> Mix:
    """The demonstration's data and model: 1 to 4 handwritten digits per sample, each an image of varied size."""
    with place(folder) as here:
        path = write_digits(here / "data", num_train=num_samples, num_eval=1).train
        config, samples, facts = encoded(write_reader(here / "model"), path)
    files = None if folder is None else MixFiles(folder / "model", path)
    return Mix("digits", f"1 to 4 digits per sample: {facts}", config, samples, files)


def encoded(
    folder: Path, path: Path, *, shares_prompts: bool = False
) -> tuple[PreTrainedConfig, list[EncodedSample], str]:
    """A model folder's configuration, the samples as the model reads them, and what there is to say of them."""
    config = load_model_config(folder)
    model = load_model(config, random_init=True)  # only for its rule of M-RoPE positions
    encoder = Encoder(load_processor(folder), rope_index(model), patch_size=patch_size_of(config))
    encoder.shares_prompts, scale = shares_prompts, encoder.pixel_scale
    samples = []
    for sample in map(encoder.encode, read_samples(path)):
        grids_M3, pixels_PD = sample.media.get("images", (None, None))
        if pixels_PD is not None and scale is not None:
            media = {"images": MediaTensors(grids_M3, normalised(pixels_PD, scale))}
            samples.append(replace(sample, media=media))
        else:
            samples.append(sample)
    lengths = np.array([sample.tokens for sample in samples])
    facts = (
        f"mean {lengths.mean():.0f} tokens (from {lengths.min()} to {lengths.max():,}), mean "
        f"{np.mean([sample.patches for sample in samples]):.0f} patches; {type(model).__name__}, "
        f"{model.num_parameters() / 1e6:.1f} M parameters"
    )
    return config, samples, facts
