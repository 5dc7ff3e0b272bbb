"""Gated delta rules and short convolution over a pack of segments in one call, in PyTorch's own operations.

transformers' PyTorch code of both takes one segment at a time, and refuses boundaries. Here every token knows the
number of its segment, so that nothing is read on the host and no number of segments changes what is launched: what
would cross a boundary is masked out.

Tensor letters: B rows, T slots, Q key heads, H value heads, K key size, V value size, G gates of a head (1 or K),
C chunks, S slots of a chunk, N segments.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

CHUNK = 64
"""Slots of a chunk, as in transformers' code and flash-linear-attention's kernels [tokens]."""


def segment_numbers(cu_seqlens_N: torch.Tensor, slots: int) -> torch.Tensor:
    """Number the segment of each slot; slots behind the last boundary have a number of their own.

    Returns:
        int32, shape (1, T).

    >>> segment_numbers(torch.tensor([0, 2, 3], dtype=torch.int32), 5)
    tensor([[0, 0, 1, 2, 2]], dtype=torch.int32)
    """
    slots_T = torch.arange(slots, device=cu_seqlens_N.device, dtype=cu_seqlens_N.dtype)
    return torch.searchsorted(cu_seqlens_N[1:].contiguous(), slots_T, right=True, out_int32=True)[None]


def packed_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: torch.Tensor,
) -> torch.Tensor:
    """Convolve each channel causally within its segment; arguments and result as `causal_conv1d_fn` has them.

    Args:
        hidden_states: channels over the slots, shape (B, D, T).
        weight: weights of each channel, the last of which is of the slot itself, shape (D, W).
        bias: added to each channel, shape (D,).
        activation: applied to the result, as transformers names it.
        seq_idx: number of each slot's segment, shape (1, T).
    """
    width, slots = weight.shape[-1], hidden_states.shape[-1]
    x_BDT = F.pad(hidden_states.to(weight.dtype), (width - 1, 0))
    numbers_1T = F.pad(seq_idx, (width - 1, 0), value=-1)
    out_BDT = x_BDT[..., width - 1 :] * weight[:, -1:]
    for back in range(1, width):
        span = slice(width - 1 - back, width - 1 - back + slots)
        weights_1DT = weight[:, -1 - back, None] * (numbers_1T[:, None, span] == seq_idx[:, None])
        out_BDT = torch.addcmul(out_BDT, x_BDT[..., span], weights_1DT)
    out_BDT = out_BDT if bias is None else out_BDT + bias[:, None]
    return (out_BDT if activation is None else ACT2FN[activation](out_BDT)).to(hidden_states.dtype)


def packed_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_options: Any,
) -> tuple[torch.Tensor, None]:
    """Run the gated delta rule over every segment from an empty state; in float32, as transformers' code does.

    Per head S_t = exp(g_t) S_{t-1} + k_t u_t' with u_t = beta_t (v_t - S_{t-1}' (exp(g_t) k_t)), and o_t = S_t' q_t;
    gates of channels scale the rows of S. In a chunk the u_t solve a triangular system, and chunks follow each other by
    their states.

    Args:
        query: shape (B, T, Q, K); scaled by 1 / sqrt(K).
        key: shape (B, T, Q, K).
        value: shape (B, T, H, V).
        g: logarithm of the decay, at most 0, shape (B, T, H), or of each channel's, (B, T, H, K).
        beta: shape (B, T, H).
        cu_seqlens: boundaries of the segments, shape (N + 1,).
        use_qk_l2norm_in_kernel: whether queries and keys are divided by their norms.

    Returns:
        Outputs, shape (B, T, H, V), in the dtype of the queries; no state.

    Source: Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464, section 3.3, the chunkwise form; with gates of channels,
    Kimi Team 2025, arXiv 2510.26692, section 3.1.
    """
    dtype, slots, groups = query.dtype, query.shape[1], value.shape[2] // key.shape[2]
    padding = -slots % CHUNK

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """Bring (B, T, H, ...) to (B, H, C, S, ...) in float32."""
        x = x.float().transpose(1, 2)
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, padding))
        return x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:])

    if use_qk_l2norm_in_kernel:
        query, key = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    if groups > 1:
        query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))
    g = g if g.dim() == 4 else g[..., None]
    q, k, v, decay, rate = map(chunked, (query, key, value, g, beta[..., None]))
    q = q * q.shape[-1] ** -0.5

    # masks of pairs in a chunk, and of reads from the chunk before, that would cross a boundary
    numbers_CS = F.pad(segment_numbers(cu_seqlens, slots)[0], (0, padding), value=-1).reshape(-1, CHUNK)
    ends_C = numbers_CS[:, -1]
    before_C = F.pad(ends_C[:-1], (1, 0), value=-2)
    later_SS = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu()
    hidden_CSS = (numbers_CS[:, :, None] != numbers_CS[:, None]).logical_or_(later_SS.triu(1))
    starts_anew_CS = numbers_CS != before_C[:, None]

    # decays from slot to slot of a chunk, summed between the two: differences of sums would round as the sums do
    between = decay[..., :, None, :].masked_fill(later_SS[..., None], 0).cumsum(-3)
    pairwise = between.masked_fill(hidden_CSS[..., None], -torch.inf).exp()
    reads = decay.cumsum(-2).masked_fill(starts_anew_CS[..., None], -torch.inf).exp()
    writes, keeps = pairwise[..., -1, :, :], reads[..., -1, :, None]
    decayed = None if g.shape[-1] == 1 else pairwise * k[..., None, :, :]

    def scores(x: torch.Tensor) -> torch.Tensor:
        """Multiply slots with the keys before them, as far as these have decayed, to (B, H, C, S, S)."""
        return (x @ k.mT) * pairwise[..., 0] if decayed is None else (decayed @ x[..., None])[..., 0]

    # writes of a chunk's slots into an empty state, and what they take back of the state before
    k_rate = k * rate
    both = torch.cat([v * rate, k_rate * reads], dim=-1)
    both = torch.linalg.solve_triangular(scores(k_rate), both, upper=False, unitriangular=True)
    written, erased = both.split((v.shape[-1], k.shape[-1]), dim=-1)
    within = scores(q)
    q, k = q * reads, (k * writes).mT

    # chunk after chunk: read the state, write into it
    state = v.new_zeros(*v.shape[:2], k.shape[-2], v.shape[-1])
    outs = []
    parts = (x.unbind(2) for x in (written, erased, within, q, k, keeps))
    for written_c, erased_c, within_c, q_c, k_c, keeps_c in zip(*parts, strict=True):
        new = written_c - erased_c @ state
        outs.append(q_c @ state + within_c @ new)
        state = state * keeps_c + k_c @ new
    out = torch.stack(outs, 2).flatten(2, 3)[:, :, :slots].transpose(1, 2)
    return out.to(dtype), None
