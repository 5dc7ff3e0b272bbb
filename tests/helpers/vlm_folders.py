"""Complete small model folders of vision-language and speech families: configuration, tokenizer, processor, template.

Made with transformers' own classes and saved as they save themselves, so that everything opens them as it opens the
real ones. The special tokens get the first ids, in the order of the family's table, which the tiny configurations
(`tiny_images`, `tiny_speech`, `tiny_models`) count on.
"""

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from headway.models.video import VideoSettings
from headway.synthetic.processor import write_processor
from helpers.tiny_images import _COUNTS, _LLAMA, _SIGLIP, _SIZES, _TOWER, tiny_image_config
from helpers.tiny_models import PATCH, tiny_config
from helpers.tiny_speech import tiny_speech_config
from helpers.vlm_family import QWEN_SIZES as _QWEN_SIZES
from helpers.vlm_family import SIDE, Family
from helpers.vlm_family import SQUARE as _SQUARE
from helpers.vlm_family import TILES as _TILES
from helpers.vlms_of_others import MORE_FAMILIES

_TEMPLATE = """\
{%- macro body(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}
                {{- 'IMAGE' -}}
            {%- elif part.type == 'audio' -%}
                {{- 'AUDIO' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- 'BEGIN' -}}
{%- for turn in messages -%}
    {{- turn.role + ': ' -}}
    {%- if turn.role == 'assistant' -%}
        {%- generation -%}{{- body(turn.content) + '<eos>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- body(turn.content) -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'assistant: ' -}}
{%- endif -%}
"""


_PIL = "image_processing_pil_"


def _llava_onevision() -> PreTrainedConfig:
    return transformers.LlavaOnevisionConfig(
        text_config=dict(_LLAMA),
        vision_config=dict(_SIGLIP),
        image_token_index=3,
        video_token_index=4,
        image_grid_pinpoints=[[SIDE * h, SIDE * w] for h, w in _TILES],
        vision_aspect_ratio="anyres_max_4",
    )


def _llava_next() -> PreTrainedConfig:
    config = tiny_image_config("llava_next")
    config.image_grid_pinpoints = [[SIDE * h, SIDE * w] for h, w in _TILES]
    return config


def _smolvlm() -> PreTrainedConfig:
    return transformers.SmolVLMConfig(
        text_config=dict(_LLAMA),
        vision_config=dict(_TOWER, image_size=SIDE),
        scale_factor=2,
        image_token_id=3,
        pad_token_id=0,
    )


def _paligemma2() -> PreTrainedConfig:
    config = tiny_image_config("paligemma")
    text = dict(_SIZES, **_COUNTS, head_dim=8, max_position_embeddings=512, sliding_window=16, vocab_size=160)
    return transformers.PaliGemmaConfig(
        text_config=dict(text, model_type="gemma2", use_bidirectional_attention=False),
        vision_config=config.vision_config.to_dict(),
        projection_dim=32,
        image_token_index=3,
    )


def _ovis2() -> PreTrainedConfig:
    return transformers.Ovis2Config(
        text_config=dict(_SIZES, **_COUNTS, model_type="qwen2", max_position_embeddings=512, vocab_size=160),
        vision_config=dict(_TOWER, image_size=SIDE, hidden_stride=2, vocab_size=20, num_visual_indicator_tokens=5),
        image_token_id=3,
        visual_indicator_token_ids=[4, 5, 6, 7, 8],
        hidden_size=32,
        vocab_size=160,
    )


def _glm4v() -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
    return transformers.Glm4vConfig(
        text_config=dict(_SIZES, **_COUNTS, rope_parameters=rope, max_position_embeddings=512, vocab_size=160),
        vision_config={
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": PATCH,
            "image_size": SIDE,
        },
        image_token_id=3,
        image_start_token_id=4,
        image_end_token_id=5,
        video_token_id=6,
        video_start_token_id=7,
        video_end_token_id=8,
    )


def _aya_vision() -> PreTrainedConfig:
    return transformers.AyaVisionConfig(
        text_config=dict(_LLAMA),
        vision_config=dict(_SIGLIP),
        downsample_factor=2,
        adapter_hidden_size=36,
        image_token_index=3,
    )


def _omni() -> PreTrainedConfig:
    config = tiny_speech_config("qwen2_5_omni_thinker")
    config.audio_start_token_id, config.audio_end_token_id = 6, 7
    config.vision_start_token_id, config.vision_end_token_id = 8, 9
    return config


_CLIP_SIZE = {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE}
_CLIP_IMAGES = ("clip", "CLIPImageProcessorPil", _CLIP_SIZE)
_ANYRES = {"size": _SQUARE, "image_grid_pinpoints": [[SIDE * h, SIDE * w] for h, w in _TILES]}
_IDEFICS_IMAGES = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
_IDEFICS_SPECIAL = (
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
)
_PIXTRAL_IMAGES = ("pixtral", "PixtralImageProcessorPil", {"size": {"longest_edge": 2 * SIDE}, "patch_size": PATCH})
_PIXTRAL_SPECIAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_TILED = {"size": _SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
_OMNI_NAMED = {f"{kind}_{end}_token": f"<|{kind}_{end}|>" for kind in ("audio", "vision") for end in ("bos", "eos")}
FAMILIES: dict[str, Family] = {
    "llava": Family(
        ("<image>",),
        "LlavaProcessor",
        _CLIP_IMAGES,
        options={"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        config=lambda: tiny_image_config("llava"),
    ),
    "llava_next": Family(
        ("<image>",),
        "LlavaNextProcessor",
        (
            "llava_next",
            "LlavaNextImageProcessorPil",
            {**_ANYRES, "size": {"shortest_edge": SIDE}, "crop_size": _SQUARE},
        ),
        options={"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        config=_llava_next,
    ),
    "llava_onevision": Family(
        ("<image>", "<video>"),
        "LlavaOnevisionProcessor",
        ("llava_onevision", "LlavaOnevisionImageProcessorPil", _ANYRES),
        options={
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
        config=_llava_onevision,
    ),
    "gemma3": Family(
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        "Gemma3Processor",
        ("gemma3", "Gemma3ImageProcessorPil", {"size": _SQUARE}),
        placeholder="<start_of_image>",
        options={"image_seq_length": 4},
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        config=lambda: tiny_image_config("gemma3"),
    ),
    "paligemma2": Family(
        ("<image>",),
        "PaliGemmaProcessor",
        ("siglip", "SiglipImageProcessorPil", {"size": _SQUARE, "image_seq_length": 16}),
        named={"image_token": "<image>"},
        config=_paligemma2,
    ),
    "idefics3": Family(
        _IDEFICS_SPECIAL,
        "Idefics3Processor",
        ("idefics3", "Idefics3ImageProcessorPil", _IDEFICS_IMAGES),
        options={"image_seq_len": 4},
        config=lambda: tiny_image_config("idefics3"),
    ),
    "smolvlm": Family(
        _IDEFICS_SPECIAL,
        "SmolVLMProcessor",
        ("smolvlm", "SmolVLMImageProcessorPil", _IDEFICS_IMAGES),
        options={"image_seq_len": 4},
        config=_smolvlm,
        needs=("num2words",),
    ),
    "internvl": Family(
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        "InternVLProcessor",
        ("got_ocr2", "GotOcr2ImageProcessorPil", _TILED),
        placeholder="<IMG_CONTEXT>",
        options={"image_seq_length": 4},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        config=lambda: tiny_image_config("internvl"),
    ),
    "aya_vision": Family(
        ("<|IMG_PATCH|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"),
        "AyaVisionProcessor",
        ("got_ocr2", "GotOcr2ImageProcessorPil", _TILED),
        options={"patch_size": PATCH, "img_size": SIDE, "downsample_factor": 2},
        config=_aya_vision,
    ),
    "pixtral": Family(
        _PIXTRAL_SPECIAL,
        "PixtralProcessor",
        _PIXTRAL_IMAGES,
        placeholder="[IMG]",
        options={"patch_size": PATCH, "spatial_merge_size": 1},
        config=lambda: transformers.LlavaConfig(
            text_config=dict(_LLAMA, model_type="mistral"),
            vision_config=dict(_TOWER, model_type="pixtral", head_dim=12, image_size=256),
            image_token_index=3,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        needs=("torchvision",),
    ),
    "mistral3": Family(
        _PIXTRAL_SPECIAL,
        "PixtralProcessor",
        _PIXTRAL_IMAGES,
        placeholder="[IMG]",
        options={"patch_size": PATCH, "spatial_merge_size": 2},
        config=lambda: tiny_image_config("mistral3"),
        needs=("torchvision",),
    ),
}
FAMILIES |= {
    "qwen2_audio": Family(
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        "Qwen2AudioProcessor",
        None,
        audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
        config=lambda: tiny_speech_config("qwen2_audio"),
    ),
    "glm4v": Family(
        ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
        "Glm4vProcessor",
        ("glm4v", "Glm4vImageProcessorPil", _QWEN_SIZES),
        placeholder="<|begin_of_image|><|image|><|end_of_image|>",
        config=_glm4v,
    ),
    "ovis2": Family(
        ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<image>"),
        "Ovis2Processor",
        ("ovis2", "Ovis2ImageProcessorPil", {"size": _SQUARE, "crop_to_patches": True, "max_patches": 3}),
        options={"image_seq_length": 4},
        config=_ovis2,
    ),
    "gemma4": Family(
        ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        "Gemma4Processor",
        ("gemma4", "Gemma4ImageProcessorPil", {"patch_size": PATCH, "max_soft_tokens": 70, "pooling_kernel_size": 3}),
        placeholder="<|image|>",
        named={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        config=lambda: tiny_image_config("gemma4"),
        sound="Gemma4AudioFeatureExtractor",
    ),
    "llama4": Family(
        ("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        "Llama4Processor",
        ("llama4", "Llama4ImageProcessor", {"size": _SQUARE, "max_patches": 4}),
        placeholder="<|image|>",
        options={"patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
        config=lambda: tiny_image_config("llama4"),
        needs=("torchvision",),
    ),
    "qwen2_5_omni_thinker": Family(
        ("<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>", *_OMNI_NAMED.values()),
        "Qwen2_5OmniProcessor",
        ("qwen2_vl", "Qwen2VLImageProcessorPil", {**_QWEN_SIZES}),
        placeholder="<|vision_bos|><|IMAGE|><|vision_eos|>",
        named={"audio_token": "<|AUDIO|>", "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", **_OMNI_NAMED},
        audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
        config=_omni,
    ),
}
FAMILIES |= MORE_FAMILIES
_QWEN = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5_vl": "Qwen3VLProcessor",
}
VLM_FOLDERS = (*(f for f, family in FAMILIES.items() if all(find_spec(each) for each in family.needs)), *_QWEN)


def write_vlm(folder: Path, family: str | Family, *, weights: bool = False) -> Path:
    """Write a model's folder.

    Args:
        folder: made if missing.
        family: one of `VLM_FOLDERS`, or what a family's folder is made of.
        weights: whether random weights go with it, drawn from torch's global generator.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(family, str) and family in _QWEN:
        config = _write_qwen(folder, family)
    else:
        config = _write_family(folder, FAMILIES[family] if isinstance(family, str) else family)
    if weights:
        name = type(config).__name__.removesuffix("Config")
        kind = getattr(transformers, f"{name}ForConditionalGeneration", None) or getattr(
            transformers, f"{name}ForCausalLM"
        )
        model = kind(config)
        with torch.no_grad():  # norms and biases start at one and zero, which hides mistakes
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def _write_qwen(folder: Path, family: str) -> PreTrainedConfig:
    write_processor(folder, ["Which picture is it? It is the one."], PATCH, processor_class=_QWEN[family])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    return tiny_config(family, len(tokenizer), ids)


def _write_family(folder: Path, family: Family) -> PreTrainedConfig:
    tokenizer = _tokenizer(family)
    template = _TEMPLATE.replace("IMAGE", family.placeholder).replace("AUDIO", family.audio)
    template = template.replace("BEGIN", "<bos>")
    kind = getattr(transformers, family.processor)
    processor = _made(kind, family, tokenizer)
    processor.tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    saved: dict[str, Any] = {"processor_class": family.processor}
    for part in ("image_processor", "feature_extractor", "audio_processor"):
        if hasattr(processor, part):
            settings = getattr(processor, part).to_dict()
            if "image_processor_type" in settings:
                settings["image_processor_type"] = settings["image_processor_type"].removesuffix("Pil")
            saved |= settings
    _write_json(folder / "preprocessor_config.json", saved)
    _write_json(folder / "processor_config.json", {"processor_class": family.processor, **family.options})
    config = family.config()
    rows = max(processor.tokenizer.get_vocab().values()) + 1
    text = config.get_text_config()
    text.vocab_size = rows
    text.pad_token_id, text.bos_token_id, text.eos_token_id = 0, 1, 2
    return config


def _made(kind: Any, family: Family, tokenizer: Any) -> Any:
    """The processor; without its video processor, which needs torchvision and is no part of these folders."""
    attributes = kind.get_attributes()
    parts: dict[str, Any] = {"tokenizer": tokenizer}
    if family.image is not None:
        module, name, settings = family.image
        kind_of_file = _PIL if name.endswith("Pil") else "image_processing_"
        images = getattr(importlib.import_module(f"transformers.models.{module}.{kind_of_file}{module}"), name)
        parts["image_processor"] = images(**settings)
    for name in {"feature_extractor", "audio_processor"}.intersection(attributes):
        kind_of_sound = getattr(transformers, family.sound)
        options = {"chunk_length": 1} if family.sound.startswith("Whisper") else {}
        parts[name] = kind_of_sound(feature_size=16, **options)
    if "video_processor" not in attributes:
        return kind(**parts, **family.options)

    class WithoutVideos(kind):
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name != "video_processor":
                return super().check_argument_for_proper_class(name, argument)
            return type(argument)

    WithoutVideos.__name__ = kind.__name__
    videos = VideoSettings(family.image[2] if family.image is not None else {})
    return WithoutVideos(**parts, video_processor=videos, **family.options)


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Bytes as tokens, after the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<bos>", "<eos>", *family.special]
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=1_000_000,
        extra_special_tokens=family.named or list(family.special),
        clean_up_tokenization_spaces=False,
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
