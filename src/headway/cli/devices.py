"""`headway devices` and `headway ceiling`: peaks of the table, and rates measured on this machine."""

import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import JsonOption
from headway.cli.output import needs_extra, print_result, warn
from headway.cli.resolve import resolve_architecture, resolve_config, resolve_cost_model
from headway.errors import UnknownDeviceError, UsageError
from headway.log.working import working
from headway.report import Column, format_rate, format_share, render_lines, render_pairs, render_table
from headway.report.table import width_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from headway.count import CostModel
    from headway.devices import Ceiling, Device
    from headway.devices.measure import Measurement
    from headway.devices.model_rates import ModelRates
    from headway.predict.block_times import TimedBlocks


_TEXT_WIDTH = 100
_ENTRIES = {"title": "name", "origin": "from"}  # fields that are named otherwise in JSON
_LEFT_OUT = ("product_shares", "attention_shares", "rates_source")
_DTYPE_COLUMNS = ("bf16", "fp8", "fp4", "tf32", "fp32", "int8")


def devices(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name that a driver reports, a short name (H100, 4090) or a key."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="Show the peaks of this dtype alone, such as bf16.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the devices whose peak is known, or show one of them with its source.

    Peaks are dense, of one device as the framework sees it, with fp32 accumulation [TFLOP/s].

    Example: headway devices H100
    """
    from headway.devices.table import DTYPES, all_devices

    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is not known. Give one of {', '.join(DTYPES)}.")
    if name is not None:
        _show(name, dtype, as_json)
        return
    listed = _in_dtype(list(all_devices()), dtype)
    columns = _DTYPE_COLUMNS if dtype is None else (dtype,)
    print_result(
        lambda: {"devices": list(map(_record, listed))}, lambda: _text_of_all(listed, columns), as_json=as_json
    )


def _in_dtype(shown: "list[Device]", dtype: str | None) -> "list[Device]":
    """The devices that have a peak in a dtype, with that peak alone; all as they are without a dtype."""
    if dtype is None:
        return shown
    return [
        replace(
            device,
            peak_flops_per_s={dtype: device.peak_flops_per_s[dtype]},
            fp16_accumulate_flops_per_s={
                name: rate for name, rate in device.fp16_accumulate_flops_per_s.items() if name == dtype
            },
        )
        for device in shown
        if dtype in device.peak_flops_per_s
    ]


def _show(name: str, dtype: str | None, as_json: bool) -> None:
    from headway.devices.names import named_devices, properties

    matches = named_devices(name)
    dtypes = ", ".join(matches[0].peak_flops_per_s)
    matches = _in_dtype(matches, dtype)
    if not matches:
        raise UsageError(f"No source has a peak of {name} in {dtype}. Those with a source are {dtypes}.")
    if len(matches) > 1:
        keys = " and ".join(f"{device.key} ({properties(device)})" for device in matches)
        warn(f"{name} is the name of {keys}, which differ only in these properties.")
    variants = {"variants": [_record(device) for device in matches]} if len(matches) > 1 else {}
    print_result(lambda: {**_record(matches[0]), **variants}, lambda: "\n\n".join(map(_text, matches)), as_json=as_json)


def _record(device: "Device") -> dict[str, Any]:
    # A field is an entry, dates as text; shares of rates, which plans read, are left out.
    entries: dict[str, Any] = {}
    for field in fields(device):
        value = getattr(device, field.name)
        value = dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
        entries[_ENTRIES.get(field.name, field.name)] = value.isoformat() if isinstance(value, date) else value
    return {name: value for name, value in entries.items() if name not in _LEFT_OUT}


def _text_of_all(shown: "list[Device]", dtypes: "Sequence[str]") -> str:
    columns = [Column("device", "left"), *map(Column, dtypes), Column("GB"), Column("GB/s"), Column("W")]
    rows = [
        [
            device.title,
            *(_cell(device, dtype) for dtype in dtypes),
            _optional(device.memory_bytes, 1e9),
            _optional(device.memory_bytes_per_s, 1e9),
            _optional(device.board_power_w, 1),
        ]
        for device in shown
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


def _text(device: "Device") -> str:
    pairs = [("device", device.title), ("reported as", "; ".join(device.names) or "nothing, found by name only")]
    spoken = dict.fromkeys([*device.aliases, *([] if device.key in map(str.lower, device.aliases) else [device.key])])
    pairs += [("also called", ", ".join(spoken))]
    # Peaks by dtype; those of fp16 accumulation apart, since no framework uses them.
    pairs += [(dtype, f"{rate / 1e12:,.6g} {_unit(dtype)}, dense") for dtype, rate in device.peak_flops_per_s.items()]
    pairs += [
        ("", f"{rate / 1e12:,.6g} {_unit(dtype)} in {dtype} if accumulated in fp16, which frameworks do not do")
        for dtype, rate in device.fp16_accumulate_flops_per_s.items()
    ]
    # The vendor's figures; a figure that the vendor does not state is left out.
    if device.memory_bytes is not None:
        pairs.append(("memory", f"{_optional(device.memory_bytes, 1e9)} GB"))
    if device.driver_memory_bytes is not None:
        pairs.append(("its driver's", f"{_optional(device.driver_memory_bytes, 2**20)} MiB ({device.driver_source})"))
    if device.memory_bytes_per_s is not None:
        pairs.append(("bandwidth", f"{_optional(device.memory_bytes_per_s, 1e9)} GB/s"))
    if device.board_power_w is not None:
        pairs.append(("board power", f"{device.board_power_w:g} W"))
    if device.num_sms is not None:
        pairs.append(("multiprocessors", str(device.num_sms)))
    # Rates to other devices and to the host; a device that is alone in its node has no link inside of it.
    if device.devices_per_node > 1:
        nodes = f"to the {device.devices_per_node:,} devices of its node, one way"
        pairs.append(("link", f"{_optional(device.link_bytes_per_s, 1e9)} GB/s {nodes}"))
    pairs.append(("network", f"{_optional(device.network_bytes_per_s, 1e9)} GB/s to other nodes, one way"))
    pairs.append(("host", f"{_optional(device.host_bytes_per_s, 1e9)} GB/s to its host's memory, one way"))
    if device.link_source is not None:
        pairs += _wrapped("links from", device.link_source)
    if device.assumed_links is not None:
        pairs += _wrapped("links taken", f"{device.assumed_links}, because no source has these numbers")
    # Sources of the figures, and sources that disagree.
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


_KINDS = ("cpu", "cuda", "mps")


def ceiling(
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|mps",
            help=("Device to measure, such as cuda:1. Default: the accelerator, or else the CPU."),
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Dtype to measure: bf16, fp16, fp32, and on CUDA tf32, fp8, int8. Default: all dtypes of the device. "
                "Repeatable."
            ),
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Measure at this model's own sizes instead, for `headway plan` to use."),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, although the cache has a result.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the best rate of matrix products [FLOP/s] and of copies [byte/s] on this device, over several shapes.

    The measurement takes up to five seconds a dtype, or two minutes with --model. The result is cached for the device,
    driver, PyTorch version and thread count.

    Example: headway ceiling --device cpu --dtype fp32
    """
    if model is not None:
        _of_model(model, device, dtype, refresh=refresh, as_json=as_json)
        return
    with needs_extra("measuring a ceiling"), working("measuring this device"):
        from headway.devices.ceilings import copy_ceiling, dtypes_of, environment, matmul_ceiling

        where = local_device(device)
        names = dtype or list(dtypes_of(where))
        products = [matmul_ceiling(where, name, refresh=refresh, warn=warn) for name in names]
        copy = copy_ceiling(where, refresh=refresh, warn=warn)
        around = environment(where)
        device_known = _known(where)
    ceilings = around, products, copy, device_known
    print_result(lambda: _record_of_ceilings(*ceilings), lambda: _text_of_ceilings(*ceilings), as_json=as_json)


def _of_model(model: str, device: str | None, dtypes: list[str] | None, *, refresh: bool, as_json: bool) -> None:
    """Measure a model's products, attention and first blocks, and print their rates and times."""
    cost_model = resolve_cost_model(model)
    with needs_extra("measuring a model's rates"):
        from headway.devices.ceilings import environment

        where = local_device(device)
        names = dtypes or ["fp32" if where.type == "cpu" else "bf16"]
        rates_by_dtype = {name: local_rates(model, cost_model, where, name, refresh=refresh) for name in names}
        around = environment(where)
    rows = [
        {"dtype": name, **rates.to_dict(), "blocks": None if blocks is None else blocks.to_dict()}
        for name, (rates, blocks) in rates_by_dtype.items()
    ]
    print_result(
        lambda: {"model": model, "device": around, "rates": rows},
        lambda: "\n\n".join(_text_of_model(model, name, *both) for name, both in rates_by_dtype.items()),
        as_json=as_json,
    )


def local_rates(
    model: str, cost_model: "CostModel", where: "torch.device", dtype: str, *, refresh: bool = False
) -> "tuple[ModelRates, TimedBlocks | None]":
    """Rates at a model's sizes and times of its first blocks on a device of this machine, measured now or before.

    Args:
        model: as `resolve_cost_model` takes it.
        cost_model: of the model.
        where: the device.
        dtype: of the products, such as "bf16".
        refresh: measure even if the cache has them.

    Raises:
        UsageError: a dtype that is not measured.
    """
    from headway.devices.model_rates import model_rates
    from headway.models.attention import attend
    from headway.predict.block_times import timed_blocks
    from headway.predict.step_time import shapes_of

    numbers = resolve_architecture(model, cost_model)
    heads = (numbers.heads, numbers.qk_dim)
    with working(f"measuring the rates of {model}"):
        rates = model_rates(where, dtype, shapes_of(cost_model), heads, attend, refresh=refresh, warn=warn)
        return rates, timed_blocks(resolve_config(model), where, dtype, refresh=refresh, warn=warn)


def _text_of_model(model: str, dtype: str, rates: "ModelRates", blocks: "TimedBlocks | None") -> str:
    columns = [Column("what", "left"), Column("size", "left"), Column("rate")]
    rows = [
        [f"{dtype} product", "x".join(map(str, shape)), format_rate(rate)] for shape, rate in rates.products.items()
    ]
    for length, both in rates.attention.items():
        for phase, rate in zip(("forward", "backward"), both, strict=True):
            rows.append([f"attention, {phase}", f"segments of {length} tokens", format_rate(rate)])
    for segments, seconds in {} if blocks is None else blocks.seconds.items():
        size = f"pack of {sum(segments):,} tokens"
        rows.append(["first blocks, forward and backward", size, f"{1e3 * seconds:.4g} ms"])
    is_cached = rates.is_cached and (blocks is None or blocks.is_cached)
    state = "from the cache; --refresh measures again" if is_cached else "just now"
    pairs = [("model", model), ("measured", f"{rates.measured_at:%Y-%m-%d %H:%M} UTC, {state}")]
    return f"{render_table(columns, rows)}\n\n{render_pairs(pairs)}"


def local_device(name: str | None) -> "torch.device":
    """A device of this machine: the one named, or the accelerator, or the CPU.

    Raises:
        UsageError: PyTorch sees no such device here.
    """
    import torch

    here = ["cpu"]
    here += ["cuda"] if torch.cuda.is_available() else []
    here += ["mps"] if torch.backends.mps.is_available() else []
    if name is None:
        return torch.device(here[-1])
    kind, _, index = name.partition(":")
    if kind not in _KINDS or (index and not (index.isdecimal() and len(index) < 5)):
        raise UsageError(
            f"--device {name!r} is none of {', '.join(_KINDS)}. Leave the option out to measure the accelerator."
        )
    if kind not in here or (kind == "cuda" and index and int(index) >= torch.cuda.device_count()):
        raise UsageError(f"--device {name}: PyTorch sees no such device here, only {', '.join(here)}.")
    return torch.device(name)


def _known(where: "torch.device") -> "Device | None":
    """Find what the table says of the device, to set it beside what was measured; of most CPUs, nothing."""
    from headway.devices import device_at

    try:
        return device_at(where)
    except UnknownDeviceError:
        return None


def _record_of_ceilings(
    around: dict[str, Any], products: "list[Ceiling]", copy: "Ceiling", device: "Device | None"
) -> dict[str, Any]:
    return {
        "device": around,
        "matmul": [
            {
                "dtype": ceiling.what,
                **_rates(ceiling.best, "flops_per_s"),
                "datasheet_flops_per_s": device.peak_flops_per_s.get(ceiling.what) if device else None,
                "shapes": [_rates(measurement, "flops_per_s") for measurement in ceiling.measurements],
                **_when(ceiling),
            }
            for ceiling in products
        ],
        "copy": {
            **_rates(copy.best, "bytes_per_s"),
            "datasheet_bytes_per_s": device.memory_bytes_per_s if device else None,
            "sizes": [_rates(measurement, "bytes_per_s") for measurement in copy.measurements],
            **_when(copy),
        },
    }


def _rates(measurement: "Measurement", unit: str) -> dict[str, Any]:
    return {
        "shape": list(measurement.shape),
        "repeats": len(measurement.durations_s),
        unit: measurement.best_per_s,
        f"median_{unit}": measurement.median_per_s,
        f"min_{unit}": measurement.worst_per_s,
    }


def _when(ceiling: "Ceiling") -> dict[str, Any]:
    return {"measured_at": ceiling.measured_at.isoformat(timespec="seconds"), "cached": ceiling.is_cached}


def _text_of_ceilings(
    around: dict[str, Any], products: "list[Ceiling]", copy: "Ceiling", device: "Device | None"
) -> str:
    columns = [Column("what", "left"), Column("shape", "left")]
    columns += [Column("best"), Column("median"), Column("slowest"), Column("repeats"), Column("of datasheet")]
    peaks = device.peak_flops_per_s if device else {}
    rows = [[top.what, *_cells(top.best, format_rate), _share(top, peaks.get(top.what))] for top in products]
    bandwidth = device.memory_bytes_per_s if device else None
    rows.append([copy.what, *_cells(copy.best, _bandwidth), _share(copy, bandwidth)])
    pairs = [("device", around["name"]), ("torch", around["torch"])]
    if around["threads"]:
        pairs.append(("threads", str(around["threads"])))
    if around["driver"]:
        pairs.append(("driver", around["driver"]))
    for ceiling in (*products, copy):
        state = "from the cache; --refresh measures again" if ceiling.is_cached else "just now"
        state = (
            state
            if ceiling.is_settled
            else "uncertain, because other work kept the device busy; measure again on an idle device"
        )
        pairs.append((f"{ceiling.what} measured", f"{ceiling.measured_at:%Y-%m-%d %H:%M} UTC, {state}"))
    return f"{render_table(columns, rows)}\n\n{render_pairs(pairs)}"


def _cells(measurement: "Measurement", write: Callable[[float], str]) -> list[str]:
    rates = [measurement.best_per_s, measurement.median_per_s, measurement.worst_per_s]
    sides = measurement.shape
    shape = "x".join(map(str, sides)) if len(sides) == 3 else f"{sides[0] / 2**20:g} MiB"
    return [shape, *map(write, rates), str(len(measurement.durations_s))]


def _share(ceiling: "Ceiling", datasheet: float | None) -> str:
    return "-" if datasheet is None else format_share(ceiling.best.best_per_s / datasheet)


def _bandwidth(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.1f} GB/s"
