"""Hugging Face's Trainer, and trainers that build on it (TRL): MFU, tokens and waste in its own log."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from transformers import DefaultFlowCallback, TrainerCallback

from headway.integrations.forwards import ForwardCalls
from headway.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from headway.count import CostModel
    from headway.devices import Peak
    from headway.meter import Window

LOGGED = ("mfu", "hfu", "tokens_per_s", "tokens_per_s_per_device", "padding_share", "balance")


class HeadwayCallback(TrainerCallback):
    """Measure a `transformers.Trainer` run: pass it as `Trainer(callbacks=[HeadwayCallback()])`.

    FLOPs are counted from the forwards that the Trainer really runs, with accumulation, packing and padding as they
    are; evaluation and saving are left out of the steps' time. The numbers join the Trainer's log dictionary before
    anything reports it, so that `log_history`, W&B, TensorBoard and MLflow have them.

    Args:
        cost_model: of the model; traced when training begins where it is None.
        peak: as for `Meter`.
        prefix: of the names in the log: "headway" logs `headway/mfu` and the others of `names`.
        names: keys of `Window.as_record()` that are logged.
        num_warmup_steps: first steps to leave out.
        recompute: as for `Meter`; taken from the Trainer's `gradient_checkpointing` where it is None.
    """

    def __init__(
        self,
        *,
        cost_model: CostModel | None = None,
        peak: Peak | None = None,
        prefix: str = "headway",
        names: Sequence[str] = LOGGED,
        num_warmup_steps: int = 0,
        recompute: str | None = None,
    ) -> None:
        self.meter: Meter | None = None
        self.run: Window | None = None
        self._cost_model = cost_model
        self._peak = peak
        self._prefix = prefix
        self._names = tuple(names)
        self._num_warmup_steps = num_warmup_steps
        self._recompute = recompute
        self._calls: ForwardCalls | None = None

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Move before every callback that reports: they read the log dictionary in the order of the list."""
        handler = sys._getframe(1).f_locals.get("self")  # the Trainer hands callbacks no reference to its list
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            flow = [i for i, callback in enumerate(callbacks) if isinstance(callback, DefaultFlowCallback)]
            callbacks.insert(flow[0] + 1 if flow else 0, self)  # after the one that says what a step is followed by

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Trace the model and start the clock."""
        del state, control
        model = kwargs["model"]
        recompute = self._recompute or ("full" if args.gradient_checkpointing else "none")
        self.meter = Meter(
            self._cost_model if self._cost_model is not None else model,
            peak=self._peak,
            log_every=sys.maxsize,  # windows end where the Trainer logs
            num_warmup_steps=self._num_warmup_steps,
            recompute=recompute,
        )
        self._calls = ForwardCalls(model, self.meter).__enter__()
        self.meter.start()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """End an optimizer step; what follows is training again unless the Trainer evaluates or saves."""
        del args, state, kwargs
        assert self.meter is not None
        self.meter.step()
        if control.should_evaluate or control.should_save:
            self.meter.leave("evaluation" if control.should_evaluate else "checkpoint")

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Go on after an evaluation, with a checkpoint if there is to be one."""
        del args, state, kwargs
        if self.meter is not None and control.should_save:
            self.meter.leave("checkpoint")
        elif self.meter is not None:
            self.meter.back()

    def on_save(self, *_: Any, **__: Any) -> None:
        """Go on after a checkpoint."""
        if self.meter is not None:
            self.meter.back()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Add the window since the last log to what the Trainer logs of a step."""
        del args, control
        logs: dict[str, Any] | None = kwargs.get("logs")
        if self.meter is None or logs is None or "loss" not in logs:
            return  # an evaluation's log, or the summary at the end
        window = self.meter.log()
        if window is None:
            return
        record = window.as_record()
        found = {f"{self._prefix}/{name}": record[name] for name in self._names if record[name] is not None}
        logs.update(found)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)  # the Trainer copied the dictionary before it called us

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Sum the run up in `run`."""
        if self._calls is not None:
            self._calls.__exit__()
        if self.meter is not None and self.meter.num_steps:
            self.run = self.meter.close()
