"""A tiny GPT-2 whose FLOPs are written out by hand, and batches for it."""

import torch

from headway.tracing.build import model_class
from helpers.tiny_models import tiny_config


class StatedSpec:
    """What mfu-tracker's calls read of a device, with round numbers."""

    name = "test card"
    peak_memory_bandwidth_tbs = 0.1

    def peak_tflops(self, dtype):
        return {"fp32": 1e3, "bf16": 2e3}[dtype]


SPEC = StatedSpec()

# width 32, 2 layers: queries, keys and values, their output, the MLP up and down; a vocabulary of 160
_BLOCK = 32 * 96 + 32 * 32 + 32 * 128 + 128 * 32
_LAST_OF_BLOCK = 128 * 32
_HEAD = 32 * 160


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = tiny_config("gpt2")
    return model_class(config)._from_config(config).train()


def forward_flops(lengths):
    """2 FLOPs per weight and token, 4 per feature and causal pair."""
    pairs = sum(s * (s + 1) // 2 for s in lengths)
    return sum(lengths) * 2 * (2 * _BLOCK + _HEAD) + 2 * 4 * 32 * pairs


def step_flops(lengths):
    """Embeddings below every layer are trained, so that each product has both gradients."""
    return 3 * forward_flops(lengths)


def recomputed_flops(lengths):
    """Both blocks again, but for the product that each ends with: nothing in the backward needs what it makes."""
    pairs = sum(s * (s + 1) // 2 for s in lengths)
    return sum(lengths) * 2 * 2 * (_BLOCK - _LAST_OF_BLOCK) + 2 * 4 * 32 * pairs


def batch_of(lengths):
    """One row per length, padded on the right."""
    width = max(lengths)
    mask = torch.tensor([[1] * s + [0] * (width - s) for s in lengths])
    ids = torch.arange(mask.numel()).view(mask.shape) % 150 + 3
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}
