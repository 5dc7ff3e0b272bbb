"""The CPU's ceiling: the best rate that a plain matrix product reaches here, with the threads that the step will use.

Nobody prints a datasheet number for "this virtual machine's two cores", so an MFU on a CPU is a share of what the same
library reaches on its favourite problem.
"""

import platform
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from headway.devices.lookup import Peak
from headway.errors import UnknownDeviceError

if TYPE_CHECKING:
    import torch

_SIZES = (256, 512, 1024, 1536, 2048)
_MIN_REPEATS = 3
_SIZE_BUDGET_S = 0.4
_TOTAL_BUDGET_S = 2.0


def measure_ceiling(dtype_name: str) -> Peak:
    """Measure the best matmul rate of this CPU, once per process, dtype and thread count.

    Square products of several sizes, each repeated; the fastest single repetition of any size wins. Takes about two
    seconds.

    Args:
        dtype_name: "fp32", "bf16" or "fp16".

    Returns:
        The peak; its source names the threads, the size that won and the dtype.

    Raises:
        UnknownDeviceError: the CPU has no matmul for this dtype.
    """
    import torch

    return _measure(dtype_name, torch.get_num_threads())


@cache
def _measure(dtype_name: str, num_threads: int) -> Peak:
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype_name not in dtypes:
        raise UnknownDeviceError(
            f"The CPU's ceiling can be measured in {', '.join(dtypes)}, not in {dtype_name!r}. Compute in one of "
            "those, or state the rate yourself: HEADWAY_PEAK_FLOPS=<FLOP/s>."
        )
    start_s = time.perf_counter()
    best_flops_per_s, best_size = 0.0, _SIZES[0]
    for size in _SIZES:
        left_s = _TOTAL_BUDGET_S - (time.perf_counter() - start_s)
        expected_s = 2 * size**3 / best_flops_per_s if best_flops_per_s else 0.0
        if expected_s * (_MIN_REPEATS + 1) > left_s:
            break
        duration_s = _fastest_product_s(size, dtypes[dtype_name], min(left_s, _SIZE_BUDGET_S))
        flops_per_s = 2 * size**3 / duration_s
        if flops_per_s > best_flops_per_s:
            best_flops_per_s, best_size = flops_per_s, size
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    source = f"measured at start: {dtype_name} matmul {best_size}x{best_size}x{best_size}, {threads}, best of repeats"
    return Peak(cpu_name(), best_flops_per_s, dtype_name, source, "ceiling")


def _fastest_product_s(size: int, dtype: "torch.dtype", budget_s: float) -> float:
    """Time a square product until the budget is spent; return the fastest repetition [s]."""
    import torch

    with torch.inference_mode():
        generator = torch.Generator().manual_seed(0)  # its own, so that the run's random state stays untouched
        a_NN = torch.randn(size, size, generator=generator).to(dtype)
        b_NN = torch.randn(size, size, generator=generator).to(dtype)
        out_NN = torch.empty(size, size, dtype=dtype)
        torch.mm(a_NN, b_NN, out=out_NN)  # the first call also allocates and warms up
        fastest_s = float("inf")
        repeats, deadline_s = 0, time.perf_counter() + budget_s
        while repeats < _MIN_REPEATS or time.perf_counter() < deadline_s:
            begin_s = time.perf_counter()
            torch.mm(a_NN, b_NN, out=out_NN)
            fastest_s = min(fastest_s, time.perf_counter() - begin_s)
            repeats += 1
    return fastest_s


@cache
def cpu_name() -> str:
    """Name this machine's processor, e.g. "AMD EPYC"."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"
