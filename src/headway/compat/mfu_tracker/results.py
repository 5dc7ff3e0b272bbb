"""What a tracked block made of the hardware; nothing waits for the device until a number is read."""

import math
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn

import torch

from headway.compat.mfu_tracker.blocks import Counted, ListedBlock, TrackedBlock
from headway.compat.mfu_tracker.gpu_spec import GPUSpec
from headway.count import FlopCount
from headway.errors import UsageError
from headway.meter import Window
from headway.meter import clock as meter_clock
from headway.meter.clock import Mark
from headway.meter.window import Utilisation

_warned: set[str] = set()


class Clock:
    """Times a block: on CUDA by the device's own clock, read late; on a CPU by the host's.

    Any other accelerator is waited for at both ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._mark()
        self._end: Mark | None = None

    def stop(self) -> None:
        """End the block."""
        self._end = self._mark()

    @property
    def has_stopped(self) -> bool:
        """Whether the block has ended."""
        return self._end is not None

    def seconds(self) -> float:
        """Wait until the device has passed the end, and return the block's time [s]."""
        assert self._end is not None
        self._end.wait()
        return self._end.seconds_since(self._begin)

    def _mark(self) -> Mark:
        if self._device.type not in ("cpu", "cuda"):
            torch.accelerator.synchronize(self._device)
        return meter_clock.mark(self._device)


class UtilizationResult:
    """What a block made of the hardware, once it has ended. Fractions, never percent; NaN where a number is not known.

    Args:
        block: what it computed.
        clock: that times it.
        spec: what one device can do.
        dtype: of the block's matrix products.
        num_gpus: devices that share its FLOPs.
        param_bytes: gives the bytes of the weights, read once in each pass; None where not known.
        num_tokens: tokens of the block, where they are stated.
        hfu_flops: FLOPs with recomputation, where they are stated.
        backward_factor: the backward with its recomputation over the forward, where it is stated; 2 without any.
    """

    def __init__(
        self,
        block: TrackedBlock,
        clock: Clock,
        spec: GPUSpec,
        dtype: str | torch.dtype,
        *,
        num_gpus: int = 1,
        param_bytes: Callable[[], float] | None = None,
        num_tokens: int | None = None,
        hfu_flops: int | float | None = None,
        backward_factor: float | None = None,
    ) -> None:
        self.gpu_spec = spec
        self.num_gpus = num_gpus
        self._block = block
        self._clock = clock
        self._dtype = dtype
        self._param_bytes = param_bytes
        self._num_tokens = num_tokens
        self._hfu_flops = hfu_flops
        self._backward_factor = backward_factor
        self._failed = False

    def count(self, batch: Any, *, forward_only: bool | None = None) -> None:
        """Add what one forward of the block computes, where a cost model or a meter is tracked.

        Args:
            batch: a `Workload`, or the forward's arguments by name.
            forward_only: it has no backward; as gradients are enabled now when None.

        Raises:
            UsageError: the block's FLOPs are stated, or counted as its forwards happen.
        """
        if not isinstance(self._block, ListedBlock):
            raise UsageError(
                "this block's FLOPs are a number, or those of the forwards that run in it, and a batch by hand would "
                "be counted twice. Track a cost model, headway.trace(model), to count by hand."
            )
        self._block.count(batch, forward_only=not torch.is_grad_enabled() if forward_only is None else forward_only)

    def end(self, kind: type[BaseException] | None) -> None:
        """End the block; `track` does so."""
        self._clock.stop()
        self._failed = kind is not None
        self._block.__exit__(kind, None, None)

    @cached_property
    def _counted(self) -> Counted:
        if self._failed or not self._clock.has_stopped:
            how = "was left by an exception" if self._failed else "has not ended"
            raise UsageError(f"the tracked block {how}: its numbers can be read once it has ended well.")
        self._clock.seconds()
        return self._block.counted()

    @cached_property
    def _utilisation(self) -> Utilisation:
        counted = self._counted
        step = Utilisation(
            flops=counted.flops,
            wall_s=self._clock.seconds(),
            data_wait_s=0.0,
            tokens=counted.workload.tokens if self._num_tokens is None else self._num_tokens,
            slots=counted.workload.slots,
            peak=self.gpu_spec.peak(self.dtype),
            world_size=self.num_gpus,
        )
        if step.warnings and self.gpu_spec.name not in _warned:
            _warned.add(self.gpu_spec.name)
            warnings.warn(step.warnings[0], stacklevel=4)
        return step

    @property
    def dtype(self) -> str | torch.dtype:
        """Dtype whose peak counts: what was given, else that of autocast in the block, else that of the weights."""
        return self._dtype if isinstance(self._dtype, str) else self._counted.dtype or self._dtype

    @property
    def flop_count(self) -> FlopCount:
        """Useful FLOPs of the block by component and phase."""
        return self._counted.flops

    @property
    def flops(self) -> int:
        """Useful FLOPs of the block."""
        return self.flop_count.total

    @property
    def elapsed_sec(self) -> float:
        """Time of the block [s]: the device's own on CUDA."""
        return self._utilisation.wall_s

    @property
    def mfu(self) -> float:
        """Useful FLOPs / (time x peak of all devices), a fraction."""
        return self._utilisation.mfu

    @property
    def hfu(self) -> float:
        """MFU with what activation checkpointing runs again, a fraction; NaN for a bare number of FLOPs."""
        step, flops = self._utilisation, self._hfu_flops
        if self._backward_factor is not None:
            flops = step.flops.total + (self._backward_factor - 2) * step.flops.forward
        if flops is not None:
            return flops / step.wall_s / step.peak_flops_per_s
        return math.nan if step.convention == "stated" else step.hfu

    @property
    def weight_bandwidth_share(self) -> float:
        """Bytes of weights read / (time x memory bandwidth), a fraction; NaN where the weights are not known.

        The weights are read at least once in each forward and in each backward of the block. Gradients, optimizer state
        and activations come on top: it is a floor below the MBU, which a `Meter` tells.

        Raises:
            UnknownDeviceError: the bandwidth is not known.
        """
        return self.achieved_tbs / (self.gpu_spec.peak_memory_bandwidth_tbs * self.num_gpus)

    @property
    def mbu(self) -> NoReturn:
        """mfu-tracker's name of `weight_bandwidth_share`; MBU is another number here.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "result.mbu is not here: mfu-tracker calls the reading of the weights alone MBU, which is "
            "result.weight_bandwidth_share. The MBU of a step, with gradients, optimizer and activations, is told by "
            "headway.Meter(model, optimizer=optimizer) as window.mbu, and logged by HeadwayCallback and MFUCallback."
        )

    @property
    def achieved_tflops(self) -> float:
        """Useful FLOPs over time [TFLOP/s]."""
        return self._utilisation.flops_per_s / 1e12

    @property
    def achieved_tbs(self) -> float:
        """Bytes of weights read over time [TB/s]; NaN where the weights are not known."""
        param_bytes = math.nan if self._param_bytes is None else self._param_bytes()
        return param_bytes * self._counted.num_passes / self.elapsed_sec / 1e12

    @property
    def tokens_per_sec(self) -> float:
        """Real tokens per second; NaN where nobody counted or stated them."""
        step = self._utilisation
        return step.tokens_per_s if step.tokens or self._num_tokens is not None else math.nan

    @property
    def window(self) -> Window | None:
        """The meter's window that the block completed as a step; None for most, and without a meter."""
        return self._block.window if isinstance(self._block, ListedBlock) else None

    def __repr__(self) -> str:
        if self._failed or not self._clock.has_stopped:
            return f"UtilizationResult({'failed' if self._failed else 'under way'})"
        return f"UtilizationResult(mfu={self.mfu:.4f}, hfu={self.hfu:.4f}, elapsed_sec={self.elapsed_sec:.6f})"
