"""The meter of a loop whose ranks exchange messages of their own, such as `headway train`'s."""

from collections.abc import Sequence

from headway.meter.meter import Meter
from headway.meter.tally import Sums
from headway.meter.window import Window


class RunMeter(Meter):
    """Measures a loop that exchanges its ranks' numbers with its own messages; each step is a window.

    The loop hands what `finished` gives of every rank to `merge`. Arguments are those of `Meter`.
    """

    _arrived: Sequence[list[tuple[int, Sums]]] = ()  # steps of each rank that not all ranks have passed yet
    _num_merged = 0
    _records_left_out = True

    def _opens(self) -> bool:
        return False

    def step(self, *, skipped: bool = False, **extra: float) -> None:
        """End an optimizer step; arguments as of `Meter.step`."""
        self._ended_step(skipped, extra, num_warmup_steps=0)

    def finished(self) -> list[tuple[int, Sums]]:
        """Take the steps that this rank's device has passed since the last call, for the other ranks.

        Nothing is waited for.
        """
        steps = self._pending.take_each()
        memory = self._with_readings(steps[-1])[0] if steps else 0
        return [(memory, sums) for sums in steps]

    def merge(self, every: Sequence[list[tuple[int, Sums]]]) -> list[Window]:
        """Describe the steps that all ranks have passed.

        Args:
            every: what `finished` gave on each rank, in the order of the ranks.

        Returns:
            A window for each step, in their order; none are lost, those that some rank has not passed come later.
        """
        self._arrived = self._arrived or [[] for _ in every]
        for arrived, new in zip(self._arrived, every, strict=True):
            arrived.extend(new)
        windows = []
        for _ in range(min(map(len, self._arrived))):
            parts = [arrived.pop(0) for arrived in self._arrived]
            self._num_merged += 1
            memory = max(memory for memory, _ in parts)
            window = self._tally.one_step([sums for _, sums in parts], memory, self.steps_before + self._num_merged)
            windows.append(self._of_loop(window))
        return windows

    def _last_window(self) -> None:
        """Nothing: the loop has merged all steps."""

    def _warn(self, window: Window | None) -> None:
        """Nothing: the loop has shown each step."""
