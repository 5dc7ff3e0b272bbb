"""Facts that the meter asks of a model, its device and the compiler; nothing here waits for a device."""

import math
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.count import CostModel
from headway.devices import Peak
from headway.errors import HeadwayError, TraceError, UnknownDeviceError, UsageError
from headway.meter.memory_traffic import Traffic

if TYPE_CHECKING:
    from torch import nn

_STATUS = Path("/proc/self/status")  # on Linux


def device_here() -> Any:
    """Find the CUDA device that this process computes on; None without one, or before torch is loaded."""
    torch = sys.modules.get("torch")
    return (
        torch.device("cuda", torch.cuda.current_device()) if torch is not None and torch.cuda.is_available() else None
    )


def device_of(model: Any) -> Any:
    """Find the one device that a model computes on.

    Raises:
        UsageError: its parameters lie on several.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise UsageError(
            f"the model lies on several devices, {', '.join(sorted(map(str, devices)))}: one peak cannot hold for it. "
            "Meter the part on each device with a Meter of its own, from that part's cost model."
        )
    return next(iter(devices), None)


def peak_of(model: Any, device: Any, dtype: Any = None) -> Peak:
    """Look up the peak of the model's device; a peak without a number, and a warning, if it is unknown.

    Args:
        model: that is trained.
        device: that computes.
        dtype: that autocast casts matrix products to, as for `peak_for`; that of the weights when None.
    """
    from headway.devices import Peak, peak_for

    if isinstance(model, CostModel):
        raise UsageError("a cost model does not say on what device it runs: pass peak=headway.peak_for(device, dtype).")
    dtype = dtype or max(model.parameters(), key=lambda parameter: parameter.is_floating_point()).dtype
    try:
        return peak_for(device, dtype)
    except UnknownDeviceError as error:
        warnings.warn(f"no MFU will be shown: {error}", stacklevel=3)
        return Peak(str(device), math.nan, str(dtype).removeprefix("torch."), "unknown", "override")


def bandwidth_of(device: Any) -> float:
    """Look a device's memory bandwidth up [B/s]; NaN where the table has none."""
    from headway.devices import device_at

    if device is None or device.type == "cpu":
        return math.nan
    try:
        return device_at(device).memory_bytes_per_s or math.nan
    except UnknownDeviceError:
        return math.nan


def traffic_or_warn(
    model: Any, optimizer: Any, cost_model: CostModel, recompute: str, results: Any = None
) -> Traffic | None:
    """Find the bytes that a model and its optimizer must move; None, and a warning, if they are unknown."""
    from headway.meter.model_traffic import traffic_of

    if isinstance(model, CostModel):
        raise UsageError("a cost model has no weights for an optimizer: give the model itself, or no optimizer.")
    try:
        return traffic_of(model, optimizer, cost_model=cost_model, recompute=recompute, results=results)
    except HeadwayError as error:
        warnings.warn(f"no MBU will be shown: {error}", stacklevel=3)
        return None


def recompute_of(model: Any) -> str:
    """Read which blocks activation checkpointing recomputes; none, and a warning, if they are unknown."""
    if isinstance(model, CostModel):
        return "none"
    from headway.tracing.classify import checkpointing_of
    from headway.tracing.unwrap import unwrapped

    try:
        return checkpointing_of(unwrapped(model))
    except UsageError as error:
        warnings.warn(f"HFU leaves out what checkpointing runs again: {error}", RuntimeWarning, stacklevel=3)
        return "none"


class Compilation:
    """Notices when torch.compile compiles in this process, and reports beginning and end."""

    def __init__(self, begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
        dynamo = sys.modules.get("torch._dynamo.utils")
        self._num_graphs = 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
        self._begin, self._end = begin, end
        self._handler: Any = None

    def watch(self) -> None:
        """Listen from now on, if torch.compile is loaded at all: loading it takes seconds.

        Call it again and again: `torch.compiler.reset` forgets who listens.
        """
        if self._handler is None:
            if "torch._dynamo" not in sys.modules:
                return
            from torch._dynamo.callback import callback_handler

            self._handler = callback_handler
        if self._begin not in self._handler.start_callbacks:
            self._handler.register_start_callback(self._begin)
        if self._end not in self._handler.end_callbacks:
            self._handler.register_end_callback(self._end)

    def happened(self) -> bool:
        """Go on to listen, and say whether a graph has been made since the last call."""
        if (dynamo := sys.modules.get("torch._dynamo.utils")) is None:
            return False
        self.watch()
        before, self._num_graphs = self._num_graphs, int(dynamo.counters["stats"]["unique_graphs"])
        return self._num_graphs != before

    def let_go(self) -> None:
        """Listen no more."""
        handler, self._handler = self._handler, None
        if handler is not None and self._begin in handler.start_callbacks:
            handler.remove_start_callback(self._begin)
        if handler is not None and self._end in handler.end_callbacks:
            handler.remove_end_callback(self._end)


def largest_memory(device: Any) -> int:
    """Read the largest memory so far: allocated on an accelerator, or resident in this process on a CPU [bytes].

    Counters of the host are read, so nothing is waited for.
    """
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # Linux's getrusage has the peak of the program that started this one in it
    status = b""
    with suppress(FileNotFoundError), _STATUS.open("rb", buffering=0) as file:
        status = file.read()
    _, name, value = status.partition(b"VmHWM:")
    return int(value.split(maxsplit=1)[0]) * 1024 if name else _largest_of_process()


def used_memory(device: Any) -> int:
    """Read the memory in use now [bytes]: by tensors on a CUDA device, else by this process.

    Where the system does not tell that, the largest so far.
    """
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return _largest_of_process()
    import resource

    return int(statm.read_text().split()[1]) * resource.getpagesize()


def _largest_of_process() -> int:
    import resource  # missing on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def memory_of(device: Any) -> int:
    """Read how much memory a CUDA device has, or this process may take of the host's [bytes]; 0 where unknown.

    Source: cgroup v2, memory.max: the limit of a container, "max" without one.
    """
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return 0
    of_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(of_host, int(text)) if text.isdigit() else of_host


def settings_of(model: Any, device: Any) -> dict[str, Any]:
    """Name the facts of all steps of a loop: memory of the device, and the type of most weights."""
    sizes: dict[str, int] = {}
    for parameter in () if isinstance(model, CostModel) else model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    try:
        memory_bytes = memory_of(device)
    except (OSError, RuntimeError):  # the system does not tell the memory
        memory_bytes = 0
    return {
        "device_memory_bytes": memory_bytes or None,
        "weights_dtype": max(sizes, key=lambda name: sizes[name]) if sizes else None,
    }


def ledger_of(model: "nn.Module", results: Any = None, watch: bool | None = True) -> CostModel:
    """Trace a model that reads text or latents; one without rows where its forwards are traced by their shapes.

    Args:
        model: any module.
        results: as for `headway.trace`.
        watch: whether any model that cannot be traced so is; None for those that take other arguments, False for none.

    Raises:
        TraceError: it cannot be traced, and is not to be watched.
    """
    from headway.tracing import trace
    from headway.tracing.inputs.model_inputs import UnknownInputsError
    from headway.tracing.unwrap import refuse_flat

    refuse_flat(model)
    refusals: tuple[type[TraceError], ...] = (UnknownInputsError,) if watch is None else (TraceError,) * watch
    with suppress(*refusals):
        return trace(model, results=results)
    return CostModel(type(model).__name__, (), ())


def in_components_of(cost_model: CostModel, name: str, driver: str | None = None) -> CostModel:
    """Rename the components of a model for its class, so that a step's models are told apart.

    Args:
        cost_model: of the model.
        name: of its class: components are `AutoencoderKL.convolution` and so on.
        driver: that each row has from now on; its own when None.
    """
    rows = (
        replace(row, component=f"{name}.{row.component.rpartition('.')[2]}", driver=driver or row.driver)
        for row in cost_model.rows
    )
    return replace(cost_model, rows=tuple(rows))
