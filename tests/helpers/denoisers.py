"""Denoisers of diffusers in small, with arguments of their forwards."""

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
