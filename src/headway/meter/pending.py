"""Steps on their way from a loop to its log: held until the device has passed them, then added up."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headway.count import CostModel, FlopCount, Generation, Workload
from headway.count.cost_model import By
from headway.errors import HeadwayError
from headway.meter.batches import workload_of
from headway.meter.clock import Mark, Span
from headway.meter.goodput import Goodput
from headway.meter.memory_traffic import ForwardTraffic, Traffic
from headway.meter.step_clock import StepTime
from headway.meter.step_phases import REST
from headway.meter.tally import AWAY_FOR, NS, WHOLE, Sums, add_count, add_quantities, added, left_out

_MOST = 128  # batches, or steps that another rank may leave out, after which they are added up without a log
_FEW = 8  # other steps: objects that live long make Python's garbage collections long


class Billing(NamedTuple):
    """Rule by which a batch is billed."""

    model: int = 0  # number of the model that computed the batch; 0 is the trained one
    forward_only: bool = False  # whether there is no backward
    input_gradients: tuple[str, ...] = ()  # names of its arguments that require a gradient
    elsewhere: bool = False  # another rank, which works on the batch too, counts it
    own: bool = True  # whether the model is the trained one, or a part of it
    counts_tokens: bool = True  # whether its tokens are counted here, not by another stage of a pipeline
    phase: str = REST  # named phase that it is counted in
    is_timed: bool = True  # whether the forward is one of those that `ForwardTimer` times
    trained: int | None = None  # bits of the parameters that are given a gradient; None for those of the ledger
    dropped: frozenset[str] = frozenset()  # blocks that the forward leaves out
    backward_only: bool = False  # whether the forward was counted before
    recompute: str = "none"  # blocks of the trained model that checkpointing runs again
    has_rerun: bool = False  # whether its backward has run the whole forward again

    @property
    def trains(self) -> bool:
        """True if the batch trains the model: its own forward, with a backward."""
        return self.own and not self.forward_only

    def flops(self, workload: Workload, cost_models: Sequence[CostModel], by: By = "component") -> FlopCount:
        """Count the FLOPs of a workload under this billing, recomputation of the trained model included."""
        cost_model = cost_models[self.model].with_input_gradients(self.input_gradients)
        if self.trained is not None:
            cost_model = cost_model.training(self.trained)
        again = self.recompute
        if not self.trains or (self.model and not any(row.block for row in cost_model.rows)):
            again = "none"
        cost_model = cost_model.without_blocks(self.dropped)
        count = cost_model.count(workload, recompute=again, forward_only=self.forward_only, by=by)
        rows = count.rows
        if self.has_rerun:
            rows = tuple(replace(row, recompute=row.recompute + row.forward) for row in rows)
        if self.backward_only:
            rows = tuple(replace(row, forward=0) for row in rows)
        return FlopCount(rows)


def as_they_ran(
    batches: list[tuple[Any, Billing]], forwards: Sequence[Any], models: Sequence[CostModel]
) -> list[tuple[Any, Billing]]:
    """Bill a loop's counted batches as their forwards ran, if there are as many batches as forwards.

    Args:
        batches: what the loop counted.
        forwards: of the trained model, each a `Forward`.
        models: the meter's ledgers.
    """
    forwards = [forward for forward in forwards if forward.has_gradients]
    if sum(billed.trains for _, billed in batches) != len(forwards):
        return batches
    queue = iter(forwards)
    return [(work, _as_it_ran(billed, next(queue), models) if billed.trains else billed) for work, billed in batches]


def _as_it_ran(billed: Billing, forward: Any, models: Sequence[CostModel]) -> Billing:
    ledger = models[billed.model].with_input_gradients(billed.input_gradients)
    trained = forward.trained_of(ledger) if forward.has_backward else None
    if trained is not None:
        trained = None if trained == ledger.trained else ledger.training(trained).trained
    return billed._replace(forward_only=not forward.has_backward, trained=trained, dropped=forward.dropped)


@dataclass(slots=True)
class PendingStep:
    """One step as it was noted down."""

    number: int  # number of the step, from 1
    time: StepTime  # end of the step, and the times since the end before
    forwards: list[tuple[Span, list[Span]]]  # forwards of the model, each with its waits for other ranks
    skipped: bool  # whether the update was left out
    left_out: bool  # warm-up, or some rank compiled something in it
    batches: list[tuple[Any, Billing]]  # batches, and the rules by which they are billed
    extra: Mapping[str, Any]  # the loop's own numbers
    profiled: bool = False  # whether it was recorded, which makes it slower


class PendingSteps:
    """Adds steps up once the device has passed them, and never waits for it.

    Args:
        cost_models: cost rows of the model that is trained, and of the others that its steps run.
        start: where the first step begins.
        traffic: what this rank must move; None where it is not asked for.
        forwards: what forwards without a backward must move, by the model's place; of models of which it is known.
        elsewhere: named phases that have devices of their own.
        goodput: the run's ledger, which is told what the device did while the host waited for data.
        on_error: told of a batch that cannot be read, which then counts nothing; None lets the error through.
        keeps_steps: whether steps stay apart until `take`, since another rank may still have one of them left out.
    """

    def __init__(
        self,
        cost_models: Sequence[CostModel],
        start: Mark,
        traffic: Traffic | None = None,
        goodput: Goodput | None = None,
        *,
        forwards: Mapping[int, ForwardTraffic] | None = None,
        elsewhere: Container[str] = (),
        on_error: Callable[[Exception], None] | None = None,
        keeps_steps: bool = False,
    ) -> None:
        self.extra: dict[str, Any] = {}
        self._cost_models = cost_models
        self._last_end = start
        self._traffic, self._forwards = traffic, forwards or {}
        self._elsewhere = elsewhere
        self._goodput = goodput
        self._updates = [0, 0]  # steps since FLOPs were last counted, and how many of them skipped theirs
        self.steps: deque[PendingStep] = deque()
        self._keeps_steps, self._on_error = keeps_steps, on_error
        self._added_up: dict[int, Sums] = {}  # by the step's number
        self._work: defaultdict[Billing, list[Workload | Generation]] = defaultdict(list)
        self._sums = Sums()
        self._totals: defaultdict[str, int] = defaultdict(int)  # the same of whole steps, by quantity

    def add_up(self) -> None:
        """Add up the steps that the device has passed, if there are many: a log that takes them may never come."""
        if len(self.steps) < (_MOST if self._keeps_steps else _FEW):
            return
        if not self._keeps_steps:
            self._collect()
            return
        for step in self._passed():
            self._take_in(step, counted=not step.left_out)
            self._added_up[step.number] = self._counted()

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Leave steps out that have not been taken yet."""
        chosen = set(numbers)
        for step in self.steps:
            step.left_out = step.left_out or step.number in chosen
        self._added_up.update({n: left_out(sums) for n, sums in self._added_up.items() if n in chosen})

    def take(self) -> Sums:
        """Return the sums of the steps that the device has passed, with left-out steps aside, and start over."""
        self._collect()
        sums = added([self._counted(), *self._added_up.values()])
        self._added_up.clear()
        return sums

    def take_each(self) -> list[Sums]:
        """Return the sums of each step that the device has passed, left-out steps included, and start over."""
        sums_of_steps = []
        for step in self._passed():
            self._take_in(step, counted=True)
            sums = self._counted()
            sums[WHOLE, "num_left_out"] = int(step.left_out)
            sums_of_steps.append(sums)
        return sums_of_steps

    def _passed(self) -> Iterator[PendingStep]:
        while self.steps and self.steps[0].time.end.has_passed():
            yield self.steps.popleft()

    def _collect(self) -> None:
        for step in self._passed():
            self._take_in(step, counted=not step.left_out)
        if sum(map(len, self._work.values())) >= _MOST:
            self._sums = self._counted()

    def _take_in(self, step: PendingStep, *, counted: bool) -> None:
        sums, totals, time = self._sums, self._totals, step.time
        # a step lasts from the end of the one before, time away taken out
        wall_ns = max(0, round((time.end.seconds_since(self._last_end) - time.away_s) * NS))
        wait_ns = round(sum([wait.seconds for wait in time.waits]) * NS)
        if self._goodput is not None and time.waits:  # goodput has charged all the host's waiting to data
            waited_ns = round(sum([wait.end.host_s - wait.begin.host_s for wait in time.waits]) * NS)
            if waited_ns > wait_ns:  # while the host waited for data, the device still computed
                self._goodput.move("data wait", "step", waited_ns - wait_ns)
        self._last_end = time.end
        self.extra = dict(step.extra)
        for bucket, away_s in time.away_for_s.items():
            if bucket in AWAY_FOR:
                totals[f"{bucket}_ns"] += round(away_s * NS)
        if not counted:
            totals["num_left_out"] += 1
            totals["left_out_ns"] += wall_ns
            return
        # batches whose tokens another rank counts are empty here
        scored: dict[str, Counter[int]] = defaultdict(Counter)  # tokens of frozen models, by phase and model
        for batch, billed in step.batches:
            work = batch if isinstance(batch, Workload) and not billed.elsewhere else self._work_of(batch, billed)
            self._work[billed].append(work)
            totals["num_batches"] += billed.trains and billed.counts_tokens
            if billed.model and billed.forward_only and isinstance(work, Workload):
                scored[billed.phase][billed.model] += work.tokens
        totals["wall_ns"] += wall_ns
        totals["data_wait_ns"] += min(wait_ns, wall_ns)
        totals["away_ns"] += round(time.away_s * NS)
        # busy: inside of forwards and backwards, without waits for data in them
        busy_s = sum([span.seconds - sum([wait.seconds for wait in waits]) for span, waits in step.forwards])
        totals["busy_ns"] += round(busy_s * NS)
        totals["collection_ns"] += round(time.collection_s * NS)
        totals["num_profiled"] += step.profiled
        self._take_phases(step, wall_ns)
        for phase, tokens in scored.items():
            sums[phase, "scored_tokens"] += max(tokens.values())
        totals["num_steps"] += 1
        totals["num_skipped"] += step.skipped
        self._updates[0] += 1
        self._updates[1] += step.skipped

    def _work_of(self, batch: Any, billed: Billing) -> Workload | Generation:
        """Read the work of a batch, on the rank that counts it."""
        if billed.elsewhere:
            return Workload()
        if isinstance(batch, Generation):
            return batch
        try:
            return workload_of(batch, self._cost_models[billed.model])
        except HeadwayError as error:
            if self._on_error is None:
                raise
            self._on_error(error)
            return Workload()

    def _take_phases(self, step: PendingStep, wall_ns: int) -> None:
        """Add the times of the phases that the loop names, of the rest, and of a sampled step's own phases."""
        sums, time, phases, rest_ns = self._sums, step.time, step.time.phases, wall_ns
        for name, span in time.phase_times.spans:
            span_ns = round(span.seconds * NS)
            sums[name, "wall_ns"] += span_ns
            rest_ns -= span_ns
        sums[REST, "wall_ns"] += max(0, rest_ns)
        for name, busy_s in time.phase_times.busy_s.items():
            sums[name, "devices_ns"] += round(busy_s * NS)
        if phases is None:
            return
        billed = [billed for _, billed in step.batches if billed.own and billed.is_timed]
        scored = sum(of_batch.forward_only for of_batch in billed)
        # A generation is counted as a whole, whose forwards nobody numbers.
        scored = phases.passes.num_scorings if any(isinstance(work, Generation) for work, _ in step.batches) else scored
        for name, (number, seconds) in phases.extra(sum(of_batch.trains for of_batch in billed), scored).items():
            sums[WHOLE, f"extra_{name}"] += number
            sums[WHOLE, f"extra_{name}_ns"] += round(seconds * NS)
        if not phases.is_whole:
            return
        sums[WHOLE, "num_sampled"] += 1
        for phase, seconds in phases.seconds().items():
            sums[WHOLE, f"{phase}_phase_ns"] += round(seconds * NS)
        if phases.even is not None:
            lead_s, host_s = phases.lead(phases.even)
            sums[WHOLE, "lead_ns"] += max(1, round(lead_s * NS))  # at least 1 ns, since 0 is a CPU's
            sums[WHOLE, "host_ns"] += round(host_s * NS)

    def _counted(self) -> Sums:
        """Count the work that waits, and give the sums so far; new ones begin."""
        sums, self._sums = self._sums, Sums()
        sums.update({(WHOLE, name): number for name, number in self._totals.items()})
        self._totals.clear()
        for billed, work in self._work.items():
            workloads = [item.workload if isinstance(item, Generation) else item for item in work]
            workload = Workload.total(workloads)
            count = billed.flops(workload, self._cost_models)
            # FLOPs of the ranks' own devices; tokens that the model learns from
            is_here, trains = billed.phase not in self._elsewhere, billed.trains and billed.counts_tokens
            if is_here and billed.is_timed and billed.own:
                sums[WHOLE, "busy_flops"] += count.forward
            if trains:
                silent = sum(1 for item in workloads if item.tokens and not item.knows_supervised)
                sums[WHOLE, "num_without_labels"] += silent
            # all that a phase computes
            add_count(sums, (WHOLE, billed.phase) if is_here else (billed.phase,), count)
            if not billed.counts_tokens:
                continue
            add_quantities(sums, (WHOLE, billed.phase) if trains else (billed.phase,), workload)
            for item in work:
                if isinstance(item, Generation):
                    for name, number in item.quantities().items():
                        sums[billed.phase, name] += number
        if self._traffic is not None or self._forwards:
            self._count_bytes(sums)
        self._work.clear()
        self._updates = [0, 0]
        return sums

    def _count_bytes(self, sums: Sums) -> None:
        """Add the bytes that each phase moved, as far as they are known, and all of them where training's are."""
        moved: dict[str, int] = {}
        trains = {billed.phase for billed in self._work if billed.trains}
        for billed, work in self._work.items():
            if not billed.trains and (forwards := self._forwards.get(billed.model)) is not None:
                moved[billed.phase] = moved.get(billed.phase, 0) + _moved_forward(forwards, work)
                sums[billed.phase, "weight_bytes"] += sum(
                    forwards.weights_of_generation(item) for item in work if isinstance(item, Generation)
                )
        if self._traffic is not None and self._updates[0]:
            phase = trains.pop() if len(trains) == 1 else REST  # an update's bytes are those of all phases that train
            moved[phase] = moved.get(phase, 0) + self._moved_in_training(self._traffic)
            sums[WHOLE, "bytes_moved"] += sum(
                num_bytes for name, num_bytes in moved.items() if name not in self._elsewhere
            )
        for name, num_bytes in moved.items():
            sums[name, "bytes_moved"] += num_bytes

    def _moved_in_training(self, traffic: Traffic) -> int:
        trained = [
            item
            for billed, work in self._work.items()
            for item in work
            if billed.trains and isinstance(item, Workload) and not billed.backward_only
        ]
        steps, skipped = self._updates
        return traffic.bytes_of(
            Workload.total(trained),
            num_batches=max(len(trained), steps),
            num_with_towers=sum(w.runs_towers for w in trained),
            num_steps=steps,
            num_skipped=skipped,
        ).total


def _moved_forward(traffic: ForwardTraffic, work: Sequence[Workload | Generation]) -> int:
    """Count the bytes of forwards without a backward."""
    batches = [item for item in work if isinstance(item, Workload)]
    generated = sum(traffic.of_generation(item) for item in work if isinstance(item, Generation))
    return generated + traffic.of_forwards(len(batches), sum(item.runs_towers for item in batches))
