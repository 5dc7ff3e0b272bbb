"""Configurations of tiny models, one per family, of text, images and sound, that tests of all rooms share."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import yaml
from transformers import PreTrainedConfig

from headway.tracing import trace
from headway.tracing.build import model_class

if TYPE_CHECKING:
    from headway.count import CostModel

_TABLES = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
SPECIAL_TOKENS: dict[str, int] = _TABLES["parts"]["special_tokens"]
PATCH: int = _TABLES["parts"]["tower"]["patch_size"]  # pixels along a patch's side in every tiny vision tower


def _installed(*groups: str) -> tuple[str, ...]:
    """Families of some groups of the table that the installed transformers has: 5.17 has no Bailing."""
    return tuple(
        name for group in groups for name, row in _TABLES[group].items() if hasattr(transformers, row["class"])
    )


TEXT_FAMILIES, VISION_FAMILIES = _installed("text"), _installed("qwen_vision")
FAMILIES = TEXT_FAMILIES + VISION_FAMILIES
RECURRENT_FAMILIES = _installed("recurrent", "qwen_vision_recurrent")
IMAGE_FAMILIES, SPEECH_FAMILIES = _installed("images"), _installed("speech")


def tiny_config(family: str, vocabulary: int = 160, special_tokens: dict[str, int] | None = None) -> PreTrainedConfig:
    """Build a fresh configuration of a family.

    Args:
        family: a row of models.yaml.
        vocabulary: rows of its embedding, of families without special tokens of their own.
        special_tokens: ids of those that stand for pictures and films, of Qwen's vision families.
    """
    (group,) = (name for name, rows in _TABLES.items() if name not in ("parts", "folders") and family in rows)
    row = copy.deepcopy(_TABLES[group][family])
    if group.startswith("qwen_vision"):
        row["text_config"]["vocab_size"] = vocabulary
        row |= SPECIAL_TOKENS if special_tokens is None else special_tokens
    elif group not in ("images", "speech"):
        row |= {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return built(row)


def built(row: dict[str, Any]) -> PreTrainedConfig:
    """Build the configuration of a row: of its class, or of the family that it is `like`, with some values changed."""
    row = copy.deepcopy(row)
    if "like" not in row:
        return getattr(transformers, row.pop("class"))(**row)
    config = tiny_config(row.pop("like"))
    for name, value in row.items():
        setattr(config, name, value)
    return config


def tiny_model(family: str, *, seed: int = 0, **options: Any) -> transformers.PreTrainedModel:
    """Build a family's model with random weights, the same for one seed; options as of transformers' classes."""
    torch.manual_seed(seed)
    config = tiny_config(family)
    return model_class(config)._from_config(config, **options)


@functools.cache
def tiny_ledger(family: str) -> CostModel:
    """Trace a family once for all tests of a process."""
    return trace(tiny_config(family))


def vision_tokens(tokenizer: Any) -> dict[str, int]:
    """Look the special tokens of Qwen's vision families up, by the names that their configurations have for them."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}


@functools.cache
def checkpointing_name() -> str:
    """Say what the installed transformers calls activation checkpointing: it changed after 5.17, the oldest one."""
    name = "activation_checkpointing"
    return name if hasattr(transformers.PreTrainedModel, f"{name}_enable") else "gradient_checkpointing"


def enable_checkpointing(
    model: transformers.PreTrainedModel, *, reentrant: bool | None = False
) -> transformers.PreTrainedModel:
    """Switch a model's checkpointing on; with None, of the kind that transformers chooses."""
    getattr(model, f"{checkpointing_name()}_enable")(*(() if reentrant is None else ({"use_reentrant": reentrant},)))
    if reentrant is False:  # transformers asks for the embeddings' gradient, which only reentrant checkpoints need
        for part in model.modules():
            if hasattr(part, "disable_input_require_grads"):
                part.disable_input_require_grads()
    return model
