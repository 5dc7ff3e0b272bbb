"""mfu-tracker's callback for Hugging Face's Trainer, under its names and with the numbers of `HeadwayCallback`."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from headway.compat.mfu_tracker.gpu_spec import check_devices, get_gpu_spec
from headway.compat.mfu_tracker.ledgers import SetupReader
from headway.compat.mfu_tracker.tracking import check_backward_factor
from headway.devices import Peak
from headway.devices.table import DTYPES
from headway.errors import UnknownDeviceError, UsageError
from headway.integrations.huggingface import HeadwayCallback
from headway.meter import Window
from headway.meter.batches import workload_of
from headway.meter.environment import device_of


class MFUCallback(HeadwayCallback):
    """Log `mfu`, `hfu`, `mbu` and `tokens_per_sec` of a `transformers.Trainer` run.

    What is counted are the batches that the Trainer really runs, over the wall time of whole steps: the optimizer and
    the wait for data are in it, evaluations and checkpoints are not. Ranks are added up. `mbu` is the
    meter's (docs/mbu.md): the bytes that the steps must move at least, not the weights alone.

    Args:
        sample_batch: a sample of the forward's arguments by name, only to see before the first step that batches like
            it can be counted.
        dtype: of the matrix products; what `bf16` and `fp16` of the Trainer's arguments say, else "fp32", when None.
        num_gpus: devices that this process computes on, as under `nn.DataParallel`; 1 under DDP and FSDP.
        backward_factor: the backward with its recomputation over the forward, stated by hand for `hfu` alone; read off
            the model when None. It never enters `mfu`.
        metric_prefix: of the names in the log, before a slash; "" for bare names.
        device: whose peak counts; the model's when None.
        hfu_backward_factor: another name of `backward_factor`.

    Raises:
        UsageError: an unknown dtype, no devices, or a backward factor below 2 or given twice.
    """

    def __init__(
        self,
        sample_batch: Mapping[str, Any] | None = None,
        dtype: str | None = None,
        num_gpus: int = 1,
        backward_factor: float | None = None,
        metric_prefix: str = "throughput",
        device: torch.device | str | None = None,
        *,
        hfu_backward_factor: float | None = None,
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise UsageError(f"dtype={dtype!r} is not known; dtypes are {', '.join(DTYPES)}.")
        check_devices(num_gpus)
        super().__init__(names=("mfu", "hfu", "mbu", "tokens_per_s"))
        self._sample = sample_batch
        self._dtype = dtype
        self._num_gpus = num_gpus
        self._backward_factor = check_backward_factor(backward_factor, hfu_backward_factor)
        self._start = f"{metric_prefix}/" if metric_prefix else ""
        self._device = device

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look the device up, trace the model and start the clock."""
        model = kwargs["model"]
        dtype = self._dtype or ("bf16" if args.bf16 else "fp16" if args.fp16 else "fp32")
        self._options |= self._peaks(self._device or device_of(model), dtype)
        self._recompute = SetupReader(model).read().recompute()
        super().on_train_begin(args, state, control, **kwargs)
        if self._sample is not None and self.meter is not None:
            on_cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in self._sample.items()}
            self.meter.cost_model.count(workload_of(on_cpu, self.meter.cost_model))

    def numbers(self, window: Window) -> dict[str, int | float]:
        """Pick what the Trainer logs of a window, under mfu-tracker's names."""
        hfu = window.hfu
        if self._backward_factor is not None:
            flops = window.flops.total + (self._backward_factor - 2) * window.flops.forward
            hfu = flops / window.wall_s / window.peak_flops_per_s
        found = {"mfu": window.mfu, "hfu": hfu, "mbu": window.mbu, "tokens_per_sec": window.tokens_per_s}
        return {f"{self._start}{name}": value for name, value in found.items() if math.isfinite(value)}

    def _peaks(self, device: torch.device | str | None, dtype: str) -> dict[str, Any]:
        """Look up what the devices of this process can do; without it there is no number, and a warning says so."""
        name = str(device)
        try:
            spec = get_gpu_spec(device)
            name = spec.name
            peak = spec.peak(dtype)
        except UnknownDeviceError as error:
            warnings.warn(f"no MFU and no MBU will be logged: {error}", stacklevel=4)
            return {"peak": Peak(name, math.nan, dtype, "unknown", "override"), "memory_bytes_per_s": math.nan}
        try:
            bytes_per_s = spec.bytes_per_s * self._num_gpus
        except UnknownDeviceError as error:
            warnings.warn(f"no MBU will be logged: {error}", stacklevel=4)
            bytes_per_s = math.nan
        peak = replace(peak, flops_per_s=peak.flops_per_s * self._num_gpus)
        return {"peak": peak, "memory_bytes_per_s": bytes_per_s}
