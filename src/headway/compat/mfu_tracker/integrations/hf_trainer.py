"""mfu-tracker's callback for Hugging Face's Trainer, under its names and with the numbers of `HeadwayCallback`."""

import math
import warnings
from typing import Any

from headway.compat.mfu_tracker import BACKWARD_FACTOR_MESSAGE, get_gpu_spec
from headway.devices import Peak
from headway.devices.table import DTYPES
from headway.errors import UnknownDeviceError, UsageError
from headway.integrations.huggingface import HeadwayCallback
from headway.meter import Window
from headway.meter.environment import device_of


class MFUCallback(HeadwayCallback):
    """Log `mfu`, `hfu`, `mbu` and `tokens_per_sec` of a `transformers.Trainer` run.

    Args:
        sample_batch: not needed: the batches that the Trainer really runs are counted.
        dtype: of the matrix products; what `bf16` and `fp16` of the Trainer's arguments say, else "fp32", when None.
        num_gpus: devices that this process computes on, as under `nn.DataParallel`; 1 under DDP and FSDP.
        hfu_backward_factor: not used, with a warning; recomputation is read off the model.
        metric_prefix: of the names in the log, before a slash; "" for bare names.
        device: whose peak counts; the model's when None.
        backward_factor: another name of `hfu_backward_factor`.
    """

    def __init__(
        self,
        sample_batch: Any = None,
        dtype: str | None = None,
        num_gpus: int = 1,
        hfu_backward_factor: float | None = None,
        metric_prefix: str = "throughput",
        device: Any = None,
        *,
        backward_factor: float | None = None,
    ) -> None:
        del sample_batch
        if dtype is not None and dtype not in DTYPES:
            raise UsageError(f"dtype={dtype!r} is not known; dtypes are {', '.join(DTYPES)}.")
        if hfu_backward_factor is not None or backward_factor is not None:
            warnings.warn(BACKWARD_FACTOR_MESSAGE, stacklevel=2)
        super().__init__(names=("mfu", "hfu", "mbu", "tokens_per_s"))
        self._dtype, self._num_gpus, self._device = dtype, num_gpus, device
        self._start = f"{metric_prefix}/" if metric_prefix else ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look the device up, trace the model and start the clock."""
        dtype = self._dtype or ("bf16" if args.bf16 else "fp16" if args.fp16 else "fp32")
        device, flops_per_s, bytes_per_s = self._device or device_of(kwargs["model"]), math.nan, math.nan
        try:
            spec = get_gpu_spec(device)
            flops_per_s = spec.peak_tflops(dtype) * 1e12 * self._num_gpus
            bytes_per_s = spec.peak_memory_bandwidth_tbs * 1e12 * self._num_gpus
        except UnknownDeviceError as error:
            warnings.warn(f"not all numbers will be logged: {error}", stacklevel=2)
        self._options["peak"] = Peak(str(device), flops_per_s, dtype, "spec", "override")
        self._options["memory_bytes_per_s"] = bytes_per_s
        super().on_train_begin(args, state, control, **kwargs)

    def numbers(self, window: Window) -> dict[str, int | float]:
        """Pick the Trainer's numbers of a window, under mfu-tracker's names."""
        names = {"mfu": window.mfu, "hfu": window.hfu, "mbu": window.mbu, "tokens_per_sec": window.tokens_per_s}
        return {f"{self._start}{name}": value for name, value in names.items() if math.isfinite(value)}
