"""The set-ups of benchmarks/engine_gpu.py: a model's published sizes, a packing length, and packs like its data's."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig

from headway.count.models import presets
from headway.data import EncodedSample, Origin
from headway.models.load import RopeIndex

VIDEO_FRAME = 28  # height and width of a pair of video frames [patches]
SMALL = 64  # how much shorter samples and packs are with small sizes

# words, and the tokens of each picture or video
Draw = Callable[[np.random.Generator], tuple[int, list[int]]]


@dataclass(frozen=True)
class Setup:
    """One of the recipes, on one device.

    Attributes:
        name: short.
        recipe: the file in recipes/ whose model and packing length it has.
        model: a shipped model.
        packing_length: tokens of a pack.
        kind: what samples hold beside text.
        draw: the lengths of a sample; those of benchmarks/length_mixes.py, and of torchtitan's page for questions.
        target: useful MFU aimed at on a H200.
    """

    name: str
    recipe: str
    model: str
    packing_length: int
    kind: str
    draw: Draw
    target: float

    def config(self, *, layers: int | None, is_small: bool) -> PreTrainedConfig:
        """The model's configuration, with fewer language layers, or small in every way."""
        values = copy.deepcopy(presets()[self.model])
        text = values.get("text_config", values)
        if is_small:
            _shrink(values, text)
        if layers is not None:
            text["num_hidden_layers"] = layers
        config: PreTrainedConfig = AutoConfig.for_model(**values)
        return config

    def layers(self, *, is_small: bool) -> int:
        """Language layers of the whole model."""
        return int(self.config(layers=None, is_small=is_small).get_text_config().num_hidden_layers)

    def packs(
        self, config: PreTrainedConfig, rule: RopeIndex | None, *, is_small: bool
    ) -> Iterator[list[EncodedSample]]:
        """Draw packs, each filled to the last token: what is left over by the samples that fit is text."""
        rng, scale = np.random.default_rng(0), SMALL if is_small else 1
        while True:
            pack: list[EncodedSample] = []
            room = self.packing_length // scale
            while room > 0:
                words, media = self.draw(rng)
                grids = [self._grid(tokens // scale) for tokens in media]
                length = max(1, words // scale) + sum(math.prod(grid) // 4 + 2 for grid in grids)
                if length > room:
                    length, grids = room, []
                pack.append(_sample(config, rule, rng, length, grids, is_video=self.kind == "video"))
                room -= length
            yield pack

    def _grid(self, tokens: int) -> tuple[int, int, int]:
        """(t, h, w) of a picture or a video that takes about so many tokens, 2 x 2 patches each."""
        if self.kind == "video":
            side = min(VIDEO_FRAME, 2 * max(1, math.isqrt(tokens)))
            return max(1, 4 * tokens // side**2), side, side
        side = 2 * max(1, round(math.sqrt(tokens)))
        return 1, side, side


def _lognormal(rng: np.random.Generator, median: float, sigma: float, low: int, high: int) -> int:
    return int(np.clip(round(rng.lognormal(math.log(median), sigma)), low, high))


def _text(rng: np.random.Generator) -> tuple[int, list[int]]:
    return _lognormal(rng, 800, 1.1, 16, 32_768), []


def _images(rng: np.random.Generator) -> tuple[int, list[int]]:
    pictures = int(rng.choice([0, 1, 2, 4], p=[0.25, 0.55, 0.12, 0.08]))
    return _lognormal(rng, 250, 1.0, 16, 16_384), [_lognormal(rng, 700, 0.7, 64, 4_096) for _ in range(pictures)]


def _videos(rng: np.random.Generator) -> tuple[int, list[int]]:
    tokens = int(rng.integers(3_000, 26_000, endpoint=True))
    return tokens // 10, [tokens * 9 // 10]


def _questions(rng: np.random.Generator) -> tuple[int, list[int]]:
    return 40, [int(rng.integers(360, 760, endpoint=True))]


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("text", "qwen2.5-7b-text-81920", "qwen2.5-7b", 81_920, "text", _text, 0.50),
        Setup("image", "qwen3-vl-8b-image-61440", "qwen3-vl-8b", 61_440, "image", _images, 0.45),
        Setup("video", "qwen2.5-vl-7b-video-51200", "qwen2.5-vl-7b", 51_200, "video", _videos, 0.40),
        Setup("vqa", "qwen3-vl-30b-a3b-vqa-8192", "qwen3-vl-30b-a3b", 8_192, "image", _questions, 0.25),
    )
}


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
    vision = config.vision_config
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels_PD = torch.from_numpy(rng.standard_normal((int(grids_M3.prod(1).sum()), channels), dtype=np.float32))
    media: dict[str, Any] = {"pixels_PD": pixels_PD, "grids_M3": grids_M3}
    if is_video:
        media = {"video_pixels_PD": pixels_PD, "video_grids_M3": grids_M3}
    return EncodedSample(position_ids_RS=positions, token_types_S=types_S, media_end=start, **text, **media)


_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _shrink(values: dict[str, Any], text: dict[str, Any]) -> None:
    """Make every size of a model small, for a run on a CPU; what kind of model it is stays."""
    text |= {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if "head_dim" in text:
        text["head_dim"] = 16
    if "mrope_section" in text.get("rope_parameters", {}):
        text["rope_parameters"]["mrope_section"] = [2, 3, 3]
    if "num_experts" in text:
        text |= {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    for name in ("bos_token_id", "eos_token_id"):
        if name in text:
            text[name] = 1
    if "vision_config" in values:
        vision = values["vision_config"]
        vision |= {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
        for name, indices in (("deepstack_visual_indexes", [0, 1]), ("fullatt_block_indexes", [1])):
            if name in vision:
                vision[name] = indices
        values |= {name: 250 + i for i, name in enumerate(_TOKENS)}
