"""Steps on their way from a loop to its log: held until the device has passed them, then added up."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.count import Workload
from headway.meter.batches import workload_of
from headway.meter.sums import NS, Sums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headway.count import CostModel
    from headway.meter.busy import Span
    from headway.meter.clock import Mark
    from headway.meter.goodput import Goodput
    from headway.meter.step_clock import StepTime
    from headway.meter.traffic import Traffic

_MOST = 128  # steps, or batches, after which they are added up without waiting for a log that may never come


@dataclass(slots=True)
class Step:
    """One step as it was noted down.

    Attributes:
        time: when it ended, and what was in between.
        forwards: of the model, each with its waits for other ranks.
        skipped: its update was left out.
        left_out: warm-up, or it compiled something.
        batches: what was computed, whether without a backward, and by which of the models.
        extra: the loop's own numbers.
    """

    time: StepTime
    forwards: list[tuple[Span, list[Span]]]
    skipped: bool
    left_out: bool
    batches: list[tuple[Any, bool, int]]
    extra: Mapping[str, Any]


class PendingSteps:
    """Adds steps up once the device has passed them, and never waits for it.

    Args:
        cost_models: cost rows of the model that is trained, and of the others that its steps run.
        recompute: as `CostModel.count` takes it.
        start: where the first step begins.
        traffic: what this rank must move; None where it is not asked for.
        goodput: the run's ledger, which is told what the device did while the host waited for data.
    """

    def __init__(
        self,
        cost_models: Sequence[CostModel],
        recompute: str,
        start: Mark,
        traffic: Traffic | None = None,
        goodput: Goodput | None = None,
    ) -> None:
        self.extra: dict[str, Any] = {}
        self._cost_models = cost_models
        self._recompute = recompute
        self._last_end = start
        self._traffic = traffic
        self._goodput = goodput
        self._updates = [0, 0]  # steps since FLOPs were last counted, and how many of them skipped theirs
        self._keys = tuple(dict.fromkeys((row.component, row.driver) for model in cost_models for row in model.rows))
        self._steps: deque[Step] = deque()
        # by whether without a backward, and by which of the models
        self._workloads: defaultdict[tuple[bool, int], list[Workload]] = defaultdict(list)
        self._sums = Sums(self._keys)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> None:
        """Note a step down."""
        self._steps.append(step)

    def add_up(self) -> None:
        """Add up the steps that the device has passed, if there are many: a log that takes them may never come."""
        if len(self._steps) >= _MOST:
            self._collect()

    def take(self) -> Sums:
        """Return the sums of the steps that the device has passed, those that are left out aside, and start over."""
        self._collect()
        return self._take_sums()

    def take_each(self) -> list[Sums]:
        """Return the sums of each step that the device has passed, those that are left out as well, and start over."""
        found = []
        while self._steps and self._steps[0].time.end.has_passed():
            step = self._steps.popleft()
            self._take_in(step, counted=True)
            sums = self._take_sums()
            sums.totals["num_left_out"] = int(step.left_out)
            found.append(sums)
        return found

    def sums(self, numbers: Sequence[int]) -> Sums:
        """Read sums that another rank has listed."""
        return Sums(self._keys, numbers)

    def _take_sums(self) -> Sums:
        self._count()
        sums, self._sums = self._sums, Sums(self._keys)
        return sums

    def _collect(self) -> None:
        while self._steps and self._steps[0].time.end.has_passed():
            step = self._steps.popleft()
            self._take_in(step, counted=not step.left_out)
            if sum(map(len, self._workloads.values())) >= _MOST:
                self._count()

    def _take_in(self, step: Step, *, counted: bool) -> None:
        totals = self._sums.totals
        time = step.time
        wall_ns = max(0, round((time.end.seconds_since(self._last_end) - time.away_s) * NS))
        wait_ns = round(sum(wait.seconds for wait in time.waits) * NS)
        if self._goodput is not None:
            waited_ns = round(sum(wait.end.host_s - wait.begin.host_s for wait in time.waits) * NS)
            if waited_ns > wait_ns:  # while the host waited for data, the device still computed
                self._goodput.move("data wait", "step", waited_ns - wait_ns)
        self._last_end = time.end
        self.extra = dict(step.extra)
        if not counted:
            totals["num_left_out"] += 1
            totals["left_out_ns"] += wall_ns
            return
        for batch, forward_only, which in step.batches:
            workload = batch if isinstance(batch, Workload) else workload_of(batch, self._cost_models[which])
            self._workloads[forward_only, which].append(workload)
            totals["num_batches"] += not forward_only and not which
        totals["wall_ns"] += wall_ns
        totals["data_wait_ns"] += min(wait_ns, wall_ns)
        busy_s = sum(span.seconds - sum(wait.seconds for wait in waits) for span, waits in step.forwards)
        totals["busy_ns"] += round(busy_s * NS)
        totals["num_steps"] += 1
        totals["num_skipped"] += step.skipped
        self._updates[0] += 1
        self._updates[1] += step.skipped

    def _count(self) -> None:
        """Turn the workloads so far into FLOPs."""
        for (forward_only, which), workloads in self._workloads.items():
            workload = Workload.total(workloads)
            recompute = "none" if forward_only or which else self._recompute
            count = self._cost_models[which].count(workload, recompute=recompute, forward_only=forward_only)
            self._sums.add_count(count)
            self._sums.totals["busy_flops"] += 0 if which else count.forward
            if not forward_only and not which:
                self._sums.add_quantities(workload)
        if self._traffic is not None and self._updates[0]:
            self._sums.totals["bytes_moved"] += self._moved(self._traffic)
        self._workloads.clear()
        self._updates = [0, 0]

    def _moved(self, traffic: Traffic) -> int:
        """Count the bytes that the trained model's part of the steps so far moved at least."""
        trained, (steps, skipped) = self._workloads[False, 0], self._updates
        return traffic.bytes_of(
            Workload.total(trained),
            num_batches=max(len(trained), steps),
            num_with_towers=sum(bool(len(w.grids) or len(w.audio)) for w in trained),
            num_steps=steps,
            num_skipped=skipped,
            num_forward_only=len(self._workloads[True, 0]),
        ).total
