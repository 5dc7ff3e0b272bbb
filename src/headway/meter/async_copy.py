"""Numbers that lie on an accelerator, fetched without waiting for it: copied aside now, read once they have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.meter import clock

if TYPE_CHECKING:
    from collections.abc import Mapping


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


class HostCopy:
    """A few numbers on their way from the device.

    Args:
        values_K: numbers on the device, shape (K,).
    """

    def __init__(self, values_K: Any) -> None:
        import torch

        self._values_K = values_K.detach()
        if values_K.device.type == "cuda":
            self._values_K = torch.empty(values_K.shape, dtype=values_K.dtype, pin_memory=True)
            self._values_K.copy_(values_K.detach(), non_blocking=True)
        self._arrived = clock.mark(values_K.device)

    def read(self) -> list[float]:
        """Return the numbers; waits for them if the device has not passed the copy."""
        self._arrived.wait()
        numbers: list[float] = self._values_K.tolist()
        return numbers
