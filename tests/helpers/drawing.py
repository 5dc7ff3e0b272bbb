"""Tiny models that draw: Bagel's architecture, with packs and data for it, and denoisers of diffusers."""

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from headway.count import splits
from headway.models.load import load_processor
from headway.packing.parts import SamplePart
from headway.synthetic.processor import write_tokenizer
from headway_bagel.layout import lay_out
from headway_bagel.model import BagelConfig, BagelModel

TEXT = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 6,
}
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [4, 8],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.36,
    "shift_factor": 0.12,
}

QUESTION = [SamplePart("read", rows=3, columns=4), SamplePart("text", 9, 5)]
PICTURE = [SamplePart("text", 7), SamplePart("draw", rows=2, columns=3)]
EDIT = [
    SamplePart("reference", rows=2, columns=2),
    SamplePart("read", rows=2, columns=1),
    SamplePart("text", 5),
    SamplePart("draw", rows=2, columns=2),
    SamplePart("text", 6, 4),
]


def bagel_config(vae=None, **text):
    return BagelConfig(
        text_config={**TEXT, **text}, vision_config=TOWER, vae_config=vae, latent_patch_size=2, max_latent_size=4
    )


def tiny_bagel(vae=None, attention="sdpa", seed=0, **text):
    """A model whose every weight is random, the one that starts at zero too."""
    torch.manual_seed(seed)
    model = BagelModel._from_config(bagel_config(vae, **text), attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        model.llm2vae.weight.normal_(0, 0.2)
    return model.train()


def contents(parts, config, seed):
    """What a sample holds, drawn by a seed of its own: tokens, patches, and for each grid of latents a time."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = sum(part.tokens or part.rows * part.columns + 2 for part in parts)
    read = sum(part.rows * part.columns for part in parts if part.kind == "read")
    grids = [part for part in parts if part.kind in ("reference", "draw")]
    features = config.latent_features, 3 * config.vision_config.patch_size**2
    latents = sum(part.rows * part.columns for part in grids)
    return {
        "input_ids": torch.randint(0, config.text_config.vocab_size, (tokens,), generator=drawn),
        "pixel_values": torch.randn(read, features[1], generator=drawn),
        "latents": torch.randn(latents, features[0], generator=drawn),
        "noise": torch.randn(latents, features[0], generator=drawn),
        "timesteps": torch.rand(len(grids), generator=drawn) * torch.tensor([p.kind == "draw" for p in grids]),
    }


def dense_mask(samples, config):
    """The mask of a pack, cell by cell."""
    masks = []
    for parts in samples:
        _, workload = lay_out([parts], config)
        runs = workload.splits if workload.splits.size else splits.all_causal(workload.segments)
        masks.append(torch.from_numpy(splits.mask_of_runs(runs)))
    return torch.block_diag(*masks).bool()[None, None]


def pack(samples, config, seeds=None):
    """Arguments of a pack of samples, each drawn by its own seed."""
    given, workload = lay_out(samples, config)
    held = [contents(parts, config, seed) for parts, seed in zip(samples, seeds or range(len(samples)), strict=True)]
    given |= {name: torch.cat([one[name] for one in held]) for name in held[0]}
    given["input_ids"] = given["input_ids"][None]
    if not len(given["pixel_values"]):
        given["pixel_values"] = None
    return given | {"attention_mask": dense_mask(samples, config)}, workload


WORDS = ["Draw a red square.", "Make it blue.", "What is this?", "a square", "a circle"]


def write_model(folder, vae=None):
    """A model folder without weights."""
    tokenizer = load_processor(write_tokenizer(folder, WORDS))
    bagel_config(vae, vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def image(content):
    return {"type": "image", "image": content}


def chat(user, assistant):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def write_data(folder, samples=24):
    """Pictures to draw, edits and questions, in turn; the paths of a file of all, and of one of pictures alone."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = []
    for number in range(samples):
        names = [f"{number}-{which}.png" for which in range(2)]
        for name in names:
            sides = rng.integers(4, 9, 2)
            Image.fromarray(rng.integers(0, 255, (*sides, 3), dtype=np.uint8)).save(folder / name)
        words = WORDS[number % 5]
        rows.append(
            [
                chat(words, [image(names[0])]),
                chat([image(names[0]), {"type": "text", "text": WORDS[1]}], [image(names[1])]),
                chat([image(names[0]), {"type": "text", "text": WORDS[2]}], words),
            ][number % 3]
        )
    for name, chosen in (("all.jsonl", rows), ("pictures.jsonl", rows[::3])):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in chosen))
    return folder / "all.jsonl", folder / "pictures.jsonl"


# denoisers of diffusers in small: tokens and features of the text that they read
TEXT_TOKENS, TEXT_WIDTH = 5, 16  # tokens and features of a text

_DENOISER_SIZES: dict[str, dict[str, Any]] = {
    "DiTTransformer2DModel": {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8,
        "num_embeds_ada_norm": 10,
    },
    "SD3Transformer2DModel": {
        "sample_size": 8, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": TEXT_WIDTH, "caption_projection_dim": 16, "pooled_projection_dim": 12, "out_channels": 4,
        "pos_embed_max_size": 64,
    },
    "FluxTransformer2DModel": {
        "in_channels": 4, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": TEXT_WIDTH, "pooled_projection_dim": 12, "axes_dims_rope": (2, 2, 4),
    },
    "WanTransformer3DModel": {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
        "out_channels": 4, "text_dim": TEXT_WIDTH, "freq_dim": 8, "ffn_dim": 32, "num_layers": 2,
    },
    "UNet2DConditionModel": {
        "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1,
        "block_out_channels": (8, 16, 16),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": TEXT_WIDTH, "attention_head_dim": 4, "norm_num_groups": 4,
    },
}  # fmt: skip
DENOISERS = tuple(_DENOISER_SIZES)


def denoiser(name: str, **sizes: Any) -> Any:
    """Build a model of diffusers in small, in training mode."""
    import diffusers

    torch.manual_seed(0)
    return getattr(diffusers, name)(**{**_DENOISER_SIZES[name], **sizes}).train()


def _dit(samples: int, _text: int) -> dict[str, Any]:
    return {"class_labels": torch.zeros(samples, dtype=torch.long)}


def _sd3(samples: int, text: int) -> dict[str, Any]:
    return _cross(samples, text) | {"pooled_projections": torch.randn(samples, 12)}


def _flux(samples: int, text: int) -> dict[str, Any]:
    return _sd3(samples, text) | {"txt_ids": torch.zeros(text, 3)}


def _cross(samples: int, text: int) -> dict[str, Any]:
    return {"encoder_hidden_states": torch.randn(samples, text, TEXT_WIDTH)}


_CONDITIONS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "DiTTransformer2DModel": _dit,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "WanTransformer3DModel": _cross,
    "UNet2DConditionModel": _cross,
}


def batch(
    name: str, samples: int = 2, side: tuple[int, int] = (8, 12), frames: int = 3, text: int = TEXT_TOKENS
) -> Any:
    """Make the arguments of a forward; `side` is that of the latents, before patches are made of them."""
    height, width = side
    shape: tuple[int, ...] = (samples, 4, height, width)
    if name.startswith("Wan"):
        shape = (samples, 4, frames, height, width)
    more = _CONDITIONS[name](samples, text)
    if name.startswith("Flux"):
        shape = (samples, height * width // 4, 4)
        more["img_ids"] = torch.zeros(shape[1], 3)
    latents = "sample" if name.startswith("UNet") else "hidden_states"
    return {latents: torch.randn(shape), "timestep": torch.full((samples,), 3), **more}


def adapted(model: nn.Module, targets: list[str]) -> Any:
    """Put LoRA of rank 4 on some layers; the rest is frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=targets))


def autoencoder() -> Any:
    """Build a frozen VAE whose latents have half the sides of a picture."""
    import diffusers

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = diffusers.AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, **blocks)
    return vae.requires_grad_(False).eval()


def titans_flux(monkeypatch: Any) -> Any:
    """Import torchtitan's FLUX without the fronts of its packages, which load datasets and kernels for GPUs."""
    folder = importlib.util.find_spec("torchtitan").submodule_search_locations[0]
    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.flux", "torchtitan.models.flux.model"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    return importlib.import_module("torchtitan.models.flux.model.model")
