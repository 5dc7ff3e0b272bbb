"""The table of devices: what ships in peaks/*.toml, and what the user's own files add to it or replace."""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from headway.errors import ConfigError

FILE_VARIABLE = "HEADWAY_PEAKS"
DTYPES = ("bf16", "fp16", "fp8", "fp4", "tf32", "fp32", "int8")

_SHIPPED = "shipped"
_NUMBERS = ("memory_gb", "memory_gb_per_s", "board_power_w")
_LINK_NUMBERS = ("link_gb_per_s", "network_gb_per_s")
# Taken where nobody prints a device's links, since no exchange is free: PCI Express 4.0 x16, one way, between eight
# devices and to the host, and 100 Gb/s of Ethernet for a node, which AWS G5 has for eight A10G.
_PCIE_GB_PER_S, _PER_NODE, _HOST_GB_PER_S, _ETHERNET_GB_PER_S = 31.5, 8, 32.0, 12.5
_RATES = ("products", "attention")
_KEYS = (
    "names",
    "title",
    "aliases",
    "tflops",
    "tflops_fp16_accumulate",
    "num_sms",
    *_NUMBERS,
    *_LINK_NUMBERS,
    "devices_per_node",
    "link_source",
    "link_read_on",
    "host_gb_per_s",
    "driver_mib",
    "driver_source",
    "driver_read_on",
    *_RATES,
    "rates_source",
    "source",
    "read_on",
    "disagreements",
)


@dataclass(frozen=True, slots=True)
class Device:
    """One device as the framework sees it: a card, a die of a card, or a core of a chip."""

    key: str  # name of its table in the file, such as "h100-sxm"
    title: str  # name to print
    # exact strings that drivers report; two devices may share one and are then told apart by `num_sms` or memory
    names: tuple[str, ...]
    aliases: tuple[str, ...]  # other names that people use
    peak_flops_per_s: Mapping[str, float]  # dense rate by dtype [FLOP/s], accumulated in fp32 as frameworks do
    # the faster rate of some cards when they accumulate in fp16 [FLOP/s]
    fp16_accumulate_flops_per_s: Mapping[str, float]
    num_sms: int | None  # streaming multiprocessors, compute units or GPU cores; None where not known
    memory_bytes: int | None  # memory as the vendor prints it, in 10**9 bytes
    driver_memory_bytes: int | None  # memory that its driver reports, in MiB
    driver_source: str | None  # source of what its driver reports
    driver_read_on: date | None  # date on which that source was read
    memory_bytes_per_s: float | None  # memory bandwidth [byte/s]
    board_power_w: float | None  # the vendor's power limit [W]
    link_bytes_per_s: float  # rate to the other devices of its node together, one way [byte/s]
    network_bytes_per_s: float  # share of a common node's network, one way [byte/s]
    devices_per_node: int  # devices that such links join
    link_source: str | None  # source of the numbers of links
    link_read_on: date | None  # date on which that source was read
    assumed_links: str | None  # links that no source has, and what is taken for them
    host_bytes_per_s: float  # rate to its host's memory, one way [byte/s]
    # share of the peak that matrix products reach in training: at best, as expected, at worst
    product_shares: tuple[float, float, float] | None
    attention_shares: Mapping[str, float]  # share of the bf16 peak that attention reaches, by kernel
    rates_source: str | None  # source of these shares
    source: str  # source of the numbers
    read_on: date  # date on which that source was read
    disagreements: tuple[str, ...]  # other sources with other numbers
    origin: str  # "shipped", or the user's file that it stands in

    @property
    def is_shipped(self) -> bool:
        """True if the entry comes with the package."""
        return self.origin == _SHIPPED

    @property
    def total_memory_bytes(self) -> int | None:
        """Memory that its driver reports [bytes], or the printed size where no source has the driver's number."""
        return self.driver_memory_bytes or self.memory_bytes

    def spoken_names(self) -> tuple[str, ...]:
        """List everything that a person may call it."""
        return (self.key, self.title, *self.aliases, *self.names)


def all_devices() -> tuple[Device, ...]:
    """List the user's devices, then the shipped ones that they do not replace.

    A user's entry replaces a shipped one that has the same key or shares a reported name. $HEADWAY_PEAKS is read first,
    then peaks.toml in Headway's configuration folder.

    Raises:
        ConfigError: a user's file is missing, is not TOML, or holds an entry that is not one.
    """
    devices: list[Device] = []
    for path in _user_files():
        devices += _not_replaced(_read_file(path, path.stat().st_mtime_ns), devices)
    return (*devices, *_not_replaced(shipped_devices(), devices))


def _not_replaced(devices: Sequence[Device], earlier: Sequence[Device]) -> list[Device]:
    keys, names = {device.key for device in earlier}, {name for device in earlier for name in device.names}
    return [device for device in devices if device.key not in keys and names.isdisjoint(device.names)]


@cache
def shipped_devices() -> tuple[Device, ...]:
    """Read the devices that come with the package."""
    folder = files("headway.devices") / "peaks"
    devices = [
        _parse_device(key, entry, path.name, _SHIPPED)
        for path in sorted(folder.iterdir(), key=lambda path: path.name)
        if path.name.endswith(".toml")
        for key, entry in tomllib.loads(path.read_text(encoding="utf-8")).items()
    ]
    return tuple(devices)


def user_file() -> Path:
    """Name the user's own file, whether it exists or not."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "headway" / "peaks.toml"


def _user_files() -> list[Path]:
    stated = os.environ.get(FILE_VARIABLE)
    paths = [user_file()] if user_file().is_file() else []
    if stated is None:
        return paths
    path = Path(stated).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{FILE_VARIABLE}={stated!r} is not a file. Give the path of a TOML file of devices (docs/devices.md shows "
            "one), or unset it."
        )
    return [path, *paths]


@cache
def _read_file(path: Path, _modified_ns: int) -> tuple[Device, ...]:
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error
    return tuple(_parse_device(key, entry, str(path), str(path)) for key, entry in entries.items())


def _parse_device(key: str, entry: Any, file: str, origin: str) -> Device:
    where = f"{file}, [{key}]"
    if not isinstance(entry, dict):
        raise ConfigError(f"{file}: {key} = {entry!r} stands outside a table. A device is a table such as [{key}].")

    # names, of which a title can be made
    _check_keys(entry, where)
    names, aliases = (_texts(entry, name, where) for name in ("names", "aliases"))
    title = entry.get("title", names[0] if names else None)
    if not isinstance(title, str) or not title:
        raise ConfigError(f'{where}: give names = ["..."], the strings that its driver reports, or a title.')

    # the source of its numbers, and when they were read there
    if not isinstance(entry["source"], str) or not entry["source"].strip():
        raise ConfigError(
            f"{where}: source = {entry['source']!r} is no text. Name the document that states the numbers."
        )
    _check_date(entry, "read_on", where)

    # GB is 10**9 bytes, as vendors print it
    memory_gb, memory_gb_per_s, board_power_w = (_number(entry, name, where) for name in _NUMBERS)
    link_gb_per_s, network_gb_per_s, per_node, assumed_links = _links(entry, where)
    host_gb_per_s = _number(entry, "host_gb_per_s", where) or _HOST_GB_PER_S
    _check_source(entry, ("driver_mib",), ("driver_source", "driver_read_on"), where)
    driver_mib = _count(entry, "driver_mib", "MiB", where)
    product_shares, attention_shares = _shares(entry, where)
    return Device(
        key=key,
        title=title,
        names=names,
        aliases=aliases,
        peak_flops_per_s=_rates(entry["tflops"], "tflops", where),
        fp16_accumulate_flops_per_s=_rates(entry.get("tflops_fp16_accumulate", {}), "tflops_fp16_accumulate", where),
        num_sms=_count(entry, "num_sms", "multiprocessors", where),
        memory_bytes=None if memory_gb is None else round(memory_gb * 1e9),
        driver_memory_bytes=None if driver_mib is None else driver_mib * 2**20,
        driver_source=entry.get("driver_source"),
        driver_read_on=entry.get("driver_read_on"),
        memory_bytes_per_s=None if memory_gb_per_s is None else memory_gb_per_s * 1e9,
        board_power_w=board_power_w,
        link_bytes_per_s=link_gb_per_s * 1e9,
        network_bytes_per_s=network_gb_per_s * 1e9,
        devices_per_node=per_node,
        link_source=entry.get("link_source"),
        link_read_on=entry.get("link_read_on"),
        assumed_links=assumed_links,
        host_bytes_per_s=host_gb_per_s * 1e9,
        product_shares=product_shares,
        attention_shares=attention_shares,
        rates_source=entry.get("rates_source"),
        source=entry["source"],
        read_on=entry["read_on"],
        disagreements=_texts(entry, "disagreements", where),
        origin=origin,
    )


def _links(entry: Mapping[str, Any], where: str) -> tuple[float, float, int, str | None]:
    """Read links' bandwidths [10**9 byte/s], which need a source of their own: datasheets of peaks rarely have them.

    Returns:
        Link, network, devices of a node, and what of the three is not stated and taken instead.
    """
    link, network = (_number(entry, name, where) for name in _LINK_NUMBERS)
    per_node = _count(entry, "devices_per_node", "devices", where) or _PER_NODE
    _check_source(entry, _LINK_NUMBERS, ("devices_per_node", "link_source", "link_read_on"), where)
    assumed = []
    if link is None:
        link = _PCIE_GB_PER_S
        assumed.append(f"{link:g} GB/s of PCI Express 4.0 x16 to the {per_node} devices of a node")
    if network is None:
        network = _ETHERNET_GB_PER_S / per_node
        assumed.append(f"100 Gb/s of Ethernet for a node, which is {network:.3g} GB/s for a device")
    return link, network, per_node, " and ".join(assumed) or None


def _check_source(entry: Mapping[str, Any], numbers: Sequence[str], needed: Sequence[str], where: str) -> None:
    """Check that a source and a date stand beside numbers that datasheets of peaks rarely have."""
    keys = [name for name in (*numbers, *needed) if name in entry]
    if not keys:
        return
    missing = [name for name in needed if name not in entry]
    if missing:
        raise ConfigError(f"{where}: {keys[0]} needs {' and '.join(missing)} beside it.")
    *_, source, read_on = needed
    if not isinstance(entry[source], str) or not entry[source].strip():
        raise ConfigError(
            f"{where}: {source} = {entry[source]!r} is no text. Name the document that states {numbers[0]}."
        )
    _check_date(entry, read_on, where)


def _shares(entry: Mapping[str, Any], where: str) -> tuple[tuple[float, float, float] | None, dict[str, float]]:
    """Read the shares of the peak that products and attention reach, which need a source of their own."""
    products, attention, source = entry.get("products"), entry.get("attention", {}), entry.get("rates_source")
    if any(name in entry for name in _RATES) and (not isinstance(source, str) or not source.strip()):
        raise ConfigError(
            f"{where}: products and attention need rates_source beside them. Name the document that states the shares."
        )
    if products is not None:
        numbers = [_share(value) for value in products] if isinstance(products, list) else []
        if len(numbers) != 3 or None in numbers or sorted(products, reverse=True) != products:
            raise ConfigError(
                f"{where}: products = {products!r} is no list of three shares of the peak, at best, as expected and at "
                "worst, such as [0.6, 0.5, 0.4]."
            )
    if not isinstance(attention, dict) or None in [_share(value) for value in attention.values()]:
        raise ConfigError(
            f"{where}: attention = {attention!r} is no table of shares of the peak, such as {{ fa2 = 0.4 }}."
        )
    return None if products is None else (products[0], products[1], products[2]), dict(attention)


def _share(value: Any) -> float | None:
    """A fraction above 0 and up to 1; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1 else None


def _check_date(entry: Mapping[str, Any], name: str, where: str) -> None:
    if not isinstance(entry[name], date) or isinstance(entry[name], datetime):
        raise ConfigError(f"{where}: {name} = {entry[name]!r} is no date. Write 2026-11-21, without quotes.")


def _count(entry: Mapping[str, Any], name: str, what: str, where: str) -> int | None:
    value = entry.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{where}: {name} = {value!r} is no count of {what}.")
    return value


def _check_keys(entry: Mapping[str, Any], where: str) -> None:
    for name in entry:
        if name not in _KEYS:
            nearest = difflib.get_close_matches(name, _KEYS, n=1)
            meant = f" Did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(f"{where}: unknown key {name!r}.{meant} Known are {', '.join(_KEYS)}.")
    missing = [name for name in ("tflops", "source", "read_on") if name not in entry]
    if missing:
        raise ConfigError(f"{where}: {' and '.join(missing)} missing. A device needs tflops, source and read_on.")


def _texts(entry: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = entry.get(name, [])
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ConfigError(f'{where}: {name} = {value!r} is no list of texts, such as ["NVIDIA H100 PCIe"].')
    return tuple(value)


def _number(entry: Mapping[str, Any], name: str, where: str) -> float | None:
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{where}: {name} = {value!r} is no positive number.")
    return value


def _rates(value: Any, name: str, where: str) -> dict[str, float]:
    if not isinstance(value, dict) or (name == "tflops" and not value):
        raise ConfigError(f"{where}: {name} = {value!r} is no table of dense TFLOP/s, such as {{ bf16 = 989.4 }}.")
    for dtype in value:
        if dtype not in DTYPES:
            raise ConfigError(f"{where}: {name} has an unknown dtype {dtype!r}. Known dtypes are {', '.join(DTYPES)}.")
    # the product of a decimal fraction and 10**12 is a whole number of FLOP/s, which binary floats miss by a little
    return {dtype: float(round(rate * 1e12)) for dtype in value if (rate := _number(value, dtype, f"{where}, {name}"))}


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
