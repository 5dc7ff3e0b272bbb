"""Display of a run on stderr: a line per logged step, a bar on a terminal, and warnings."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from statistics import median
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from headway.log.boundary import ErrorBoundary
from headway.log.held_out import Parting
from headway.log.live import TimeLeft, fitted, shared_console, shown_fields
from headway.report import format_count, format_share, presentable
from headway.report.numbers import number
from headway.train.best import BestEvaluation

_LINES = "Lines on the screen"
LEAST = 0.1  # share of the time that a warning is worth
_EVERY, _KEPT = 50, 300  # steps from one look to the next, and that each looks back at
_LOOKS = 4  # fewest looks before a fall against their median is told
# Passes by itself, names no cause, is what a shared machine is like, or is told with the guard that failed.
_NOT_TOLD = ("first-steps", "not-compute-bound", "unstable-steps", "recompilation")


class Progress:
    """Lines and, on a terminal, a progress bar.

    Args:
        steps: optimizer steps of the whole run [steps].
        done: steps taken before a resumed run goes on [steps].
        log_every: steps between printed lines [steps].
        epochs: how often the data play in the whole run; None where steps say how long it is [epochs].
        quiet: print nothing, as on all ranks but the first.
        has_panel: a live panel shows how far the run is, and takes the bar's place.
        boundary: around what is shown: a terminal may be closed, and the file behind it full.
    """

    def __init__(
        self,
        steps: int,
        *,
        done: int,
        log_every: int,
        epochs: float | None = None,
        quiet: bool = False,
        has_panel: bool = False,
        boundary: ErrorBoundary | None = None,
    ) -> None:
        self._boundary = boundary or ErrorBoundary()
        self._parted_since: int | None = None
        self._steps, self._left = steps, TimeLeft(steps)
        self._warnings = None if quiet else RunWarnings(self.note)
        self._log_every, self._epochs = log_every, epochs
        self._console = Console(stderr=True, quiet=True) if quiet else shared_console()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[mfu]}"),
            console=self._console,
            disable=quiet or has_panel or not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done, mfu="")

    def note(self, text: str) -> None:
        """Print a line of information."""
        with self._boundary.guard(_LINES):
            self._bar.console.print(presentable(text))

    def step(self, record: dict[str, Any]) -> None:
        """Show a finished step: a line if it is its turn, and the bar."""
        with self._boundary.guard(_LINES):
            self._show(record)
        if self._warnings is not None:
            self._warnings.add(record)

    def _show(self, record: dict[str, Any]) -> None:
        step = record["step"]
        self._bar.update(self._task, completed=step)
        if (mfu := record.get("mfu")) is not None:
            self._bar.update(self._task, mfu=f"MFU {format_share(mfu)}")
        if "epoch" in record:
            self._bar.update(self._task, description=f"epoch {epoch_of(record['epoch'], self._epochs)}")
        left = [] if self._console.is_terminal else self._left.after(step)  # a terminal's bar has it
        if step % self._log_every == 0 or step in (1, self._steps):
            width = self._console.width if self._console.is_terminal else None
            self.note(step_line(record, self._steps, self._epochs, width, left))

    def recompiled(self, step: int, guards: Iterable[str]) -> None:
        """Warn of guards that failed in a step, so that a block was compiled again."""
        for guard in guards:
            self.note(f"warning: compiled again in step {step}, as a guard failed: {guard}")

    def parted(self, parting: Parting | None) -> None:
        """Warn where held-out loss has parted from training loss, once until the model betters itself."""
        if parting is not None and parting.least.step != self._parted_since:
            self._parted_since = parting.least.step
            self.note(
                f"warning: {parting}: the model learns its training samples by heart. checkpoint.keep_best keeps the "
                "best checkpoint, eval.stop_after ends a run by itself; more data or fewer epochs help."
            )

    def __enter__(self) -> Self:
        with self._boundary.guard(_LINES):
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:  # rich 13 ends a bar off a terminal with an empty line
            with self._boundary.guard(_LINES):
                self._bar.stop()


def step_line(
    record: dict[str, Any],
    steps: int,
    epochs: float | None = None,
    width: int | None = None,
    left: Iterable[tuple[str, str]] = (),
) -> str:
    """Render a step's record as one line; where it does not fit, without the numbers that are missed least."""
    fields = [("step", f"{record['step']:>{len(str(steps))}}/{steps}")]
    if "epoch" in record:
        fields.append(("epoch", epoch_of(record["epoch"], epochs)))
    return fitted([*fields, *shown_fields(record), *left], width)


def epoch_of(done: float, epochs: float | None) -> str:
    """Render the epochs that are done, of the epochs that are wanted.

    >>> epoch_of(1.2345, 3.0), epoch_of(0.5, None)
    ('1.23/3', '0.50')
    """
    return f"{done:.2f}" if epochs is None else f"{done:.2f}/{epochs:g}"


def evaluation_line(record: dict[str, Any], best: BestEvaluation) -> str:
    """Render an evaluation's record as one line, with the best one where that was another.

    Args:
        record: of the evaluation.
        best: of all so far.
    """
    if "pairs" in record:
        judged = f"{format_share(record['accuracy'])} of {format_count(record['pairs'])} pairs right"
        judged += f", margin {record['margin']:.4f}"
    else:
        judged = f"exact match {format_share(record['exact_match'])} "
        judged += f"({record['exact']} of {format_count(record['samples'])})"
    line = f"evaluation after step {record['step']}: {judged}, loss {record['loss']:.4f}"
    return f"{line}; best {best.text}" if best.text and best.step != record["step"] else line


class RunWarnings:
    """Looks at the records of the last 300 steps, every 50 steps, with the rules of `headway explain`.

    A fall that takes longer, or came at once, shows against the run itself: the median MFU of the last 50 steps beside
    that of all looks before.

    Args:
        note: prints a line.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._records: deque[Mapping[str, Any]] = deque(maxlen=_KEPT)
        self._since, self._warned = 0, set[str]()
        self._usual: list[float] = []  # median MFU of each look

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a step's record, and warn of changes in the run since the last look."""
        from headway.explain.findings.series import FALLING, FALLING_CAUSE, FALLING_HINT  # loaded at the first step
        from headway.explain.records import find_in_records

        self._records.append(record)
        self._since += 1
        if self._since < _EVERY:
            return
        self._since = 0
        for finding in find_in_records(self._records):
            if finding.share >= LEAST and finding.id not in _NOT_TOLD:
                self._warn(finding.id, f"{finding.seen} Likely: {finding.cause} Try: {finding.next}")
        if fall := self._fall(list(islice(reversed(self._records), _EVERY))):
            self._warn(FALLING, f"{fall} Likely: {FALLING_CAUSE} Try: {FALLING_HINT}")

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            self._note(f"warning: {text}")

    def _fall(self, last: Sequence[Mapping[str, Any]]) -> str:
        """Say that MFU is below the run's own median by a tenth, and by more than looks differ; "" where it is not."""
        measured = [mfu for record in last if (mfu := _mfu(record)) is not None]
        if not measured:
            return ""
        now, before = median(measured), [*self._usual]
        self._usual.append(now)
        if len(before) < _LOOKS:
            return ""
        usual = median(before)
        # a slow fall does not widen this scatter
        scatter = median(abs(after - before_it) for before_it, after in pairwise(before))
        if usual - now <= max(LEAST * usual, 3 * scatter):
            return ""
        return (
            f"MFU of the last {len(last)} steps is {format_share(now)}, {format_share(1 - now / usual)} below the "
            f"run's own median of {format_share(usual)}; waiting for data is in neither."
        )


def _mfu(record: Mapping[str, Any]) -> float | None:
    """Of the time in which data did not have to be waited for, whose warning is another one."""
    flops = record.get("flops")
    total = number(flops.get("total")) if isinstance(flops, Mapping) else None
    peak, wall_s = number(record.get("peak_flops_per_s")), number(record.get("wall_s"))
    if total is None or not peak or wall_s is None:
        return None
    busy_s = wall_s - (number(record.get("data_wait_s")) or 0.0)
    return total / (busy_s * peak * (number(record.get("world_size")) or 1.0)) if busy_s > 0 else None
