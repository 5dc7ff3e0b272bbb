"""A model shrunk in every direction but its structure, as an ordinary model folder without weights.

What decides which code runs is kept: the family, heads per key-value head, windowed and full layers, where deep vision
features enter and leave, patch sizes, tied embeddings, experts. Depth, width, vocabulary and experts shrink.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from headway.data.chat import stop_ids_of
from headway.data.stops import with_stops
from headway.errors import ConfigError
from headway.models.load import load_processor
from headway.plugins import family_hook, lays_out_packs
from headway.synthetic.processor import write_processor, write_sound_processor, write_tokenizer
from headway.tracing.build import with_layers

EXPERTS, EXPERTS_PER_TOKEN = 8, 2
_WIDTH_STEP = 16  # widths are multiples of it, as kernels like them

_PROCESSORS = {
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_audio": "Qwen2AudioProcessor",
}
# M-RoPE's sections where a configuration has none: the defaults of transformers' code, for heads of 128.
_SECTIONS = {"qwen2_vl_text": [16, 24, 24], "qwen2_5_vl_text": [16, 24, 24]}
_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Shape:
    """Sizes of a small model: how small.

    Attributes:
        layers: of the text model, and of the vision or audio tower, at most.
        head_dim: of an attention head.
        key_value_heads: where the model has so many: two processes of sequence parallelism then hold one each.
        vision_heads: of the vision or audio tower, at most.
    """

    layers: int = 4
    head_dim: int = 16
    key_value_heads: int = 2
    vision_heads: int = 4


SMALLEST = Shape()


def write_small_model(
    folder: Path,
    config: PreTrainedConfig,
    texts: Iterable[str],
    *,
    max_pixels: int,
    shape: Shape = SMALLEST,
    vocab_size: int = 512,
) -> Path:
    """Write the configuration, tokenizer and processor of a small model of the same structure.

    Args:
        folder: created where needed.
        config: configuration of the large model.
        texts: texts that the vocabulary is learned from.
        max_pixels: larger images and videos are shrunk to this area [pixels].
        shape: how small.
        vocab_size: upper bound on vocabulary entries [tokens].

    Raises:
        ConfigError: a model whose configuration does not name its widths, heads and depth as transformers' do.
    """
    vision = getattr(config, "vision_config", None)
    audio = getattr(config, "audio_config", None)
    # a tokenizer alone, or a processor with the model's own patches and merging, or bands of sound
    if vision is None and audio is not None and processor_class(config):
        write_sound_processor(folder, texts, num_mel_bins=audio.num_mel_bins, vocab_size=vocab_size)
    elif vision is None or lays_out_packs(config):  # the encoder of such a model takes a tokenizer
        write_tokenizer(folder, texts, vocab_size=vocab_size)
    else:
        write_processor(
            folder,
            texts,
            vision.patch_size,
            vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            max_pixels=max_pixels,
            vocab_size=vocab_size,
            processor_class=processor_class(config),
        )
    opened: Any = load_processor(folder)
    tokenizer = getattr(opened, "tokenizer", opened)
    # special tokens have other ids in the small vocabulary
    small = small_config(config, len(tokenizer), shape)
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"audio_token_index": "<|AUDIO|>", "audio_token_id": "<|AUDIO|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    for name, token in names.items():
        if vars(small).get(name) is not None:
            setattr(small, name, tokenizer.convert_tokens_to_ids(token))
    small.save_pretrained(folder)
    write_generation_config(folder, opened)
    return folder


def write_generation_config(folder: Path, processor: Any) -> None:
    """Write where generation stops: at the tokens that end an answer, by the chat template."""
    settings: Any = GenerationConfig  # transformers leaves the class untyped
    with_stops(settings(), stop_ids_of(processor)).save_pretrained(folder)


def processor_class(config: PreTrainedConfig) -> str:
    """Name the class of the processor of a model that sees or listens.

    Raises:
        ConfigError: how to write a small one is not known.
    """
    if config.model_type not in _PROCESSORS:
        raise ConfigError(
            f"A small model like {config.model_type} cannot be made, because Headway can write small processors only "
            f"for text models and for {', '.join(_PROCESSORS)}."
        )
    return _PROCESSORS[config.model_type]


def small_config(config: PreTrainedConfig, vocabulary: int, shape: Shape = SMALLEST) -> PreTrainedConfig:
    """Shrink a configuration.

    Args:
        config: configuration of a causal, image-text or audio-text model.
        vocabulary: entries of the small tokenizer [tokens].
        shape: how small.

    Raises:
        ConfigError: as for `write_small_model`.
    """
    small: Any = with_layers(config, shape.layers)
    text, old_text = small.get_text_config(), config.get_text_config()
    _shrink_text(text, old_text, vocabulary, shape)
    for part in (small, text):
        for name, value in (("bos_token_id", None), ("eos_token_id", 2), ("pad_token_id", 0)):
            if hasattr(part, name):
                setattr(part, name, value)
    old_vision = getattr(config, "vision_config", None)
    if old_vision is not None:
        _shrink_vision(small.vision_config, old_vision, text.hidden_size, shape)
    if getattr(config, "audio_config", None) is not None:
        _shrink_audio(small.audio_config, shape)
    of_family = family_hook(config, "small_config")
    shrunk: PreTrainedConfig = small if of_family is None else of_family(small)
    return shrunk


def _shrink_text(small: Any, old: Any, vocabulary: int, shape: Shape) -> None:
    needed = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")
    if missing := [name for name in needed if not isinstance(getattr(old, name, None), int)]:
        raise ConfigError(
            f"a model of type {old.model_type!r} cannot be scaled down: its configuration names no {missing[0]}."
        )
    # query heads per key head stay, so that grouped queries stay grouped
    heads = old.num_attention_heads
    key_value = getattr(old, "num_key_value_heads", None) or heads
    head_dim = getattr(old, "head_dim", None) or old.hidden_size // heads
    new_key_value = min(shape.key_value_heads, key_value)
    small.num_key_value_heads = new_key_value
    small.num_attention_heads = heads // key_value * new_key_value
    # every width shrinks as all heads together do
    scale = small.num_attention_heads * shape.head_dim / (heads * head_dim)
    small.hidden_size = _width(old.hidden_size * scale)
    if getattr(old, "head_dim", None):
        small.head_dim = shape.head_dim
    for name in _SIZES:
        if isinstance(size := getattr(old, name, None), int) and size:
            setattr(small, name, _width(size * scale))
    small.vocab_size = vocabulary
    if rope := getattr(small, "rope_parameters", None):
        small.rope_parameters = _small_rope(rope, head_dim, shape.head_dim, _SECTIONS.get(old.model_type))
    # a few experts, from which a router still chooses
    for name in _NUM_EXPERTS:
        if isinstance(getattr(old, name, None), int) and getattr(old, name):
            setattr(small, name, min(EXPERTS, getattr(old, name)))
            small.num_experts_per_tok = min(EXPERTS_PER_TOKEN, old.num_experts_per_tok)


def _small_rope(rope: dict[str, Any], old_dim: int, head_dim: int, unsaid: list[int] | None) -> dict[str, Any]:
    rope = copy.deepcopy(rope)
    if sections := rope.get("mrope_section", unsaid):
        shares = [section * head_dim // old_dim for section in sections]
        rope["mrope_section"] = [head_dim // 2 - sum(shares[1:]), *shares[1:]]
    return rope


def _shrink_vision(small: Any, old: Any, width_of_text: int, shape: Shape) -> None:
    if not hasattr(old, "num_heads"):  # SigLIP's
        small.num_attention_heads = min(shape.vision_heads, old.num_attention_heads)
        small.hidden_size = small.num_attention_heads * shape.head_dim
        small.intermediate_size = _width(old.intermediate_size * small.hidden_size / old.hidden_size)
        return
    heads = min(shape.vision_heads, old.num_heads)
    if hasattr(old, "embed_dim"):  # Qwen2-VL's: hidden_size is the text's, and an MLP is a multiple of the width
        small.num_heads, small.embed_dim, small.hidden_size = heads, heads * shape.head_dim, width_of_text
        return
    scale = heads * shape.head_dim / old.hidden_size
    small.num_heads, small.hidden_size = heads, heads * shape.head_dim
    small.intermediate_size = _width(old.intermediate_size * scale)
    if hasattr(old, "out_hidden_size"):
        small.out_hidden_size = width_of_text
    if deep := getattr(old, "deepstack_visual_indexes", None):  # each has a merger and a layer of text that takes it
        small.deepstack_visual_indexes = _places(min(len(deep), small.depth), small.depth)
    if full := getattr(old, "fullatt_block_indexes", None):  # the others see windows
        small.fullatt_block_indexes = _places(max(1, len(full) * small.depth // old.depth), small.depth)


def _shrink_audio(small: Any, shape: Shape) -> None:
    """Shrink a tower of Whisper's kind; its clips and bands stay."""
    old_width, small.encoder_attention_heads = small.d_model, min(shape.vision_heads, small.encoder_attention_heads)
    small.d_model = small.encoder_attention_heads * shape.head_dim
    small.encoder_ffn_dim = _width(small.encoder_ffn_dim * small.d_model / old_width)


def _places(count: int, depth: int) -> list[int]:
    """So many layers of a tower, evenly spread, the last among them.

    >>> _places(3, 4), _places(1, 4)
    ([0, 2, 3], [3])
    """
    return [round((number + 1) * depth / count) - 1 for number in range(count)]


def _width(size: float) -> int:
    return max(_WIDTH_STEP, round(size / _WIDTH_STEP) * _WIDTH_STEP)
