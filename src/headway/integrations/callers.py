"""Find the trainer that calls us, where it passes no reference to itself."""

from __future__ import annotations

import sys
from typing import TypeVar

from headway.errors import UsageError

T = TypeVar("T")


def caller_of(kind: type[T], called: str) -> T:
    """Find the trainer in whose methods a call is made.

    Args:
        kind: class of the trainer.
        called: what it calls, for the error.

    Raises:
        UsageError: no such trainer calls.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(trainer := frame.f_locals.get("self"), kind):
            return trainer
    raise UsageError(
        f"{called} is called by no {kind.__module__.partition('.')[0]}.{kind.__name__}: it finds there what a step "
        "runs. In a loop of your own use headway.Meter."
    )
