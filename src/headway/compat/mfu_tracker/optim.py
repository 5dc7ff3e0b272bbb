"""`MFUOptimizerWrapper`: an optimizer that measures the steps of its loop."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.compat.mfu_tracker.flops import ProfiledFlops, profile_flops, watch
from headway.compat.mfu_tracker.tracker import UtilizationResult, track
from headway.errors import UsageError

BACKWARD_FACTOR_MESSAGE = (
    "a backward factor is not used: MFU never has recomputation in it, and HFU has what is really run again, as it is "
    "read off the model."
)


class MFUOptimizerWrapper(Optimizer):
    """Give an optimizer `track_step`, which measures blocks of its training loop.

    The optimizer itself is returned, with this class among its bases: schedulers, `torch.amp.GradScaler`, checkpoints
    and Accelerate see what they saw before.

    mfu-tracker's clears the gradients at the entry of each block, accumulated ones as well. Here only gradients that
    a step has used are cleared, as loops without a `zero_grad` of their own rely on; those that a gradient scaler
    skipped a step for are used too.

    Args:
        optimizer: that steps.
        model: whose forwards are counted, as the loop calls it; before torch.compile has compiled it, or what
            torch.compile returned.
        sample_batch: a sample of the forward's arguments by name, for `profile`; what is measured are the batches
            that the model is really given.
        dtype: as for `track`.
        num_gpus: as for `track`.
        hfu_backward_factor: not used, with a warning; recomputation is read off the model.
        device: as for `track`.
        backward_factor: another name of that.

    Raises:
        UsageError: no optimizer, or a model on several devices.

    >>> optimizer = MFUOptimizerWrapper(torch.optim.AdamW(model.parameters()), model)     # doctest: +SKIP
    >>> with optimizer.track_step() as result:                                            # doctest: +SKIP
    ...     model(**batch).loss.backward()
    >>> optimizer.step()                                                                  # doctest: +SKIP
    """

    def __new__(
        cls,
        optimizer: Optimizer,
        model: nn.Module,
        sample_batch: Mapping[str, Any] | None = None,
        dtype: str | None = "bf16",
        num_gpus: int = 1,
        hfu_backward_factor: float | None = None,
        device: torch.device | str | None = None,
        *,
        backward_factor: float | None = None,
    ) -> "MFUOptimizerWrapper":
        """Make the optimizer one of this class."""
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"{type(optimizer).__name__} is no torch.optim.Optimizer: wrap the optimizer that steps.")
        if hfu_backward_factor is not None or backward_factor is not None:
            warnings.warn(BACKWARD_FACTOR_MESSAGE, stacklevel=2)
        if not isinstance(optimizer, cls):
            optimizer.__class__ = type(f"MFU{type(optimizer).__name__}", (cls, type(optimizer)), {})
            optimizer.register_step_post_hook(lambda self, *_: self._use_gradients())
        watch(model)
        wrapper: MFUOptimizerWrapper = optimizer  # type: ignore[assignment]  # it is one now
        wrapper._model, wrapper._sample = model, sample_batch
        wrapper._options = {"dtype": dtype, "num_gpus": num_gpus, "device": device}
        wrapper._used_gradients = None
        return wrapper

    def __init__(self, *_: Any, **__: Any) -> None:
        """Leave the optimizer's state and groups as they are."""

    _model: nn.Module
    _sample: Mapping[str, Any] | None
    _options: dict[str, Any]
    _used_gradients: list[tuple[int, int]] | None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that was wrapped: this one."""
        return self

    def profile(self) -> ProfiledFlops | None:
        """Trace the model now rather than in the first block; returns the FLOPs of the sample, if there is one."""
        return profile_flops(self._model, kwargs=self._sample) if self._sample is not None else None

    @contextmanager
    def track_step(self, num_tokens: int | None = None) -> Iterator[UtilizationResult]:
        """Measure a block: one micro-batch, or all of an optimizer step.

        Step after the block to leave the optimizer's time out, or in it to have the whole step's.

        Args:
            num_tokens: tokens of the block, stated; those of its batches when None.
        """
        if self._used_gradients == self._gradients():  # no backward has added to them since the step
            self.zero_grad()
        with track(self._model, num_tokens=num_tokens, **self._options) as result:
            yield result

    def _gradients(self) -> list[tuple[int, int]]:
        """Identify the gradients and their contents: PyTorch raises a tensor's version whenever it is written into."""
        gradients = (p.grad for group in self.param_groups for p in group["params"])
        return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]

    def _use_gradients(self) -> None:
        self._used_gradients = self._gradients()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Answer a gradient scaler, which asks before it steps or skips: the gradients are used either way."""
        self._use_gradients()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports
