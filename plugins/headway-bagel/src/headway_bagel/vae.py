"""Bagel's frozen autoencoder (VAE), which diffusers builds, and the cutting of images and latents into patches."""

from typing import Any

import torch
from torch import nn

from headway.errors import ConfigError


def load_vae(config: dict[str, Any]) -> nn.Module:
    """Build the autoencoder that a configuration describes, frozen and in evaluation mode; weights are random.

    Args:
        config: arguments of diffusers' `AutoencoderKL`.

    Raises:
        ConfigError: diffusers is not installed.
    """
    try:
        from diffusers import AutoencoderKL
    except ModuleNotFoundError as error:
        raise ConfigError(
            "vae_config names an autoencoder, and diffusers, which builds it, is not installed. Install it with pip "
            "install 'headway[engine]', or take a model that draws pixels (vae_config: null)."
        ) from error
    vae: nn.Module = AutoencoderKL(**config).requires_grad_(False).eval()
    return vae


@torch.no_grad()
def encode(vae: Any, image: torch.Tensor, patch: int, noise_LC: torch.Tensor | None = None) -> torch.Tensor:
    """Encode an image (3, height, width) from -1 to 1 into clean latent patches (patches, patch**2 * channels).

    Args:
        vae: diffusers' `AutoencoderKL`.
        image: what is encoded.
        patch: latents along the side of a patch.
        noise_LC: standard normal numbers that say which latents of the encoder's distribution these are, mean +
            standard deviation x noise, as in Bagel's training; the mean when None.
    """
    encoded = vae.encode(image[None].to(vae.dtype)).latent_dist
    latents = patches(encoded.mean[0], patch)
    if noise_LC is not None:
        latents = latents + patches(encoded.std[0], patch) * noise_LC.to(latents)
    return (latents - (vae.config.shift_factor or 0.0)) * float(vae.config.scaling_factor)


def patches(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """Lay (channels, height, width) out as patches, row by row; in each come row, column and channel.

    >>> patches(torch.arange(8).view(1, 2, 4), 2).tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    channels, height, width = latents.shape
    squares = latents.view(channels, height // patch, patch, width // patch, patch)
    return squares.permute(1, 3, 2, 4, 0).reshape(-1, patch * patch * channels)
