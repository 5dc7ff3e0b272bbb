"""Travel of a batch: from a worker through shared memory, into page-locked memory, and to the device.

All tensors of a batch lie in one block, one after the other, with the rest of the object pickled behind them. So a
batch costs one file descriptor however many tensors it has, and the message that announces it is a few hundred bytes,
which a pipe takes whole or not at all: a worker that is killed cannot leave half a message behind.

On a CUDA device copies are queued on a stream of their own. While the kernels of one pack run, the next one is copied:
neither the host nor the kernels wait for more than what is not there yet.
"""

import io
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:  # a worker of the pool starts without what collating needs
    from headway.data.collate import Batch

_ALIGNMENT = 64  # bytes; a cache line, and more than any element needs


class SharedBlock(NamedTuple):
    """An object and its tensors, serialised into one block of memory.

    Attributes:
        block: the tensors, then the pickled rest of the object; uint8, in shared memory as workers send it.
        start: where the pickled rest begins [bytes].
    """

    block: torch.Tensor
    start: int


class _TensorPickler(pickle.Pickler):
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


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, block: torch.Tensor) -> None:
        super().__init__(file)
        self.block = block

    def persistent_load(self, place: Any) -> torch.Tensor:
        start, dtype, shape = place
        return self.block[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def to_block(value: Any, new_block: Callable[[int], torch.Tensor] | None = None) -> SharedBlock:
    """Lay an object and the CPU tensors in it into one block.

    Args:
        value: any object that can be pickled.
        new_block: allocates a number of bytes; None for shared memory.

    Raises:
        RuntimeError: there is not enough shared memory.
    """
    file = io.BytesIO()
    pickler = _TensorPickler(file)
    pickler.dump(value)
    pickled = file.getvalue()
    block = (new_block or _shared_block)(pickler.end + len(pickled))
    for start, tensor in pickler.tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            block[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    block[pickler.end :] = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    return SharedBlock(block, pickler.end)


def _shared_block(num_bytes: int) -> torch.Tensor:
    # Shared from the start, as torch's own collating does it: `share_memory_` would copy a block made elsewhere.
    storage: Any = torch.UntypedStorage  # torch leaves the methods untyped
    return torch.empty(0, dtype=torch.uint8).set_(storage._new_shared(num_bytes))


def pinned_block(num_bytes: int) -> torch.Tensor:
    """So many bytes of page-locked memory, from which a CUDA device copies while the host does other things."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def from_block(shared: SharedBlock) -> Any:
    """The object again; its tensors are views of the block, without a copy."""
    pickled = shared.block[shared.start :].numpy().tobytes()
    return _TensorUnpickler(io.BytesIO(pickled), shared.block).load()


def transfer_ahead(batches: "Iterable[Batch]", device: torch.device) -> "Iterator[Batch]":
    """Move packs to a device, each before it is asked for; whoever asks computes on the stream that is current then.

    Args:
        batches: in page-locked memory, or the host waits for the copies. One more than was asked for is taken of them.
        device: on a CPU the packs are given as they are, one by one.

    Yields:
        The packs, in order. The stream that is current waits for the copy, the host does not.
    """
    if device.type != "cuda":
        for batch in batches:
            yield batch.to(device)
        return
    copying = _copy_stream(device)
    under_way: deque[tuple[Batch, torch.cuda.Event]] = deque()
    remaining = iter(batches)
    while True:
        for batch in islice(remaining, 2 - len(under_way)):
            with torch.cuda.stream(copying):
                moved, arrived = batch.to(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(copying)
            under_way.append((moved, arrived))
        if not under_way:
            return
        moved, arrived = under_way.popleft()
        computing = torch.cuda.current_stream(device)
        computing.wait_event(arrived)
        # The memory belongs to the copying stream: recorded, it is not reused by the next copy while kernels read it.
        moved.record_stream(computing)
        yield moved
        del moved  # by the time the next one is asked for, no reference here keeps this one's memory


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
