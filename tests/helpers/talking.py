"""Small models with random weights to talk to: one that reads pictures, and one of text without a chat template."""

import torch
from PIL import Image
from transformers import Qwen3Config

from headway.models.load import load_model
from headway.synthetic.digits import write_reader
from helpers.tiny_tokenizer import tiny_tokenizer

QUESTIONS = ("What is this?", "How many digits are there?")


def picture_reader(folder):
    """Write a Qwen3-VL of a million random weights; its answers are nonsense, and always the same."""
    write_reader(folder, [*QUESTIONS, "user\n", "assistant\n", "system\n"])
    torch.manual_seed(3)
    load_model(str(folder), random_init=True).save_pretrained(folder)
    return folder


def text_model(folder):
    """Write a Qwen3 of a few thousand random weights, whose tokenizer has no chat template."""
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, **sizes
    )
    torch.manual_seed(4)
    load_model(config, random_init=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def picture(path, size=(48, 32), color="red"):
    """Write a picture of one colour."""
    Image.new("RGB", size, color).save(path)
    return path
