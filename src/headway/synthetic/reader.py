"""The demonstration's model: a Qwen3-VL of about a million parameters, as an ordinary model folder without weights."""

from collections.abc import Iterable
from pathlib import Path

from headway.models.load import load_processor
from headway.synthetic.digits import QUESTIONS
from headway.synthetic.processor import write_processor

PATCH_SIZE = 8  # [pixels]; the smallest images then are one token of 2 x 2 patches


def write_reader(folder: Path, texts: Iterable[str] = (*QUESTIONS, "user\n", "assistant\n")) -> Path:
    """Write the configuration, tokenizer and image processor of a small model that can learn to read small images.

    Weights are drawn when training starts. They are drawn wider than a large model's 0.02: in a hidden size of 128 that
    would leave every layer's output small beside its input, and learning starts several times later.

    Args:
        folder: created where needed.
        texts: what the vocabulary is learned from: their words become single tokens.

    Returns:
        The folder; `headway train` and transformers open it like any other.
    """
    from transformers import Qwen3VLConfig

    # Of the digits, answers stay digit by digit, as no number is among their questions.
    write_processor(folder, texts, PATCH_SIZE, temporal_patch_size=1)
    tokenizer = load_processor(folder).tokenizer
    token = tokenizer.convert_tokens_to_ids
    hidden_size, num_heads, spread = 128, 4, 0.06
    head_dim = hidden_size // num_heads
    third = head_dim // 6
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": 2,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 1024,
            "initializer_range": spread,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [head_dim // 2 - 2 * third, third, third],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_heads": num_heads,
            "patch_size": PATCH_SIZE,
            "temporal_patch_size": 1,
            "out_hidden_size": hidden_size,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": spread,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    return folder
