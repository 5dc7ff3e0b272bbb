"""`headway devices`: the peaks that are known, and where each stands."""

import sys
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import JsonOption
from headway.cli.output import print_json, warn
from headway.errors import UnknownDeviceError, UsageError
from headway.report import Column, render_lines, render_pairs, render_table
from headway.report.terminal import width_of

if TYPE_CHECKING:
    from headway.devices import Device


_TEXT_WIDTH = 100
_DTYPE_COLUMNS = ("bf16", "fp8", "fp4", "tf32", "fp32", "int8")


def devices(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="What a driver reports, a short name (H100, 4090) or a key; any case."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the devices whose peak is known, or show one of them with its source.

    Peaks are dense, of one device as the framework sees it, with fp32 accumulation [TFLOP/s].

    Example: headway devices H100
    """
    from headway.devices.table import all_devices

    if name is not None:
        _show(name, as_json)
    elif as_json:
        print_json({"devices": [_record(device) for device in all_devices()]})
    else:
        print(_render_all(list(all_devices())))


def _show(name: str, as_json: bool) -> None:
    from headway.devices.names import named_devices, properties

    try:
        found = named_devices(name)
    except UnknownDeviceError as error:
        raise UsageError(str(error)) from error
    if len(found) > 1:
        keys = " and ".join(f"{device.key} ({properties(device)})" for device in found)
        warn(f"{name} is the name of {keys}; only these properties tell them apart.")
    if as_json:
        variants = {"variants": [_record(device) for device in found]} if len(found) > 1 else {}
        print_json({**_record(found[0]), **variants})
    else:
        print("\n\n".join(_render(device) for device in found))


def _record(device: "Device") -> dict[str, Any]:
    return {
        "key": device.key,
        "name": device.title,
        "names": list(device.names),
        "aliases": list(device.aliases),
        "peak_flops_per_s": dict(device.peak_flops_per_s),
        "fp16_accumulate_flops_per_s": dict(device.fp16_accumulate_flops_per_s),
        "num_sms": device.num_sms,
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "board_power_w": device.board_power_w,
        "link_bytes_per_s": device.link_bytes_per_s,
        "network_bytes_per_s": device.network_bytes_per_s,
        "devices_per_node": device.devices_per_node,
        "link_source": device.link_source,
        "link_read_on": None if device.link_read_on is None else device.link_read_on.isoformat(),
        "source": device.source,
        "read_on": device.read_on.isoformat(),
        "disagreements": list(device.disagreements),
        "from": device.origin,
    }


def _render_all(found: "list[Device]") -> str:
    columns = [Column("device", "left"), *map(Column, _DTYPE_COLUMNS), Column("GB"), Column("GB/s"), Column("W")]
    rows = [
        [
            device.title,
            *(_cell(device, dtype) for dtype in _DTYPE_COLUMNS),
            _optional(device.memory_bytes, 1e9),
            _optional(device.memory_bytes_per_s, 1e9),
            _optional(device.board_power_w, 1),
        ]
        for device in found
    ]
    legend = [
        "Dense TFLOP/s of one device as the framework sees it, accumulated in fp32; TOP/s in int8. * fp16: no bf16.",
        "Sources, dates and disagreements: headway devices NAME. To add a device: docs/devices.md.",
    ]
    return "\n".join([render_table(columns, rows), "", render_lines(legend)])


def _cell(device: "Device", dtype: str) -> str:
    rates = device.peak_flops_per_s
    if dtype == "bf16" and "bf16" not in rates and "fp16" in rates:
        return f"{_optional(rates['fp16'], 1e12)}*"
    return _optional(rates.get(dtype), 1e12)


def _optional(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:,.6g}"


def _render(device: "Device") -> str:
    pairs = [("device", device.title), ("reported as", "; ".join(device.names) or "nothing, found by name only")]
    spoken = dict.fromkeys([*device.aliases, *([] if device.key in map(str.lower, device.aliases) else [device.key])])
    pairs += [("also called", ", ".join(spoken))]
    pairs += [(dtype, f"{rate / 1e12:,.6g} {_unit(dtype)}, dense") for dtype, rate in device.peak_flops_per_s.items()]
    pairs += [
        ("", f"{rate / 1e12:,.6g} {_unit(dtype)} in {dtype} if accumulated in fp16, which frameworks do not do")
        for dtype, rate in device.fp16_accumulate_flops_per_s.items()
    ]
    if device.memory_bytes is not None:
        pairs.append(("memory", f"{_optional(device.memory_bytes, 1e9)} GB"))
    if device.memory_bytes_per_s is not None:
        pairs.append(("bandwidth", f"{_optional(device.memory_bytes_per_s, 1e9)} GB/s"))
    if device.board_power_w is not None:
        pairs.append(("board power", f"{device.board_power_w:g} W"))
    if device.num_sms is not None:
        pairs.append(("multiprocessors", str(device.num_sms)))
    if device.link_bytes_per_s is not None:
        nodes = f"to the {device.devices_per_node:,} devices of its node, one way"
        pairs.append(("link", f"{_optional(device.link_bytes_per_s, 1e9)} GB/s {nodes}"))
    if device.network_bytes_per_s is not None:
        pairs.append(("network", f"{_optional(device.network_bytes_per_s, 1e9)} GB/s to other nodes, one way"))
    if device.link_source is not None:
        pairs += _wrapped("links from", device.link_source)
    pairs += _wrapped("source", device.source)
    pairs.append(("read on", device.read_on.isoformat()))
    for text in device.disagreements:
        pairs += _wrapped("elsewhere", text)
    if not device.is_shipped:
        pairs.append(("from", device.origin))
    return render_pairs(pairs)


def _wrapped(name: str, text: str) -> list[tuple[str, str]]:
    if width_of(sys.stdout) is not None:  # the terminal's width wraps it
        return [(name, text)]
    lines = textwrap.wrap(text, _TEXT_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]


def _unit(dtype: str) -> str:
    return "TOP/s" if dtype == "int8" else "TFLOP/s"
