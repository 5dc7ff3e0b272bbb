"""A small model of another library, or of one's own, with an example of its arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

WIDTH, HEADS, LAYERS, VOCABULARY, BATCH, LENGTH = 16, 2, 2, 64, 2, 9
SIZE = WIDTH // HEADS


@dataclass(frozen=True)
class Foreign:
    """A model and how it is called."""

    build: Callable[[], nn.Module]
    arguments: Callable[[], Any]  # a dictionary by name, or a tuple
    forbidden: int = 0  # FLOPs of forward over forbidden pairs; backward has twice as many
    refused: str = ""  # what the error says, where the model cannot be counted


def causal(layers: int = LAYERS, heads: int = HEADS, size: int = SIZE, length: int = LENGTH, batch: int = BATCH) -> int:
    """Derive what eager attention computes over pairs that a causal mask forbids: s (s - 1) / 2 for each head."""
    return batch * layers * heads * 2 * (size + size) * (length * (length - 1) // 2)
