"""The peak that each tool divides by, found the way it finds it: substrings of the device's name, in its own order.

These are other people's rules, wrong ones included; the peaks to trust are in `headway.devices`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# Each entry: substrings that must all occur, then FLOP/s; the first that matches wins.
_Rules = tuple[tuple[tuple[str, ...], float], ...]

# pytorch/torchtitan, torchtitan/tools/utils.py, get_peak_flops (commit 0258167, 2025). Where `lspci` is installed it
# first replaces the name by the bus's lines that say H100, which other Hopper devices do too.
_TORCHTITAN: _Rules = (
    (("A100",), 312e12),
    (("H100", "NVL"), 835e12),
    (("H100", "PCIe"), 756e12),
    (("H100",), 989e12),
    (("H200",), 989e12),
    (("B200",), 2.25e15),
    (("MI300X",), 1300e12),
    (("MI325X",), 1300e12),
    (("MI250X",), 191.5e12),
    (("l40s",), 362e12),
)
# EvolvingLMMs-Lab/lmms-engine, src/lmms_engine/utils/train_utils.py, get_device_flops (commit 19992ec, 2026).
_LMMS_ENGINE: _Rules = (
    (("B200",), 2.25e15),
    (("B300",), 2.25e15),
    (("MI300X",), 1336e12),
    (("H100",), 989e12),
    (("H800",), 989e12),
    (("H200",), 989e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("L40",), 181.05e12),
    (("L20",), 119.5e12),
    (("H20",), 148e12),
    (("910B",), 354e12),
)
# ByteDance-Seed/VeOmni, veomni/utils/count_flops.py, get_device_flops (2026; up to commit 6f45f07 an H200 was an H20).
_VEOMNI: _Rules = (
    (("H100",), 989e12),
    (("H800",), 989e12),
    (("H200",), 989e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("L40",), 181.05e12),
    (("L20",), 119.5e12),
    (("H20",), 148e12),
    (("910B",), 354e12),
    (("B200",), 2.25e15),
)
# verl-project/verl, verl/utils/flops_counter.py, _DEVICE_FLOPS in reverse alphabetical order (commit 02cf355, 2026).
_VERL: _Rules = (
    (("MI300X",), 1336e12),
    (("L40S",), 362.05e12),
    (("L40",), 181.05e12),
    (("L20",), 119.5e12),
    (("H800",), 989e12),
    (("H200",), 989e12),
    (("H20",), 148e12),
    (("H100",), 989e12),
    (("GB200",), 2.5e15),
    (("B200",), 2.25e15),
    (("A800",), 312e12),
    (("A40",), 149.7e12),
    (("A100",), 312e12),
    (("910B",), 354e12),
)
# karpathy/nanochat, nanochat/common.py, get_peak_flops (2026), on the lower-cased name.
_NANOCHAT: _Rules = (
    (("gb200",), 2.5e15),
    (("b200",), 2.25e15),
    (("b100",), 1.8e15),
    (("h200", "nvl"), 836e12),
    (("h200",), 989e12),
    (("h100", "nvl"), 835e12),
    (("h100", "pcie"), 756e12),
    (("h100",), 989e12),
    (("h800", "nvl"), 989e12),
    (("h800",), 756e12),
    (("a100",), 312e12),
    (("a800",), 312e12),
    (("a40",), 149.7e12),
    (("a30",), 165e12),
    (("l40s",), 362e12),
    (("l4",), 121e12),
    (("mi300x",), 1307.4e12),
    (("mi250x",), 383e12),
    (("5090",), 209.5e12),
    (("4090",), 165.2e12),
    (("3090",), 71e12),
)
_TABLES: dict[str, tuple[_Rules, float]] = {  # with what an unknown device gets
    "torchtitan": (_TORCHTITAN, 312e12),
    "lmms-engine": (_LMMS_ENGINE, inf),
    "veomni": (_VEOMNI, inf),
    "verl": (_VERL, inf),
    "nanochat": (_NANOCHAT, inf),
    "nanogpt": ((), 312e12),  # model.py, estimate_mfu: an A100, whatever the device
    "trl": ((), 989e12),  # compute_mfu's default: an H100, unless the caller says otherwise
}


@dataclass(frozen=True, slots=True)
class ToolPeak:
    """What a tool divides by on a device.

    Attributes:
        flops_per_s: FLOP/s of one device; infinite where the tool does not know it and prints 0; None where the tool
            prints no MFU at all.
        note: what is odd about it, "" for nothing.
    """

    flops_per_s: float | None
    note: str = ""


def tool_peak(tool: str, device_name: str) -> ToolPeak:
    """Find the peak that a tool divides by.

    Args:
        tool: key of a convention's `tool`; "" for one that prints no MFU.
        device_name: what `torch.cuda.get_device_name()` prints.

    >>> tool_peak("torchtitan", "NVIDIA L4")
    ToolPeak(flops_per_s=312000000000000.0, note='unknown device, taken for an A100')
    """
    if tool not in _TABLES:
        return ToolPeak(None, "prints no MFU; the datasheet peak is used")
    rules, unknown = _TABLES[tool]
    name = device_name.lower() if tool == "nanochat" else device_name
    for substrings, flops_per_s in rules:
        if all(substring in name for substring in substrings):
            return ToolPeak(flops_per_s)
    if unknown == inf:
        return ToolPeak(inf, "unknown device, infinite peak: prints an MFU of 0")
    if not rules:
        return ToolPeak(unknown, f"always {unknown / 1e12:.0f} TFLOP/s, whatever the device")
    return ToolPeak(unknown, "unknown device, taken for an A100")


def plausible_peaks() -> list[float]:
    """List every finite peak that some tool divides by [FLOP/s], ascending."""
    found = {peak for rules, unknown in _TABLES.values() for peak in (*(flops for _, flops in rules), unknown)}
    return sorted(found - {inf})
