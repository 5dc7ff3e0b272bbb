"""Packs on their way to the device: copied beside the computing, one ahead.

On a CUDA device copies are queued on a stream of their own. While the kernels of one pack run, the next one is copied:
neither the host nor the kernels wait for more than what is not there yet.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice

import torch

from headway.data.collate import Batch


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
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
        # Made for the copies' stream, whose next copy must not take the memory while kernels here still read it.
        moved.record_stream(computing)
        yield moved
        del moved  # by the time the next one is asked for, no reference here keeps this one's memory


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
