"""Patch embeddings as the matrix products that they are.

A vision tower whose processor cuts the patches begins with a convolution over inputs just as large as its kernel, so it
has one position and is a linear layer with its weight written in more dimensions. Convolution libraries have no good
algorithm for that: on two cores of a CPU it took 7 % of a step for 2 % of its FLOPs, on an H100 in bfloat16 seconds a
call were reported (sgl-project/sglang-omni#539, huggingface/transformers#45750).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _PatchConv2d(nn.Conv2d):
    """Multiplies where the input is one position of the kernel, and convolves elsewhere."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the name that torch gives it
        return _project(self, input) if input.shape[2:] == self.kernel_size else super().forward(input)


class _PatchConv3d(nn.Conv3d):
    """Multiplies where the input is one position of the kernel, and convolves elsewhere."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the name that torch gives it
        return _project(self, input) if input.shape[2:] == self.kernel_size else super().forward(input)


def _project(conv: nn.Conv2d | nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    rows_PE = F.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)
    return rows_PE.view(*rows_PE.shape, *(1 for _ in conv.kernel_size))


_MULTIPLYING: dict[type[nn.Module], Any] = {nn.Conv2d: _PatchConv2d, nn.Conv3d: _PatchConv3d}


def project_patches(model: nn.Module) -> list[str]:
    """Let a model's convolutions multiply matrices where their input is a single patch; weights stay as they are.

    Returns:
        Names of the modules that may do so.
    """
    found = []
    for name, module in model.named_modules():
        if type(module) not in _MULTIPLYING:
            continue
        assert isinstance(module, (nn.Conv2d, nn.Conv3d))
        if module.groups == 1 and not any(module.padding) and set(module.dilation) == {1}:
            module.__class__ = _MULTIPLYING[type(module)]
            found.append(name)
    return found
