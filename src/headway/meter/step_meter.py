"""Work of every meter of a loop: it knows the model's costs, and keeps each step until the device has passed it."""

import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from headway.count import CostModel, Generation, Workload
from headway.devices import Peak
from headway.errors import HeadwayError, UsageError
from headway.log.records import ratio
from headway.meter import pauses
from headway.meter.batch_share import BatchShare, rank_and_size
from headway.meter.batches import input_gradients_of, read_or_copy
from headway.meter.environment import in_components_of, largest_memory, ledger_of, recompute_of
from headway.meter.hooks import CallStack
from headway.meter.memory_traffic import ForwardTraffic
from headway.meter.pending import Billing, PendingStep, PendingSteps, as_they_ran
from headway.meter.phases import data_parallel_around
from headway.meter.slow_code import slow_code_of, slow_code_of_loop
from headway.meter.step_clock import LoopWatcher, StepClock
from headway.meter.step_phases import REST, NamedPhase
from headway.meter.tally import WHOLE, Sums, Tally
from headway.meter.window import Window

if TYPE_CHECKING:
    from headway.meter.leaves import Leaves
    from headway.meter.watch import ForwardWatch


class StepMeter(StepClock, ABC):
    """Counts the steps of a loop, and keeps their numbers until the device has passed them; `Meter` sets it up.

    Attributes:
        results: from which results of the trained model its backward starts, as for `headway.trace`.
        models: ledgers of all that the steps run; those of shapes join as they come.
        failure: the error that ended the counting of forwards; None while all is well.
        on_failure: told of it, in place of a warning.
        second_backward: name of a model through whose forward a second backward has gone.
        watches_parts: whether the parts of a model that is traced by shapes may run without it.
        looks_every: steps from one look at the parameters, and at those that a backward reaches, to the next.
        calls: of each thread by itself, the calls of watched modules under way: the outermost of them is a forward.
    """

    results: Any
    cost_model: CostModel
    models: list[CostModel]
    batch_share: BatchShare
    recompute: str
    ceiling: Peak | None
    memory_bytes_per_s: float
    steps_before: int
    num_steps = 0
    by_messages: bool
    failure: Exception | None = None
    on_failure: Callable[[Exception], None] | None = None
    second_backward = ""
    watches_parts = True
    looks_every = 1
    calls: CallStack
    _counts_tokens = True
    _has_looked_at_loop = False
    _has_own_ledger: bool  # whether the loop gave the cost model
    _reads_recompute: bool  # whether it is read off the model
    _watch: bool | None
    _own: set[int]  # places of the ledgers of the trained model
    _tally: Tally
    _traffic: Any
    _forward_traffic: dict[int, ForwardTraffic]
    _watches: "list[ForwardWatch]"
    _leaves: "weakref.ref[Leaves] | None" = None  # leaves of the trained model, which its watch holds
    _batches: list[tuple[Any, Billing]]
    _warned: set[str]  # texts of warnings, or what they are about
    _settings: dict[str, Any]
    _pending: PendingSteps
    _run: Window | None = None
    _places: pauses.PlaceSampler | None = None

    def _ledger(self, model: Any, cost_model: CostModel | None = None) -> CostModel:
        """Take the cost model that the loop gives, or trace its model as it is now.

        Raises:
            UsageError: the results of a backward are named, though nothing is traced.
        """
        ledger = model if isinstance(model, CostModel) else cost_model
        if ledger is None:
            return ledger_of(model, self.results, self._watch)
        if self.results is not None:
            raise UsageError(
                f"results={self.results!r} of a model with a cost model: nothing is traced. Give one of the two."
            )
        return ledger

    def start(self) -> None:
        """Start the clock; the first `count`, `batches` or `away` does so by itself. The device is waited for once."""
        if self._run is not None:
            raise UsageError("the meter is closed, and its run summed up: make a new Meter for another run.")
        if self.has_started:
            return
        several = self._opens()
        super().start()
        self._pending = self._make_pending(keeps_steps=several)
        self.watchers += LoopWatcher.waiting
        LoopWatcher.waiting.clear()
        if self._phases is not None and several and self.model is not None:
            with self.boundary.guard("The wrappers around this loop's model"):
                for wrapper in data_parallel_around(self.model):
                    self._phases.listen_to(wrapper)
        if self._phases is not None and rank_and_size()[0] == 0:
            with self.boundary.guard(pauses.PRODUCT):
                self._places = pauses.PlaceSampler(self._phases, self.boundary)
        for watcher in tuple(self.watchers):
            watcher.start(self)

    def _add_others(self, others: Sequence[Any]) -> None:
        """Take in the other models of the steps: cost models, which `count` names, and modules, which are watched."""
        for other in others:
            if isinstance(other, CostModel | tuple):
                module, ledger = other if isinstance(other, tuple) else (other, other)
                self.models.append(ledger)
                self._note_traffic(len(self.models) - 1, module)
                continue
            ledger = ledger_of(other)
            ledger = in_components_of(ledger, ledger.name)
            self.models.append(ledger)
            self._note_traffic(len(self.models) - 1, other)
            from headway.meter.watch import ForwardWatch

            self.add_watch(ForwardWatch(other, self, ledger, is_trained=False))

    def _note_traffic(self, place: int, model: Any) -> None:
        """Find the bytes that forwards of a model move, if its weights are here."""
        if isinstance(model, CostModel) or not self.models[place].rows:
            return
        with self.boundary.guard("The bytes that forwards of this loop's models move"):
            from headway.meter.model_traffic import forward_traffic

            if (traffic := forward_traffic(model, self.models[place])) is not None:
                self._forward_traffic[place] = traffic

    def _make_pending(self, *, keeps_steps: bool) -> PendingSteps:
        return PendingSteps(
            self.models,
            self._last,
            self._traffic,
            self.goodput,
            forwards=self._forward_traffic,
            elsewhere=self.phase_devices,
            on_error=self.stop_counting if any(watch.counts for watch in self._watches) else None,
            keeps_steps=keeps_steps,
        )

    @property
    def trains_now(self) -> bool:
        """True if the trained model is in training mode, as far as it is known."""
        return self.model is None or self.model.training

    def hear_of_forward(self, trains: bool) -> None:
        """Hear that a watched module begins to run, for loops that do not say themselves when they evaluate."""

    @property
    def leaves(self) -> "Leaves":
        """Parameters of the trained model, which is a module."""
        leaves = None if self._leaves is None else self._leaves()
        if leaves is None:
            from headway.meter.leaves import Leaves

            leaves = Leaves(self.model)
            self._leaves = weakref.ref(leaves)
            self._signature, self._checkpointed = leaves.signature(), leaves.checkpointed
        return leaves

    def add_watch(self, watch: "ForwardWatch") -> None:
        """Count the forwards of one more watch, which comes in place of one of the trained model, with each step."""
        for other in [other for other in self._watches if other.is_trained and watch.is_trained]:
            other.close()
            self._watches.remove(other)
        self._watches.insert(0 if watch.is_trained else len(self._watches), watch)

    def follow(self, leaves: "Leaves", *, at_once: bool = False) -> None:
        """Look up a model's parameters once a step, and trace the trained model again if they have changed.

        Args:
            leaves: the parameters.
            at_once: whether a forward has run as none before.
        """
        is_due = leaves.step < 0 or (leaves.step != self.num_steps and not self.num_steps % self.looks_every)
        if not is_due and not at_once:
            return
        leaves.step = self.num_steps
        signature, checkpointed = leaves.signature(), leaves.checkpointed
        if self._leaves is None or leaves is not self._leaves():
            return
        if self._reads_recompute and checkpointed != self._checkpointed:
            self._checkpointed, self.recompute = checkpointed, recompute_of(self.model)
        if signature == self._signature:
            return
        self._signature = signature
        if self._has_own_ledger:
            name = type(self.model).__name__
            self._warn_once(f"{name} has other parameters than the cost model by which this meter counts its steps.")
            return
        if not self.cost_model.rows:
            return  # each forward is traced by its shapes, and those of the parameters
        with self.away("set-up"):
            self.cost_model = self._ledger(self.model)
        self.add_ledger(self.cost_model, is_trained=True)

    def _warn_once(self, message: str, category: type[Warning] = RuntimeWarning, about: str = "") -> None:
        if (about or message) not in self._warned:
            self._warned.add(about or message)
            warnings.warn(message, category, stacklevel=5)

    def add_ledger(self, cost_model: CostModel, *, is_trained: bool) -> None:
        """Take in the ledger of one more shape; one that is there already changes nothing."""
        if any(ledger is cost_model for ledger in self.models):
            return
        self.models.append(cost_model)
        if is_trained:
            self._own.add(len(self.models) - 1)

    def stop_counting(self, error: Exception) -> None:
        """Warn of forwards that cannot be counted, and go on without MFU."""
        if self.failure is not None:
            return
        self.failure = error
        for watch in self._watches:
            watch.close()
        self._tally.forget_peak()
        if self.on_failure is not None:
            self.on_failure(error)
            return
        text = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
        warnings.warn(f"this loop goes on without MFU: {text}", RuntimeWarning, stacklevel=3)

    def _of_loop(self, window: Window) -> Window:
        """Add this rank's facts of its loop to a window."""
        loop = dict(self._settings)
        with self.boundary.guard("Facts about this loop"):
            if self._phases is not None:
                loop["optimizer"] = self._phases.optimizer or None
            if self._places is not None:
                loop["places"] = self._places.take(max(1, window.readings["num_steps"]), window.readings["wall_s"])
            torch = sys.modules.get("torch")
            loop["anomaly_mode"] = None if torch is None else bool(torch.is_anomaly_enabled())
        return replace(window, readings={**window.readings, **loop})

    def _opens(self) -> bool:
        """Open the parts that windows need; returns whether steps are kept one by one, for several ranks to sum up."""
        return False

    def count(
        self,
        batch: Any,
        *,
        forward_only: bool = False,
        cost_model: CostModel | None = None,
        input_gradients: Sequence[str] | None = None,
    ) -> None:
        """Add the work of one forward of a step, and of its backward.

        Of ranks that work on a batch together the first counts it; on the others it is known to profiles alone.

        Args:
            batch: a `Workload`, the forward's arguments by name (see `workload_of`), or a `Generation`, which has no
                backward and whose time is that of the phase around it.
            forward_only: it has no backward, as that of a reference model. Its tokens are then not counted again.
            cost_model: one of `others` where it is not the trained model's; its tokens are not counted again either.
            input_gradients: names of the arguments that require a gradient, since something in front of the model is
                trained (see `CostModel.with_input_gradients`); those of the batch's tensors that do when None.

        Raises:
            UsageError: the cost model is not one of `others`.
            WorkloadError: the batch does not say what it computes, or the cost model what an input's gradient costs.
        """
        phase = self._phase_clock.current
        if not self.has_started or self._run is not None:
            self.start()
        leaves = None if self._leaves is None else self._leaves()
        if leaves is not None:
            self.follow(leaves)
        forward_only = forward_only or isinstance(batch, Generation) or (phase is not None and phase.forward_only)
        ledger = self.cost_model
        if cost_model is not None:
            ledger = self.models[self._place_of(cost_model)]
        if input_gradients is None:
            input_gradients = () if isinstance(batch, Workload | Generation) else input_gradients_of(batch)
        gradients = () if forward_only else tuple(input_gradients)
        trained = None
        if cost_model is None and not forward_only and leaves is not None:
            trained = leaves.mask(ledger, leaves.trained)
        if gradients:
            ledger.with_input_gradients(gradients)  # refuses those that it does not know
        work = batch if isinstance(batch, Workload) else read_or_copy(batch, ledger)
        billed = self.billing(phase, ledger, forward_only=forward_only, input_gradients=gradients, trained=trained)
        self.bill(work, billed)

    def bill(self, work: Any, billed: Billing) -> None:
        """Add a forward to the step, as `read_or_copy` left it, perhaps after its phase."""
        if not self.has_started or self._run is not None:
            self.start()
        self._batches.append((work, billed))

    def billing(
        self,
        phase: NamedPhase | None,
        cost_model: CostModel,
        *,
        forward_only: bool,
        input_gradients: tuple[str, ...] = (),
        trained: int | None = None,
        **ran: Any,
    ) -> Billing:
        """Make the rule by which a forward is billed; `ran` is the rest of it."""
        which = 0 if cost_model is self.models[0] else self._place_of(cost_model)
        forward_only = forward_only or (phase is not None and phase.forward_only)
        if trained is not None and not forward_only:
            ledger = cost_model.with_input_gradients(input_gradients)
            trained = None if trained == ledger.trained else ledger.training(trained).trained
        return Billing(
            which,
            forward_only,
            () if forward_only else input_gradients,
            elsewhere=not self.batch_share.is_first,
            own=which in self._own,
            counts_tokens=self._counts_tokens,
            phase=REST if phase is None else phase.name,
            is_timed=phase is None or not phase.forward_only,
            trained=None if forward_only else trained,
            recompute=self.recompute,
            **ran,
        )

    @property
    def model(self) -> Any:
        """The model whose forwards run here; None if the meter has a cost model alone."""
        return None if self._forwards is None else self._forwards.model

    def _place_of(self, cost_model: Any) -> int:
        for place, candidate in enumerate(self.models):
            if candidate is cost_model:
                return place
        if not isinstance(cost_model, CostModel):
            raise UsageError(
                f"cost_model={type(cost_model).__name__}: count takes a cost model. A module in Meter(others=[...]) is "
                "counted by itself; give a pair (module, headway.trace(module)) to count its batches yourself."
            )
        raise UsageError(
            f"this meter does not know the cost model {cost_model.name}: pass it to Meter as others=[...]."
        )

    def _ended_step(self, skipped: bool, extra: dict[str, float], num_warmup_steps: int) -> PendingStep:
        """End a step, whose numbers wait until the device has passed it."""
        for watch in self._watches if self.failure is None else ():
            try:
                if watch.counts:
                    watch.settle()
                else:
                    self._batches = as_they_ran(self._batches, watch.take(), self.models)
            except Exception as error:  # noqa: BLE001 - a forward that cannot be counted ends the numbers, not the loop
                self.stop_counting(error)
        if self.second_backward:
            name, self.second_backward = self.second_backward, ""
            self._warn_once(f"a second backward goes through a forward of {name}, which is counted with one alone.")
        time = self._end_step(self.num_steps)
        self.num_steps += 1
        if self.num_steps == 1 and (slow := slow_code_of(self.model)):  # one warning, however many there are
            self._warn_once(" ".join(row.text for row in slow))
        if not self._batches and self.failure is None and not time.compiled:
            self._warn_of_no_batch()
        left_out = time.compiled or self.num_steps <= num_warmup_steps
        forwards = [] if self._forwards is None else self._forwards.take()
        step = PendingStep(self.num_steps, time, forwards, skipped, left_out, self._batches, extra)
        self._pending.steps.append(step)
        self._batches = []
        if self._energy is not None:
            self._energy.step(left_out=left_out and not self.by_messages)
        if self.watchers:
            self._tell_watchers("took", step)
        return step

    def _warn_of_slow_loop(self, window: Window) -> None:
        """Warn of code that the first window with a second step shows to be slow on a device."""
        if self._has_looked_at_loop or window.step < 2 or self.device is None or self.device.type != "cuda":
            return
        self._has_looked_at_loop = True
        patches = ratio(window.readings.get("patches", 0), window.num_batches) or 0.0
        if slow := slow_code_of_loop(patches, self.num_workers, window.data_wait_share):
            self._warn_once(" ".join(row.text for row in slow))

    def _warn_of_no_batch(self) -> None:
        names = [watch.name for watch in self._watches if watch.counts]
        advice = (
            "call count(batch) for each micro-batch, or count(Workload()) where this rank has none. With "
            "Meter(model, watch=True) a model's forwards are counted by themselves."
        )
        if names:  # models that are counted by themselves
            advice = f"no forward of {names[0]} was seen. Call the model that the meter was given, not a part of it."
        text = f"step {self.num_steps} ends without a batch and counts as one without work: {advice}"
        self._warn_once(text, UserWarning, about="batches")

    @property
    def _step(self) -> int:
        """Number of the last step that the device is known to have passed."""
        return self.steps_before + self.num_steps - len(self._pending.steps)

    def _with_readings(self, sums: Sums) -> tuple[int, Sums]:
        """Add energy and state of the device to sums of steps; returns the largest memory so far too [bytes], or 0."""
        if self._energy is None:
            sums[WHOLE, "num_without_energy"] += 1
        else:
            self._energy.add_to(sums)
        core_wait_ns = self._core_waited()
        if sums[WHOLE, "num_steps"]:  # steps that are left out count no waits
            sums[WHOLE, "core_wait_ns"] += core_wait_ns
        if self._sampler is not None:
            self._sampler.add_to(sums)
        largest = 0
        with self.boundary.guard("The peak of this rank's memory"):
            largest = largest_memory(self.device)
        return largest, sums

    @abstractmethod
    def log(self) -> Window | None:
        """Add up the steps that no window has yet."""

    @abstractmethod
    def _warn(self, window: Window | None) -> None: ...

    def close(self) -> Window:
        """Wait for the device once and return the run: all counted steps of all ranks. The meter is then done.

        Where there are none, that is a warning, and the run is a window of 0 steps without any rate.
        """
        if self._run is not None:
            return self._run
        self._finish()
        self._tell_watchers("stop")
        self.log()
        self.abandon()
        run = self._tally.run(self._step, self._pending.extra)
        if not run.num_steps and self.failure is None:
            warnings.warn(
                f"there is nothing to sum up: of {self.num_steps} steps, all were warm-up or compiled something. Run "
                "more steps, or lower num_warmup_steps.",
                stacklevel=2,
            )
        self._run = run
        self._warn(run)
        return run

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None and self.num_steps:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the model, files and other ranks without summing up, as after an error."""
        if self._places is not None:
            self._places.close()
        if self._forwards is not None:
            self._forwards.close()
        for watch in self._watches:
            watch.close()
        self._stop()
