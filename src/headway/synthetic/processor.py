"""A small tokenizer and image processor, saved as an ordinary Qwen3-VL processor folder.

Demos and tests train models of a few million parameters from nothing; a vocabulary of 150,000 entries would be most of
such a model. This writes a folder with the same special tokens, placeholder rules and patch layout as Qwen3-VL's, but
with a few hundred tokens, made from the caller's own texts.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headway.models.video import VIDEO_PROCESSORS

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

AUDIO_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
"""Likewise, of models that listen."""

# Turns in ChatML form; an image, video or audio part stands for one placeholder that the processor
# expands. The generation block marks what an assistant writes itself, its closing token included.
CHAT_TEMPLATE = """\
{%- macro body(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif part.type == 'audio' -%}
                {{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for turn in messages -%}
    {{- '<|im_start|>' + turn.role + '\\n' -}}
    {%- if turn.role == 'assistant' -%}
        {%- generation -%}{{- body(turn.content) + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- body(turn.content) + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def write_processor(
    folder: str | Path,
    texts: Iterable[str],
    patch_size: int = 16,
    merge_size: int = 2,
    *,
    temporal_patch_size: int = 2,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    vocab_size: int = 512,
    processor_class: str = "Qwen3VLProcessor",
) -> Path:
    """Train a small byte-level tokenizer on texts and save it with an image processor and a chat template.

    Args:
        folder: where to write; made if missing.
        texts: texts that the vocabulary is learned from; any other text still encodes, byte by byte.
        patch_size: side of a vision patch [pixels].
        merge_size: patches per side that one token stands for [patches].
        temporal_patch_size: frames per patch; a still image is repeated this often.
        min_pixels: smaller images are enlarged to at least this area [pixels]; one token's area by default.
        max_pixels: larger images are shrunk to at most this area [pixels]; 64 tokens' area by default.
        vocab_size: upper bound on vocabulary entries, the special tokens and the 256 bytes included.
        processor_class: which model's rules it follows: "Qwen3VLProcessor", "Qwen2_5_VLProcessor" or
            "Qwen2VLProcessor".

    Returns:
        The folder; `headway.models.load_processor` opens it, and so does transformers' `AutoProcessor` where
        torchvision is installed.
    """
    target = write_tokenizer(folder, texts, vocab_size=vocab_size)
    token_area = (patch_size * merge_size) ** 2
    size = {"shortest_edge": min_pixels or token_area, "longest_edge": max_pixels or 64 * token_area}
    vision: dict[str, Any] = {"patch_size": patch_size, "merge_size": merge_size}
    vision["temporal_patch_size"] = temporal_patch_size

    image_processor = Qwen2VLImageProcessorPil(
        size=size, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5], **vision
    ).to_dict()
    image_processor["image_processor_type"] = "Qwen2VLImageProcessor"
    image_processor["processor_class"] = processor_class
    _write_json(target / "preprocessor_config.json", image_processor)
    _write_json(target / "processor_config.json", {"processor_class": processor_class})
    _write_json(
        target / "video_preprocessor_config.json",
        {"video_processor_type": VIDEO_PROCESSORS[processor_class], "size": size, **vision},
    )
    return target


def write_tokenizer(folder: str | Path, texts: Iterable[str], *, vocab_size: int = 512) -> Path:
    """Train a small byte-level tokenizer, which encodes any other text byte by byte, and save it with a template."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    _train_tokenizer(texts, vocab_size).save_pretrained(target)
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return target


def write_sound_processor(
    folder: str | Path, texts: Iterable[str], *, num_mel_bins: int, vocab_size: int = 512
) -> Path:
    """Write a tokenizer as `write_tokenizer` does, with Qwen2-Audio's rules and Whisper's features of 30 s."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts, vocab_size, AUDIO_TOKENS)
    make_features: Any = WhisperFeatureExtractor  # transformers leaves these constructors untyped
    make: Any = Qwen2AudioProcessor
    make(make_features(feature_size=num_mel_bins), tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(target)
    return target


def _train_tokenizer(texts: Iterable[str], vocab_size: int, more_special_tokens: tuple[str, ...] = ()) -> Any:
    special_tokens = [*SPECIAL_TOKENS, *more_special_tokens]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    make: Any = PreTrainedTokenizerFast  # transformers leaves its constructor untyped
    return make(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in special_tokens if t not in ("<|im_end|>", "<|endoftext|>")],
        model_max_length=1_000_000,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
