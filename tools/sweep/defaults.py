"""Make a configuration's defaults fit each other, where transformers leaves them such that its own model cannot run.

The defaults of a language model and of a tower are often those of two checkpoints. What is changed here is a size at
the seam between them; what a model computes, and how, stays as its defaults say.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headway.tracing import build

if TYPE_CHECKING:
    from torch import nn

SPECIAL = ("_token_id", "_token_index")
_MEDIA = ("image", "video", "audio")


def fit_defaults(config: Any) -> None:
    """Change a configuration's sizes, in place, so that its towers fit each other.

    Args:
        config: a default configuration of transformers.
    """
    _fit_widths(config)
    _fit_pictures(config)
    _fit_audio(config)
    _fit_tokens(config)


def fit_sections(config: Any, model: nn.Module) -> None:
    """Share out a text's rotary frequencies among time, height and width, in place, where default shares do not add up.

    Args:
        config: as above.
        model: built from it.
    """
    for module in model.modules():
        section, frequencies = getattr(module, "mrope_section", None), getattr(module, "inv_freq", None)
        if section is None or frequencies is None or sum(section) == frequencies.numel():
            continue
        number = frequencies.numel()
        even = number // 3
        config.get_text_config().rope_parameters["mrope_section"] = [number - 2 * even, even, even]


def _fit_widths(config: Any) -> None:
    """Let towers give features of the text's width."""
    width = getattr(config.get_text_config(), "hidden_size", None)
    vision = getattr(config, "vision_config", None)
    if width is None or vision is None:
        return
    for name in ("out_hidden_size", "projection_dim"):
        if name in vars(vision):
            setattr(vision, name, width)
    for part in build.subconfigs(config):
        if "text_hidden_size" in vars(part):
            part.text_hidden_size = width
    if {"embed_dim", "hidden_size"} <= set(vars(vision)):  # Qwen2-VL's tower names its own width embed_dim
        vision.hidden_size = width
    if "hidden_size" in vars(config):
        config.hidden_size = width
    if "projector_input_dim" in vars(vision):  # Llama-4 shuffles squares of patches into channels before it projects
        vision.hidden_size = int(vision.intermediate_size * vision.pixel_shuffle_ratio**2)
        vision.vision_output_dim = vision.projector_output_dim


def _fit_audio(config: Any) -> None:
    """Let an audio tower give features of the text's width, and its projector take what the tower gives."""
    tower: Any = getattr(config, "audio_config", None)
    if hasattr(tower, "output_dim") and "text_config" in vars(config):
        tower.output_dim = config.get_text_config().hidden_size
    projector: Any = getattr(config, "projector_config", None)
    encoder: Any = getattr(config, "encoder_config", None)
    if hasattr(projector, "encoder_hidden_size") and hasattr(encoder, "hidden_dim"):
        projector.encoder_hidden_size = encoder.hidden_dim


def _fit_pictures(config: Any) -> None:
    """Let a picture have as many patches along a side as its projector can share out."""
    for part in build.subconfigs(config):
        vision: Any = getattr(part, "vision_config", None)
        if not isinstance(getattr(vision, "image_size", None), int) or not hasattr(vision, "patch_size"):
            continue
        patches = vision.image_size // vision.patch_size
        queries = getattr(part, "projector_patch_to_query_dict", None)
        tokens = math.isqrt(getattr(part, "mm_tokens_per_image", 1))
        if queries is not None and patches**2 not in queries:
            patches = math.isqrt(min(queries))
        unit = math.lcm(tokens, getattr(part, "scale_factor", 1))
        fitting = math.ceil(patches / unit) * unit
        if fitting != vision.image_size // vision.patch_size:
            vision.image_size = vision.patch_size * fitting


def _fit_tokens(config: Any) -> None:
    """Name tokens for images, videos and audio where there are none, and let the vocabulary hold them all."""
    text = config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        return
    most = -1
    for number, name in enumerate(n for n in list(vars(config)) if n.startswith(_MEDIA) and n.endswith(SPECIAL)):
        if getattr(config, name) is None:
            setattr(config, name, 8 + number)
        most = max(most, getattr(config, name))
    if most >= text.vocab_size:
        text.vocab_size = most + 1
