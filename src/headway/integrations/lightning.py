"""Lightning's Trainer: MFU, tokens and waste in its loggers."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headway.count import Workload
from headway.errors import UsageError
from headway.integrations.loops import LOGGED, Observer, logged, observing, peak_under
from headway.meter import Meter, Window
from headway.meter.watch import ForwardWatch

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # one library under two names, each with a Callback of its own; what is installed of them takes this one
    _PACKAGES = [name for name in ("lightning", "pytorch_lightning") if find_spec(name) is not None]
    _HOMES = [import_module("lightning.pytorch" if name == "lightning" else name) for name in _PACKAGES]
    Callback = type("Callback", tuple(home.Callback for home in _HOMES), {})


class HeadwayMonitor(Observer, Callback):
    """Measure a Lightning run: pass it as `Trainer(callbacks=[HeadwayMonitor()])`.

    FLOPs are counted from the forwards that training really runs on one module of the LightningModule, with
    accumulation, packing and padding as they are, and with manual optimization: an optimizer step ends with the batch
    in which an optimizer stepped. Validation and checkpoints are left out of the steps' time. Every
    `log_every_n_steps` the numbers go to the Trainer's loggers. What cannot be counted is warned of once, and training
    goes on without numbers.

    Args:
        model: path of the module within the LightningModule, such as "model" or "net.backbone", "" for the
            LightningModule itself; where it is None, the only module with parameters that it holds.
        prefix: of the names in the loggers: "headway" logs `headway/mfu` and the others of `names`.
        names: keys of `Window.to_dict()` that are logged. With "mbu" among them the model is traced once more.
        workload: makes a workload from a forward's arguments by name, for models that do not take `input_ids`.
        meter_options: what else `Meter` takes, such as `cost_model`, `peak` or `goodput`.

    Attributes:
        meter: of the run that is going on, or of the last one.
        run: the whole run, once it has ended.
        failure: what ended the measuring; None while all is well.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        prefix: str = "headway",
        names: Sequence[str] = LOGGED,
        workload: Callable[[Mapping[str, Any]], Workload] | None = None,
        **meter_options: Any,
    ) -> None:
        super().__init__()
        self.meter: Meter | None = None
        self.run: Window | None = None
        self._path = model
        self._prefix = prefix
        self._names = tuple(names)
        self._workload = workload
        self._options: dict[str, Any] = {"log_every": sys.maxsize, **meter_options}
        self._calls: ForwardWatch | None = None
        self._trainer: Trainer | None = None
        self._num_updates = self._num_calls = 0

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Trace the model and start the clock."""
        self.failure, self._trainer = None, trainer
        self._begin(trainer, pl_module)

    @observing
    def _begin(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        # a meter of the one module that is measured, from the step at which the trainer goes on
        path = _only_module(pl_module) if self._path is None else self._path
        model = pl_module.get_submodule(path)
        optimizers = trainer.optimizers if "mbu" in self._names else None
        place = trainer.global_step // max(1, len(trainer.optimizers))  # each optimizer counts, and a step has them all
        options = {"optimizer": optimizers, "steps_before": place, **self._options, "watch": None}
        options["peak"] = options.get("peak") or peak_under(trainer.precision, model)
        self.meter = meter = Meter(model, **options)
        meter.on_failure = self.stop_measuring
        is_compiled = getattr(pl_module, "_compiler_ctx", None) is not None
        self._calls = ForwardWatch(model, meter, workload=self._workload, phase=nullcontext, breaks_graphs=is_compiled)
        meter.add_watch(self._calls)
        self._num_updates, self._num_calls = trainer.global_step, 0
        # Lightning has no hook for these two, so its methods are wrapped until the run ends
        save = trainer.save_checkpoint

        @functools.wraps(save)
        def save_away(*args: Any, **kwargs: Any) -> None:
            with meter.away("checkpoint"):
                save(*args, **kwargs)

        trainer.save_checkpoint = save_away  # type: ignore[method-assign]  # no hook tells when a checkpoint is written
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # Lightning sets it from elsewhere
        begin = profiler.start

        @functools.wraps(begin)
        def noted(action_name: str) -> None:
            if action_name.endswith("train_dataloader_next"):
                meter.await_data()
            begin(action_name)

        profiler.start = noted  # no hook tells when a batch is asked for, which comes after logging
        meter.await_data()

    @observing
    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Wait for the first batches, for which workers may have to be started."""
        del trainer, pl_module
        assert self.meter is not None
        self.meter.await_data()

    @observing
    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Note that the batch has come."""
        del trainer, pl_module, batch, batch_idx
        assert self.meter is not None
        self.meter.got_data()

    @observing
    def on_train_batch_end(self, trainer: "Trainer", pl_module: "LightningModule", *_: Any) -> None:
        """End an optimizer step if an optimizer has stepped, and log."""
        assert self.meter is not None
        self._end_step(trainer, pl_module, self.meter)

    def _end_step(self, trainer: "Trainer", pl_module: "LightningModule", meter: Meter) -> None:
        assert self._calls is not None
        if trainer.global_step == self._num_updates:
            return  # accumulating
        if self._calls.num_calls == self._num_calls:
            raise UsageError(
                f"the module that HeadwayMonitor measures ran no forward in step {trainer.global_step} of "
                f"{type(pl_module).__name__}: name the one that its training_step calls, HeadwayMonitor(model=...)."
            )
        self._num_updates, self._num_calls = trainer.global_step, self._calls.num_calls
        meter.step()
        place = trainer.fit_loop.epoch_loop._batches_that_stepped  # under this number Lightning logs the step's loss
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # 0 for a Trainer that logs nothing
        if not every or (place + 1) % every:
            return
        window = meter.log()
        if window is not None:
            for logger in trainer.loggers:
                logger.log_metrics(logged(window, self._names, self._prefix), step=place)  # rank 0 writes

    @observing
    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Leave the validation out of the steps' time."""
        del pl_module
        if self._calls is not None and self.meter is not None and not trainer.sanity_checking:
            self.meter.leave("evaluation")

    @observing
    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Go on after a validation."""
        del trainer, pl_module
        if self._calls is not None and self.meter is not None:
            self.meter.back()

    @observing
    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Sum the run up in `run`."""
        del trainer, pl_module
        self._let_go()
        if self.meter is not None and self.meter.num_steps:
            self.run = self.meter.close()

    @observing
    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Leave the model and the Trainer as they were."""
        del trainer, pl_module, exception
        self._let_go()

    def _release(self) -> None:
        self._let_go()
        if self.meter is not None:
            self.meter.abandon()

    def _let_go(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None
            trainer: Any = self._trainer
            for patched, name in ((trainer, "save_checkpoint"), (trainer.profiler, "start")):
                vars(patched).pop(name, None)  # the wrapper hides the class's own method


def _only_module(pl_module: "LightningModule") -> str:
    names = [name for name, child in pl_module.named_children() if next(child.parameters(), None) is not None]
    if len(names) != 1:
        raise UsageError(
            f"{type(pl_module).__name__} holds {', '.join(names) or 'no module with parameters'}: which one "
            "HeadwayMonitor is to measure is not known. Name it: HeadwayMonitor(model=...), with a path within the "
            "LightningModule."
        )
    return names[0]
