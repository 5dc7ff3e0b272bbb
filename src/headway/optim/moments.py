"""Storage of moments between steps: in full, in bfloat16, or as 8-bit codes with a scale per block.

They are computed in float32 whatever they are held in. Blocks lie within rows, so a sharded parameter's codes and
scales are sharded as it is, and a checkpoint goes on with any number of processes. Letters: R rows of blocks, B values
of a block.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from headway.errors import ConfigError
from headway.models.parallel import local
from headway.optim.parts import Part, Values, laid_as

MomentType = Literal["float32", "bfloat16", "8bit"]

MAX_BLOCK = 256  # values that share a scale, as in torchao and newer bitsandbytes
_MIN_BLOCK = 64  # below it scales would cost more than they save
_MIN_NUMEL = 4096  # smaller tensors stay in float32, as in bitsandbytes


def block_size(shape: torch.Size) -> int:
    """Values that share a scale: the largest divisor of a row's length up to 256; 0 where 8 bits are not worth it.

    >>> block_size(torch.Size([64, 3584])), block_size(torch.Size([1280, 3420])), block_size(torch.Size([3584]))
    (256, 228, 0)
    """
    if len(shape) < 2 or shape.numel() < _MIN_NUMEL:
        return 0
    block = next(b for b in range(MAX_BLOCK, 0, -1) if shape[-1] % b == 0)
    return block if block >= _MIN_BLOCK else 0


def new_moment(state: dict[str, Any], name: str, parameter: torch.Tensor, moment_type: MomentType) -> None:
    """Put a moment of zeros into a parameter's state: one tensor, or codes under its name and scales beside them."""
    block = block_size(parameter.shape) if moment_type == "8bit" else 0
    if block:
        state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
        state[f"{name}_scale"] = _zero_scales(parameter, block)
    else:
        dtype = torch.bfloat16 if moment_type == "bfloat16" else torch.float32
        state[name] = torch.zeros_like(parameter, dtype=dtype)


def open_moment(
    states: Sequence[dict[str, Any]], name: str, parts: Sequence[Part], *, signed: bool, copied: bool = False
) -> Values:
    """Open a moment of a group's parts, all held in one way.

    Args:
        states: of each part's parameter, as `new_moment` made them.
        name: of the moment.
        parts: of parameters whose `width` is the same.
        signed: whether it can be negative.
        copied: as in `Values`.
    """
    stored = [part.of(state[name]) for part, state in zip(parts, states, strict=True)]
    if stored[0].dtype is not torch.uint8:
        return Values(stored, copied=copied)
    block = width(parts[0].parameter.shape)
    scales = [part.of(state[f"{name}_scale"], block=block) for part, state in zip(parts, states, strict=True)]
    return _Coded(stored, scales, block, signed=signed)


def width(shape: torch.Size) -> int:
    """Values that stay together where moments are held in 8 bits."""
    return block_size(shape) or 1


class _Coded(Values):
    """8-bit codes into a table of values from -1 or 0 to 1, and a scale per block.

    Source: block-wise dynamic quantization, Dettmers et al. 2022 (arXiv:2110.02861), sections 2.1 and 2.2.
    """

    def __init__(self, codes: list[torch.Tensor], scales: list[torch.Tensor], block: int, *, signed: bool) -> None:
        self._stored, self._scales = codes, scales
        self._codes_RB, self._scales_R1 = torch.cat(codes).view(-1, block), torch.cat(scales).view(-1, 1)
        self._table = code_table(signed=signed, device=self._codes_RB.device)
        self.put((self._table[self._codes_RB.int()] * self._scales_R1).view(-1))

    def write(self, noise: torch.Generator, skip: torch.Tensor | None) -> None:
        del noise
        values_RB = self.flat.view(self._codes_RB.shape)
        scales_R1 = torch.linalg.vector_norm(values_RB, math.inf, dim=-1, keepdim=True).clamp_(min=1e-12)
        between = (self._table[1:] + self._table[:-1]) / 2
        codes_RB = torch.bucketize(values_RB / scales_R1, between, out_int32=True).to(torch.uint8)
        if skip is not None:  # the codes of a value that a code stands for need not be that code
            codes_RB = torch.where(skip, self._codes_RB, codes_RB)
            scales_R1 = torch.where(skip, self._scales_R1, scales_R1)
        for stored, values in ((self._stored, codes_RB), (self._scales, scales_R1)):
            torch._foreach_copy_(stored, laid_as(stored, values.view(-1)))


@cache
def code_table(*, signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values that codes stand for, in rising order, with 0 and 1 among them.

    A decade below 1 has a fraction of seven bits (six if signed), each decade below it one bit less.

    Source: dynamic (tree) quantization, Dettmers 2016 (arXiv:1511.04561), as in arXiv:2110.02861, section 1.3.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (6 - decade) if signed else 2 ** (7 - decade)
        edges = torch.linspace(0.1, 1.0, count + 1)
        magnitudes = (edges[:-1] + edges[1:]) / 2 * 10.0**-decade
        values += magnitudes.tolist()
        if signed:
            values += (-magnitudes).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def _zero_scales(parameter: torch.Tensor, block: int) -> torch.Tensor:
    own = local(parameter)
    if own.shape[-1] != parameter.shape[-1]:
        raise ConfigError(
            f"optim.state '8bit' needs whole rows in every process, but a parameter of shape {tuple(parameter.shape)} "
            "is sharded along its last dimension. Use optim.state bfloat16."
        )
    scales = own.new_zeros((*own.shape[:-1], own.shape[-1] // block), dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // block))
    distributed = DTensor.from_local(
        scales,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return distributed.to(parameter.device)  # a mesh of devices would pull offloaded scales to itself
