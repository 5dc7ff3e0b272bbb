"""Attention over packs: each segment sees itself only, and no mask of the pack's square is ever in memory.

`backend` is what transformers calls: it chooses among `segments` (the CPU's fused kernel), `cuda_kernel` (which kernel
runs on CUDA; those of PyTorch and cuDNN are in `ragged`), `masks` (rules that boundaries do not say, and scores written
out) and `splits` (runs within a segment). Tensor letters are in `backend`.
"""

from headway.models.attention.backend import attend, mask, register_attention, use_attention

__all__ = ["attend", "mask", "register_attention", "use_attention"]
