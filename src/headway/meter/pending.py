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
    from headway.meter.late import Arrival
    from headway.meter.traffic import Traffic

_MOST = 128  # steps, or batches, after which they are added up without waiting for a log that may never come


@dataclass(slots=True)
class Step:
    """One step as it was noted down.

    Attributes:
        wall_s: wall time, without what was not training [s].
        away_s: time within it that was not training [s].
        data_wait_s: part of `wall_s` that was spent waiting for data [s].
        skipped: its update was left out.
        left_out: warm-up, or it compiled something.
        batches: what was computed, whether without a backward, and by which of the models.
        end: its end in the device's queue.
        extra: the loop's own numbers.
    """

    wall_s: float
    away_s: float
    data_wait_s: float
    skipped: bool
    left_out: bool
    batches: list[tuple[Any, bool, int]]
    end: Arrival
    extra: Mapping[str, Any]


class PendingSteps:
    """Adds steps up once the device has passed them, and never waits for it.

    Args:
        cost_models: cost rows of the model that is trained, and of the others that its steps run.
        recompute: as `CostModel.count` takes it.
        start: where the first step begins in the device's queue.
        traffic: what this rank must move; None where it is not asked for.
    """

    def __init__(
        self, cost_models: Sequence[CostModel], recompute: str, start: Arrival, traffic: Traffic | None = None
    ) -> None:
        self.extra: dict[str, Any] = {}
        self._cost_models = cost_models
        self._recompute = recompute
        self._last_end = start
        self._traffic = traffic
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
        if len(self._steps) >= _MOST:
            self._collect()

    def wait(self) -> None:
        """Wait until the device has passed every step."""
        for step in self._steps:
            step.end.wait()

    def take(self) -> Sums:
        """Return the sums of the steps that the device has passed, and start over."""
        self._collect()
        self._count()
        sums, self._sums = self._sums, Sums(self._keys)
        return sums

    def sums(self, numbers: list[int]) -> Sums:
        """Read sums that another rank has listed."""
        return Sums(self._keys, numbers)

    def _collect(self) -> None:
        while self._steps and self._steps[0].end.has_come():
            self._take_in(self._steps.popleft())
            if sum(map(len, self._workloads.values())) >= _MOST:
                self._count()

    def _take_in(self, step: Step) -> None:
        totals = self._sums.totals
        wall_s = step.wall_s
        if step.end.timed:
            wall_s = max(step.end.seconds_since(self._last_end) - step.away_s, 0.0)
        self._last_end = step.end
        self.extra = dict(step.extra)
        if step.left_out:
            totals["num_left_out"] += 1
            return
        for batch, forward_only, which in step.batches:
            workload = batch if isinstance(batch, Workload) else workload_of(batch, self._cost_models[which])
            self._workloads[forward_only, which].append(workload)
            totals["num_batches"] += not forward_only and not which
        totals["wall_ns"] += round(wall_s * NS)
        totals["data_wait_ns"] += round(min(step.data_wait_s, wall_s) * NS)
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
