"""A device's peak: the rate that MFU is a share of, with where it comes from."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that one device can do, and where the number comes from.

    Attributes:
        name: the device, e.g. "NVIDIA H100 80GB HBM3".
        flops_per_s: dense rate [FLOP/s], never the sparse one.
        dtype: the arithmetic it holds for, such as "bf16" or "tf32"; "fp8+bf16" for a mixture.
        source: datasheet with its date, the benchmark that measured it, or the variable or file that set it.
        kind: "datasheet"; "ceiling", measured on this very device; or "override", given by the user.
    """

    name: str
    flops_per_s: float
    dtype: str
    source: str
    kind: Literal["datasheet", "ceiling", "override"] = "datasheet"
