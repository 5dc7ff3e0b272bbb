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


class Shape:
    """What stays of a tensor whose values are not needed.

    Args:
        tensor: any; it is not kept alive.
    """

    def __init__(self, tensor: Any) -> None:
        self.shape = tuple(tensor.shape)
        self.ndim = len(self.shape)


def on_host(batch: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Mapping[str, Any], bool]:
    """Take the named tensors of a batch to the CPU without waiting for the device; of all others the shape is kept.

    Args:
        batch: a forward's arguments.
        names: the tensors whose values are needed.

    Returns:
        What was taken, and whether copies are still under way; they have come when the device passes any later point.
        A batch that lies on the CPU comes back as it is.
    """
    devices = {name: getattr(getattr(value, "device", None), "type", "cpu") for name, value in batch.items()}
    if not any(device != "cpu" for device in devices.values()):
        return batch, False
    import torch

    taken: dict[str, Any] = {}
    for name, value in batch.items():
        if name not in names or devices[name] == "cpu":
            taken[name] = value if name in names or not hasattr(value, "shape") else Shape(value)
            continue
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=devices[name] == "cuda")
        taken[name] = pinned.copy_(value.detach(), non_blocking=devices[name] == "cuda")
    return taken, "cuda" in devices.values()
