"""The peak that each tool divides by, found the way it finds it: the rules of `tool_peaks.toml`, in their order."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from headway.plugins import hooks_of_all

_NAMES: dict[str, Callable[[str], str]] = {
    "lower": str.lower,
    "upper": str.upper,
    "words": lambda name: f" {re.sub('[^A-Za-z0-9]+', ' ', name).upper().strip()} ",
}


@dataclass(frozen=True, slots=True)
class ToolPeak:
    """The peak that a tool divides by on a device."""

    # FLOP/s of one device; infinite where the tool does not know it and prints 0; None where the tool prints no MFU at
    # all
    flops_per_s: float | None
    note: str = ""  # oddity of that peak; "" for none


@cache
def _tools() -> dict[str, dict[str, Any]]:
    """The rules of each tool: those of the file, then those of installed families."""
    tools = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    for brought in hooks_of_all("tool_peaks"):
        tools |= brought
    return tools


def tool_peak(tool: str, device_name: str) -> ToolPeak:
    """Find the peak that a tool divides by.

    Args:
        tool: key of a convention's `tool`; "" for one that prints no MFU.
        device_name: what `torch.cuda.get_device_name()` prints.

    >>> tool_peak("torchtitan", "NVIDIA L4")
    ToolPeak(flops_per_s=312000000000000.0, note='unknown device, taken for an A100')
    """
    if tool not in _tools():
        return ToolPeak(None, "prints no MFU; the datasheet peak is used")
    rules, unknown, form = (_tools()[tool].get(key) for key in ("rules", "unknown", "name"))
    name = _NAMES.get(str(form), str)(device_name)
    for flops_per_s, *parts in rules or ():
        if parts == [name] if form == "whole" else all(part in name for part in parts):
            return ToolPeak(flops_per_s)
    if unknown is None:
        return ToolPeak(None, "unknown device, on which it prints no MFU; the datasheet peak is used")
    if unknown == inf:
        return ToolPeak(inf, "unknown device, infinite peak: prints an MFU of 0")
    if not rules:
        return ToolPeak(unknown, f"always {unknown / 1e12:g} TFLOP/s, whatever the device")
    return ToolPeak(unknown, "unknown device, taken for an A100")


def plausible_peaks(tools: frozenset[str] | None = None) -> list[float]:
    """List every finite peak that some of the tools, or all, divide by [FLOP/s], ascending."""
    tables = [table for tool, table in _tools().items() if tools is None or tool in tools]
    peaks = {
        peak for table in tables for peak in (table.get("unknown", inf), *(rule[0] for rule in table.get("rules", ())))
    }
    return sorted(peaks - {inf})
