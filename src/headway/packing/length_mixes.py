"""Typical lengths of training samples, each a distribution with its source: to plan packs without data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from headway.packing.costs import square_grid
from headway.packing.lengths import LengthTable

if TYPE_CHECKING:
    from collections.abc import Callable

Ints = NDArray[np.int64]

PATCHES_PER_TOKEN = 4
"""Squares of 2 x 2 patches are a token, as in Qwen2-VL and what followed it."""

VIDEO_FRAME = (28, 28)
"""Height and width of a pair of video frames [patches]."""


@dataclass(frozen=True)
class Mix:
    """One distribution of sample lengths.

    Attributes:
        name: short.
        description: the distribution.
        kind: what the samples hold beside text.
        source: where it is from.
        draw: makes, of so many samples, the lengths [tokens], how many of these are media's [tokens], and the number of
            images or videos, each of shape (N,).
    """

    name: str
    description: str
    kind: Literal["text", "images", "videos"]
    source: str
    draw: Callable[[np.random.Generator, int], tuple[Ints, Ints, Ints]]

    def lengths(self, num_samples: int, seed: int = 0) -> LengthTable:
        """Draw samples, with pictures about square and videos of frames of one size, rounded up to whole rows."""
        tokens, media, number = self.draw(np.random.default_rng(seed), num_samples)
        rows = np.repeat(np.arange(num_samples), number)
        each = media[rows] * PATCHES_PER_TOKEN // number[rows]
        grids = np.array([self._grid(int(patches)) for patches in each], dtype=np.int64).reshape(-1, 3)
        patches = np.bincount(rows, grids.prod(axis=1), num_samples).astype(np.int64)
        return LengthTable(tokens, patches, grids, rows)

    def _grid(self, patches: int) -> tuple[int, int, int]:
        if self.kind == "videos":
            return max(1, round(patches / math.prod(VIDEO_FRAME))), *VIDEO_FRAME
        return square_grid(patches, math.isqrt(PATCHES_PER_TOKEN))


def lognormal(rng: np.random.Generator, count: int, median: float, sigma: float, low: int, high: int) -> Ints:
    """Draw whole numbers whose logarithms are normal, cut off at both ends."""
    drawn: Ints = np.clip(np.round(rng.lognormal(np.log(median), sigma, count)), low, high).astype(np.int64)
    return drawn


def _text(tokens: Ints) -> tuple[Ints, Ints, Ints]:
    none = np.zeros_like(tokens)
    return tokens, none, none


def _chats(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    return _text(lognormal(rng, count, 800, 1.1, 16, 32_768))


def _images(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    words = lognormal(rng, count, 250, 1.0, 16, 16_384)
    pictures = rng.choice([0, 1, 2, 4], count, p=[0.25, 0.55, 0.12, 0.08])
    merged = lognormal(rng, count, 700, 0.7, 64, 4_096) * pictures
    return words + merged, merged, pictures


def _videos(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    tokens = rng.integers(3_000, 26_000, count, endpoint=True)
    return tokens, tokens * 9 // 10, np.ones(count, dtype=np.int64)


def _reasoning(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    return _text(lognormal(rng, count, 8_000, 0.9, 128, 51_200))


def _documents(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    return _text(lognormal(rng, count, 250, 1.0, 16, 8_192))


def _vqa(rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Ints]:
    tokens = rng.integers(400, 800, count, endpoint=True)
    return tokens, tokens - 40, np.ones(count, dtype=np.int64)


_OURS = "our own, for benchmarks/packing.py"

MIXES = {
    mix.name: mix
    for mix in (
        Mix("chats", "lognormal, median 800 tokens, sigma 1.1, 16 to 32,768", "text", _OURS, _chats),
        Mix(
            "images",
            "text lognormal, median 250 tokens, sigma 1.0, 16 to 16,384; none, 1, 2 or 4 pictures in 25, 55, 12 and "
            "8 %, each lognormal with median 700 tokens, sigma 0.7, 64 to 4,096, of 4 patches a token",
            "images",
            _OURS,
            _images,
        ),
        Mix("videos", "uniform, 3,000 to 26,000 tokens, nine tenths of them video", "videos", _OURS, _videos),
        Mix("reasoning", "lognormal, median 8,000 tokens, sigma 0.9, 128 to 51,200", "text", _OURS, _reasoning),
        Mix(
            "documents",
            "web pages: lognormal, median 250 tokens, sigma 1.0, 16 to 8,192, a mean of about 410",
            "text",
            "C4's mean of 156 billion tokens over 365 million documents (Dodge et al. 2021, table 1); the spread is "
            "ours",
            _documents,
        ),
        Mix(
            "vqa",
            "one picture and a question: uniform, 400 to 800 tokens, all but 40 of them the picture's",
            "images",
            "torchtitan's Qwen3-VL experiments on VQAv2 (2025-12): 'short sequences (~400-800 tokens)'",
            _vqa,
        ),
    )
}
"""By name."""
