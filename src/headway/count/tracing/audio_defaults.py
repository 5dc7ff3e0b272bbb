"""Make a default configuration's audio tower fit its text, where transformers leaves them such that they do not run."""

from __future__ import annotations

from typing import Any


def fit_audio(config: Any) -> None:
    """Change a configuration, in place, so that its audio tower gives features that its text can take.

    Args:
        config: a default configuration of transformers.
    """
    text = config.get_text_config()
    tower: Any = getattr(config, "audio_config", None)
    if hasattr(tower, "output_dim") and "text_config" in vars(config):
        tower.output_dim = text.hidden_size
    projector: Any
    encoder: Any
    projector, encoder = getattr(config, "projector_config", None), getattr(config, "encoder_config", None)
    if hasattr(projector, "encoder_hidden_size") and hasattr(encoder, "hidden_dim"):
        projector.encoder_hidden_size = encoder.hidden_dim
    if "audio_token_id" in vars(config) and config.audio_token_id is None:
        config.audio_token_id = text.vocab_size - 1
