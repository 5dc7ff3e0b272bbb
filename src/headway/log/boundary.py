"""The boundary between a loop and its observers: an error of an observer never becomes an error of the loop."""

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class ErrorBoundary:
    """Runs the observers of a loop (records, trackers, profiles, readings): their errors warn once and go no further.

    What belongs to the loop itself (its data, its weights, a wrong setting told before it begins) stays outside of it,
    and so do interrupts, which are no errors.

    Attributes:
        lost: what has failed, each with its first error.
        warn: shows a warning; Python's own may be an error, which a loop that others wrote must not hear of.

    >>> boundary = ErrorBoundary()
    >>> with warnings.catch_warnings(action="ignore"), boundary.guard("the power of this device"):
    ...     raise OSError("no such counter")
    >>> boundary.lost
    {'the power of this device': 'OSError: no such counter'}
    """

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        self.warn: Callable[[str], None] = partial(warnings.warn, category=RuntimeWarning, stacklevel=2)

    def guard(self, what: str, consequence: str = "Training goes on without.") -> "_Guard":
        """Run a block; an error in it is a warning that names the loss, the first time.

        Args:
            what: is lost if the block fails, as a sentence begins with it.
            consequence: that follows, a sentence.
        """
        return _Guard(self, what, consequence)


class _Guard:
    """A block that may fail: a class, which costs a third of a generator."""

    __slots__ = ("_boundary", "_consequence", "_what")

    def __init__(self, boundary: ErrorBoundary, what: str, consequence: str) -> None:
        self._boundary, self._what, self._consequence = boundary, what, consequence

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        lost = self._boundary.lost
        if self._what not in lost:
            lost[self._what] = f"{type(error).__name__}: {error}"
            self._boundary.warn(f"{self._what}: {lost[self._what]}. {self._consequence}")
        return True
