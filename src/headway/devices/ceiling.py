"""The CPU's ceiling: the best rate that a plain matrix product reaches here, with the threads that the step will use.

Nobody prints a datasheet number for "this virtual machine's two cores", so an MFU on a CPU is a share of what the same
library reaches on its favourite problem. It is measured in the process that trains and never read from a file: the
machine may have been busier when that was written, and a share of less than it can do is no honest MFU.
"""

from functools import cache

from headway.devices.measure import TimeBudget, sweep_matmul
from headway.devices.names import OVERRIDE_VARIABLE
from headway.devices.peak import Peak
from headway.devices.probe import cpu_name
from headway.errors import UnknownDeviceError

_SIZES = (256, 512, 1024, 1536, 2048)
_BUDGET = TimeBudget(shape_s=0.4, total_s=2.0, min_repeats=3)


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
            f"those, or state the rate yourself: {OVERRIDE_VARIABLE}=<FLOP/s>."
        )
    shapes = [(size, size, size) for size in _SIZES]
    found = sweep_matmul(torch.device("cpu"), dtypes[dtype_name], shapes, _BUDGET)
    best = max(found, key=lambda measurement: measurement.best_per_s)
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    shape = "x".join(map(str, best.shape))
    source = f"measured at start: {dtype_name} matmul {shape}, {threads}, best of repeats"
    return Peak(cpu_name(), best.best_per_s, dtype_name, source, "ceiling")
