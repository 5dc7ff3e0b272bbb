"""Hugging Face's Trainer, and trainers that build on it (TRL): MFU, tokens and waste in its own log."""

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from transformers import DefaultFlowCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from headway.count import CostModel, Workload
from headway.devices import Peak
from headway.errors import HeadwayError, TraceError
from headway.integrations.loops import (
    LOGGED,
    LOGGED_OF_PHASES,
    Observer,
    caller_of,
    logged,
    observing,
    peak_under,
    ranks_of_sequences,
    replaced,
)
from headway.integrations.trainer_phases import POLICY, REFERENCE, TrainerCalls
from headway.meter import Meter, PhaseDevices, Window
from headway.meter.environment import ledger_of
from headway.meter.watch import ForwardWatch
from headway.tracing import trace


class HeadwayCallback(Observer, TrainerCallback):
    """Measure a `transformers.Trainer` run: pass it as `Trainer(callbacks=[HeadwayCallback()])`, and to TRL's likewise.

    FLOPs are counted from the forwards that the Trainer really runs, with accumulation, packing and padding as they
    are; evaluation and saving are left out of the steps' time. Other models that the trainer holds and runs in its
    steps, such as a reference, a reward model or a teacher, are found, traced and counted with them. What generates in
    a step, what scores and the update are phases of it, found by themselves. The numbers join the Trainer's log
    dictionary before anything reports it, so that `log_history`, W&B, TensorBoard and MLflow have them. What cannot be
    counted is warned of once, and training goes on without numbers.

    Args:
        cost_model: of the model; traced when training begins where it is None.
        peak: as for `Meter`.
        prefix: of the names in the log: "headway" logs `headway/mfu` and the others of `names`.
        names: keys of `Window.to_dict()` that are logged, and those within its `phases`, such as `phases/rollout/mfu`
            (`*` for any phase). With "mbu" among them the model is traced once more.
        num_warmup_steps: first steps to leave out.
        recompute: as for `Meter`; read off the model, which the Trainer has set up by then, where it is None.
        workload: makes a workload from a forward's arguments by name, for models that do not take `input_ids`, and
            where sequences are cut over ranks: of the whole batch then.
        rollout_devices: devices that generate where they are not the trainer's own, such as those of a vLLM server, all
            of them or how many; as many workers as the server tells, with this trainer's peak, when None.
        meter_options: what else `Meter` takes, such as `goodput` or `log_to`.

    Attributes:
        meter: of the run that is going on, or of the last one.
        run: the whole run, once it has ended.
        failure: what ended the measuring; None while all is well.
    """

    def __init__(
        self,
        *,
        cost_model: CostModel | None = None,
        peak: Peak | None = None,
        prefix: str = "headway",
        names: Sequence[str] = (*LOGGED, *LOGGED_OF_PHASES),
        num_warmup_steps: int = 0,
        recompute: str | None = None,
        workload: Callable[[Mapping[str, Any]], Workload] | None = None,
        rollout_devices: PhaseDevices | int | None = None,
        **meter_options: Any,
    ) -> None:
        self.meter: Meter | None = None
        self.run: Window | None = None
        self._cost_model = cost_model
        self._prefix = prefix
        self._names = tuple(names)
        self._recompute = recompute
        self._workload = workload
        self._rollout_devices = rollout_devices
        self._options = {"peak": peak, "num_warmup_steps": num_warmup_steps, **meter_options}
        self._calls: ExitStack | None = None
        self._accelerator: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Trace the models and start the clock."""
        self.failure = None
        self._begin(args, state, control, **kwargs)

    @observing
    def _begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        del control
        trainer, model = caller_of(Trainer, "HeadwayCallback"), kwargs["model"]
        self._move_up(trainer.callback_handler.callbacks)
        self._accelerator = trainer.accelerator
        models = _Models(trainer, model)
        options = dict(self._options)
        options["peak"] = options["peak"] or peak_under(trainer.accelerator.mixed_precision, model)
        self.meter = Meter(
            model,
            cost_model=self._cost_model,
            log_every=sys.maxsize,  # windows end where the Trainer logs
            recompute=self._recompute,
            others=[*models.others, *options.pop("others", ())],
            optimizer=kwargs["optimizer"] if "mbu" in self._names else None,
            **{
                "steps_before": state.global_step,
                "batch_ranks": ranks_of_sequences(trainer.accelerator, self._workload),
                **options,
                "watch": None,
            },
        )
        self.meter.on_failure = self.stop_measuring
        if self._calls is not None:
            self._calls.close()  # ends the watch of a run that ended in an error
        self._phases = phases = TrainerCalls(self.meter, self.stop_measuring, self._rollout_devices)
        self._calls = models.calls(self.meter, phases, self._workload)
        self._calls.callback(phases.close)
        phases.watch(trainer, {model: self.meter.cost_model, **models.ledgers})
        phases.is_named = phases.is_named or bool(models.others)
        # no hook of a callback tells when the Trainer asks for batches, and its logging comes before
        self._calls.enter_context(replaced(trainer, "get_batch_samples", self._awaited))
        if args.eval_on_start:
            self.meter.leave("evaluation")
        else:
            self.meter.await_data()

    def _awaited(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        def awaited(*args: Any, **kwargs: Any) -> Any:
            self.on_epoch_begin()
            return fetch(*args, **kwargs)

        return awaited

    def _release(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        if self.meter is not None:
            self.meter.abandon()

    @property
    def _training(self) -> Meter | None:
        return self.meter if self._calls is not None else None

    @observing
    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the first batches, for which workers may have to be started."""
        if meter := self._training:
            meter.await_data()

    @observing
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note that the step's batches have come."""
        if meter := self._training:
            meter.got_data()

    def _move_up(self, callbacks: list[TrainerCallback]) -> None:
        """Move before every callback that reports: they read the log dictionary in the order of the list."""
        callbacks.remove(self)
        flow = [i for i, callback in enumerate(callbacks) if isinstance(callback, DefaultFlowCallback)]
        callbacks.insert(flow[0] + 1 if flow else 0, self)  # after the one that says what a step is followed by

    @observing
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End an optimizer step; the next one begins, unless the Trainer evaluates or saves."""
        assert self.meter is not None
        self._phases.end_update()
        self.meter.step(skipped=self._accelerator.optimizer_step_was_skipped)
        self.on_epoch_end(args, state, control, **kwargs)

    @observing
    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """End the update of a micro-batch: the next one may have to be generated and scored first."""
        if self._training:
            self._phases.end_update()

    @observing
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave training if the Trainer is to evaluate or save now."""
        del args, state, kwargs
        if (meter := self._training) and (control.should_evaluate or control.should_save):
            meter.leave("evaluation" if control.should_evaluate else "checkpoint")

    @observing
    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Go on after an evaluation, with a checkpoint if there is to be one."""
        del state, kwargs
        if (meter := self._training) is None:
            return
        meter.back()
        if control.should_save or args.save_strategy == SaveStrategy.BEST:  # "best" is decided after this call
            meter.leave("checkpoint")  # until it is saved, or the next batch is asked for

    @observing
    def on_save(self, *_: Any, **__: Any) -> None:
        """Go on after a checkpoint."""
        if meter := self._training:
            meter.back()

    @observing
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the window since the last log to the Trainer's log of a step."""
        del args, control
        logs: dict[str, Any] | None = kwargs.get("logs")
        meter = self._training
        if meter is None or logs is None or "loss" not in logs:
            return  # an evaluation's log, or the summary at the end
        window = meter.log()
        if window is None:
            return
        numbers = self.numbers(window)
        logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)  # the Trainer copied the dictionary before it called us

    def numbers(self, window: Window) -> dict[str, int | float]:
        """Pick the Trainer's numbers of a window, by name."""
        return logged(window, self._names, self._prefix)

    @observing
    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Sum the run up in `run`."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        if self.meter is not None and self.meter.num_steps:
            self.run = self.meter.close()


class _Models:
    """Find the models that a trainer runs in its steps, trace them, and count their forwards.

    Others than the trained one, such as a reference, reward model or teacher, are held by the trainer. One whose
    `ref_model` is None runs the trained model with its adapters switched off as the reference, which is traced as a
    model of its own.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self._trained = model
        self._names = _others(trainer, model)
        self.ledgers = {other: _traced(other, name) for other, name in self._names.items()}
        self._adapter: Any = None
        self._bare: CostModel | None = None
        if getattr(trainer, "ref_model", model) is None and hasattr(model, "disable_adapter"):
            self._adapter = _adapter_of(model)
        if self._adapter is not None:
            self._active = self._adapter.active_adapters
            with model.disable_adapter():  # type: ignore[operator]  # a PeftModel
                self._bare = trace(model)

    @property
    def others(self) -> list[tuple[nn.Module, CostModel]]:
        """Models that a step runs beside the trained one, with their ledgers, for `Meter(others=...)`."""
        return [*self.ledgers.items(), *([] if self._bare is None else [(self._trained, self._bare)])]

    def calls(
        self,
        meter: Meter,
        phases: TrainerCalls,
        workload: Callable[[Mapping[str, Any]], Workload] | None,
    ) -> ExitStack:
        """Count forwards of all models of the trainer until the stack is closed."""

        def phase() -> AbstractContextManager[Any]:
            if torch.is_grad_enabled():
                return phases.training()
            return phases.scoring(REFERENCE if self._is_reference else POLICY)

        policy = ForwardWatch(self._trained, meter, self._without_adapters, workload=workload, phase=phase)
        phases.forwards = [policy]
        for other, ledger in self.ledgers.items():
            scoring = functools.partial(phases.scoring, self._names[other])
            watch = ForwardWatch(other, meter, ledger, is_trained=False, workload=workload, phase=scoring)
            phases.forwards.append(watch)
        stack = ExitStack()
        for watch in phases.forwards:
            meter.add_watch(watch)
            stack.callback(watch.close)
        return stack

    @property
    def _is_reference(self) -> bool:
        """True if the trained model is the reference now: its adapters are off, or others are on."""
        adapter = self._adapter
        return adapter is not None and (adapter.disable_adapters or adapter.active_adapters != self._active)

    def _without_adapters(self) -> CostModel | None:
        return self._bare if self._adapter is not None and self._adapter.disable_adapters else None


def _others(trainer: Any, model: nn.Module) -> dict[nn.Module, str]:
    """List a trainer's models that share no parameter with the trained one, and their phases.

    A phase is named by the attribute that holds the model: `reward` for `reward_funcs`, `teacher` for `teacher_model`.
    """
    trained = {id(parameter) for parameter in model.parameters()}
    modules = {
        value: _PHASES.get(name := _KIND.sub("", attribute), name)
        for attribute, values in vars(trainer).items()
        for value in (values if isinstance(values, list | tuple) else [values])
        if isinstance(value, nn.Module) and next(value.parameters(), None) is not None
    }
    return {o: name for o, name in modules.items() if not any(id(p) in trained for p in o.parameters())}


_KIND = re.compile(r"_(models?|func(tion)?s?)$")
_PHASES = {"ref": REFERENCE}


def _traced(model: nn.Module, name: str) -> CostModel:
    try:
        return ledger_of(model, watch=None)
    except HeadwayError as error:
        raise TraceError(f"the {name} model of this trainer, a {type(model).__name__}: {error}") from error


def _adapter_of(model: nn.Module) -> Any:
    """Find one of the layers that peft has put adapters into; they are switched off all at once."""
    layers: Any = sys.modules.get("peft.tuners.tuners_utils")  # no adapters are there while peft is not imported
    if layers is None:
        return None
    return next((module for module in model.modules() if isinstance(module, layers.BaseTunerLayer)), None)
