"""The type that matrix products compute in."""

import torch


def product_dtype(x: torch.Tensor, other: torch.Tensor) -> torch.dtype:
    """The products' type: autocast's on the device of `x` where it is on, else that of `other`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else other.dtype
