"""Loops written with Hugging Face's Accelerate: the meter with its accumulation, wrappers and trackers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from headway.count import Workload
from headway.errors import UsageError
from headway.integrations.loops import LOGGED, Observer, logged, observing, peak_under, ranks_of_sequences
from headway.meter import Meter, Window
from headway.meter.watch import ForwardWatch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn


class AccelerateMeter(Observer, Meter):
    """Measure a loop around `accelerator.accumulate`: FLOPs from the forwards that the prepared model really runs.

    Call `step` after every micro-batch; an optimizer step ends where Accelerate synchronises gradients. Each window is
    logged through the accelerator's trackers as well. A forward that cannot be counted is warned of once, and the loop
    goes on without numbers.

    Args:
        accelerator: of the loop.
        model: what `accelerator.prepare` gave back, or the model inside.
        completed_steps: optimizer steps of earlier processes, from whose number on windows are numbered.
        prefix: of the names in the trackers: "headway" logs `headway/mfu` and the others of `names`.
        names: keys of `Window.to_dict()` that the trackers are given.
        workload: makes a workload from a forward's arguments by name, for models that do not take `input_ids`, and
            where sequences are cut over ranks: of the whole batch then.
        on_window: as for `Meter`; called after the trackers.
        meter_options: what else `Meter` takes.

    Attributes:
        failure: what ended the measuring; None while all is well.

    >>> meter = AccelerateMeter(accelerator, model, log_every=10)   # doctest: +SKIP
    >>> for batch in meter.batches(loader):                         # doctest: +SKIP
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(model(**batch).loss)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     meter.step()
    """

    def __init__(
        self,
        accelerator: "Accelerator",
        model: "nn.Module",
        *,
        completed_steps: int = 0,
        prefix: str = "headway",
        names: Sequence[str] = LOGGED,
        workload: Callable[[Mapping[str, Any]], Workload] | None = None,
        on_window: Callable[[Window], None] | None = None,
        **meter_options: Any,
    ) -> None:
        inner: nn.Module = accelerator.unwrap_model(model)
        options = {
            "batch_ranks": ranks_of_sequences(accelerator, workload),
            "peak": None if "peak" in meter_options else peak_under(accelerator.mixed_precision, inner),
            **meter_options,
            "watch": workload is None and meter_options.get("cost_model") is None,
        }
        super().__init__(inner, on_window=self._log_window, steps_before=completed_steps, **options)
        self._accelerator = accelerator
        self._prefix = prefix
        self._names = tuple(names)
        self._then = on_window
        self.on_failure = self.stop_measuring
        if not options["watch"]:
            self.add_watch(ForwardWatch(inner, self, workload=workload, phase=nullcontext))

    @observing
    def step(self, *, skipped: bool = False, **extra: float) -> Window | None:
        """End a micro-batch, and the optimizer step if Accelerate let the optimizer run; as `Meter.step` otherwise."""
        if not self._accelerator.sync_gradients:
            return None
        if not self._watches[0].num_calls and not self.trains_now:
            raise UsageError(
                "the model is in evaluation mode, as from_pretrained leaves it, and its forwards are no training. Call "
                "model.train() before the loop."
            )
        return super().step(skipped=skipped or self._accelerator.optimizer_step_was_skipped, **extra)

    @observing
    def log(self) -> Window | None:
        """Add up the steps since the last log, as `Meter.log` does."""
        return super().log()

    def _release(self) -> None:
        self.abandon()

    def _log_window(self, window: Window) -> None:
        numbers = logged(window, self._names, self._prefix)
        self._accelerator.log(numbers, step=window.step)
        if self._then is not None:
            self._then(window)
