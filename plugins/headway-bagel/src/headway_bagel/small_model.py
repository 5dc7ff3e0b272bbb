"""Bagel models small enough for a CPU: that of the demo that draws, and recipes scaled down."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.models.load import load_processor
from headway.synthetic.processor import write_tokenizer
from headway_bagel.configuration import BagelConfig

_NORM_GROUPS = 8  # groups of a small autoencoder's norms


def write_drawer(folder: Path, texts: Sequence[str], *, side: int) -> Path:
    """Write a Bagel model of about two million parameters, without weights: configuration and tokenizer.

    It draws pixels, four to a latent patch, without an autoencoder.

    Args:
        folder: created where needed.
        texts: texts that the vocabulary is learned from.
        side: of the images that it reads and draws [pixels].

    Returns:
        The folder; `headway train` opens it like any other.
    """
    tokenizer: Any = load_processor(write_tokenizer(folder, texts))
    # weights are drawn wider than a large model's 0.02, as in `headway.synthetic.digits.write_reader`
    size, spread = 128, 0.06
    config = BagelConfig(
        text_config={
            "model_type": "qwen3",
            "vocab_size": len(tokenizer),
            "hidden_size": size,
            "intermediate_size": 2 * size,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": size // 4,
            "max_position_embeddings": 1024,
            "initializer_range": spread,
            "tie_word_embeddings": False,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": 2,
        },
        # pixels are drawn themselves, in patches of 2 x 2
        latent_patch_size=2,
        max_latent_size=side // 2,
        initializer_range=spread,
        architectures=["BagelModel"],
    )
    config.save_pretrained(folder)
    return folder


def small_config(config: Any) -> Any:
    """Shrink the autoencoder of a configuration whose other parts are small already."""
    if config.vae_config:
        config.vae_config = _small_vae(config.vae_config)
    return config


def _small_vae(config: dict[str, Any]) -> dict[str, Any]:
    """Shrink an autoencoder to a sixteenth of its channels; its levels and latent channels stay."""
    widths = [max(_NORM_GROUPS, width // 16) for width in config["block_out_channels"]]
    return {**config, "block_out_channels": widths, "norm_num_groups": _NORM_GROUPS}


def small_chat(messages: list[dict[str, Any]], row: int) -> list[dict[str, Any]]:
    """Have every other made-up chat with an image ask for its first image instead of showing it."""
    content = messages[0]["content"]
    if row % 2 == 0 or len(content) < 2:  # words stand behind images
        return messages
    return [{"role": "user", "content": content[-1:]}, {"role": "assistant", "content": content[:1]}]
