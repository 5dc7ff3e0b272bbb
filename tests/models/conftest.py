"""A tiny processor, the tiny models with its special tokens, and chats with real image files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedConfig

from headway.data import Chat, read_samples
from headway.models import load_processor
from headway.models.load import Processor
from headway.synthetic.processor import write_processor
from helpers import models


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def processor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ["Which digits do you see? One, two, three.", "How many pictures are there?"]
    return write_processor(tmp_path_factory.mktemp("processor"), texts, patch_size=models.PATCH)


@pytest.fixture(scope="session")
def processor(processor_folder: Path) -> Processor:
    return load_processor(processor_folder)


@pytest.fixture(scope="session")
def tiny_config(processor: Any) -> Callable[[str], PreTrainedConfig]:
    """Build a fresh configuration of a family, its special tokens those of the tiny processor."""
    tokens = models.vision_tokens(processor.tokenizer)
    return lambda family: models.tiny_config(family, len(processor.tokenizer), tokens)


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> list[Chat]:
    """Chats of different lengths: no, one and several images of different shapes, one and two answers."""
    folder = tmp_path_factory.mktemp("chats")
    rng = np.random.default_rng(7)
    shapes = [[(40, 72)], [], [(16, 16), (64, 33)], [(70, 70)], [], [(16, 16), (16, 16), (48, 16)]]
    lines = []
    for number, sizes in enumerate(shapes):
        parts: list[dict[str, str]] = []
        for place, (height, width) in enumerate(sizes):
            name = f"{number}_{place}.png"
            Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / name)
            parts += [{"type": "image", "image": name}, {"type": "text", "text": f"Picture {place}. "}]
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "Which digits? " * (number + 1)}]}
        messages = [question, {"role": "assistant", "content": " ".join(map(str, range(number + 2)))}]
        if number % 2:
            messages += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return read_samples(folder / "chats.jsonl")
