"""Multi-tensor updates: parts of many parameters laid end to end, updated in float32 by one kernel per operation.

A model has hundreds of parameters, most of them small. So an optimizer takes as many as fit a budget of memory, cuts
what is larger, and computes on one flat tensor of them all. Letters: R rows of blocks, B values of a block.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from headway.count.updating import AT_ONCE
from headway.models.parallel import local


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
        """The same range of another tensor that is laid out as the parameter, flat.

        Args:
            tensor: whole, or sharded as the parameter is.
            block: values of the parameter that share one of the tensor's.
        """
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
        spread = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        kind = (parameter.dtype, parameter.device, block_of(parameter.shape), spread)
        lists.setdefault(kind, []).append(parameter)
    return list(lists.values())


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
