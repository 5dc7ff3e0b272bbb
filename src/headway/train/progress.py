"""Display of a run on stderr: a line per logged step, a bar on a terminal, and warnings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from headway.log.boundary import ErrorBoundary
from headway.log.held_out import Parting
from headway.log.live import TimeLeft, fitted, shared_console, shown_fields
from headway.report import format_count, format_share, presentable
from headway.train.best import BestEvaluation

_LINES = "Lines on the screen"


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

    Attributes:
        observer: is given each record after its line, to warn of what it shows; None for nobody.
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
        self.observer: Callable[[Mapping[str, Any]], None] | None = None
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
        if self.observer is not None:
            self.observer(record)

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
                f"warning: {parting}. The model overfits its training samples. Use more data or fewer epochs. "
                "checkpoint.keep_best keeps the best checkpoint, and eval.stop_after ends such a run early."
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
        judged += ", "
    elif record["exact_match"] is None:  # documents have no answer
        judged = ""
    else:
        judged = f"exact match {format_share(record['exact_match'])} "
        judged += f"({record['exact']} of {format_count(record['samples'])}), "
    line = f"evaluation after step {record['step']}: {judged}loss {record['loss']:.4f}"
    return f"{line}; best {best.text}" if best.text and best.step != record["step"] else line
