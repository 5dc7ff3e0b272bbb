"""A tiny processor and datasets of chats with real image files, shared by the data tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

from headway.data import Chat, Encoder, read_samples
from headway.models import load_processor
from headway.models.load import Processor
from headway.synthetic.processor import write_processor


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    texts = ["Which digits do you see? One, two, three.", "How many pictures are there?"]
    return load_processor(write_processor(tmp_path_factory.mktemp("processor"), texts, patch_size=8))


@pytest.fixture(scope="session")
def encoder(processor: Processor) -> Encoder:
    return Encoder(processor)


@pytest.fixture(scope="session")
def text_encoder(processor: Any) -> Encoder:
    return Encoder(processor.tokenizer)


@pytest.fixture(scope="session")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """An encoder for a Qwen2-Audio with a small tokenizer, read from an ordinary folder."""
    folder = tmp_path_factory.mktemp("hearing")
    base: Any = load_processor(write_processor(folder / "base", ["What is that? A tone."], patch_size=8))
    tokenizer = base.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]})
    tokenizer.chat_template = None
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=128), tokenizer)
    processor.save_pretrained(folder / "model")
    saved = json.loads((folder / "model" / "processor_config.json").read_text())
    assert saved["processor_class"] == "Qwen2AudioProcessor"
    return Encoder(load_processor(folder / "model"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write lines (objects or raw text) as a JSONL file, and pictures of given (height, width) beside it."""

    def build(*lines: Any, pictures: dict[str, tuple[int, int]] | None = None) -> Path:
        rng = np.random.default_rng(0)
        for name, (height, width) in (pictures or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(tmp_path / name)
        file = tmp_path / "chats.jsonl"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return file

    return build


@pytest.fixture
def many(write: Callable[..., Path]) -> list[Chat]:
    """Forty chats of different lengths, every third with a picture."""
    lines = []
    for number in range(40):
        parts = [{"type": "image", "image": f"{number % 6}.png"}] if number % 3 == 0 else []
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "Which? " * (1 + number * 7 % 13)}]}
        lines.append({"messages": [question, {"role": "assistant", "content": f"It is {number}."}]})
    return read_samples(write(*lines, pictures={f"{n}.png": (16 + 16 * n, 40) for n in range(6)}))
