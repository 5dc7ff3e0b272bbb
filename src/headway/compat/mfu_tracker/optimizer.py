"""An optimizer that measures the steps it is used in; to schedulers, scalers and trainers it is the one inside."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.compat.mfu_tracker.blocks import ledger_of
from headway.compat.mfu_tracker.flops import ProfiledFlops, profile_flops
from headway.compat.mfu_tracker.results import UtilizationResult
from headway.compat.mfu_tracker.tracking import check_backward_factor, track
from headway.errors import UsageError

_METHODS = (
    "add_param_group",
    "load_state_dict",
    "register_load_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_state_dict_pre_hook",
    "register_step_post_hook",
    "register_step_pre_hook",
    "state_dict",
)
_ATTRIBUTES = ("defaults", "param_groups", "state", "grad_scale", "found_inf")  # the last two are a gradient scaler's


class MFUOptimizerWrapper(Optimizer):
    """Wrap an optimizer to measure blocks of its training loop with `track_step`.

    Everything else goes to the optimizer inside: its state, groups and hooks are the same objects, so that
    learning-rate schedulers, `torch.amp.GradScaler`, checkpoints and Accelerate see no difference.

    Gradients are the loop's. The one thing done to them is what `track_step` is documented for: at its entry, gradients
    which a step has used already are cleared, as loops without a `zero_grad` of their own rely on. Gradients that no
    step has used, which a loop accumulates, stay. A step that a gradient scaler skips has used them too.

    Args:
        optimizer: that steps.
        model: whose forwards are counted, as the loop calls it; before torch.compile has compiled it, or what
            torch.compile returned.
        sample_batch: a sample of the forward's arguments by name, for `profile`; what is measured are the batches
            that the model is really given, whatever the sample's size.
        dtype: as for `track`.
        num_gpus: as for `track`.
        backward_factor: as for `track`; None reads the recomputation off the model, which is exact.
        device: as for `track`.
        hfu_backward_factor: another name of `backward_factor`.
        clear_used_gradients: False leaves even used gradients to the loop.

    Raises:
        UsageError: no optimizer, a model on several devices, or a backward factor below 2.

    >>> optimizer = MFUOptimizerWrapper(torch.optim.AdamW(model.parameters()), model)     # doctest: +SKIP
    >>> with optimizer.track_step() as result:                                            # doctest: +SKIP
    ...     model(**batch).loss.backward()
    >>> optimizer.step()                                                                  # doctest: +SKIP
    >>> result.mfu                                                                        # doctest: +SKIP
    0.41
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        sample_batch: Mapping[str, Any] | None = None,
        dtype: str | None = "bf16",
        num_gpus: int = 1,
        backward_factor: float | None = None,
        device: torch.device | str | None = None,
        *,
        hfu_backward_factor: float | None = None,
        clear_used_gradients: bool = True,
    ) -> None:
        # Optimizer's own constructor would make groups and state of its own.
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"{type(optimizer).__name__} is no torch.optim.Optimizer: wrap the optimizer that steps.")
        self.optimizer = optimizer
        self._model = model
        self._sample = sample_batch
        self._clear = clear_used_gradients
        self._ledger = ledger_of(model)  # watched from here on
        self._ledger.follows_backwards = True
        self._used_at: int | None = None  # backwards seen when a step used the gradients
        self._options: dict[str, Any] = {
            "dtype": dtype,
            "num_gpus": num_gpus,
            "backward_factor": check_backward_factor(backward_factor, hfu_backward_factor),
            "device": device,
        }
        track(model, **self._options)  # what is wrong with them is said now
        optimizer.register_step_post_hook(lambda *_: self._use_gradients())

    def profile(self) -> ProfiledFlops | None:
        """Trace the model now rather than before the first block; returns the FLOPs of the sample, if there is one.

        Raises:
            TraceError: an operation of the model cannot be explained.
        """
        if self._sample is not None:
            return profile_flops(self._model, kwargs=self._sample)
        self._ledger.prepare()
        return None

    @contextmanager
    def track_step(self, num_tokens: int | None = None) -> Iterator[UtilizationResult]:
        """Measure a block: one micro-batch, or all of an optimizer step.

        Gradients that a step has used are cleared first, before the time begins. Step after the block to leave the
        optimizer's time out, or in it to have the whole step's.

        Args:
            num_tokens: tokens of the block, stated; those of its batches when None.
        """
        if self._clear and self._used_at == self._ledger.num_backwards:
            self.zero_grad()
        with track(self._model, num_tokens=num_tokens, **self._options) as result:
            yield result

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer."""
        return self.optimizer.step(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self._used_at = None
        self.optimizer.zero_grad(set_to_none)

    def _use_gradients(self) -> None:
        self._used_at = self._ledger.num_backwards

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Answer a gradient scaler, which asks this before it steps or skips: the gradients are used either way."""
        self._use_gradients()
        return getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "an MFUOptimizerWrapper belongs to one model and cannot be copied or pickled: take its state_dict(), or "
            "copy the optimizer inside, .optimizer."
        )

    def __repr__(self) -> str:
        return f"MFUOptimizerWrapper({self.optimizer!r})"


def _method_of_inner(name: str) -> Any:

    @functools.wraps(getattr(Optimizer, name))
    def method(self: MFUOptimizerWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, name)(*args, **kwargs)

    return method


def _attribute_of_inner(name: str) -> Any:
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
        lambda self: delattr(self.optimizer, name),
    )


for _name in _METHODS:
    setattr(MFUOptimizerWrapper, _name, _method_of_inner(_name))
for _name in _ATTRIBUTES:
    setattr(MFUOptimizerWrapper, _name, _attribute_of_inner(_name))
