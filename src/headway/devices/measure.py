"""Time matrix products and copies on a device: one shape or size at a time, each repeated, none hidden in a mean."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MAX_REPEATS = 1000
_COPY_PASSES = 2  # every byte is read once and written once
_UNDISTURBED = 0.9  # least share of all threads' time with a core, if nothing disturbed the threads
_AGREEMENT = 1.05  # the second fastest repetition over the fastest, at most, for both to be believed


@dataclass(frozen=True, slots=True)
class Measurement:
    """One problem, repeated."""

    shape: tuple[int, ...]  # (m, k, n) of a product of m x k with k x n, or (bytes,) of a copy
    work: int  # FLOPs of one product, or bytes that one copy reads and writes
    durations_s: tuple[float, ...]  # seconds of each repetition
    core_share: float | None = None  # processor time of all over time x threads, where several share a product

    @property
    def is_steady(self) -> bool:
        """True if the two fastest repetitions agree, and the threads did not wait for a core.

        On a CPU with other work every repetition may be slow, and all alike: the time that threads had a core tells.
        """
        fastest_s = sorted(self.durations_s)[:2]
        agree = len(fastest_s) == 2 and fastest_s[1] <= _AGREEMENT * fastest_s[0]
        return agree and (self.core_share is None or self.core_share >= _UNDISTURBED)

    @property
    def best_per_s(self) -> float:
        """Work over the fastest repetition [FLOP/s or byte/s]."""
        return self.work / min(self.durations_s)

    @property
    def median_per_s(self) -> float:
        """Work over the median repetition [FLOP/s or byte/s]."""
        return self.work / statistics.median(self.durations_s)

    @property
    def worst_per_s(self) -> float:
        """Work over the slowest repetition [FLOP/s or byte/s]."""
        return self.work / max(self.durations_s)


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """The time that a sweep over shapes may take."""

    shape_s: float  # time for the repetitions of one shape [s]
    total_s: float  # time for all shapes; larger ones that would not fit any more are left out [s]
    min_repeats: int  # repetitions that each shape gets, whatever they take


def sweep_matmul(
    device: "torch.device", dtype: "torch.dtype", shapes: Sequence[tuple[int, int, int]], budget: TimeBudget
) -> list[Measurement]:
    """Time products of several shapes, small ones first, until the budget is spent.

    Args:
        device: where to multiply.
        dtype: of both factors and the product.
        shapes: (m, k, n) of each product, ascending in work.
        budget: how long it may take; the first shape is always measured.

    Returns:
        One measurement per shape that fitted.
    """
    import torch

    threads = torch.get_num_threads() if device.type == "cpu" else 0  # a lone one waits for no other
    measurements: list[Measurement] = []
    deadline_s = time.perf_counter() + budget.total_s
    for shape in shapes:
        left_s = deadline_s - time.perf_counter()
        if measurements:
            fastest = max(measurement.best_per_s for measurement in measurements)
            if _flops(shape) / fastest * (budget.min_repeats + 1) > left_s or not _fits(device, dtype, shape):
                break
        run = _matmul(device, dtype, shape)
        begin_s, begin_processor_s = time.perf_counter(), time.process_time()
        durations_s = _time(run, device, min(budget.shape_s, left_s), budget.min_repeats)
        threads_s = (time.perf_counter() - begin_s) * threads
        core_share = (time.process_time() - begin_processor_s) / threads_s if threads > 1 else None
        measurements.append(Measurement(shape, _flops(shape), durations_s, core_share))
    return measurements


def is_settled(measurements: Sequence[Measurement]) -> bool:
    """Tell whether a sweep shows the device's own rate: its fastest shape is steady, and so is the next larger one.

    Where other work keeps the cores busy, small products may run undisturbed between its slices of time while larger
    ones, which would reach more, never do.

    Args:
        measurements: of a sweep, ascending in work.
    """
    best = max(range(len(measurements)), key=lambda place: measurements[place].best_per_s)
    return all(measurement.is_steady for measurement in measurements[best : best + 2])


def single_thread_rate(dtype: "torch.dtype", shapes: Sequence[tuple[int, int, int]], budget: TimeBudget) -> float:
    """Measure the best matmul rate of one CPU thread by its own processor time [FLOP/s]: other work hardly moves it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [(_matmul(torch.device("cpu"), dtype, shape), _flops(shape)) for shape in shapes]
        return max(work / min(_processor_times(run, budget)) for run, work in runs)
    finally:
        torch.set_num_threads(threads)


def sweep_copy(device: "torch.device", sizes: Sequence[int], budget: TimeBudget) -> list[Measurement]:
    """Time copies of several sizes [byte] within the device's memory.

    Returns:
        One measurement per size that fitted; its work counts every byte twice, read and written.
    """
    measurements: list[Measurement] = []
    deadline_s = time.perf_counter() + budget.total_s
    for size in sizes:
        left_s = deadline_s - time.perf_counter()
        if measurements and left_s <= 0:
            break
        durations_s = _time(_copy(device, size), device, min(budget.shape_s, left_s), budget.min_repeats)
        measurements.append(Measurement((size,), _COPY_PASSES * size, durations_s))
    return measurements


def sweep(
    device: "torch.device",
    shapes: Sequence[tuple[int, ...]],
    make: "Callable[[tuple[int, ...]], tuple[Callable[[], object], int]]",
    budget: TimeBudget,
) -> list[Measurement]:
    """Time problems of any kind, small ones first, until the budget is spent.

    Args:
        device: where they run.
        shapes: of the problems, ascending in work.
        make: gives the function to time and its work [FLOP or byte].
        budget: how long it may take; the first problem is always measured.
    """
    measurements: list[Measurement] = []
    deadline_s = time.perf_counter() + budget.total_s
    for shape in shapes:
        left_s = deadline_s - time.perf_counter()
        if measurements and left_s <= min(measurements[-1].durations_s) * (budget.min_repeats + 1):
            break
        run, work = make(shape)
        durations_s = _time(run, device, min(budget.shape_s, max(left_s, 0.0)), budget.min_repeats)
        measurements.append(Measurement(shape, work, durations_s))
    return measurements


def _flops(shape: tuple[int, int, int]) -> int:
    rows, inner, columns = shape
    return 2 * rows * inner * columns


def _matmul(device: "torch.device", dtype: "torch.dtype", shape: tuple[int, int, int]) -> "Callable[[], torch.Tensor]":
    """Make a product of random factors: into their own dtype, or where that is too narrow into a wider one."""
    import torch
    import torch.nn.functional as F

    from headway.devices.cpu_products import product

    rows, inner, columns = shape
    generator = torch.Generator(device).manual_seed(0)  # a generator apart: the run's random state stays untouched
    a_MK = torch.randn(rows, inner, generator=generator, device=device).to(dtype)
    if dtype.itemsize == 1:  # the narrow kernels want the second factor column by column
        b_KN = torch.randn(columns, inner, generator=generator, device=device).to(dtype).t()
        if not dtype.is_floating_point:
            return lambda: torch._int_mm(a_MK, b_KN)
        scale, by_tensor = torch.ones((), device=device), F.ScalingType.TensorWise
        use_fast_accum = device.type == "cuda"
        return lambda: F.scaled_mm(a_MK, b_KN, scale, by_tensor, scale, by_tensor, use_fast_accum=use_fast_accum)
    b_KN = torch.randn(inner, columns, generator=generator, device=device).to(dtype)
    out_MN = torch.empty(rows, columns, device=device, dtype=dtype)
    return lambda: product(a_MK, b_KN, out=out_MN)


def _copy(device: "torch.device", size: int) -> "Callable[[], torch.Tensor]":
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _fits(device: "torch.device", dtype: "torch.dtype", shape: tuple[int, int, int]) -> bool:
    """Say whether three matrices fit into half of a CUDA device's free memory; elsewhere shapes are small."""
    import torch

    if device.type != "cuda":
        return True
    rows, inner, columns = shape
    needed = (rows * inner + inner * columns + rows * columns) * dtype.itemsize
    return needed < torch.cuda.mem_get_info(device)[0] / 2


def _processor_times(run: Callable[[], object], budget: TimeBudget) -> list[float]:
    run()
    times_s: list[float] = []
    while len(times_s) < budget.min_repeats or sum(times_s) < budget.shape_s / 2:
        begin_s = time.thread_time()
        run()
        times_s.append(max(time.thread_time() - begin_s, 1e-9))
    return times_s


def _time(run: Callable[[], object], device: "torch.device", budget_s: float, min_repeats: int) -> tuple[float, ...]:
    """Time repetitions until the budget is spent, after one that allocates and warms up."""
    import torch

    with torch.inference_mode():
        run()
        if device.type == "cuda":
            return _time_by_events(run, device, budget_s, min_repeats)
        wait = torch.mps.synchronize if device.type == "mps" else lambda: None
        wait()
        durations_s: list[float] = []
        deadline_s = time.perf_counter() + budget_s
        while len(durations_s) < min_repeats or (time.perf_counter() < deadline_s and len(durations_s) < _MAX_REPEATS):
            begin_s = time.perf_counter()
            run()
            wait()
            durations_s.append(time.perf_counter() - begin_s)
    return tuple(durations_s)


def _time_by_events(
    run: Callable[[], object], device: "torch.device", budget_s: float, min_repeats: int
) -> tuple[float, ...]:
    """Let a CUDA device time itself: an event before and after each repetition, read once all are done."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        run()
        torch.cuda.synchronize()
        one_s = max(time.perf_counter() - begin_s, 1e-6)
        repeats = min(max(min_repeats, int(budget_s / one_s)), _MAX_REPEATS)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        return tuple(before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events))
