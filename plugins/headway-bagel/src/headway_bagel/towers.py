"""The parts before and after Bagel's blocks: the tower that reads images, positions on a grid, times of the flow."""

import math
from typing import Any

import torch
from torch import nn
from transformers import SiglipVisionConfig
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.siglip.modeling_siglip import (
    SiglipAttention,
    SiglipEncoder,
    eager_attention_forward,
)


def for_backend(mask: Any, config: Any, dtype: torch.dtype) -> Any:
    """Write a boolean mask as numbers for eager attention, which adds its mask; leave it to others as it is."""
    if config._attn_implementation != "eager":
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


class _PackedAttention(SiglipAttention):
    """SigLIP's attention on the patches of several images, [1, patches, size], each image seeing itself."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Attend within each image; `cu_seq_lens_q` or `attention_mask` gives where images end."""
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            project(hidden_states).view(heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        out, _ = attend(self, q, k, v, attention_mask, is_causal=False, scaling=self.scale, dropout=dropout, **kwargs)
        return self.out_proj(out.flatten(2)), None


class _Embeddings(nn.Module):
    """Patches of pixels, row, column and channel, with a learnt position each."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        patch, side = int(config.patch_size), config.image_size // config.patch_size
        self.patch_embedding = nn.Linear(config.num_channels * patch**2, config.hidden_size)
        self.position_embedding = nn.Embedding(side**2, config.hidden_size)

    def forward(self, pixels: torch.Tensor, places_P: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.patch_embedding(pixels) + self.position_embedding(places_P)
        return embedded


class _Vision(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = SiglipEncoder(config)
        for layer in self.encoder.layers:
            layer.self_attn = _PackedAttention(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class VisionTower(nn.Module):
    """SigLIP on packed images of any size, with the layer names of BAGEL's checkpoints.

    Source: NaViT (Dehghani et al. 2023) on SigLIP so400m/14 (Zhai et al. 2023).
    """

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_model = _Vision(config)

    def forward(
        self, pixels: torch.Tensor, places_P: torch.Tensor, cu_M: torch.Tensor, longest: int, split: Any = None
    ) -> torch.Tensor:
        """Encode patches.

        Args:
            pixels: shape (P, channels * patch size**2).
            places_P: place of each patch in a square of the largest image, row * side + column.
            cu_M: boundaries of the images [patches], int32, shape (M + 1,).
            longest: patches of the largest image.
            split: how several processes share the patches, of which P are this one's; the images are those of all.

        Returns:
            Shape (P, tower's hidden size).
        """
        x = self.vision_model.embeddings(pixels, places_P)[None]
        if "flash" in str(self.config._attn_implementation):  # flash kernels take boundaries
            more = {"max_length_q": longest, "max_length_k": longest} | ({} if split is None else {"pack_split": split})
            x = self.vision_model.encoder(x, cu_seq_lens_q=cu_M, cu_seq_lens_k=cu_M, **more).last_hidden_state
        else:
            image_P = torch.bucketize(torch.arange(x.shape[1], device=cu_M.device), cu_M[1:], right=True)
            same = (image_P[:, None] == image_P)[None, None]
            x = self.vision_model.encoder(x, attention_mask=for_backend(same, self.config, x.dtype)).last_hidden_state
        out: torch.Tensor = self.vision_model.post_layernorm(x)[0]
        return out


class Connector(nn.Module):
    """Two linear layers from the tower's size to the text's."""

    def __init__(self, features: int, size: int, activation: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, size)
        self.activation = ACT2FN[activation]
        self.fc2 = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project, shape (P, features) to (P, D)."""
        out: torch.Tensor = self.fc2(self.activation(self.fc1(x)))
        return out


class GridPositions(nn.Module):
    """Fixed sines and cosines of the row and column of each place in a square; a buffer, never trained.

    Source: DiT (Peebles and Xie 2023), whose first half of the numbers tells the column.
    """

    pos_embed: torch.Tensor

    def __init__(self, side: int, size: int) -> None:
        super().__init__()
        self.side = side
        self.register_buffer("pos_embed", torch.empty(side**2, size))

    def fill(self) -> None:
        """Write the table."""
        quarter = self.pos_embed.shape[1] // 4
        place = torch.arange(self.side, dtype=torch.float64)
        angles = place[:, None] / 10000 ** (torch.arange(quarter, dtype=torch.float64) / quarter)
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # waves of one direction
        columns, rows = waves.repeat(self.side, 1), waves.repeat_interleave(self.side, dim=0)
        self.pos_embed.copy_(torch.cat([columns, rows], dim=1))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Look up places, row * side + column."""
        return self.pos_embed[places]


class TimestepEmbedder(nn.Module):
    """Times of the flow as vectors: sinusoids, then two linear layers.

    Source: DiT (Peebles and Xie 2023).
    """

    SINUSOIDS = 256

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(self.SINUSOIDS, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, times_G: torch.Tensor) -> torch.Tensor:
        """Embed times from 0 (clean) to 1 (noise), shape (G,), as (G, D)."""
        half = self.SINUSOIDS // 2
        slopes = torch.arange(half, dtype=torch.float32, device=times_G.device) * (-math.log(10000) / half)
        angles = times_G[:, None].float() * slopes.exp()
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        out: torch.Tensor = self.mlp(waves.to(next(self.mlp.parameters()).dtype))
        return out
