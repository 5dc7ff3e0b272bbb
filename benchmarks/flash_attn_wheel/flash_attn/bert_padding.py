"""Rows with padding as tokens end to end, and back.

Source: names and results of Dao-AILab/flash-attention 2.8.3, flash_attn/bert_padding.py.
"""

import torch


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Take the tokens of rows, shape (B, S, ...), that a mask of shape (B, S) does not hide.

    Returns:
        Tokens, shape (T, ...); their places in the flattened rows, shape (T,); where rows begin among them, int32,
        shape (B + 1,); the longest row [tokens]; tokens of each row, shape (B,).
    """
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    places = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[places], places, starts, int(lengths.max()), lengths


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Put tokens, shape (T, ...), at their places in rows of zeros, shape (batch, seqlen, ...)."""
    rows = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return rows.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
