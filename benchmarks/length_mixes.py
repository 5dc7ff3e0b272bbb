"""The four mixes of sample lengths that packing is compared on, each a distribution and a seed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.count import load_cost_model
from headway.data.plan import Items
from headway.data.plan.costs import patch_costs, segment_costs

Ints = NDArray[np.int64]
VIDEO_FRAME = 28 * 28  # patches of one frame of the video mix, 2 x 2 of them a token


@dataclass(frozen=True)
class LengthMix:
    """Lengths, what a pack holds, and whose costs are balanced.

    Attributes:
        name: short.
        description: the distribution.
        packing_length: token budget of a pack [tokens].
        model: a shipped cost model.
        num_samples: for the comparison.
    """

    name: str
    description: str
    packing_length: int
    model: str
    num_samples: int

    def items(self, num_samples: int | None = None) -> Items:
        """Draw samples and count their FLOPs."""
        rng = np.random.default_rng([0, MIXES.index(self)])
        tokens, patches = _DRAWS[self.name](rng, num_samples or self.num_samples)
        model = load_cost_model(self.model)
        costs = segment_costs(model, tokens)
        if self.name == "video":  # frames see no other frame, so a video costs its number of frames
            frame = patch_costs(model, np.array([VIDEO_FRAME]))[0]
            costs += patches / VIDEO_FRAME * frame
        elif patches.any():
            costs += patch_costs(model, patches)
        return Items.of(tokens, patches, costs)


def _lognormal(rng: np.random.Generator, count: int, median: float, sigma: float, low: int, high: int) -> Ints:
    drawn: Ints = np.clip(np.round(rng.lognormal(np.log(median), sigma, count)), low, high).astype(np.int64)
    return drawn


def _text(rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    return _lognormal(rng, count, 800, 1.1, 16, 32_768), np.zeros(count, dtype=np.int64)


def _image(rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    words = _lognormal(rng, count, 250, 1.0, 16, 16_384)
    pictures = rng.choice([0, 1, 2, 4], count, p=[0.25, 0.55, 0.12, 0.08])
    merged = _lognormal(rng, count, 700, 0.7, 64, 4_096) * pictures
    return words + merged, 4 * merged


def _video(rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    tokens = rng.integers(3_000, 26_000, count, endpoint=True)
    return tokens, (tokens * 9 // 10) * 4


def _reasoning(rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    return _lognormal(rng, count, 8_000, 0.9, 128, 51_200), np.zeros(count, dtype=np.int64)


_DRAWS = {"text": _text, "image": _image, "video": _video, "reasoning": _reasoning}

MIXES = (
    LengthMix("text", "chats: lognormal, median 800 tokens, sigma 1.1, 16 to 32,768", 81_920, "qwen2.5-7b", 400_000),
    LengthMix(
        "image",
        "text lognormal, median 250 tokens, sigma 1.0, 16 to 16,384; none, 1, 2 or 4 pictures in 25, 55, 12 and 8 %, "
        "each lognormal with median 700 tokens, sigma 0.7, 64 to 4,096, of 4 patches a token",
        61_440,
        "qwen2.5-vl-7b",
        300_000,
    ),
    LengthMix("video", "uniform, 3,000 to 26,000 tokens, nine tenths of them video", 51_200, "qwen2.5-vl-7b", 100_000),
    LengthMix("reasoning", "lognormal, median 8,000 tokens, sigma 0.9, 128 to 51,200", 51_200, "qwen2.5-7b", 100_000),
)
