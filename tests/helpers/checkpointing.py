"""Activation checkpointing by the name that the installed transformers knows: it changed after 5.17, the oldest one."""

from typing import Any

from transformers import PreTrainedModel

NAME = "activation_checkpointing"
if not hasattr(PreTrainedModel, f"{NAME}_enable"):
    NAME = "gradient_checkpointing"


def enable(model: PreTrainedModel, *options: Any) -> None:
    """Switch a model's checkpointing on."""
    getattr(model, f"{NAME}_enable")(*options)
