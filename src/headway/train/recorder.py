"""Finished steps become records: in metrics.jsonl, on the screen, and an error where a loss is not finite."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headway.checkpoint.folder import CHAIN, RESUMES, SKIPPED
from headway.data import Batch
from headway.errors import NotFiniteError
from headway.log.boundary import ErrorBoundary
from headway.log.records import StepRecord, known
from headway.log.run_files import write_json
from headway.meter import Window
from headway.models.compiling import Compilations
from headway.models.experts import RouterSummary
from headway.train.check import chained
from headway.train.objective import Objective
from headway.train.record import MetricsLog
from headway.train.share import StepShare
from headway.train.step_numbers import DeviceNumbers, StepNumbers


class LaunchedStep(NamedTuple):
    """A step whose numbers may still be on their way from the device.

    Attributes:
        step: its number.
        lr: its learning rate.
        epochs: how often the data have played by its end; None where that is not known.
        share: what all ranks computed.
        batches: this rank's packs.
        num_data_ranks: how many have equally many.
        compilations: of this rank.
        making_s: time that workers spent on this rank's packs, by part: read, decode, tokenise [s].
    """

    step: int
    lr: float
    epochs: float | None
    share: StepShare
    batches: Sequence[Batch]
    num_data_ranks: int
    compilations: Compilations
    making_s: Mapping[str, float]


class StepRecorder:
    """Turns finished steps into records: into metrics.jsonl, onto the screen, and an error where a loss is not finite.

    No other error comes from here: a record that fails is missing, with a warning.

    A step's numbers are read back once the device has passed it, so nothing waits for a record: on a CPU it is written
    when the next step begins, on a GPU as late as the host is ahead.

    Args:
        log: the run's metrics.jsonl.
        show: called with each record.
        sources: names of the sources; where there are several, each has its loss and tokens recorded.
        objective: says what records have of the losses.
        may_skip: updates in a row that may have been left out because their numbers were not finite [steps].
        bad_samples: file for the samples of a step whose numbers are not finite, when they end the run.
        before: what the run has behind it, as `behind` gave it at the checkpoint that it goes on from.
        resumes: times that the run went on after it was interrupted, this time included.
        boundary: around the making and writing of records.
    """

    def __init__(
        self,
        log: MetricsLog,
        show: Callable[[dict[str, Any]], None],
        sources: Sequence[str],
        *,
        may_skip: int,
        bad_samples: Path,
        before: Mapping[str, Any],
        objective: Objective,
        resumes: int = 0,
        boundary: ErrorBoundary | None = None,
    ) -> None:
        self._boundary = boundary or ErrorBoundary()
        self._log = log
        self._show = show
        self._sources, self._objective = sources, objective
        self._may_skip, self._bad_samples = may_skip, bad_samples
        self._skipped = int(before.get(SKIPPED, 0))
        self._chain: str = before.get(CHAIN, "")
        self._resumes = max(resumes, int(before.get(RESUMES, 0)))
        self._pending: deque[tuple[LaunchedStep, Callable[[], StepNumbers]]] = deque()

    def add(self, pending: LaunchedStep, numbers: DeviceNumbers) -> None:
        """Take in a step that has been launched; call it before the meter ends the step.

        Args:
            pending: what the host knows of it.
            numbers: of all ranks, on the device.
        """
        self._pending.append((pending, numbers.arriving()))

    def router_of_last(self) -> Callable[[], RouterSummary | None]:
        """Reader of the last step's routing, for when the device has passed that step; gives None without experts."""
        _, arrived = self._pending[-1]
        return lambda: arrived().router

    def behind(self) -> dict[str, Any]:
        """State for a checkpoint: skipped updates in a row, and what `headway check` compares with the records."""
        return {SKIPPED: self._skipped, CHAIN: self._chain, RESUMES: self._resumes}

    def write(self, windows: Sequence[Window]) -> None:
        """Write the records of steps that all ranks have passed.

        Args:
            windows: one for each step, in the order in which they were pending.

        Raises:
            NotFiniteError: a step had a loss or gradient that is not finite.
        """
        for window in windows:
            self._write(window, *self._pending.popleft())

    def _write(self, window: Window, pending: LaunchedStep, arrived: Callable[[], StepNumbers]) -> None:
        numbers = arrived()  # the device has passed it
        self._skipped = 0 if numbers.is_finite else self._skipped + 1
        if self._skipped > self._may_skip:
            loss = sum(numbers.losses) / pending.share.divisor
            raise NotFiniteError(self._not_finite(pending, loss, numbers.grad_norm))
        with self._boundary.guard("Records of steps"):
            record = self._record(window, pending, numbers)
            self._chain = chained(self._chain, record)
            self._log.write(record)
            self._show(record)

    def _record(self, window: Window, pending: LaunchedStep, numbers: StepNumbers) -> StepRecord:
        """Put a step's record together, from its window and the numbers that the device has given."""
        is_finite, share = numbers.is_finite, pending.share
        # JSON has no numbers for what is not finite.
        losses = self._objective.record(numbers, share) if is_finite else {"loss": None}
        record = {
            **window.measured(),
            **losses,
            "lr": pending.lr,
            **({} if pending.epochs is None else {"epoch": pending.epochs}),
            "grad_norm": numbers.grad_norm if is_finite else None,
            **({} if is_finite else {"skipped": True}),
            **({} if pending.share.learns else {"empty": True}),
            "compiled": pending.compilations.happened,
            "recompiles": numbers.recompiles,
            "packs": len(pending.batches) * pending.num_data_ranks,
            "making_s": dict(pending.making_s),
            "samples_digest": f"{pending.share.digest:016x}",
        }
        if pending.compilations.guards:
            record["recompile_guards"] = list(pending.compilations.guards)
        if len(self._sources) > 1:
            record["sources"] = self._by_source(numbers.losses, share)
        if numbers.router is not None:
            record["router"] = numbers.router._asdict()
        return StepRecord(known(record))

    def _not_finite(self, pending: LaunchedStep, loss: float, grad_norm: float) -> str:
        """Text of the error that ends the run; the samples that this rank had in the step go to a file."""
        step, batches = pending.step, pending.batches
        samples = [source for batch in batches for source in batch.sources]
        try:
            write_json(self._bad_samples, {"step": step, "packs": [list(batch.sources) for batch in batches]})
            where = f"all are in {self._bad_samples}"
        except OSError as error:  # the reason why the run ends is not to be lost to a full disk
            where = f"{self._bad_samples} with all of them could not be written: {error.strerror}"
        row = f", after {self._may_skip} updates in a row that were left out" if self._may_skip else ""
        return (
            f"step {step} has loss {loss} and gradient norm {grad_norm}{row}. Training has diverged, or a sample is "
            f"bad. The learning rate was {pending.lr:.3g}. Lower optim.lr, or lengthen optim.warmup_steps. This "
            f"rank's packs held {len(samples)} samples, the first {', '.join(samples[:3])}; {where}. Earlier "
            "checkpoints are complete."
        )

    def _by_source(self, losses: Sequence[float], share: StepShare) -> dict[str, dict[str, float | None]]:
        """Mean loss, tokens and targets of each source that the step has of, and the fraction that was left out."""
        counts = share.tokens, share.supervised, share.units, share.lost
        return {
            name: {
                "loss": loss / units if units and math.isfinite(loss) else None,
                "tokens": tokens,
                "supervised": supervised,
                **({"units": units} if units != supervised else {}),
                "waste": lost / (tokens + lost) if tokens + lost else 0.0,
            }
            for name, loss, tokens, supervised, units, lost in zip(self._sources, losses, *counts, strict=True)
            if tokens or lost
        }
