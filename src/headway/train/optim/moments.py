"""How moments are held between steps: in full, in bfloat16, or as 8-bit codes with a scale per block.

They are computed in float32 whatever they are held in. Blocks lie within rows, so a sharded parameter's codes and
scales are sharded as it is, and a checkpoint goes on with any number of processes. Letters: R rows of blocks, B values
of a block.
"""

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from headway.errors import ConfigError

Held = Literal["float32", "bfloat16", "8bit"]

MAX_BLOCK = 256  # values that share a scale, as in torchao and newer bitsandbytes
_MIN_BLOCK = 64  # below it scales would cost more than they save
_MIN_NUMEL = 4096  # smaller tensors stay in float32, as in bitsandbytes
_CHUNK = 2**24  # values worked on at a time, so that float32 copies stay small


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor; a tensor that is not sharded is all its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def block_size(shape: torch.Size) -> int:
    """Values that share a scale: the largest divisor of a row's length up to 256; 0 where 8 bits are not worth it.

    >>> block_size(torch.Size([64, 3584])), block_size(torch.Size([1280, 3420])), block_size(torch.Size([3584]))
    (256, 228, 0)
    """
    if len(shape) < 2 or shape.numel() < _MIN_NUMEL:
        return 0
    block = next(b for b in range(MAX_BLOCK, 0, -1) if shape[-1] % b == 0)
    return block if block >= _MIN_BLOCK else 0


class Moment(ABC):
    """One moment of one parameter, this process's part of it, seen as rows of blocks."""

    @abstractmethod
    def read(self, rows: slice) -> torch.Tensor:
        """Some rows in float32, shape (R, B); free to change."""

    @abstractmethod
    def write(self, rows: slice, values_RB: torch.Tensor) -> None:
        """Hold new values of some rows, given in float32."""


def new_moment(state: dict[str, Any], name: str, parameter: torch.Tensor, held: Held) -> None:
    """Put a moment of zeros into a parameter's state: one tensor, or codes under its name and scales beside them."""
    block = block_size(parameter.shape) if held == "8bit" else 0
    if block:
        state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
        state[f"{name}_scale"] = _zero_scales(parameter, block)
    else:
        dtype = torch.bfloat16 if held == "bfloat16" else torch.float32
        state[name] = torch.zeros_like(parameter, dtype=dtype)


def open_moment(state: dict[str, Any], name: str, shape: torch.Size, noise: torch.Generator, *, signed: bool) -> Moment:
    """Open a moment that `new_moment` made.

    Args:
        state: of the parameter.
        name: of the moment.
        shape: of the whole parameter.
        noise: for stochastic rounding.
        signed: whether it can be negative.
    """
    held = local(state[name])
    if held.dtype is torch.uint8:
        return _Coded(held, local(state[f"{name}_scale"]), width(shape), signed=signed)
    return Plain(held, width(shape), noise)


def width(shape: torch.Size) -> int:
    """Values of a row as moments are opened: a block where there are blocks."""
    return block_size(shape) or 1


def chunks(numel: int, block: int) -> list[slice]:
    """Slices of the rows of a local tensor, small enough for float32 copies of them to be cheap."""
    rows, step = numel // block, max(1, _CHUNK // block)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


class Plain(Moment):
    """A tensor in a floating-point type; bfloat16 is rounded stochastically, so that small changes are not lost.

    Args:
        tensor: this process's part.
        block: values of a row.
        noise: for the rounding.
    """

    def __init__(self, tensor: torch.Tensor, block: int, noise: torch.Generator) -> None:
        self._tensor_RB = tensor.view(-1, block)
        self._noise = noise

    def read(self, rows: slice) -> torch.Tensor:
        """Some rows in float32."""
        return self._tensor_RB[rows].to(torch.float32, copy=True)

    def write(self, rows: slice, values_RB: torch.Tensor) -> None:
        """Hold new values of some rows."""
        if self._tensor_RB.dtype is torch.bfloat16:
            values_RB = round_stochastically(values_RB, self._noise)
        self._tensor_RB[rows] = values_RB


class _Coded(Moment):
    """8-bit codes into a table of values from -1 or 0 to 1, and a scale per block.

    Source: block-wise dynamic quantization, Dettmers et al. 2022 (arXiv:2110.02861), sections 2.1 and 2.2.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, block: int, *, signed: bool) -> None:
        self._codes_RB = codes.view(-1, block)
        self._scales_R1 = scales.view(-1, 1)
        self._table = code_table(signed=signed, device=codes.device)

    def read(self, rows: slice) -> torch.Tensor:
        return self._table[self._codes_RB[rows].int()] * self._scales_R1[rows]

    def write(self, rows: slice, values_RB: torch.Tensor) -> None:
        scales_R1 = values_RB.abs().amax(-1, keepdim=True).clamp_(min=1e-12)
        between = (self._table[1:] + self._table[:-1]) / 2
        self._codes_RB[rows] = torch.bucketize(values_RB / scales_R1, between, out_int32=True).to(torch.uint8)
        self._scales_R1[rows] = scales_R1


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


def round_stochastically(values: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Round float32 to bfloat16, up or down with the probability that makes the mean exact.

    The 16 bits that bfloat16 drops are a number below one step of it: a uniform number of 16 bits added to them carries
    into the kept bits with that very probability.
    """
    random = torch.randint(0, 2**16, values.shape, generator=noise, device=values.device, dtype=torch.int32)
    bits = values.contiguous().view(torch.int32).add(random).bitwise_and_(-(2**16))
    return bits.view(torch.float32).to(torch.bfloat16)


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
    whole = DTensor.from_local(
        scales,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return whole.to(parameter.device)  # a mesh of devices would pull offloaded scales to itself
