"""The peak that `--device` and `--dtype` name together."""

import math
from typing import TYPE_CHECKING

from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.devices import Peak


def stated_peak(device: str | None, dtype: str | None) -> "Peak | None":
    """Find the peak of a device in the dtypes of its matrix products; None without a device.

    Args:
        device: as of `--device`.
        dtype: as of `--dtype`: one dtype, or several with their shares of the FLOPs ("fp8:0.7,bf16:0.3").

    Raises:
        UsageError: `--dtype` is no list of dtypes and shares, or cannot take effect.
        UnknownDeviceError: the device, or a dtype on it, is not known.

    >>> round(stated_peak("B200", "fp8:3,bf16:1").flops_per_s / 1e12)  # 4 / (3 / 4500 + 1 / 2250)
    3600
    """
    from headway.devices import named_peak, weighted_peak

    if device is None:
        if dtype is not None:
            raise UsageError(f"--dtype {dtype} cannot take effect without --device, whose peak it chooses.")
        return None
    if dtype is None:
        return named_peak(device)
    shares = _shares(dtype)
    peak = named_peak(device, next(iter(shares)))
    if peak.source == f"--device {device}":  # a number
        raise UsageError(
            f"--dtype {dtype} cannot take effect: --device {device} states the rate itself. Leave one of them out."
        )
    return peak if len(shares) == 1 else weighted_peak(shares, device)


def _shares(text: str) -> dict[str, float]:
    """Read dtypes with their shares of the FLOPs; one alone needs none.

    Raises:
        UsageError: a share is missing or no positive number, or a dtype is named twice.
    """
    items = [item.strip().partition(":") for item in text.split(",")]
    if len(items) == 1 and not items[0][1] and items[0][0]:
        return {items[0][0]: 1.0}
    shares: dict[str, float] = {}
    for name, _, share in items:
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if not (name and math.isfinite(value) and value > 0) or name in shares:
            raise UsageError(
                f"--dtype {text!r}: {':'.join((name, share)).strip(':')!r} is not a dtype with its share of the FLOPs. "
                "Give one dtype, such as fp8, or several with positive shares, such as fp8:0.7,bf16:0.3."
            )
        shares[name] = value
    return shares
