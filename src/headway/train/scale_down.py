"""A recipe shrunk until a laptop trains it in about a minute, through the same code.

The model keeps its structure and loses depth, width and vocabulary; packs and samples shrink by one factor, so that
packs hold about as many samples as the real ones; data are made up, of the recipe's kind, and read through the real
sources. What the machine at hand does not have - several processes, CUDA - is reduced to what it has.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from headway.config import TrainConfig, changed_config
from headway.config.data import MediaConfig
from headway.models.load import named_config
from headway.models.parallel.ranks import join_ranks
from headway.models.precision import choose_device
from headway.packing.lengths import MIXES
from headway.plugins import family_hook, objective_of
from headway.synthetic.small_data import vocabulary_texts, write_small_data
from headway.synthetic.small_model import EXPERTS, write_small_model
from headway.train.run_folder import refuse_existing_run

STEPS = 30
LR = 3e-3  # small models learn at higher rates
_LEAST_TOKENS, _MOST_TOKENS, _SHARE = 512, 1024, 16  # a small pack: a sixteenth of the real one, within these
_PACKS = 6  # packs' worth of samples that are written; they play again and again
_MAX_SAMPLES = 512
_IMAGE_TOKENS = 256  # larger images are shrunk to so many tokens


@dataclass(frozen=True)
class Small:
    """A recipe that was scaled down.

    Attributes:
        config: what is trained.
        mix: name of the mix that the samples are made of.
        pixels: side of a vision patch, and patches per side of a token; 1 and 1 without vision.
        scale: of all lengths.
        source: the configuration of the real model.
    """

    config: TrainConfig
    mix: str
    pixels: tuple[int, int]
    scale: float
    source: PreTrainedConfig

    @property
    def folder(self) -> Path:
        """Where model, data and run lie."""
        return self.config.run.folder.parent


def scale_down(config: TrainConfig, *, world_size: int, cuda: bool, overrides: tuple[str, ...] = ()) -> Small:
    """Shrink a recipe; nothing is written.

    Args:
        config: the recipe.
        world_size: processes that train.
        cuda: whether they have CUDA devices.
        overrides: assignments `a.b=value` that go on top of what was shrunk.

    Raises:
        ConfigError: an override that is not allowed.
        UnknownModelError: the recipe's model is not known here.
    """
    source = named_config(config.model.path)
    vision = getattr(source, "vision_config", None)
    pixels = (1, 1) if vision is None else (vision.patch_size, getattr(vision, "spatial_merge_size", 1))
    tokens = max(_LEAST_TOKENS, min(_MOST_TOKENS, config.data.tokens_per_pack // _SHARE))
    tokens = min(tokens, config.data.tokens_per_pack)
    scale = tokens / config.data.tokens_per_pack
    patches = config.data.patches_per_pack
    folder = config.run.folder / "small"
    raw = config.to_dict()
    raw["model"] |= {"path": str(folder / "model"), "random_init": True}
    raw["data"] |= {
        "train": [{"path": str(folder / "data" / "samples.jsonl")}],
        "stages": [],
        "eval": None,
        "tokens_per_pack": tokens,
        "patches_per_pack": None if patches is None else max(1, round(patches * scale)),
        "bucket_tokens": _bucket(config.data.bucket_tokens, tokens),
        "bucket_patches": _bucket(config.data.bucket_patches, 4 * tokens),
        "workers": min(1, config.data.workers),
        **dict.fromkeys(MediaConfig.model_fields),  # made-up pictures have sizes of their own
    }
    raw["optim"] |= {
        "steps": STEPS,
        "epochs": None,
        "lr": LR,
        "warmup_steps": min(3, config.optim.warmup_steps),
        "lr_of": {},
    }
    raw["optim"]["accumulation"] = min(2, config.optim.accumulation)
    if config.optim.ema is not None:
        raw["optim"]["ema"]["every"] = min(config.optim.ema.every, STEPS)
    raw["eval"], raw["plan"] = {}, {}
    raw["checkpoint"] |= {"every": None, "keep_best": False}
    raw["parallel"] |= _mesh(config, world_size)
    raw["run"] |= {"folder": str(folder / "run"), "trackers": [], "profile": None}
    if not cuda:
        raw["parallel"] |= {"reduce_dtype": "float32", "offload": False}
        raw["speed"] |= {"kernels": "auto"}
        raw["run"] |= {"dtype": "auto"}
    mix = config.plan.mix or ("images" if vision is not None else "chats")
    return Small(changed_config(config, raw, overrides), mix, pixels, scale, source)


def write_small(small: Small) -> None:
    """Write the model folder and the samples of a recipe that was scaled down; of several processes, the first does.

    Raises:
        ConfigError: its folder holds a run already.
        DataError: the folder cannot be written.
    """
    data = small.config.data
    device = choose_device(small.config.run)
    ranks = join_ranks(device)
    if ranks.is_first:
        refuse_existing_run(small.config.run.folder)
        patch_size, merge_size = small.pixels
        area = (patch_size * merge_size) ** 2
        # A small model with a tokenizer of its own, and as many samples as a few steps need.
        texts = vocabulary_texts()
        write_small_model(small.folder / "model", small.source, texts, max_pixels=_IMAGE_TOKENS * area)
        mix, objective = MIXES[small.mix], objective_of(small.config.objective_name)
        make_rows = None if objective is None else objective.hook("small_rows")
        tokens, _, _ = mix.draw(np.random.default_rng(0), 1000)
        packs = ranks.size // small.config.parallel.sequence * small.config.optim.accumulation * _PACKS
        wanted = math.ceil(packs * data.tokens_per_pack / max(1.0, float(tokens.mean()) * small.scale))
        write_small_data(
            small.folder / "data",
            mix,
            scale=small.scale,
            num_samples=min(_MAX_SAMPLES, wanted),
            longest=data.tokens_per_pack // (1 if make_rows is None else 2),  # rows of the objective have two answers
            patch_size=patch_size,
            merge_size=merge_size,
            change=family_hook(small.source, "small_chat"),
            seed=small.config.run.seed,
        )
        if make_rows is not None:
            make_rows(small.folder / "data" / "samples.jsonl")
    ranks.wait()


def _mesh(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Degrees of parallelism for so many processes, each a divisor of the recipe's."""
    parallel = config.parallel
    sequence = math.gcd(parallel.sequence, world_size)
    replicate = math.gcd(parallel.replicate, world_size // sequence)
    expert = math.gcd(math.gcd(parallel.expert, world_size // replicate), EXPERTS)
    return {"shard": "auto", "sequence": sequence, "replicate": replicate, "expert": expert}


def _bucket(bucket: int | None, budget: int) -> int | None:
    return None if bucket is None else min(bucket, budget)
