"""Architectures that transformers does not have, built from its blocks: Bagel, which reads and draws images.

`register_architectures` makes them known to the Auto classes of transformers, so that a folder or a `config.json` of
one opens like any other.
"""

from transformers import AutoConfig, AutoModelForImageTextToText

from headway.architectures.bagel import BagelConfig, BagelModel

__all__ = ["BagelConfig", "BagelModel", "register_architectures"]


def register_architectures() -> None:
    """Register the architectures with transformers; doing so again changes nothing."""
    AutoConfig.register(BagelConfig.model_type, BagelConfig, exist_ok=True)
    AutoModelForImageTextToText.register(BagelConfig, BagelModel, exist_ok=True)
