"""The blocks of a mixture of transformers: every weight exists twice, and what a token is decides which copy it uses.

Hidden states lie in the order of the copies: first the understood tokens, then the latent patches, so that each copy
works on one piece. Only attention, which is one call over all tokens, puts them into the order of the pack.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2MLP,
    Qwen2RMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

DRAWS = "_moe_gen"  # ends the names of the copy for latent patches, in BAGEL's checkpoints


class TokenOrder(NamedTuple):
    """The places of tokens, in hidden states and in the pack.

    Attributes:
        understood: number of understood tokens, which come first in hidden states.
        slots_T: slot in the pack of each row of hidden states.
        rows_T: row of hidden states of each slot.
    """

    understood: int
    slots_T: torch.Tensor
    rows_T: torch.Tensor


def both(understand: nn.Module, draw: nn.Module, x_1TD: torch.Tensor, understood: int) -> torch.Tensor:
    """Apply each copy of a module to its own tokens."""
    return torch.cat([understand(x_1TD[:, :understood]), draw(x_1TD[:, understood:])], dim=1)


class Pair(nn.Module):
    """A module that holds pairs of modules under the names that BAGEL's checkpoints give them."""

    def add(self, name: str, make: Callable[[], nn.Module]) -> None:
        """Add both copies of a module."""
        self.add_module(name, make())
        self.add_module(name + DRAWS, make())

    def run(self, name: str, x_1TD: torch.Tensor, understood: int) -> torch.Tensor:
        """Apply each copy of a module to its own tokens."""
        return both(self.get_submodule(name), self.get_submodule(name + DRAWS), x_1TD, understood)


class MixtureAttention(Pair):
    """Attention of all tokens together, with projections and norms for each copy."""

    is_causal = False  # the mask says all

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.num_key_value_groups = heads // groups
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        is_qwen2 = config.model_type == "qwen2"
        bias = is_qwen2 or bool(config.attention_bias)
        for name, number in (("q_proj", heads), ("k_proj", groups), ("v_proj", groups)):
            self.add(name, lambda n=number: nn.Linear(config.hidden_size, n * self.head_dim, bias=bias))  # type: ignore[misc]  # of a default
        self.add("o_proj", lambda: nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias and not is_qwen2))
        self.normalised = getattr(config, "qk_norm", not is_qwen2)
        for name in ("q_norm", "k_norm") if self.normalised else ():
            self.add(name, lambda: Qwen2RMSNorm(self.head_dim, eps=config.rms_norm_eps))

    def _heads(self, name: str, x_1TD: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Project to heads [1, heads, slots, head size], in the order of the pack."""
        y = self.run(f"{name}_proj", x_1TD, order.understood)
        y = y.view(*y.shape[:2], -1, self.head_dim)
        if self.normalised and name != "v":
            y = self.run(f"{name}_norm", y, order.understood)
        return y[:, order.rows_T].transpose(1, 2)

    def forward(
        self,
        x_1TD: torch.Tensor,
        order: TokenOrder,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend; hidden states in and out are in the order of the copies."""
        q, k, v = (self._heads(name, x_1TD, order) for name in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=dropout, is_causal=False, **kwargs)
        out_1TD = out.flatten(2)[:, order.slots_T]
        return self.run("o_proj", out_1TD, order.understood)


class MixtureBlock(Pair, GradientCheckpointingLayer):
    """One block: attention of all tokens together, and an MLP for each copy."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = MixtureAttention(config, layer_idx)
        self.add("mlp", lambda: Qwen2MLP(config))
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.add(name, lambda: Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(
        self,
        hidden_states: torch.Tensor,
        order: TokenOrder,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the block on hidden states (1, T, D) in the order of the copies."""
        x_1TD = hidden_states
        normed_1TD = self.run("input_layernorm", x_1TD, order.understood)
        x_1TD = x_1TD + self.self_attn(normed_1TD, order, rotary, attention_mask, **kwargs)
        normed_1TD = self.run("post_attention_layernorm", x_1TD, order.understood)
        out_1TD: torch.Tensor = x_1TD + self.run("mlp", normed_1TD, order.understood)
        return out_1TD


class MixtureModel(Pair):
    """The blocks with their embedding and final norms."""

    def __init__(self, config: PreTrainedConfig, rotary: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MixtureBlock(config, i) for i in range(config.num_hidden_layers))
        self.add("norm", lambda: Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.rotary_emb = rotary

    def forward(
        self, x_1TD: torch.Tensor, order: TokenOrder, position_ids: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Run all blocks; hidden states in and out are in the order of the copies."""
        rotary = self.rotary_emb(x_1TD, position_ids)
        for layer in self.layers:
            x_1TD = layer(x_1TD, order, rotary, attention_mask, **kwargs)
        return self.run("norm", x_1TD, order.understood)
