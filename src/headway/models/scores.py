"""Reward models: the body of a model with an output layer of one column, whose score is read at an answer's last token.

They are transformers' models for sequence classification with one label, of the families whose class scores each token
by a layer `score`. `headway.models.head.ScoreLosses` runs them on packs.
"""

import copy
import zlib
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from headway.errors import UnknownModelError
from headway.models.parallel.mesh import fill

SCORE = "score"
"""Name of the output layer."""
SCORE_WEIGHT = f"{SCORE}.weight"


def scoring_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the reward model that is made of a model; of a reward model itself.

    Raises:
        UnknownModelError: transformers has no class for it.
    """
    scorer = _class_of(config)
    if scorer is None:
        raise UnknownModelError(
            f"transformers has no reward model of type {config.model_type!r} (a class for sequence classification "
            "that scores each token). Train another model, such as the language model of the same family."
        )
    config = copy.deepcopy(config)
    config.architectures, config.num_labels = [scorer.__name__], 1
    return config


def is_scorer(config: PreTrainedConfig) -> bool:
    """Tell whether a configuration is that of a reward model."""
    scorer = _class_of(config)
    return scorer is not None and scorer.__name__ in (config.architectures or ()) and config.num_labels == 1


def name_padding(config: PreTrainedConfig, tokenizer: Any) -> int:
    """Have a reward model's configuration name the token that pads, which several texts need; give the token."""
    text = config.get_text_config()
    if text.pad_token_id is None:
        text.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return int(text.pad_token_id)


def _class_of(config: PreTrainedConfig) -> Any:
    mapping: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    scorer = mapping.get(type(config), None)
    return scorer if scorer is not None and issubclass(scorer, GenericForSequenceClassification) else None


@torch.no_grad()
def initialise_score(model: PreTrainedModel, seed: int) -> None:
    """Give the output layer its first weights: the same for a seed, on any number of processes.

    Args:
        model: a reward model, sharded or not.
        seed: of the run.

    Source: transformers' rule for linear layers, a normal distribution of the configuration's initializer_range.
    """
    weight = model.get_parameter(SCORE_WEIGHT)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{SCORE}".encode()))
    scale = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    fill(weight, torch.empty(weight.shape).normal_(std=scale, generator=generator))
