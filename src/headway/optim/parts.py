"""Parts of many parameters and their moments, laid end to end and updated in float32 by one kernel per operation.

A model has hundreds of parameters, most of them small. So an optimizer takes as many as fit a budget of memory, cuts
what is larger, and computes on one flat tensor of them all, whatever weights and moments are held in between steps: in
float32, in bfloat16, or as 8-bit codes with a scale per block. Blocks lie within rows, so a sharded parameter's codes
and scales are sharded as it is, and a checkpoint goes on with any number of processes.

Letters: R rows of blocks, B values of a block.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from headway.config import OptimConfig
from headway.count.updating import AT_ONCE
from headway.errors import ConfigError
from headway.tracing.unwrap import local

MomentType = Literal["float32", "bfloat16", "8bit"]

MAX_BLOCK = 256  # values that share a scale, as in torchao and newer bitsandbytes
_MIN_BLOCK = 64  # below it scales would cost more than they save
_MIN_NUMEL = 4096  # smaller tensors stay in float32, as in bitsandbytes


@dataclass(frozen=True)
class Update:
    """A step of the parameters of a group, as the function of a rule gets it.

    Attributes:
        group: settings of the group: `lr`, `betas`, `eps`, `weight_decay`.
        settings: of the run.
        states: what is kept of each parameter, in the order of `group`; made, and its step counted.
        found_inf: above 0 where the step leaves everything as it is, on the parameters' device; None for never.
        skip: whether it does, likewise.
        factor: of gradients, likewise; None for 1.
        one_pass_on: type of the devices on which AdamW runs in one pass; None for nowhere.
        noise_of: gives the noise of a list of parameters by its first one, and a number for the purpose.
        seed_of: gives the seed of a parameter's own noise.
    """

    group: dict[str, Any]
    settings: OptimConfig
    states: dict[torch.Tensor, dict[str, Any]]
    found_inf: torch.Tensor | None
    skip: torch.Tensor | None
    factor: torch.Tensor | None
    one_pass_on: str | None
    noise_of: Callable[..., torch.Generator]
    seed_of: Callable[[torch.Tensor], int]

    def lists(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Iterator[list["Part"]]]]:
        """Yield the first of each list of parameters that can be worked on together, and the list in parts."""
        is_coded = self.settings.state == "8bit"
        for kind in uniform_lists(parameters, width if is_coded else lambda _: 1):
            yield kind[0], cut_parameters(kind, width(kind[0].shape) if is_coded else 1)


class Part(NamedTuple):
    """A range of values in this process's slice of a parameter.

    Attributes:
        parameter: whose.
        start: the first value.
        stop: one past the last value.
    """

    parameter: torch.Tensor
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """True if it ends its parameter."""
        return self.stop == local(self.parameter).numel()

    def of(self, tensor: torch.Tensor, *, block: int = 1) -> torch.Tensor:
        """The same range of a tensor that is laid out as the parameter, flat; it has one for each `block` values."""
        return local(tensor).view(-1)[self.start // block : self.stop // block]

    @property
    def gradient(self) -> torch.Tensor:
        """This part of the parameter's gradient, flat."""
        assert self.parameter.grad is not None
        return self.of(local(self.parameter.grad).contiguous())


def uniform_lists(
    parameters: Iterable[torch.Tensor], block_of: Callable[[torch.Size], int]
) -> list[list[torch.Tensor]]:
    """Sort parameters into lists that can be worked on together: of one type, device, block and spread.

    The lists, and the order in them and of them, are the same on all processes. Processes that hold copies of one
    parameter's slice hold copies of all slices of its list, so what is drawn for a list at random is the same on them.
    """
    lists: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, block_of(parameter.shape), spread_of(parameter))
        lists.setdefault(kind, []).append(parameter)
    return list(lists.values())


def spread_of(parameter: torch.Tensor) -> Any:
    """Way in which processes share a parameter: its mesh and placements; None for one that each has whole."""
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None


def slice_number(parameter: torch.Tensor) -> int:
    """Number of this process's slice among all slices of a parameter; copies of a slice have one number."""
    number = 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    return number


def cut_parameters(parameters: Iterable[torch.Tensor], block: int = 1) -> Iterator[list[Part]]:
    """Cut parameters into parts and put as many together as may be worked on at a time.

    Args:
        parameters: all of them come, in order; one of which this process holds nothing as an empty part.
        block: values that stay together.
    """
    group: list[Part] = []
    room = at_once = max(1, AT_ONCE // block) * block
    for parameter in parameters:
        numel, start = local(parameter).numel(), 0
        while True:  # at least once, so that a parameter of which this process holds nothing comes as an empty part
            stop = min(numel, start + room)
            group.append(Part(parameter, start, stop))
            room -= stop - start
            if room == 0:
                yield group
                group, room = [], at_once
            if stop == numel:
                break
            start = stop
    if group:
        yield group


class Values:
    """One quantity of a group's parts in float32: weights, gradients or a moment.

    What is held in float32 is worked on where it is, unless a copy is asked for; anything else in a copy, one flat
    tensor for the whole group.

    Args:
        tensors: the quantity as it is held, flat, a tensor for each part.
        copied: whether float32 is copied too.

    Attributes:
        parts: the values in float32, a tensor for each part.
        flat: all of them, where they are a copy.
    """

    def __init__(self, tensors: list[torch.Tensor], *, copied: bool = False) -> None:
        self._stored = tensors
        self.parts = tensors
        self._is_copy = copied or any(tensor.dtype is not torch.float32 for tensor in tensors)
        if self._is_copy:
            self.put(tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=torch.float32))
            torch._foreach_copy_(self.parts, tensors)

    def put(self, flat: torch.Tensor) -> None:
        """Replace the values of the copy."""
        self.flat = flat
        self.parts = laid_as(self._stored, flat)

    def scale(self, factor: torch.Tensor | None) -> None:
        """Multiply the values by a scalar on their device, in float32; None for 1."""
        if factor is not None and self._is_copy:
            self.flat.mul_(factor)
        elif factor is not None:
            torch._foreach_mul_(self.parts, factor)

    def write(self, noise: torch.Generator, skip: torch.Tensor | None) -> None:
        """Write the values back; bfloat16 is rounded stochastically, so that changes below a step of it are not lost.

        Args:
            noise: for the rounding.
            skip: whether the values are those that were read, which then stay what they are to the bit; on the device.
        """
        del skip  # values in bfloat16 or float32 come back as they were
        if self._is_copy:
            if self._stored[0].dtype is torch.bfloat16:
                round_stochastically_(self.flat, noise)
            torch._foreach_copy_(self._stored, self.parts)


def laid_as(tensors: Iterable[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Cut a flat tensor into pieces with the lengths of some tensors."""
    return list(torch.split(flat, [tensor.numel() for tensor in tensors]))


def round_stochastically_(values: torch.Tensor, noise: torch.Generator) -> None:
    """Round float32 in place to values of bfloat16, up or down with the probability that makes the mean exact.

    The 16 bits that bfloat16 drops are a number below one step of it: a uniform number of 16 bits added to them carries
    into the kept bits with that very probability. NaN is written anew, in bits that have room for it: those of CUDA's
    NaN, 2^31 - 1, would be carried over to minus zero.
    """
    values.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    random = torch.randint(0, 2**16, values.shape, generator=noise, device=values.device, dtype=torch.int32)
    values.view(torch.int32).add_(random).bitwise_and_(-(2**16))


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
    """Open a moment of a group's parts, all held in one way as `new_moment` made it; `copied` as in `Values`."""
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

    def write(self, _noise: torch.Generator, skip: torch.Tensor | None) -> None:
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


def is_float32(parameter: torch.Tensor, settings: OptimConfig) -> bool:
    """Tell whether a parameter and its moments are held in float32."""
    return parameter.dtype is torch.float32 and settings.state in ("auto", "float32")


def moment_type(parameter: torch.Tensor, settings: OptimConfig) -> MomentType:
    """Type in which the moments of a parameter are held: the run's, or the parameter's own."""
    own: MomentType = "bfloat16" if parameter.dtype is torch.bfloat16 else "float32"
    return own if settings.state == "auto" else settings.state
