"""The set-ups of benchmarks/engine_gpu.py: a recipe with its model's published sizes, and packs like its data's."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headway.config import TrainConfig, load_config
from headway.data.collate import Batch, Collator
from headway.data.encoded import EncodedSample
from headway.data.media.tensors import MediaTensors
from headway.data.samples import Origin
from headway.models import load_model, rope_index
from headway.models.load import RopeIndex
from headway.models.vision import vision_geometry
from headway.packing.lengths import MIXES
from headway.synthetic.small_model import small_config
from headway.tracing.build import preset_config

RECIPES = Path(__file__).parents[1] / "recipes"
VIDEO_FRAME = 28  # height and width of a pair of video frames [patches]
SMALL = 64  # how much shorter samples and packs are with small sizes


@dataclass(frozen=True)
class Setup:
    """One of the recipes, on one device.

    Attributes:
        name: short.
        recipe: the file in recipes/ whose model and packing length it has.
        model: a shipped model.
        packing_length: tokens of a pack.
        mix: the lengths of its samples, by their name in `headway.packing.lengths`.
        target: useful MFU aimed at on a H200.
    """

    name: str
    recipe: str
    model: str
    packing_length: int
    mix: str
    target: float

    @property
    def is_video(self) -> bool:
        """Whether samples hold videos."""
        return MIXES[self.mix].kind == "videos"

    def with_packs_of(self, tokens: int | None) -> "Setup":
        """The set-up with packs of so many tokens; as it is if None."""
        return self if tokens is None else replace(self, packing_length=tokens)

    def config(self, *, layers: int | None, is_small: bool) -> PreTrainedConfig:
        """The model's configuration, with fewer language layers, or small in every way."""
        config: Any = preset_config(self.model)
        if is_small:
            config = small_config(config, 256)
            for number, name in enumerate(_TOKENS):
                if hasattr(config, name):
                    setattr(config, name, 250 + number)
        if layers is not None:
            text = config.get_text_config()
            text.num_hidden_layers = layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
        shaped: PreTrainedConfig = config
        return shaped

    def recipe_for(self, folder: Path, model: PreTrainedConfig, settings: dict[str, Any]) -> TrainConfig:
        """The recipe as `headway train` reads it, for a model at random.

        Args:
            folder: where the model's configuration is written; the run's folder would be in it.
            model: the configuration.
            settings: of the recipe, as `--set` names them, and what they are instead; None leaves one as it is.
        """
        model.save_pretrained(folder / "model")
        given = {"model.path": folder / "model", "model.random_init": "true", "run.folder": folder / "run"} | settings
        return load_config(
            RECIPES / f"{self.recipe}.yaml", tuple(f"{k}={v}" for k, v in given.items() if v is not None)
        )

    def layers(self, *, is_small: bool) -> int:
        """Language layers of the whole model."""
        return int(self.config(layers=None, is_small=is_small).get_text_config().num_hidden_layers)

    def batches(self, count: int, *, is_small: bool) -> tuple[list[Batch], int]:
        """Draw packs as the feed would hand them over: patches as bytes, the vision tower's inputs ready-made.

        Returns:
            The packs, and how many samples were drawn that are longer than a pack.
        """
        model = without_data(self.config(layers=1, is_small=is_small))  # no layer's weights decide what a pack holds
        vision = getattr(model.config, "vision_config", None)
        values = 0 if vision is None else _frame_values(vision) * vision.temporal_patch_size
        scale = torch.full((values,), 2 / 255), torch.full((values,), -1.0)  # bytes as numbers from -1 to 1
        collator = Collator(geometry=vision_geometry(model), pixel_scale=scale)
        drawn = [*islice(self.packs(model.config, rope_index(model), is_small=is_small), count)]
        return [collator(samples) for samples, _ in drawn], sum(num_longer for _, num_longer in drawn)

    def packs(
        self, config: PreTrainedConfig, rule: RopeIndex | None, *, is_small: bool
    ) -> Iterator[tuple[list[EncodedSample], int]]:
        """Draw samples of packs, each filled to the last token: what is left over by those that fit is text.

        Yields:
            A pack, and how many samples were drawn for it that are longer than a pack, in whose place is text.
        """
        rng, scale = np.random.default_rng(0), SMALL if is_small else 1
        while True:
            pack: list[EncodedSample] = []
            room = self.packing_length // scale
            num_longer = 0
            while room > 0:
                tokens, media, number = (int(drawn[0]) for drawn in MIXES[self.mix].draw(rng, 1))
                grids = [self._grid(media // number // scale) for _ in range(number)]
                length = max(1, (tokens - media) // scale) + sum(math.prod(grid) // 4 + 2 for grid in grids)
                num_longer += length > self.packing_length // scale
                if length > room:
                    length, grids = room, []
                pack.append(_sample(config, rule, rng, length, grids, is_video=self.is_video))
                room -= length
            yield pack, num_longer

    def _grid(self, tokens: int) -> tuple[int, int, int]:
        """(t, h, w) of a picture or a video that takes about so many tokens, 2 x 2 patches each."""
        if self.is_video:
            side = min(VIDEO_FRAME, 2 * max(1, math.isqrt(tokens)))
            return max(1, 4 * tokens // side**2), side, side
        side = 2 * max(1, round(math.sqrt(tokens)))
        return 1, side, side


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("text", "qwen2.5-7b-text-81920", "qwen2.5-7b", 81_920, "chats", 0.50),
        Setup("image", "qwen3-vl-8b-image-61440", "qwen3-vl-8b", 61_440, "images", 0.45),
        Setup("video", "qwen2.5-vl-7b-video-51200", "qwen2.5-vl-7b", 51_200, "videos", 0.40),
        Setup("vqa", "qwen3-vl-30b-a3b-vqa-8192", "qwen3-vl-30b-a3b", 8_192, "vqa", 0.25),
    )
}

PEERS = Setup("peers", "qwen2.5-7b-text-81920", "qwen3-8b", 81_920, "chats", 0.50)
"""The text recipe's settings on a model that torchtitan has too, for benchmarks/peers.py."""


def setup_named(name: str) -> Setup:
    """One of the set-ups, or that of the peers."""
    return PEERS if name == PEERS.name else SETUPS[name]


def without_data(config: PreTrainedConfig) -> PreTrainedModel:
    """A model that is shapes alone."""
    return load_model(config, device="meta", random_init=True)


def _sample(
    config: PreTrainedConfig,
    rule: RopeIndex | None,
    rng: np.random.Generator,
    length: int,
    grids: list[tuple[int, int, int]],
    *,
    is_video: bool,
) -> EncodedSample:
    """Random words, each supervised, after pictures of random numbers."""
    specials = [getattr(config, name) for name in _TOKENS if hasattr(config, name)]
    ids_S = torch.from_numpy(rng.integers(0, min([*specials, config.get_text_config().vocab_size]), length))
    labels_S, types_S = ids_S.clone(), torch.zeros_like(ids_S)
    start = 0
    for grid in grids:
        end = start + 1 + math.prod(grid) // 4
        ids_S[start], ids_S[end] = config.vision_start_token_id, config.vision_end_token_id
        ids_S[start + 1 : end] = config.video_token_id if is_video else config.image_token_id
        types_S[start + 1 : end] = 2 if is_video else 1
        start = end + 1
    labels_S[:start] = -100
    grids_M3 = torch.tensor(grids, dtype=torch.long).reshape(-1, 3)
    positions = torch.arange(length)[None]
    text: dict[str, Any] = {
        "input_ids_S": ids_S,
        "labels_S": labels_S,
        "origin": Origin("engine", "engine", 0, "made up"),
    }
    if rule is None:
        return EncodedSample(position_ids_RS=positions, **text)
    if not grids:
        return EncodedSample(position_ids_RS=positions.repeat(3, 1), token_types_S=types_S, **text)
    known = {"video_grid_thw" if is_video else "image_grid_thw": grids_M3}
    positions = rule(input_ids=ids_S[None], mm_token_type_ids=types_S[None], **known)[0][:, 0]
    values = _frame_values(config.vision_config) * (config.vision_config.temporal_patch_size if is_video else 1)
    pixels_PD = torch.from_numpy(rng.integers(0, 256, (int(grids_M3.prod(1).sum()), values), dtype=np.uint8))
    media = {"videos" if is_video else "images": MediaTensors(grids_M3, pixels_PD)}
    return EncodedSample(position_ids_RS=positions, token_types_S=types_S, media_end=start, media=media, **text)


def _frame_values(vision: Any) -> int:
    """Bytes of a patch in one frame."""
    return int(vision.in_channels * vision.patch_size**2)


_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
