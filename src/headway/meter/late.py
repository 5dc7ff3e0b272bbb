"""Numbers that lie on an accelerator, fetched without waiting for it: copied aside now, read once they have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Arrival:
    """A point in an accelerator's queue; on the CPU everything has arrived.

    Args:
        device: a `torch.device`, or None for the CPU.
    """

    def __init__(self, device: Any = None) -> None:
        self._event: Any = None
        if device is not None and device.type == "cuda":
            import torch

            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record(torch.cuda.current_stream(device))

    @property
    def timed(self) -> bool:
        """Whether the device's own clock is read."""
        return self._event is not None

    def has_come(self) -> bool:
        """Say whether the device has passed this point; never waits."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the device has passed this point."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, other: Arrival) -> float:
        """Measure the device time between two points that have come [s]."""
        return float(other._event.elapsed_time(self._event)) / 1e3


def on_host(batch: Mapping[str, Any], names: tuple[str, ...]) -> tuple[dict[str, Any], Arrival]:
    """Take the named tensors of a batch to the CPU without waiting for the device; shapes of all others stay readable.

    Args:
        batch: a forward's arguments.
        names: the tensors whose values are needed.

    Returns:
        The batch with copies of those tensors that lie on an accelerator, and when the copies may be read.
    """
    copied = dict(batch)
    device: Any = None
    for name in names:
        tensor = batch.get(name)
        where = getattr(tensor, "device", None)
        if tensor is None or where is None or where.type == "cpu":
            continue
        import torch

        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=where.type == "cuda")
        copied[name] = pinned.copy_(tensor.detach(), non_blocking=where.type == "cuda")
        device = where
    return copied, Arrival(device)
