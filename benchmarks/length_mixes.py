"""The four mixes of sample lengths that packing is compared on, each a distribution and a seed."""

import math
from dataclasses import dataclass

import numpy as np

from headway.count import load_cost_model
from headway.packing import Items, lengths
from headway.packing.budget import patch_costs, segment_costs


@dataclass(frozen=True)
class LengthMix:
    """Lengths, what a pack holds, and whose costs are balanced.

    Attributes:
        name: short.
        drawn_from: the distribution, one of `headway.packing.lengths`.
        packing_length: token budget of a pack [tokens].
        model: a shipped cost model.
        num_samples: for the comparison.
    """

    name: str
    drawn_from: str
    packing_length: int
    model: str
    num_samples: int

    @property
    def description(self) -> str:
        """The distribution in words."""
        mix = lengths.MIXES[self.drawn_from]
        return f"{mix.name}: {mix.description}"

    def items(self, num_samples: int | None = None) -> Items:
        """Draw samples and count their FLOPs."""
        rng = np.random.default_rng([0, MIXES.index(self)])
        tokens, merged, _ = lengths.MIXES[self.drawn_from].draw(rng, num_samples or self.num_samples)
        patches = lengths.PATCHES_PER_TOKEN * merged
        model = load_cost_model(self.model)
        costs = segment_costs(model, tokens)
        if self.name == "video":  # frames see no other frame, so a video costs its number of frames
            frame = math.prod(lengths.VIDEO_FRAME)
            costs += patches / frame * patch_costs(model, np.array([frame]))[0]
        elif patches.any():
            costs += patch_costs(model, patches)
        return Items.of(tokens, patches, costs)


MIXES = (
    LengthMix("text", "chats", 81_920, "qwen2.5-7b", 400_000),
    LengthMix("image", "images", 61_440, "qwen2.5-vl-7b", 300_000),
    LengthMix("video", "videos", 51_200, "qwen2.5-vl-7b", 100_000),
    LengthMix("reasoning", "reasoning", 51_200, "qwen2.5-7b", 100_000),
)
