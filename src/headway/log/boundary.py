"""The boundary between a loop and its observers: an error of an observer never becomes an error of the loop."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class ErrorBoundary:
    """Runs the observers of a loop (records, trackers, profiles, readings): their errors warn once and go no further.

    What belongs to the loop itself (its data, its weights, a wrong setting told before it begins) stays outside of it,
    and so do interrupts, which are no errors.

    Attributes:
        lost: what has failed, each with its first error.

    >>> boundary = ErrorBoundary()
    >>> with warnings.catch_warnings(action="ignore"), boundary.guard("the power of this device"):
    ...     raise OSError("no such counter")
    >>> boundary.lost
    {'the power of this device': 'OSError: no such counter'}
    """

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}

    @contextmanager
    def guard(self, what: str, consequence: str = "Training goes on without.") -> Iterator[None]:
        """Run a block; an error in it is a warning that names the loss, the first time.

        Args:
            what: is lost if the block fails, as a sentence begins with it.
            consequence: that follows, a sentence.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - an observer may fail of anything, and the loop goes on
            if what not in self.lost:
                self.lost[what] = f"{type(error).__name__}: {error}"
                warnings.warn(f"{what}: {self.lost[what]}. {consequence}", RuntimeWarning, stacklevel=3)
