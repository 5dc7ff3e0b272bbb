"""Objects that hold tensors, as one block of shared memory: what a worker process hands over.

All tensors of a batch lie in one block, one after the other, with the rest of the object pickled behind them. So a
batch costs one file descriptor however many tensors it has, and the message that announces it is a few hundred bytes,
which a pipe takes whole or not at all: a worker that is killed cannot leave half a message behind.
"""

import io
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_ALIGNMENT = 64  # bytes; a cache line, and more than any element needs


class Parcel(NamedTuple):
    """An object in one block.

    Attributes:
        block: tensors, then the pickled rest, uint8 in shared memory.
        start: where the pickled rest begins [bytes].
    """

    block: torch.Tensor
    start: int


class _Packing(pickle.Pickler):
    """Pickles an object, leaving out its tensors: each becomes its place in the block."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.end = 0

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return None
        place = (self.end, value.dtype, tuple(value.shape))
        self.tensors.append((self.end, value))
        self.end += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        return place


class _Unpacking(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, block: torch.Tensor) -> None:
        super().__init__(file)
        self.block = block

    def persistent_load(self, place: Any) -> torch.Tensor:
        start, dtype, shape = place
        return self.block[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def wrap(value: Any, new_block: Callable[[int], torch.Tensor] | None = None) -> Parcel:
    """Lay an object and the CPU tensors in it into one block.

    Args:
        value: any object that can be pickled.
        new_block: makes so many bytes of memory; None for shared memory.

    Raises:
        RuntimeError: there is not enough shared memory.
    """
    file = io.BytesIO()
    packing = _Packing(file)
    packing.dump(value)
    rest = file.getvalue()
    block = (new_block or _shared_block)(packing.end + len(rest))
    for start, tensor in packing.tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            block[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    block[packing.end :] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
    return Parcel(block, packing.end)


def _shared_block(num_bytes: int) -> torch.Tensor:
    # Shared from the start, as torch's own collating does it: `share_memory_` would copy a block made elsewhere.
    storage: Any = torch.UntypedStorage  # its methods are untyped
    return torch.empty(0, dtype=torch.uint8).set_(storage._new_shared(num_bytes))


def pinned_block(num_bytes: int) -> torch.Tensor:
    """So many bytes of page-locked memory, from which a CUDA device copies while the host does other things."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def unwrap(parcel: Parcel) -> Any:
    """The object again; its tensors are views of the block, without a copy."""
    rest = parcel.block[parcel.start :].numpy().tobytes()
    return _Unpacking(io.BytesIO(rest), parcel.block).load()
