"""Times of steps: begin, end, waits, and time away from training: every second of a loop in one place."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

from headway.devices import Peak
from headway.errors import UsageError
from headway.log.boundary import ErrorBoundary
from headway.meter import clock as meter_clock
from headway.meter.clock import ForwardTimer, Mark, Span
from headway.meter.energy import StateSampler, WindowEnergy
from headway.meter.environment import Compilation
from headway.meter.goodput import Goodput
from headway.meter.goodput_report import Bucket
from headway.meter.pauses import CollectionTimer
from headway.meter.phases import PhaseTimer, StepPhases
from headway.meter.step_phases import NamedPhase, PhaseClock, PhaseDevices, PhaseTimes
from headway.meter.tally import NS

_PHASES = ("evaluation", "checkpoint")  # buckets that watchers are told of as phases


class StepTime(NamedTuple):
    """The time of one step, which began at the end of the one before."""

    end: Mark
    away_s: float  # time within it that was not training, by the host's clock [s]
    away_for_s: Mapping[str, float]  # the same by bucket, such as "compile" [s]
    waits: list[Span]  # waits for data
    phase_times: PhaseTimes  # phases that the loop names
    phases: StepPhases | None  # phases of a sampled step; None for others
    collection_s: float  # time of Python's garbage collections [s]
    compiled: bool  # whether something was compiled in it


class LoopWatcher:
    """Hears from a meter what its loop does, as one of its `watchers`; this class does nothing about it.

    Attributes:
        waiting: watchers of whichever meter starts next in this process.
        product: what the loop loses if the watcher fails.
    """

    waiting: ClassVar[list["LoopWatcher"]] = []
    product: ClassVar[str] = "what a watcher of this loop makes"

    def start(self, meter: Any) -> None:
        """Note that the clock of a meter has started."""

    def begin(self, phase: str) -> None:
        """Note that a phase begins, such as "data_wait"; the phase before ends."""

    def end(self, phase: str) -> None:
        """Note that a phase ends, if it is the one that lasts."""

    def enter(self, name: str) -> None:
        """Note that a phase begins that the loop names; a phase within another interrupts it."""

    def leave(self) -> None:
        """Note that the innermost phase ends that the loop names."""

    def took(self, step: Any) -> None:
        """Note that a step has ended, a `PendingStep`, and that the next one begins."""

    def stop(self) -> None:
        """Note that the loop has ended without an error, and the device is done."""

    def give_up(self) -> None:
        """Let go of everything, after an error of this watcher's own."""


class StepClock:
    """Times the steps of a loop without a gap, and keeps its goodput along with them.

    A step lasts from the end of the one before to its own end on the device's clock, less what is charged to something
    else: an evaluation, a checkpoint, compiling. The device is waited for only where the loop leaves training and comes
    back; so its lag behind the host is the steps', and the host's clock and the device's agree on what lies between.

    Args:
        device: a `torch.device`, or None for the CPU.
        goodput: ledger of the run's time, moved between its buckets as the loop goes.
        clock: the host's monotonic clock [s]; `headway.meter.clock`'s when None.

    Attributes:
        boundary: around all that only observes the loop.
    """

    def __init__(self, device: Any, goodput: Goodput | None, clock: Callable[[], float] | None) -> None:
        self.device = device
        self.goodput = goodput
        self.has_started = False
        self.boundary = ErrorBoundary()
        self.watchers: list[LoopWatcher] = []
        self._clock = clock or meter_clock.now_s
        self._energy: WindowEnergy | None = None  # None without a GPU
        self._sampler: StateSampler | None = None  # None before the start
        self._phases: PhaseTimer | None = None
        self._forwards: ForwardTimer | None = None  # None where there is no module
        self.peak: Peak
        self.num_workers: int | None = None  # workers of the loader; None if they are not known
        self._phase_clock = PhaseClock(self._mark)
        self._collections = CollectionTimer(self._clock)
        self._compilation = Compilation(self._compiling, self._compiled)
        self._core_wait: meter_clock.CoreWait | None = None  # clock of the loop's thread, if it computes itself
        # waits for a core [ns] until the step began, and of the step before the loop left training
        self._core_waited_ns = self._core_left_ns = 0
        self._compile_span: AbstractContextManager[None] | None = None
        self._waits: list[Span] = []
        self._waits_since: Mark | None = None
        self._left_s: float | None = None
        self._left_for: Bucket | None = None
        self._away_for_s: dict[str, float] = {}
        self._queue = device if device is not None and device.type == "cuda" else None
        self._last = self._mark()

    def start(self) -> None:
        """Start the clock, once the device has finished its earlier work."""
        self.has_started = True
        if self.device is not None and self.device.type == "cuda":
            self._energy = WindowEnergy(self.device, self.boundary)
        else:
            self._core_wait = meter_clock.CoreWait()
            self._core_waited()
        with self.boundary.guard("The state of this rank's device and processor"):
            self._sampler = StateSampler(self._energy, self.boundary, self._clock)
        self._mark().wait()
        self._last = self._mark()
        self._charge("step")
        self._compilation.watch()
        self._collections.start()
        if self._phases is not None:
            self._phases.next_step(1, self._last, 0.0)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader, noting how long the loop waits for each batch."""
        self.num_workers = getattr(loader, "num_workers", None)
        self.await_data()  # workers may have to be started
        iterator = iter(loader)
        while True:
            self.await_data()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.got_data()
            yield batch

    def await_data(self) -> None:
        """Note that the loop waits for data from now on, until `got_data`; `batches` does so by itself."""
        if not self.has_started:
            self.start()
        self.back()
        self.got_data()
        self._waits_since = self._mark()
        if self._phases is not None:
            self._phases.begin("data", self._waits_since)
        self._charge("data wait")
        if self.watchers:
            self._tell_watchers("begin", "data_wait")

    def got_data(self) -> None:
        """Note that the loop has its batch; without an `await_data` before, nothing happens."""
        if self._waits_since is None:
            return
        end = self._mark()
        self._waits.append(Span(self._waits_since, end))
        self._waits_since = None
        if self._phases is not None:
            self._phases.end("data", end)
        self._charge("step")
        if self.watchers:
            self._tell_watchers("end", "data_wait")

    def exchanging(self) -> AbstractContextManager[None]:
        """Note that ranks wait for each other within a block, so that it is no rank's own time."""
        return nullcontext() if self._phases is None else self._phases.within_gap("exchange")

    def leave(self, bucket: Bucket = "evaluation") -> None:
        """Leave the time from now until `back` out of the steps' time, as no training. Waits for the device.

        Args:
            bucket: what it is in the run's goodput, such as "evaluation" or "checkpoint".
        """
        self.start()
        self.got_data()
        self.back()
        mark = self._mark()
        mark.wait()  # until then the device is busy with steps
        self._phase_clock.interrupt(mark)
        if self._phases is not None:
            self._phases.leave(mark)
        self._left_s, self._left_for = self._clock(), bucket
        self._core_left_ns = self._core_waited()
        if self._energy is not None:
            self._energy.leave()
        self._charge(bucket)
        if bucket in _PHASES:
            self._tell_watchers("begin", bucket)

    def back(self) -> None:
        """Go on with training, once the device has finished the work in between; without a `leave`, nothing happens."""
        if self._left_s is None:
            return
        self._mark().wait()
        mark = self._mark()
        self._phase_clock.resume(mark)
        if self._phases is not None:
            self._phases.back(mark)
        bucket = str(self._left_for)
        self._away_for_s[bucket] = self._away_for_s.get(bucket, 0.0) + self._clock() - self._left_s
        self._core_waited()  # waits while away are no step's
        self._core_waited_ns -= self._core_left_ns
        if bucket in _PHASES:
            self._tell_watchers("end", bucket)
        self._left_s = self._left_for = None
        if self._energy is not None:
            self._energy.back()
        self._charge("step")

    @property
    def is_away(self) -> bool:
        """True if the loop does something else than training, from a `leave` to its `back`."""
        return self._left_s is not None

    @property
    def phase_devices(self) -> dict[str, PhaseDevices]:
        """The named phases that have devices of their own."""
        return self._phase_clock.devices

    @property
    def current_phase(self) -> NamedPhase | None:
        """The named phase that the loop is in; None without one."""
        return self._phase_clock.current

    @contextmanager
    def phase(
        self,
        name: str,
        *,
        forward_only: bool = False,
        peak: Peak | None = None,
        num_devices: int | None = None,
        memory_bytes_per_s: float = math.nan,
    ) -> Iterator[NamedPhase]:
        """Name the part of a step within a block, such as "rollout", "reference" or "update".

        Windows tell the time, FLOPs, MFU and MBU of each; one may come several times in a step, and one within another
        interrupts it. Ranks need not name the same ones. Nothing waits for the device.

        Args:
            name: of the phase.
            forward_only: nothing in it has a backward. Forwards within it are then not timed one by one.
            peak: of one of the phase's own devices, where it does not run on those of the ranks; the meter's when None.
            num_devices: number of the phase's own devices, of all ranks together; None where it has none.
            memory_bytes_per_s: memory bandwidth of one of them [B/s].

        Returns:
            The phase. Set its `busy_s` where its own devices tell how long they worked.

        Raises:
            UsageError: a name that is taken, a peak without a number of devices.

        >>> with meter.phase("rollout", forward_only=True):                       # doctest: +SKIP
        ...     answers = generate(prompts)
        ...     meter.count(Generation(prompt_lengths, answer_lengths, batch_size=64))
        """
        if num_devices is None and (peak is not None or not math.isnan(memory_bytes_per_s)):
            raise UsageError(
                f"the phase {name!r} has a peak or bandwidth of its own: say num_devices=, how many devices."
            )
        if num_devices is not None and num_devices < 1:
            raise UsageError(f"num_devices={num_devices}: a phase with devices of its own has 1 or more.")
        devices = None if num_devices is None else PhaseDevices(peak or self.peak, num_devices, memory_bytes_per_s)
        self.start()
        phase = NamedPhase(name, forward_only, devices)
        self._phase_clock.enter(phase)
        self._pause(phase)
        self._tell_watchers("enter", name)
        try:
            yield phase
        finally:
            self._tell_watchers("leave")
            self._phase_clock.leave()
            self._resume(phase)

    def _pause(self, phase: NamedPhase) -> None:
        """Stop timing forwards one by one in a phase without a backward."""
        if not phase.forward_only:
            return
        if self._forwards is not None:
            self._forwards.pause()
        if self._phases is not None:
            self._phases.begin("inference")

    def _resume(self, phase: NamedPhase) -> None:
        outer = self.current_phase
        if not phase.forward_only or (outer is not None and outer.forward_only):
            return
        if self._forwards is not None:
            self._forwards.resume()
        if self._phases is not None:
            self._phases.end("inference")

    @property
    def is_compiling(self) -> bool:
        """Tell whether something compiles in the middle of training."""
        return self._left_for == "compile"

    def _compiling(self, _what: Any) -> None:
        """Charge compilation that begins now, in the middle of a step, an evaluation or a checkpoint."""
        if self._left_s is None:
            self._compile_span = self.away("compile")
        else:
            self._compile_span = nullcontext() if self.goodput is None else self.goodput.bucket("compile")
        self._compile_span.__enter__()

    def _compiled(self, _what: Any) -> None:
        if self._compile_span is not None:
            span, self._compile_span = self._compile_span, None
            span.__exit__(None, None, None)

    @contextmanager
    def away(self, bucket: Bucket = "evaluation") -> Iterator[None]:
        """Leave a block out of the steps' time, and go on with the interrupted step, wait or evaluation."""
        left_for, waited = self._left_for, self._waits_since is not None
        self.leave(bucket)
        try:
            yield
        finally:
            if left_for is not None:
                self.leave(left_for)
            elif waited:
                self.await_data()
            else:
                self.back()

    def _end_step(self, num_steps: int) -> StepTime:
        self.got_data()
        self.back()
        end = self._mark()  # a clock that has stepped back, as some virtual machines' do, makes a step of no time
        last_s = end.host_s - self._last.host_s
        time = StepTime(
            end,
            sum(self._away_for_s.values()),
            self._away_for_s,
            self._waits,
            self._phase_clock.take(end),
            None if self._phases is None else self._phases.next_step(num_steps + 2, end, last_s),
            self._collections.take(),
            self._compilation.happened(),
        )
        self._waits, self._away_for_s, self._last = [], {}, end
        return time

    def _core_waited(self) -> int:
        """Time for which the loop's thread has waited for a core since the last call [ns]."""
        if self._core_wait is None:
            return 0
        before, self._core_waited_ns = self._core_waited_ns, self._core_wait.read_ns()
        return max(0, self._core_waited_ns - before)

    def _finish(self) -> None:
        """Wait for the device, and charge the time since the last step as idle."""
        self.got_data()
        self.back()
        end = self._mark()
        end.wait()
        if self.goodput is not None:
            waited_s = sum(wait.end.host_s - wait.begin.host_s for wait in self._waits)
            away_s = sum(self._away_for_s.values())
            self.goodput.move("data wait", "step", round(waited_s * NS))
            self.goodput.move("step", "idle", round((end.seconds_since(self._last) - away_s) * NS))

    def _stop(self) -> None:
        self._compilation.let_go()
        self._collections.close()
        if self._phases is not None:
            self._phases.close()
        self._charge("idle")

    def _tell_watchers(self, event: str, *args: Any) -> None:
        """Call a method of all watchers; a watcher that fails hears so, and nothing more."""
        for watcher in tuple(self.watchers):
            watches = False
            with self.boundary.guard(watcher.product):
                getattr(watcher, event)(*args)
                watches = True
            if not watches:
                self.watchers.remove(watcher)
                with self.boundary.guard(watcher.product):
                    watcher.give_up()

    def _mark(self) -> Mark:
        return meter_clock.Mark(self._queue, self._clock())

    def _charge(self, bucket: Bucket) -> None:
        if self.goodput is not None:
            self.goodput.switch(bucket)
