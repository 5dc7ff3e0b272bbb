"""A Bagel model small enough for a CPU, for the demo that draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.families.bagel.configuration import BagelConfig
from headway.models.load import load_processor
from headway.synthetic.processor import write_tokenizer


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
