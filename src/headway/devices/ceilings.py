"""Measured ceilings: the best rates of matrix products and copies, cached for devices, new on each start for a CPU."""

import hashlib
import json
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cache import cache_root, write_whole
from headway.devices.measure import (
    Measurement,
    TimeBudget,
    is_settled,
    single_thread_rate,
    sweep_copy,
    sweep_matmul,
)
from headway.devices.names import OVERRIDE_VARIABLE, cpu_name, report
from headway.devices.table import Peak
from headway.errors import UnknownDeviceError

if TYPE_CHECKING:
    import torch

COPY = "copy"
DTYPES = {
    "cpu": ("fp32", "bf16", "fp16"),
    "cuda": ("bf16", "fp16", "tf32", "fp32", "fp8", "int8"),
    "mps": ("fp32", "fp16", "bf16"),
}

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "int8": "int8"}
_LEAST_CAPABILITY = {"fp8": (8, 9), "int8": (7, 5), "bf16": (8, 0), "tf32": (8, 0)}  # needed CUDA capability, by dtype

_SQUARES = (256, 512, 1024, 1536, 2048)
_QUICK = TimeBudget(shape_s=0.4, total_s=2.0, min_repeats=3)
_PATIENCE_S = 10.0  # longest time for which a CPU with other work is measured again [s]
_FORMAT = 2
_BUDGET = TimeBudget(shape_s=0.5, total_s=4.0, min_repeats=5)
# Squares, and a projection as transformers have it (tokens x hidden x wider); in ascending work.
_SHAPES = {
    "cpu": ((256,) * 3, (512,) * 3, (1024,) * 3, (2048, 512, 2048), (1536,) * 3, (2048,) * 3),
    "cuda": ((2048,) * 3, (4096,) * 3, (8192, 4096, 14336), (8192,) * 3, (16384, 8192, 28672), (16384,) * 3),
    "mps": ((1024,) * 3, (2048,) * 3, (4096, 1024, 4096), (4096,) * 3),
}
_MIB = 2**20
_SIZES = {"cpu": (64 * _MIB, 256 * _MIB), "cuda": (256 * _MIB, 1024 * _MIB), "mps": (64 * _MIB, 512 * _MIB)}


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best rate that a device reached, in products of one dtype or in copying."""

    device: str  # name of the device
    what: str  # the dtype of the products, such as "bf16"; or "copy"
    measurements: tuple[Measurement, ...]  # one per shape or size
    measured_at: datetime  # time of the measurement, in UTC
    is_cached: bool  # whether it was read from the cache

    @property
    def is_settled(self) -> bool:
        """True if it shows what the device reaches, as far as its threads tell, and not what other work left of it."""
        return all(measurement.core_share is None for measurement in self.measurements) or is_settled(self.measurements)

    @property
    def best(self) -> Measurement:
        """The measurement whose fastest repetition is the fastest of all."""
        return max(self.measurements, key=lambda measurement: measurement.best_per_s)

    def peak(self) -> Peak:
        """Use it as a peak, so that an MFU is a share of what this very device reached."""
        shape, repeats = "x".join(map(str, self.best.shape)), len(self.best.durations_s)
        source = f"measured {self.measured_at:%Y-%m-%d}: {self.what} matmul {shape}, best of {repeats}"
        if not self.is_settled:
            source += ", unsure: other work kept the device busy"
        return Peak(self.device, self.best.best_per_s, self.what, source, "ceiling")


def dtypes_of(device: "torch.device") -> tuple[str, ...]:
    """Name the dtypes in which a device's products can be measured."""
    import torch

    names = DTYPES.get(device.type, ())
    if device.type != "cuda" or torch.version.hip:
        return tuple(name for name in names if name not in {"fp8", "int8"})
    capability = torch.cuda.get_device_capability(device)
    return tuple(name for name in names if capability >= _LEAST_CAPABILITY.get(name, (0, 0)))


def matmul_ceiling(
    device: "torch.device | str", dtype_name: str, *, refresh: bool = False, warn: Callable[[str], None] = warnings.warn
) -> Ceiling:
    """Measure the best matmul rate of a device in one dtype, or take it from the cache.

    The cache is kept per device, driver, PyTorch version, thread count and dtype, in Headway's cache folder
    (`headway.cache`). A damaged file is reported, measured again and replaced; so is, in silence, what other work
    disturbed.

    Args:
        device: a torch.device or its string; "cpu", "cuda" or "mps".
        dtype_name: "bf16", "fp16", "fp32", or on CUDA "tf32", "fp8" (e4m3, fast accumulation, bf16 out) and "int8".
        refresh: measure even if the cache has it.
        warn: told what is wrong with the cache.

    Raises:
        UnknownDeviceError: a device or dtype that is not measured.
    """
    import torch

    device = torch.device(device)
    names = DTYPES.get(device.type)
    if names is None or dtype_name not in names:
        measured = "; ".join(f"{kind} in {', '.join(dtypes)}" for kind, dtypes in DTYPES.items())
        raise UnknownDeviceError(
            f"Headway cannot measure the ceiling of {device.type} in {dtype_name!r}. It can measure {measured}."
        )
    if dtype_name not in dtypes_of(device):
        has = ", ".join(dtypes_of(device))
        raise UnknownDeviceError(
            f"{report(device).name} has no {dtype_name} products to measure. The device has {has}."
        )
    dtype = TORCH_NAMES.get(dtype_name, "float32")

    def measure() -> list[Measurement]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if dtype_name == "tf32" else "highest")
        try:
            return sweep_matmul(device, getattr(torch, dtype), _SHAPES[device.type], _BUDGET)
        finally:
            torch.set_float32_matmul_precision(before)

    return cached_ceiling(device, dtype_name, measure, refresh=refresh, warn=warn)


def copy_ceiling(
    device: "torch.device | str", *, refresh: bool = False, warn: Callable[[str], None] = warnings.warn
) -> Ceiling:
    """Measure the best copy bandwidth within a device's memory, or take it from the cache.

    Bytes read and bytes written count.

    Args:
        device: as for `matmul_ceiling`.
        refresh: measure even if the cache has it.
        warn: told what is wrong with the cache.

    Raises:
        UnknownDeviceError: a device that is not measured.
    """
    import torch

    device = torch.device(device)
    if device.type not in _SIZES:
        raise UnknownDeviceError(f"Headway cannot measure copies on {device.type}, only on {', '.join(_SIZES)}.")
    return cached_ceiling(
        device, COPY, lambda: sweep_copy(device, _SIZES[device.type], _BUDGET), refresh=refresh, warn=warn
    )


def measure_ceiling(dtype_name: str) -> Peak:
    """Measure the best matmul rate of this CPU, once per process, dtype and thread count: its peak for an MFU.

    Nobody prints a datasheet number for "this virtual machine's two cores", so an MFU on a CPU is a share of what the
    same library reaches on its favourite problem, with the threads that the step will use. It is never read from a
    file: the machine may have been busier when that was written, and a share of less than it can do is no honest MFU.

    Square products of several sizes, each repeated; the fastest single repetition of any size wins. Takes about two
    seconds; up to ten more where other work keeps the cores busy, until the rates settle. If they never do, the peak is
    estimated as the rate of one thread by its own processor time, times the threads, and a warning says so.

    Args:
        dtype_name: "fp32", "bf16" or "fp16".

    Returns:
        The peak; its source names the threads, the size that won and the dtype, or how it was estimated.

    Raises:
        UnknownDeviceError: the CPU has no matmul for this dtype.
    """
    import torch

    return _best_square(dtype_name, torch.get_num_threads())


@cache
def _best_square(dtype_name: str, num_threads: int) -> Peak:
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype_name not in dtypes:
        raise UnknownDeviceError(
            f"The CPU's ceiling can be measured in {', '.join(dtypes)}, not in {dtype_name!r}. Compute in one of "
            f"these dtypes, or state the rate yourself: {OVERRIDE_VARIABLE}=<FLOP/s>."
        )
    # sweeps until the rates settle, for as long as other work may keep the cores busy
    shapes = [(size, size, size) for size in _SQUARES]
    deadline_s = time.monotonic() + _PATIENCE_S
    measurements = sweep_matmul(torch.device("cpu"), dtypes[dtype_name], shapes, _QUICK)
    while not is_settled(measurements) and time.monotonic() < deadline_s:
        measurements = sweep_matmul(torch.device("cpu"), dtypes[dtype_name], shapes, _QUICK)
    best = max(measurements, key=lambda measurement: measurement.best_per_s)
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    # rates that never settled: threads x the rate of one thread by its processor time, which other work hardly moves
    if not is_settled(measurements):
        per_thread = single_thread_rate(dtypes[dtype_name], shapes[:3], _QUICK)  # [FLOP/s]
        warnings.warn(
            f"The peak of this CPU is uncertain, because for {_PATIENCE_S:g} s other work kept its cores busy. In "
            f"that time {threads} reached {best.best_per_s:.3g} FLOP/s in {dtype_name}. Headway takes {num_threads} "
            f"x the {per_thread:.3g} FLOP/s of one thread by its processor time. State the peak with "
            f"{OVERRIDE_VARIABLE}=<FLOP/s>, or measure while nothing else runs.",
            stacklevel=2,
        )
        source = f"estimated at start, other work was running: {dtype_name} matmul of 1 thread x {num_threads}"
        return Peak(cpu_name(), max(num_threads * per_thread, best.best_per_s), dtype_name, source, "ceiling")
    # rates that settled: the fastest repetition of any size
    shape = "x".join(map(str, best.shape))
    source = f"measured at start: {dtype_name} matmul {shape}, {threads}, best of repeats"
    return Peak(cpu_name(), best.best_per_s, dtype_name, source, "ceiling")


def environment(device: "torch.device") -> dict[str, Any]:
    """Describe a ceiling's conditions: the device, its driver, PyTorch and, on a CPU, the threads."""
    import torch

    from headway.devices.cpu_products import LIBRARY

    reported = report(device)
    return {
        "type": device.type,
        "name": reported.name,
        "num_sms": reported.num_sms,
        "memory_bytes": reported.memory_bytes,
        "driver": _driver() if device.type == "cuda" else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        **({"float32 products": LIBRARY} if device.type == "cpu" and LIBRARY else {}),
    }


def cache_folder() -> Path:
    """Name the folder of the cached ceilings, whether it exists or not."""
    return cache_root() / "ceilings"


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    version = re.search(r"(\d+\.\d+(\.\d+)?)", path.read_text(encoding="utf-8")) if path.is_file() else None
    return version.group(1) if version else None


def cached_ceiling(
    device: "torch.device",
    what: str,
    measure: Callable[[], list[Measurement]],
    *,
    refresh: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> Ceiling:
    """Take what was measured on a device from the cache, or measure it and keep it there.

    Args:
        device: that was or is measured.
        what: names the measurement; another name is another file.
        measure: measures it.
        refresh: measure even if the cache has it.
        warn: told what is wrong with the cache.
    """
    key = {**environment(device), "what": what, "format": _FORMAT}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / f"{device.type}-{what}-{digest}.json"
    if not refresh and path.is_file():
        try:
            cached = _from_record(json.loads(path.read_text(encoding="utf-8")), key)
            if cached.is_settled:
                return cached
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            warn(f"The cached ceiling {path} is damaged ({error!r}). Headway measures again and replaces the file.")
    ceiling = Ceiling(key["name"], what, tuple(measure()), datetime.now(UTC), is_cached=False)
    try:
        record = json.dumps(_to_record(ceiling, key)).encode()
        write_whole(path, lambda file: file.write(record))
    except OSError as error:
        warn(f"The ceiling cannot be kept in {path.parent} ({error}). The next call measures again.")
    return ceiling


def _to_record(ceiling: Ceiling, key: dict[str, Any]) -> dict[str, Any]:
    return {
        "key": key,
        "measured_at": ceiling.measured_at.isoformat(timespec="seconds"),
        "measurements": [asdict(measurement) for measurement in ceiling.measurements],
    }


def _from_record(record: dict[str, Any], key: dict[str, Any]) -> Ceiling:
    if record["key"] != key:
        raise ValueError("it belongs to another device")
    measurements = tuple(
        Measurement(
            tuple(map(int, entry["shape"])),
            int(entry["work"]),
            tuple(map(float, entry["durations_s"])),
            None if entry["core_share"] is None else float(entry["core_share"]),
        )
        for entry in record["measurements"]
    )
    if not measurements or not all(entry.durations_s and min(entry.durations_s) > 0 for entry in measurements):
        raise ValueError("it holds no time above zero")
    measured_at = datetime.fromisoformat(record["measured_at"])
    return Ceiling(key["name"], key["what"], measurements, measured_at, is_cached=True)
