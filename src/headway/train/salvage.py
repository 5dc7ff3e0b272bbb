"""The last complete step of a run, saved when the run ends, whatever ends it."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from headway.errors import CheckpointError, NotFiniteError, RankLostError
from headway.train.prepare import Place, Run, begin_checkpoint
from headway.train.recorder import StepRecorder


class LastStep:
    """Saves the steps of a run: those that it is told to, and the last complete one when an error ends the run.

    An error that comes between two updates leaves weights and optimizer as the step before made them; with the place in
    the data and the random generators as they were then, that step is as good as one that was saved at once. So it is
    saved, unless

    * the update itself failed, or its numbers were not finite: then the weights are lost;
    * the disk refused a checkpoint, or another process has ended;
    * there are several processes, and they do not all know of the error. One that fails alone in a forward, backward or
      evaluation leaves the others within an exchange that it will never come to. They would wait for each other until
      their time is up; so it ends at once, and the others with it.

    Args:
        run: its parts.
        recorder: of its steps.
        leave: waits for the device, and records the steps that it has taken.
        note: prints a line.

    Attributes:
        all_know: whether all processes know of the error that is raised next; a lone process always does.
    """

    def __init__(
        self, run: Run, recorder: StepRecorder, leave: Callable[[], None], note: Callable[[str], None]
    ) -> None:
        self._run, self._recorder, self._leave, self._note = run, recorder, leave, note
        self._saved = run.checkpoint.step if run.checkpoint else 0
        self._place: Place | None = None
        self.all_know = run.ranks.size == 1

    def updating(self) -> None:
        """Note that the weights change from now on, so that they are of no step until `complete`."""
        self._place = None

    def complete(self, step: int) -> None:
        """Note that a step is complete, and where the run stands behind it."""
        self._place = self._run.place(step)

    def save(self, *, goes_on: bool = True) -> None:
        """Begin to save the step, all processes together.

        Args:
            goes_on: whether training may go on meanwhile.

        Raises:
            CheckpointError: the checkpoint before could not be written, or this one.
            NotFiniteError: the numbers of a step are not finite.
        """
        assert self._place is not None
        self._leave()
        self._saved = self._place.step
        if self._run.meter.goodput is not None:  # before it is written: a kill may come right after
            self._run.meter.goodput.checkpoint_saved(self._saved)
        begin_checkpoint(self._run, self._place, self._recorder.behind(), goes_on=goes_on)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._place is None or self._place.step <= self._saved or not self._may_save_after(error):
            return
        step = self._place.step
        try:
            self.save(goes_on=False)
            folder = self._run.saver.wait().folder
        except Exception as reason:  # noqa: BLE001 - the error that ends the run is the one to be raised
            self._note(f"step {step}, the last complete one, could not be saved: {reason}")
        else:
            self._note(f"an error ends the run; step {step}, the last complete one, is saved in {folder}")

    def _may_save_after(self, error: BaseException | None) -> bool:
        fatal = (NotFiniteError, CheckpointError, RankLostError)
        return self.all_know and isinstance(error, Exception) and not isinstance(error, fatal)
